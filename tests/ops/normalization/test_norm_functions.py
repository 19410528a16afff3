"""The norms of jax_cudnn.ops x their options, beside float64, Flax and several devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import cotangents_of, exactly, outcome
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from norm_calls import (
    CASES,
    KINDS,
    PLANNED,
    Case,
    S,
    ada,
    assert_close,
    group,
    instance,
    layer,
    rms,
)
from transformations import (
    ALL,
    TOLERANCES,
    Transformations,
    graphs_of,
    methods,
    primitives,
    relative_error,
    shapes_of,
)

import jax_cudnn as jc
from jax_cudnn._core.graph.wire import wire
from jax_cudnn._core.planning import losses

each_kind = pytest.mark.parametrize("name", KINDS)
TWICE = 1.6  # what comes in two parts: each rounded, and their sum

# -- values and gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_values_statistics_and_their_gradients(name):
    """Cotangents come into y and the statistics."""
    case = CASES[name]
    operands = case.operands()
    cotangents = cotangents_of(jax.eval_shape(case.plain, *operands))
    got = outcome(case, operands, cotangents)
    assert_close(got, exactly(case.plain, operands, cotangents))
    y, *statistics = got[0]
    if not case.groups:
        kept = tuple(1 if i in case.axes else n for i, n in enumerate(case.x))
        assert [s.shape for s in statistics] == [kept] * len(statistics)
    np.testing.assert_allclose(case.y(*operands), y, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", True), ("float16", False)])
@each_kind
def test_sixteen_bits_and_wider_parameters(name, dtype, wide):
    case = KINDS[name]
    x, *parameters = case.operands(dtype)
    operands = [x, *(p.astype("float32") * 1.001 if wide else p for p in parameters)]
    results = jax.eval_shape(case, *operands)
    assert [r.dtype for r in results] == [dtype, *["float32"] * (len(results) - 1)]
    cotangents = cotangents_of(results)
    got = outcome(case, operands, cotangents)
    assert [g.dtype for g in got[1]] == [o.dtype for o in operands]
    assert_close(got, exactly(case.plain, operands, cotangents), slack=TWICE)


@each_kind
def test_cotangents_of_one_result_only(name):
    case = KINDS[name]
    operands = case.operands()
    results = jax.eval_shape(case, *operands)
    for i in range(len(results)):
        (cotangent,) = cotangents_of(results[i : i + 1])
        got = outcome(lambda *a, i=i: case(*a)[i], operands, cotangent)[1]
        want = exactly(lambda *a, i=i: case.plain(*a)[i], operands, cotangent)[1]
        assert_close(got[: None if i == 0 else 1], want[: None if i == 0 else 1])
        assert i == 0 or not any(np.any(g) for g in got[1:]), "statistics know nothing of scale"


@each_kind
def test_epsilon_as_an_array_with_its_gradient(name):
    case = KINDS[name]
    operands, epsilon = case.operands(), jnp.float32(0.3)
    cotangents = cotangents_of(jax.eval_shape(case, *operands))
    got = outcome(lambda e, *a: case(*a, epsilon=e), [epsilon, *operands], cotangents)
    want = exactly(lambda e, *a: case.plain(*a, epsilon=e), [epsilon, *operands], cotangents)
    assert_close(got, want)
    assert np.abs(want[1][0]) > 1e-2
    for a, b in zip(case(*operands, epsilon=0.3), got[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_another_epsilon_compiles_nothing():
    x = KINDS["layer"].operands()[0]
    norm = functools.partial(layer, x)
    norm(epsilon=jnp.float32(0.1))
    compiled = []

    def listener(event, *_, **__):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        norm(epsilon=jnp.float32(0.2))
        assert not compiled
        jax.jit(lambda x: x + 1.25)(x)
        assert compiled, "the listener hears of compilations"
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


@pytest.mark.parametrize("epsilon", [0, 1, np.float32(1e-3), np.float64(1e-3)], ids=repr)
def test_a_number_is_in_the_graph(epsilon):
    (spec,) = graphs_of(lambda x: layer(x, epsilon=epsilon), S((4, 6), "float32"))
    (node,) = spec.calls
    assert spec.tensor(dict(node.inputs)["epsilon"]).value == float(epsilon)


@pytest.mark.parametrize("name", ["rms", "layer", "instance", "group"])
def test_flax_has_the_same(name):
    case = KINDS[name]
    of = {"rms": nnx.RMSNorm, "layer": nnx.LayerNorm, "instance": nnx.InstanceNorm}
    more = {"num_groups": 4} if name == "group" else {}
    more |= {} if name == "rms" else {"use_fast_variance": False}
    module = of.get(name, nnx.GroupNorm)(case.x[-1], epsilon=1e-3, rngs=nnx.Rngs(0), **more)
    x, *parameters = case.operands()
    module.scale = nnx.Param(parameters[0])
    if len(parameters) > 1:
        module.bias = nnx.Param(parameters[1])
    want, pull = jax.vjp(lambda x: module(x), x)
    got, ours = jax.vjp(lambda x: case.y(x, *parameters, epsilon=1e-3), x)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(ours(jnp.cos(x))[0], pull(jnp.cos(x))[0], rtol=1e-4, atol=1e-4)


# -- transformations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(group, (2, 3, 4), (), (2,), keywords={"num_groups": 2}, groups=2),
        Case(layer, (4, 3), (0,), (0,), keywords={"axis": 0, "zero_centered_scale": True}),
    ],
    ids=["group", "layer"],
)
def test_each_transformation(case):
    """Those of every graph, of what stands around one here."""
    operands = [np.asarray(x) for x in case.operands()]
    transformations = Transformations(operands, jax.eval_shape(case, *operands))
    data = transformations.data()

    def run(f):
        return jax.jit(lambda d: {n: getattr(transformations, n)(f, d) for n in ALL})(data)

    got, want = run(case), run(case.plain)
    for name in ALL:
        pairs = zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True)
        assert max(relative_error(a, b) for a, b in pairs) <= 2 * TOLERANCES["float32"], name


def test_the_policy_keeps_graphs_and_remat_computes_them_again():
    f = lambda x, s, b: jnp.sum(jnp.sin(layer(jnp.cos(x), s, b)))  # noqa: E731

    def forwards(**policy):
        specs = graphs_of(
            jax.value_and_grad(jax.checkpoint(f, **policy)), *KINDS["layer"].operands()
        )
        return [methods(spec) for spec in specs].count(["layernorm"])

    assert (forwards(), forwards(policy=jc.save_cudnn)) == (2, 1)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("rms", (0, 10)), ("ada", (0, 4, 10)), ("ada", (3, 0, 10)), ("instance", (0, 3, 5, 7)),
     ("group", (0, 3, 4, 8)), ("group, one", (0, 5, 6)), ("group, of each channel", (0, 5, 6))],
)  # fmt: skip
def test_no_rows(name, shape):
    case = dataclasses.replace({**CASES, **KINDS}[name], x=shape)
    operands = case.operands()
    results, pull = jax.jit(functools.partial(jax.vjp, case))(*operands)
    assert results[0].shape == shape
    gradients = pull([jnp.ones_like(r) for r in results])
    assert [g.shape for g in gradients] == list(case.shapes)
    assert not any(np.any(g) for g in gradients)


def test_vmap_over_nobody():
    x = jnp.ones((0, 4, 6))
    assert jax.vmap(jax.grad(lambda x: rms(x).sum()))(x).shape == (0, 4, 6)


needs_devices = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 (host) devices")


@needs_devices
@each_kind
def test_the_batch_may_be_sharded(name):
    """Under jit with sharded operands, and in shard_map; gradients of parameters are summed."""
    case = dataclasses.replace(KINDS[name], x=(8, *KINDS[name].x[1:]))
    operands = case.operands()
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    specs = [P("data") if case.function is ada or i == 0 else P() for i in range(len(operands))]

    def both(f):
        total = lambda *o: jnp.sum(jnp.sin(f(*o)))  # noqa: E731
        return lambda *o: (f(*o), jax.grad(total, tuple(range(len(o))))(*o))

    want = jax.jit(both(lambda *o: case.plain(*o)[0]))(*operands)
    sharded = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]
    mapped = jax.shard_map(case.y, mesh=mesh, in_specs=tuple(specs), out_specs=P("data"))
    for f in (case.y, mapped):
        got = jax.jit(both(f))(*sharded)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


# -- what the programs hold ------------------------------------------------------------------------


def total(case, **keywords):
    return lambda *o: jnp.sum(jnp.sin(case.y(*o, **keywords).astype(jnp.float32)))


METHODS = {"rms": "rmsnorm", "ada": "adalayernorm", "instance": "instancenorm"}


@each_kind
def test_a_gradient_is_one_forward_and_one_backward(name):
    """The backward reads its operands and statistics, and nothing else of the size of x; what it
    writes and nobody reads has memory, and is dropped. Without gradient there are no statistics."""
    case = CASES["group, one"] if name == "group" else KINDS[name]
    avals, method = case.avals(), METHODS.get(name, "layernorm")
    forward, backward = graphs_of(jax.grad(total(case), tuple(range(len(avals)))), *avals)
    assert (methods(forward), methods(backward)) == ([method], [f"{method}_backward"])
    assert forward.origin.residuals == ()
    ports = [port for port, result in forward.calls[0].outputs if result in forward.outputs]
    assert ports == (["Y", "inv_var"] if name == "rms" else ["Y", "mean", "inv_var"])
    large = [t for t in backward.input_tensors if np.prod(t.shape) >= np.prod(case.x)]
    assert len(large) == 2, "x and the cotangent"

    _, backward = graphs_of(jax.grad(total(case)), *avals)
    (call,) = wire(backward).calls
    written = [port for port, _ in call.outputs]
    assert written == (["DX", "DScale"] if name == "rms" else ["DX", "DScale", "DBias"])
    assert (len(backward.outputs), len(wire(backward).outputs)) == (1, len(written))
    assert wire(backward).outputs[0] == backward.outputs[0]

    jaxpr = jax.make_jaxpr(case.y)(*avals)
    (equation,) = (e for e in jaxpr.jaxpr.eqns if e.primitive.name == "cudnn")
    assert equation.params["name"] == case.function.__name__
    (alone,) = graphs_of(case.y, *avals)
    (call,) = wire(alone).calls
    assert call.node.norm_forward_phase == "INFERENCE"
    assert [port for port, _ in call.outputs] == ["Y"]


def test_axes_are_moved_outside_of_the_graph_and_the_scale_from_zero_inside():
    (spec,) = graphs_of(CASES["layer, middle"].y, *CASES["layer, middle"].avals())
    assert methods(spec) == ["layernorm"]
    assert shapes_of(spec, "layernorm")["input"] == (2, 3, 4, 6)
    case = CASES["layer, 1 + scale"]
    forward, backward = graphs_of(jax.grad(total(case), (0, 1, 2)), *case.avals())
    assert methods(forward) == ["add", "layernorm"]
    assert methods(backward) == ["add", "layernorm_backward"]


def test_vmap_folds_into_the_node_also_of_parameters_alone():
    case = KINDS["layer"]
    x, *parameters = case.avals()
    for axes, found in (
        ((0, None, None), ("layernorm", (18, 10))),
        ((None, 0, None), ("adalayernorm", (3, 6, 10))),
        ((0, 0, 0), ("adalayernorm", (3, 6, 10))),
    ):
        given = [
            a if axis is None else S((3, *a.shape), a.dtype)
            for a, axis in zip((x, *parameters), axes, strict=True)
        ]
        mapped = jax.vmap(case.y, in_axes=axes)
        (spec,) = graphs_of(mapped, *given)
        assert (methods(spec), shapes_of(spec, found[0])["input"]) == ([found[0]], found[1])
        assert not {"scan", "while"} & {*primitives(jax.make_jaxpr(mapped)(*given))}


def test_group_norm_with_a_scale_by_channel_keeps_x_and_statistics_alone():
    x = jnp.ones((2, 4, 4, 16), jnp.bfloat16)
    scale = bias = jnp.ones(16, jnp.bfloat16)
    _, pull = jax.eval_shape(
        lambda *o: jax.vjp(functools.partial(group, num_groups=4), *o), x, scale, bias
    )
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= x.size]
    assert {str(leaf.dtype) for leaf in kept} == {"bfloat16"}
    assert len(kept) <= 2, "x, and a view of it"


# -- errors ----------------------------------------------------------------------------------------

X, SHAPE, DTYPE = jnp.zeros((4, 6, 8)), jc.GraphError, jc.GraphTypeError
WRONG = {
    "scale": (lambda: layer(X, jnp.ones(6)), SHAPE, r"scale[^$]*\(8,\)[^$]*\(6,\)"),
    "bias": (lambda: layer(X, bias=jnp.ones((1, 8))), SHAPE, r"bias[^$]*\(1, 8\)"),
    "scale of two axes": (lambda: rms(X, jnp.ones(8), axis=(1, 2)), SHAPE, r"\(6, 8\)"),
    "integers": (lambda: layer(X.astype(int)), DTYPE, r"x[^$]*int32[^$]*x.astype"),
    "complex scale": (lambda: layer(X, jnp.ones(8, "complex64")), DTYPE, "scale[^$]*complex64"),
    "axis": (lambda: rms(X, axis=3), SHAPE, "rank 3[^$]*axis=3"),
    "axis below": (lambda: rms(X, axis=-4), SHAPE, "axis=-4"),
    "axis twice": (lambda: rms(X, axis=(1, -2)), SHAPE, r"different axes[^$]*\(1, -2\)"),
    "no axis": (lambda: rms(X, axis=()), SHAPE, r"axis=\(\)"),
    "axis of a kind": (lambda: rms(X, axis=1.0), SHAPE, "axis=1.0"),
    "a number": (lambda: rms(1.0), SHAPE, "rank 0"),
    "groups": (lambda: group(X, num_groups=3), SHAPE, "divisor of 8"),
    "no groups": (lambda: group(X, num_groups=0), SHAPE, "num_groups=0"),
    "groups of a kind": (lambda: group(X, num_groups=2.0), SHAPE, "num_groups=2.0"),
    "channels first": (lambda: instance(X, axis=0), SHAPE, "axis=0"),
    "no spatial axis": (lambda: instance(X[0]), SHAPE, r"\*spatial"),
    "axes of channels": (lambda: instance(X, axis=(1, 2)), SHAPE, r"axis=\(1, 2\)"),
    "no batch": (lambda: ada(X[0, 0], jnp.ones(8)), SHAPE, "batch"),
    "scale of an example": (lambda: ada(X, jnp.ones(8)), SHAPE, r"scale[^$]*\(4, 8\)"),
    "no scale": (lambda: ada(X, None), SHAPE, "scale is missing"),
    "epsilons": (lambda: rms(X, epsilon=jnp.ones(2)), SHAPE, "epsilon"),
    "a complex epsilon": (lambda: rms(X, epsilon=1j), SHAPE, "real scalar"),
    "epsilon of a kind": (lambda: rms(X, epsilon="a"), DTYPE, "epsilon[^$]*str: 'a'"),
    "no epsilon": (lambda: layer(X, epsilon=None), DTYPE, "epsilon[^$]*NoneType"),
    "nothing": (lambda: layer(None), DTYPE, "x[^$]*NoneType"),
    "implementation": (lambda: rms(X, implementation="cuda"), SHAPE, "split[^$]*cuda"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what):
    call, kind, words = WRONG[what]
    with pytest.raises(kind, match=words):
        call()


# -- plans without a GPU ---------------------------------------------------------------------------


def planned(function, *avals):
    with jc.target("H200"):
        return jc.plans(function, *avals)


@pytest.mark.deviceless
@pytest.mark.parametrize("name", PLANNED)
def test_forward_and_backward_are_a_plan_each(name):
    case = PLANNED[name]
    step = jax.grad(total(case, implementation="cudnn"), tuple(range(len(case.shapes))))
    found = planned(step, *case.avals())
    title = "instance_norm" if "of each channel" in name else case.function.__name__
    assert [*found] == [title, f"{title} (backward)"]
    for plan in found.values():
        assert [segment.engine != "XLA" for segment in plan.segments] == [True]


REFUSED = {
    # what -> call, operands, what the reason says
    "epsilon": (
        lambda x, e, **k: layer(x, epsilon=e, **k),
        [(5, 64), ()],
        "give a Python number",
    ),
    "rows of one element": (lambda x, **k: layer(x, **k), [(64, 1)], "one element"),
    "groups": (
        lambda x, **k: group(x, num_groups=4, **k),
        [(4, 8, 8, 32)],
        "not the last in memory",
    ),
}


@pytest.mark.deviceless
@pytest.mark.parametrize("what", REFUSED)
def test_what_cudnn_does_not_run(what, monkeypatch):
    """In words under "cudnn"; by default it is XLA's, and the plan says why."""
    monkeypatch.setattr(losses, "table", dict)  # which may name another reason
    call, shapes, words = REFUSED[what]
    avals = [S(s, "bfloat16" if s else "float32") for s in shapes]
    with pytest.raises(jc.UnsupportedGraphError, match=words):
        planned(functools.partial(call, implementation="cudnn"), *avals)
    (plan,) = planned(call, *avals).values()
    assert [s.engine for s in plan.segments] == ["XLA"]
    assert words in " ".join(str(plan.explain()).split())
