"""On a mesh, values and gradients are those of the unsharded program.

``pytest -m long`` runs a sample; with ``--every``, each case along each axis that it has. Where
JAX sees several GPUs, their values are compared with those of one.
"""

import functools
import itertools
import random
import re

import flax_cases
import function_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_cases
from flax import nnx
from helpers import placed, share, whole
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import SMALL, is_float, spec_and_operands

import jax_cudnn as jc
import jax_cudnn.flax as jnn
from jax_cudnn._core.primitive import bind

COUNT, ON_GPUS = len(jax.devices()), jax.default_backend() == "gpu"
KINDS = AUTO, EXPLICIT, PARTLY_MANUAL = "auto", "explicit", "partly manual"
REGISTRY = [*all_cases()]
FUNCTIONS = function_cases.CASES | function_cases.IN_16_BITS | function_cases.STATIC
REFUSED = {  # on explicit axes, some or all layouts, by JAX's own check of types: in what words
    "dot_general": "to have the same sharding|specify the output sharding|illegally sharded",
    "conv_general_dilated": "specify the output sharding|illegally sharded",
    "delayed scaling": "cannot be sharded on the axis being rolled over",  # amax_history
}
# Their relu follows a sum of 16 bits, or of products in TF32.
FLIPS = {"batch_norm, bfloat16", *(("conv", "conv_norm_act") if ON_GPUS else ())}
FLOAT8 = "fp8", "mxfp8", "float8_matmul"  # which round to it inside
EXAMPLES = 10  # a size that nothing else has
OF_ALL_EXAMPLES = {  # what these compute: in a shard_map it is of each device's
    *("batch_norm", "batch_norm, relu", "conv_batch_norm", "cross-entropy", "attention, dropout"),
    *("fp8", "float8_matmul", "write_pages", "batch_norm, bfloat16"),
    "attention, dropout, bfloat16",
}
# In a shard_map over a part of the axes XLA aborts, for jnp, too, where pages and a table are
# sharded, or rows and biases of groups, or where a logit is read of a sharded product (on CPUs).
ABORTS = {"paged", "paged, bfloat16", "write_pages", "ragged_dot, gated"}
ABORTS |= {"cross-entropy, each token"}


def decoding(rngs):
    layer = jnn.MultiHeadAttention(4, 32, decode=True, page_size=4, rngs=rngs)
    layer.init_cache((4, 8, 32))
    return layer


CONSTRUCTED = {  # those that Flax does not have, and with a state
    "conv_norm_act": (lambda r: jnn.ConvNormAct(8, 16, (3, 3), rngs=r), (4, 6, 6, 8)),
    "gated_mlp": (lambda r: jnn.GatedMLP(8, 16, use_bias=True, rngs=r), (4, 6, 8)),
    "quantized": (lambda r: jnn.QuantizedLinear(jnn.Linear(8, 16, rngs=r), group_size=4), (4, 8)),
    "delayed scaling": (lambda r: jnn.Linear(16, 32, float8="delayed", rngs=r), (32, 16)),
    "experts": (lambda r: jnn.MoE(8, 12, 4, 2, use_bias=True, rngs=r), (4, 6, 8)),
    "decoding": (decoding, (4, 1, 32)),
}
LAYERS = CONSTRUCTED | {
    name: (lambda r, case=case: case.made(case.ours), case.shape)
    for name, case in flax_cases.CASES.items()
}
SIZES = {"b": 4, "t": 4, "s": 8, "h": 8, "k": 8, "m": 4, "n": 8, "c": 4, "p": 8}
MESHES = {8: (2, 2, 2), 4: (2, 2, 1), 2: (2, 1, 1)}
pytestmark = [
    pytest.mark.long,
    pytest.mark.several_gpus,
    pytest.mark.skipif(COUNT not in MESHES, reason="needs 2, 4 or 8 (host) devices"),
]


def axes_of(arrays):
    """Each axis that two devices may share: the operand and its dimension."""
    return [(i, d) for i, x in enumerate(arrays) for d, n in enumerate(x.shape) if n % 2 == 0 < n]


def layout(arrays, places):
    """PartitionSpecs that shard some axes, each over the mesh axis given for it."""
    return [P(*(places.get((i, d)) for d in range(x.ndim))) for i, x in enumerate(arrays)]


def each_axis(name, arrays, pairs, kind=AUTO):
    """All axes alone, and a sample of their pairs; next to a manual mesh axis those alone over the
    second of two others."""
    names = "ba" if kind == PARTLY_MANUAL and COUNT == 8 else "ab"
    alone = axes_of(arrays)
    two = [*itertools.combinations(alone, 2)]
    chosen = random.Random(name).sample(two, min(pairs, len(two)))
    return [layout(arrays, dict(zip(places, names, strict=False)))
            for places in [*zip(alone), *chosen]]  # fmt: skip


def together(arrays):
    """The first dimension of all operands; then the later ones of floats of the first's rank."""
    first, made = arrays[0], []
    for dim in range(first.ndim):
        alike = [x.ndim == first.ndim and (dim == 0 or is_float(x)) for x in arrays]
        places = {(i, d): "a" for i, d in axes_of(arrays) if d == dim and alike[i]}
        made += [layout(arrays, places)] if (0, dim) in places else []
    return made


def differentiated(function, arrays):
    """The results, and gradients of a linear function of them, of a list of arrays.

    On GPUs float8 graphs are differentiated without their factors, whose gradients are sums of
    terms that cancel, and without their largest values: XLA may add the parts of a product again
    where it looks for the element, and not find it (jnp.max's, too)."""
    cancel = ON_GPUS and any("float8" in str(x.dtype) for x in arrays)
    floats = tuple(i for i, x in enumerate(arrays) if is_float(x) and not (cancel and x.size == 1))

    def weighted(y):  # without a pattern: parts of a sum are not much larger than the sum
        return (y.astype("float32") * jnp.cos(jnp.arange(y.size) ** 2.0).reshape(y.shape)).sum()

    def run(given):
        def total(*moving):
            own = [*given]
            for i, x in zip(floats, moving, strict=True):
                own[i] = x
            results = jax.tree.leaves(function(*own))
            summed = [y for y in results if is_float(y) and not (cancel and y.size == 1)]
            return sum(map(weighted, summed), jnp.float32(0)), results

        try:
            return jax.grad(total, (*range(len(floats)),), has_aux=True)(
                *(given[i] for i in floats)
            )
        except jc.GraphError:  # it has no derivative
            return function(*given)

    return run if floats else lambda given: function(*given)


def on_mesh(kind, arrays, specs):
    axes = (AxisType.Explicit if kind == EXPLICIT else AxisType.Auto,) * 3
    sizes = (2, 1, 2) if COUNT == 4 and kind == PARTLY_MANUAL else MESHES[COUNT]
    mesh = jax.make_mesh(sizes, ("a", "b", "c"), axis_types=axes)
    return [
        [placed(x, NamedSharding(mesh, s)) for x, s in zip(arrays, own, strict=True)]
        for own in specs
    ]


def varying(function, mesh, i):
    """In a shard_map in which one operand varies, by its type, and the others do not: the mean of
    the devices' results, which are equal."""

    def run(*operands):
        x = [jax.lax.pcast(x, "a", to="varying") if j == i else x for j, x in enumerate(operands)]
        joined = {True: jax.lax.pmean, False: jax.lax.pmax}
        return jax.tree.map(lambda y: joined[is_float(y)](y, "a"), function(*x))

    return jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P())


def by_example(function, arrays, mesh):
    """In a shard_map along the examples: all dimensions of that size."""

    def spec(x):
        return P(*("a" if n == EXAMPLES else None for n in x.shape))

    specs = tuple(map(spec, arrays))
    results = jax.tree.map(spec, jax.eval_shape(function, *arrays))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results)


def check(function, arrays, kind, specs, inside=None, flips=False, float8=False):
    """All layouts in one program: each has operands of its own, so none determines another.
    ``inside`` makes, of the mesh, the function of each. Gradients are not compared where a sum may
    have another sign (``flips``)."""
    assert specs
    # Otherwise XLA may leave out a cast of a cotangent to float8 in one of the two programs.
    jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    run = (lambda given: function(*given)) if flips else differentiated(function, arrays)
    want = jax.tree.leaves(jit(run)(arrays))
    results = len(jax.tree.leaves(jax.eval_shape(function, *arrays)))  # after gradients
    assert any(map(np.any, want)) or not any(x.size for x in want[-results:])
    operands = on_mesh(kind, arrays, specs)
    mesh = operands[0][0].sharding.mesh
    mapped = [run] * len(specs)
    if inside is not None:
        mapped = [differentiated(own, arrays) for own in inside(mesh)]
    if kind == PARTLY_MANUAL:
        how = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
        mapped = [jax.shard_map(run, axis_names={"c"}, **how)] * len(specs)
    made = jit(lambda given: [f(own) for f, own in zip(mapped, given, strict=True)])(operands)
    dtypes = {str(x.dtype) for x in jax.tree.leaves((arrays, want))}
    tolerance = 2e-4 if {d for d in dtypes if "float" in d} <= {"float32"} else 2e-2
    if ON_GPUS:  # products in TF32, of other plans
        tolerance = 2e-2
    if float8 or any("float8" in d for d in dtypes):  # a step of float8_e4m3fn is at most 1/8
        tolerance = 0.13
    for own, got in zip(specs, made, strict=True):
        for i, (x, y) in enumerate(zip(jax.tree.leaves(got), want, strict=True)):
            least = float(jnp.finfo(y.dtype).smallest_subnormal) if is_float(y) and ON_GPUS else 0
            y, part = np.asarray(y, np.float64), share(x)
            x = whole(x, y)
            largest = np.max(np.abs(y), initial=0, where=np.isfinite(y))
            # a gradient may be a difference of numbers of about 1
            near = 2e-2 if x.size == 1 and i >= len(want) - results else tolerance
            atol = near * largest + max(1e-5, least)
            np.testing.assert_allclose(x, y, near, atol, err_msg=f"{own}, leaf {i}")
            most = 0.05 if ON_GPUS else 0.01  # single elements may be rounded to another step
            assert not float8 or np.linalg.norm(x - y) <= most * part**0.5 * np.linalg.norm(y)


def sample():
    """The first case of each method, and all fusions."""
    return {case.name.rsplit("_", 2)[0]: case.name for case in reversed(REGISTRY)}.values()


def pytest_generate_tests(metafunc):
    if "kind" not in metafunc.fixturenames:
        return
    (name,) = {"case", "function", "layer"} & {*metafunc.fixturenames}
    every = metafunc.config.getoption("every")
    rows = {"case": REGISTRY, "function": [*FUNCTIONS], "layer": [*LAYERS]}[name]
    rows = [x for x in rows if every or name != "case" or x.name in {*sample()}]
    metafunc.parametrize(
        (name, "kind"),
        [
            pytest.param(x, kind, id=f"{x.name if name == 'case' else x}-{kind}")
            for i, x in enumerate(rows)
            for j, kind in enumerate(KINDS)
            if (every or i % 5 % 3 == j) and not (kind == PARTLY_MANUAL and x in ABORTS)
        ],
    )


def test_graphs(case, kind, request):
    spec, operands = spec_and_operands(case, SMALL)
    if case.name.startswith("cmp_eq"):  # some are equal
        operands = [jnp.round(x) for x in operands]
    anchored = any(call.node.anchor for call in spec.calls)
    specs = each_axis(case.name, operands, 3 if anchored else 0, kind)
    if not request.config.getoption("every"):
        specs = each_axis(case.name, operands, 1)[-1:] if anchored else together(operands)[:1]
    specs = specs or [layout(operands, {})]  # no axis has an even size: all devices have all
    flips = "relu" in case.name and any(x.dtype.itemsize == 2 for x in operands)
    check(lambda *x: bind(spec, case.name, *x), operands, kind, specs, flips=flips)


def call(name, sizes=SIZES):
    """A function of arrays, and arrays."""
    case = FUNCTIONS[name]
    operands = [*function_cases.operands(case, sizes)]
    if name == "write_pages":  # the table: no slot is written twice, or either value may stay
        operands[2] = jnp.arange(operands[2].size, dtype="int32").reshape(operands[2].shape)
    return function_cases.given(case, 0), operands


def test_functions(function, kind, request):
    name, every = function, request.config.getoption("every")
    run, operands = call(name)
    specs = together(operands)[:: max(1, operands[0].ndim - 2)]  # examples, and heads or features
    specs = each_axis(name, operands, 3, kind) if every else specs
    specs = typed(name, run, operands, kind, specs)
    if specs:
        check(run, operands, kind, specs, flips=name in FLIPS, float8=name in FLOAT8)


def test_layers(layer, kind):
    """Results, the state, and gradients by the input and the state, along each axis of these."""
    make, shape = LAYERS[layer]
    graph, state = nnx.split(make(nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(state)

    def run(x, *leaves):
        made = nnx.merge(graph, tree.unflatten(leaves))
        return made(x), nnx.state(made, nnx.Not(nnx.Param))

    operands = [jax.random.normal(jax.random.key(1), shape), *leaves]
    specs = typed(layer, run, operands, kind, each_axis(layer, operands, 3, kind))
    check(run, operands, kind, specs, flips=layer in FLIPS, float8="delayed" in layer)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "mxfp8"])
def test_one_operand_varies(name):
    """As activations do in a shard_map, where weights are replicated. (mxfp8 would round half of a
    cotangent in another way.)"""
    run, operands = call(name)
    specs = [layout(operands, {})] * len(operands)
    each = lambda mesh: [varying(run, mesh, i) for i in range(len(operands))]  # noqa: E731
    check(run, operands, AUTO, specs, each, float8=name in FLOAT8)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, case in FUNCTIONS.items()
        if "b" in function_cases.letters(case) and name not in OF_ALL_EXAMPLES
    ],
)
def test_examples_in_a_shard_map(name):
    run, operands = call(name, SIZES | {"b": EXAMPLES})
    inside = lambda mesh: [by_example(run, operands, mesh)]  # noqa: E731
    check(run, operands, AUTO, [layout(operands, {})], inside, float8=name in FLOAT8)


def typed(name, function, arrays, kind, specs):
    """Those layouts that jnp, or a rule that it lacks, lets a function that may be REFUSED have."""
    if kind != EXPLICIT or name not in REFUSED:
        return specs
    found = []
    for own, given in zip(specs, on_mesh(kind, arrays, specs), strict=True):
        try:
            jax.eval_shape(differentiated(function, arrays), given)
            found.append(own)
        except Exception as error:
            if not re.search(REFUSED[name], str(error)):
                raise
    assert len(found) < len(specs)
    return found
