"""jc.ops.batch_norm x its options, beside float64, Flax and several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_norm_calls import (
    IMAGE,
    MOMENTUM,
    Case,
    S,
    check,
    check_on_gpu,
    loss,
    moving,
    planned,
    same,
    with_,
)
from flax import nnx
from helpers import cotangents_of, exactly, outcome
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import (
    FLOAT32_ON_GPU,
    Transformations,
    graphs_of,
    methods,
    relative_error,
)

import jax_cudnn as jc

ALL = "scale bias residual"
TWO = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])

# -- values and gradients --------------------------------------------------------------------------

# shape, axis, what is given, activation, dtypes of x and parameters; for training and inference
OPTIONS = [
    ((9, 5), 1, "", "relu", "float32", "float32"),
    ((4, 6, 5), -1, ALL, "relu", "bfloat16", "float32"),
    ((4, 5, 3, 6), -1, "scale", "gelu", "float32", "bfloat16"),
    ((4, 5, 3, 6), -1, ALL, None, "float16", "float32"),
    ((4, 8, 3, 5), 1, ALL, "silu", "float32", "float32"),
    ((4, 3, 7, 5), 2, "bias", "gelu_exact", "float16", "bfloat16"),
    ((4, 3, 7, 5), 2, "residual", "elu", "float32", "float32"),
    ((3, 2, 4, 3, 6), -1, "scale residual", "relu6", "bfloat16", "bfloat16"),
    ((3, 8, 2, 4, 3), -4, "scale bias", "relu", "float32", "float16"),
    ((2, 3, 2, 7, 2, 3), -3, "bias residual", "leaky_relu", "float16", "float16"),
    ((2, 3, 2, 2, 3, 4), -1, ALL, "softplus", "bfloat16", "float32"),
    ((4, 5, 3, 6), -1, "scale bias", "tanh", "float32", "float32"),
]


@TWO
@pytest.mark.parametrize(("shape", "axis", "given", "name", "dtype", "parameters"), OPTIONS)
def test_values_statistics_and_gradients(shape, axis, given, name, dtype, parameters, training):
    """y has x's dtype, statistics theirs; y is rounded once, in training also in front of residual
    and activation."""
    case = Case(shape, axis, training, given, name)
    operands = case.operands(dtype, parameters)
    through = "float32" if name is None else dtype
    (got, _), (want, _) = check(case, operands, slack=2.0, through=through)
    assert [g.dtype for g in got] == [dtype, parameters, parameters]
    assert [g.shape for g in got] == [shape, *[(shape[axis],)] * 2]
    once = {"float32": 2e-5, "bfloat16": 2**-9, "float16": 2**-12}[dtype]
    twice = training and {name, "residual"} & {*given.split(), name} - {None}
    assert relative_error(got[0], want[0]) <= once * (2 if twice else 1)
    again = case(*operands, activation={"silu": jax.nn.silu, "tanh": jnp.tanh}.get(name, name))[0]
    assert relative_error(again, got[0]) <= once


def test_parameters_of_different_dtypes():
    x, mean, var, momentum, scale, bias = IMAGE.operands("bfloat16")
    check(IMAGE, [x, mean.astype("float16"), var, momentum, scale.astype("bfloat16"), bias])


def test_cotangents_of_one_result_only():
    operands = IMAGE.operands()
    for i, result in enumerate(jax.eval_shape(IMAGE, *operands)):
        (cotangent,) = cotangents_of([result])
        got = outcome(lambda *a, i=i: IMAGE(*a)[i], operands, cotangent)[1]
        same(got, exactly(lambda *a, i=i: IMAGE.plain(*a)[i], operands, cotangent)[1])


@pytest.mark.parametrize("shape", [(1, 6), (1, 1, 1, 6)], ids=str)
def test_a_batch_of_one_element_per_channel(shape):
    """It is its own mean: y is the bias, and x has no derivative."""
    case = Case(shape)
    operands = case.operands()
    ((y, _, var), (dx, *_)), _ = check(case, operands)
    np.testing.assert_array_equal(y, jnp.broadcast_to(operands[-1], shape))
    np.testing.assert_allclose(var, MOMENTUM * operands[2], rtol=1e-6)
    assert dx.shape == shape


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)], ids=str)
@TWO
def test_empty_arrays(shape, training):
    case = Case(shape, training=training)
    y, mean, var = case(*case.operands())
    assert (y.shape, mean.shape, var.shape) == (shape, shape[-1:], shape[-1:])
    unknown = training and shape[-1] > 0  # as jnp.mean's of nothing
    assert np.isnan(mean).all() == np.isnan(var).all() == (unknown or not shape[-1])
    (dx, *_) = outcome(case, case.operands(), cotangents_of([y, mean, var]))[1]
    assert dx.shape == shape


@pytest.mark.parametrize("fused", [None, False, True], ids=["alone", "conv", "fused"])
def test_nan_in_the_running_statistics_stays_out_of_a_training_step(fused):
    """Nor does infinity reach y: the sums of fused_statistics are of distances from the mean."""
    case = IMAGE if fused is None else with_(IMAGE, w=(3, 3, 6, 6), fused=fused)
    count = len(case.arrays)
    operands = case.operands()
    good = case.plain(*operands)
    for value in (np.nan, np.inf):
        bad = jnp.full(6, value, jnp.float32)
        given = [*operands[:count], bad, bad, *operands[count + 2 :]]
        (y, *new), (dx, *_) = outcome(case, given, [jnp.sin(good[0]), *good[1:]])
        np.testing.assert_allclose(y, good[0], rtol=1e-4, atol=1e-4)
        assert not np.isfinite(new).any()
        assert np.isfinite(dx).all()


# -- momentum and epsilon --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [1, np.float64(0.25), np.asarray(0.25, np.float32), jnp.bfloat16(0.25)], ids=repr
)
@TWO
def test_momentum_and_epsilon_in_any_form(number, training):
    case = with_(IMAGE, training=training, epsilon=float(number))
    operands = case.operands()
    operands[3] = jnp.float32(number)
    want = case.plain(*operands)
    same(case(*operands, momentum=number, epsilon=number), want)
    same(jax.jit(lambda n, *a: case(*a, momentum=n, epsilon=n))(number, *operands), want)


@TWO
def test_gradient_by_epsilon(training):
    case = with_(IMAGE, training=training)
    operands = [jnp.float32(0.3), *case.operands()]
    cotangents = cotangents_of(jax.eval_shape(case, *operands[1:]))
    got = outcome(lambda e, *a: case(*a, epsilon=e), operands, cotangents)
    want = exactly(lambda e, *a: with_(case, epsilon=e).plain(*a), operands, cotangents)
    same(got, want, 2e-4)
    assert abs(got[1][0]) > 1e-2


def test_another_momentum_is_no_other_graph():
    """Neither of numbers nor of arrays: it is not in the graph."""
    found = {
        graphs_of(lambda *a, m=momentum: IMAGE(*a, momentum=m), *IMAGE.avals())[0]
        for momentum in (0.9, 0.99, np.float32(0.5), jnp.float32(0.1))
    }
    assert len(found) == 1


def test_statistics_and_schedules_go_through_a_scan_of_steps():
    case = with_(IMAGE, x=(4, 3, 5))
    xs = jnp.asarray(np.random.default_rng(6).standard_normal((4, *case.x)), "float32")
    _, mean, var, _, scale, bias = case.operands()
    epsilons = 10.0 ** -jnp.arange(1.0, 5.0)

    def last(f):
        def run(xs, running, scale):
            def step(running, each):
                x, epsilon = each
                y, *new = f(epsilon)(x, *running, 1 - epsilon, scale, bias)
                return tuple(new), jnp.sum(jnp.sin(y) * x)

            running, losses = jax.lax.scan(jax.checkpoint(step), running, (xs, epsilons))
            return jnp.sum(losses) + jnp.sum(jnp.cos(running[0]) * running[1])

        return jax.jit(jax.value_and_grad(run, (0, 1, 2)))(xs, (mean, var), scale)

    same(last(lambda e: with_(case, epsilon=e)), last(lambda e: with_(case, epsilon=e).plain))


@pytest.mark.parametrize(
    ("axis", "dtype", "use_scale", "use_bias"),
    [(1, "float32", True, True), (-1, "bfloat16", False, True), (-1, "float32", False, False)],
)
def test_flax_has_the_same(axis, dtype, use_scale, use_bias):
    """Over some steps of training, and then in inference."""
    random = np.random.default_rng(4)
    batches = [jnp.asarray(2 * random.standard_normal((4, 6, 5, 6)) + t, dtype) for t in range(3)]
    module = nnx.BatchNorm(
        6, axis=axis, momentum=0.8, epsilon=1e-3, use_scale=use_scale, use_bias=use_bias,
        dtype=jnp.dtype(dtype), use_fast_variance=False, rngs=nnx.Rngs(0),
    )  # fmt: skip
    scale = jnp.linspace(0.5, 2, 6) if use_scale else None
    bias = jnp.linspace(-1, 1, 6) if use_bias else None
    for parameter, value in ((module.scale, scale), (module.bias, bias)):
        if value is not None:
            parameter.set_value(value)
    running = jnp.zeros(6), jnp.ones(6)
    tolerance = {"float32": 1e-5, "bfloat16": 2**-7}[dtype]  # Flax rounds after each operation
    for x, training in (*((x, True) for x in batches), (batches[0], False)):
        y, running = jc.ops.batch_norm(
            x, scale, bias, *running, training=training, momentum=0.8, epsilon=1e-3, axis=axis
        )
        want = module(x, use_running_average=not training)
        assert y.dtype == want.dtype
        assert relative_error(y, want) <= tolerance
        same(running, [module.mean[...], module.var[...]], 1e-5)


def test_transformations():
    case = Case((3, 2, 2, 4), given=ALL, activation="gelu")
    names = ("vjp_of_one", "jvp", "jvp_of_vjp", "vmap", "vmap_of_each", "vmap_of_vjp", "remat")
    operands = case.operands()
    transformations = Transformations(operands, jax.eval_shape(case, *operands))
    data = transformations.data()

    def run(f):
        return jax.jit(lambda d: {n: getattr(transformations, n)(f, d) for n in names})(data)

    got, want = run(case), run(case.plain)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(a, b) < 1e-4, a.shape


# -- large means -----------------------------------------------------------------------------------


def check_large_means(case, ratio, least=1e-5):
    """The variance is of distances from the mean: what float32 loses of x itself is lost, and
    a mean that is off by an ulp of x moves y by as much, in deviations."""
    x, mean, var, _, scale, bias = case.operands()
    operands = [x * 0.01 + 0.01 * ratio, mean, var, jnp.float32(0), scale, bias]
    cotangents = cotangents_of(jax.eval_shape(case, *operands))
    got = jax.device_get(outcome(case, operands, cotangents))
    want = exactly(case.plain, *jax.device_get((operands, cotangents)))
    allowed = least + 1e-6 * ratio
    errors = [relative_error(a, b) for a, b in zip(got[0], want[0], strict=True)]
    assert errors[0] <= allowed
    assert errors[1] <= least / 5
    assert errors[2] <= least / 5 + allowed**2  # the square of what the mean is off by
    assert relative_error(got[1][0], want[1][0]) <= 2 * allowed


@pytest.mark.parametrize("ratio", [0, 1000, 30000])
def test_large_means_with_small_variances(ratio):
    check_large_means(Case((8, 6, 6, 4), epsilon=1e-12), ratio)


# Images of which one pixel, or two of those that make the guess of the mean, are unlike the others.
OUTLIERS = [
    ((8, 56, 56), [(28, 28)], 2e-6),
    ((8, 56, 56), [(28, 28), (14, 14)], 2e-3),
    ((8, 56, 56), [(0, 0)], 2e-6),
    ((1, 256, 256), [(128, 128), (64, 64)], 2e-6),
    ((4, 100000), [(50000,), (25000,)], 2e-6),
    ((1, 40, 40, 40), [(20, 20, 20), (10, 10, 10)], 2e-6),
]


@pytest.mark.parametrize(("value", "mean"), [(0.0, 1000.0), (1e5, 0.0)])
@pytest.mark.parametrize(("shape", "places", "allowed"), OUTLIERS)
def test_statistics_of_images_with_an_outlier(shape, places, allowed, value, mean):
    """Of up to 4096 pixels one pass takes a guess of the mean; a factor of so many is lost where
    two of the three that make it are outliers, and else none."""
    x = np.random.default_rng(0).normal(mean, 1, (*shape, 2)).astype("float32")
    for place in places:
        x[(slice(None), *place)] = value
    one, zero = jnp.ones(2), jnp.zeros(2)
    _, (got_mean, got) = jc.ops.batch_norm(x, one, zero, zero, one, training=True, momentum=0.0)
    axes, wide = tuple(range(x.ndim - 1)), x.astype("float64")
    assert relative_error(got, wide.var(axes)) <= allowed
    largest = (np.abs(wide.mean(axes)) + wide.std(axes)).max()
    assert np.abs(got_mean - wide.mean(axes)).max() <= (1e-6 + allowed) * largest


# -- several devices -------------------------------------------------------------------------------

needs_devices = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 (host) devices")


def devices(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices("cpu")[:8]), ("data",), axis_types=(kind,))


@needs_devices
def test_inside_shard_map_each_device_has_its_own_statistics():
    case = Case((2, 3, 3, 4), given=ALL, activation="silu")
    x, mean, var, momentum, scale, bias, residual = with_(case, x=(16, 3, 3, 4)).operands()
    batch, whole = P("data"), P()

    def local(f):
        def run(x, mean, var, scale, bias, residual):
            y, *new = f(x, mean, var, momentum, scale, bias, residual)
            return y, *(v[None] for v in new)

        return run

    mapped = jax.shard_map(
        local(case), mesh=devices(), check_vma=True, out_specs=batch,
        in_specs=(batch, whole, whole, whole, whole, batch),
    )  # fmt: skip

    def parts(x, mean, var, scale, bias, residual):
        pairs = zip(jnp.split(x, 8), jnp.split(residual, 8), strict=True)
        found = [local(case.plain)(x, mean, var, scale, bias, r) for x, r in pairs]
        return tuple(jnp.concatenate(each) for each in zip(*found, strict=True))

    def both(f):
        total = lambda *a: sum(jnp.sum(jnp.sin(r)) for r in f(*a))  # noqa: E731
        return jax.jit(lambda *a: (f(*a), jax.grad(total, range(6))(*a)))

    operands = (x, mean, var, scale, bias, residual)
    got = both(mapped)(*operands)
    assert np.ptp(np.asarray(got[0][1]), 0).min() > 1e-3  # they differ
    same(got, both(parts)(*operands), 2e-4)


@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("w", [(), (3, 3, 6, 4)], ids=["bn", "conv"])
def test_under_jit_statistics_are_those_of_the_whole_batch(w, kind):
    case = Case((16, 3, 3, 6), given="scale bias" if w else ALL, activation="relu", w=w)
    operands = case.operands()
    sharded = [
        jax.device_put(x, NamedSharding(devices(kind), P("data") if x.shape[:1] == (16,) else P()))
        for x in operands
    ]

    def both(f):
        def total(*a):
            y, mean, var = f(*a)
            return jnp.sum(jnp.sin(y)) + jnp.sum(mean * var)

        return jax.jit(lambda *a: (f(*a), jax.grad(total, tuple(range(len(a))))(*a)))

    with jax.set_mesh(devices(kind)):
        got = jax.device_get(both(case)(*sharded))
    same(got, both(case.plain)(*operands), 2e-4)


@needs_devices
@pytest.mark.parametrize("activation", [None, "relu"])
def test_images_that_are_sharded_along_pixels_or_channels(activation):
    """On a mesh with explicit axes, where JAX slices no sharded axis."""
    x = jax.random.normal(jax.random.key(0), (2, 8, 4, 16)) + 1
    zeros, ones = jnp.zeros(16), jnp.ones(16)

    def loss(x):
        y, _ = jc.ops.batch_norm(x, None, None, zeros, ones, training=True, activation=activation)
        return jnp.sum(y * y)

    want = jax.grad(loss)(x)
    mesh = devices(AxisType.Explicit)
    with jax.set_mesh(mesh):
        for spec in (P(None, "data"), P(None, None, None, "data")):
            got = jax.jit(jax.grad(loss))(jax.device_put(x, NamedSharding(mesh, spec)))
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# -- what the programs hold ------------------------------------------------------------------------


def outputs(spec):
    return sorted((t.shape, t.dtype) for t in spec.output_tensors)


@pytest.mark.parametrize("activation", [None, "relu", "relu6", "gelu", "tanh"])
def test_the_forward_keeps_statistics_and_what_the_activation_needs(activation):
    """Behind relu its sign, which is in the result; of relu without a residual a bit an element."""
    image, each = ((4, 8, 3, 3), "bfloat16"), ((1, 8, 1, 1), "float32")
    case = Case((4, 3, 3, 8), given=ALL, activation=activation)
    forward, backward = graphs_of(jax.value_and_grad(loss(case), moving(case)), *case.avals())
    assert methods(forward)[:2] == ["batchnorm", "add"]
    assert methods(backward)[-1] == "batchnorm_backward"
    assert activation or len(methods(backward)) == 1
    kept = [] if activation in (None, "relu", "relu6") else [image]
    assert outputs(forward) == sorted([image, each, each, *kept])
    # x, the gradient, and what is kept of the activation: its result or what it is of.
    read = [(t.shape, t.dtype) for t in backward.input_tensors]
    assert read.count(image) == (2 if activation is None else 3)
    if activation == "relu":
        case, mask = with_(case, given="scale bias"), ((4, 1, 3, 3), "uint8")
        forward, backward = graphs_of(jax.value_and_grad(loss(case), moving(case)), *case.avals())
        assert outputs(forward) == sorted([image, each, each, mask])
        read = [(t.shape, t.dtype) for t in backward.input_tensors]
        assert (read.count(image), read.count(mask)) == (2, 1)


def test_inference_is_one_graph_in_which_nothing_moves():
    case = with_(IMAGE, training=False, given=ALL, activation="relu")
    (spec,) = graphs_of(case, *case.avals())
    assert methods(spec) == ["batchnorm_inference", "add", "relu"]
    assert len(spec.outputs) == 1


# -- plans -----------------------------------------------------------------------------------------

BIG = Case((8, 14, 14, 64))


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("dtype", "epilogue"),
    [("bfloat16", ()), ("bfloat16", ("relu",)), ("float16", ("add", "relu")), ("float32", ())],
    ids=str,
)
def test_training_is_one_plan_and_its_backward_one(dtype, epilogue):
    activation = "relu" if "relu" in epilogue else None
    case = with_(BIG, given=ALL if "add" in epilogue else "scale bias", activation=activation)
    found = planned(jax.value_and_grad(loss(case), moving(case)), *case.avals(dtype))
    alone = epilogue == ("relu",)
    names = ["batchnorm", "relu_mask"] if alone else ["batchnorm", *epilogue]
    # Behind a residual cuDNN is measured to be slower than XLA.
    assert found["batch_norm"] == [("add" not in epilogue, names)]
    *before, backward = found["batch_norm (backward)"]
    assert backward == (True, ["masked"] * alone + ["batchnorm_backward"])
    assert [(by_cudnn, names[0]) for by_cudnn, names in before] == (
        [] if activation is None or alone else [(False, "relu_backward")]
    )
    forward = lambda *a: case(*a, implementation="cudnn")  # noqa: E731
    assert planned(forward, *case.avals(dtype)) == {"batch_norm": [(True, names)]}


@pytest.mark.deviceless
@pytest.mark.usefixtures("by_cudnn")
@pytest.mark.parametrize("shape", [(32, 64), (8, 9, 64), (2, 3, 4, 3, 2, 64)])
def test_every_rank_is_planned(shape):
    case = Case(shape)
    found = planned(jax.value_and_grad(loss(case), moving(case)), *case.avals())
    assert found == {
        "batch_norm": [(True, ["batchnorm"])],
        "batch_norm (backward)": [(True, ["batchnorm_backward"])],
    }


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": (8, 14, 14, 30)}, "30 channels, which is no multiple of 8"),
        ({"x": (1, 1, 1, 64)}, "one element"),
        ({"training": False}, "XLA runs it"),
        ({"epsilon": None}, "Python number"),
    ],
    ids=str,
)
def test_what_is_xlas(changes, words):
    case = with_(BIG, **changes)
    more = {"epsilon": S((), "float32")} if "epsilon" in changes else {}

    def run(e, *a, **keywords):
        return case(*a, **({"epsilon": e["epsilon"]} if e else {}), **keywords)

    with jc.target("H200"):
        (plan,) = jc.plans(run, more, *case.avals()).values()
        assert words in str(plan.explain())
        assert [s.plan for s in plan.segments] == [None]
        with pytest.raises(jc.UnsupportedGraphError, match=words):
            jc.plans(lambda *a: run(*a, implementation="cudnn"), more, *case.avals())


# -- on a GPU --------------------------------------------------------------------------------------

ON_GPU = {"float32": FLOAT32_ON_GPU, "bfloat16": 2**-8, "float16": 2**-10}
each_dtype = pytest.mark.parametrize("dtype", ON_GPU)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_cudnn")
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((32, 64), -1),
        ((8, 16, 9), 1),
        ((4, 9, 7, 8), -1),
        ((4, 8, 9, 7), 1),
        ((4, 9, 7, 1000), -1),
        ((64, 1, 1, 64), -1),
        ((2, 5, 4, 3, 16), -1),
        ((2, 3, 4, 3, 2, 16), -1),
    ],
)
@each_dtype
def test_training_on_the_gpu(shape, axis, dtype):
    """y and its gradients in one plan each: what statistics' cotangents add is XLA's."""
    case = Case(shape, axis)
    y, plain = lambda *a: case(*a)[:1], lambda *a: case.plain(*a)[:1]
    check_on_gpu(y, plain, case.operands(dtype), ON_GPU[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [30, 64])
@pytest.mark.parametrize(("given", "name"), [("scale bias", "relu"), (ALL, "relu"), (ALL, "silu")])
@each_dtype
def test_training_with_an_epilogue_on_the_gpu(dtype, given, name, channels):
    """As it is by default; the forward also in one plan."""
    case = Case((4, 9, 7, channels), given=given, activation=name)
    operands = case.operands(dtype)
    check_on_gpu(case, case.plain, operands, 3 * ON_GPU[dtype])
    if name == "relu" and channels == 64:
        got = jax.jit(lambda *a: case(*a, implementation="cudnn"))(*operands)
        for a, b in zip(got, jax.jit(case)(*operands), strict=True):
            assert relative_error(a, b) <= 2 * ON_GPU[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [30, 1000, 30000])
def test_large_means_on_the_gpu(ratio):
    check_large_means(Case((8, 12, 12, 64), epsilon=1e-12), ratio, FLOAT32_ON_GPU)
