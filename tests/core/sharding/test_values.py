"""On a mesh, values and gradients are those of the unsharded program.

``pytest -m long`` runs a sample; with ``--every``, each case along each axis that it has.
"""

import itertools
import random

import function_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_cases
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import SMALL, is_float, spec_and_operands

import jax_cudnn as jc
from jax_cudnn._core.primitive import bind

KINDS = ("auto", "explicit", "partly manual")
SIZES = {"b": 4, "t": 4, "s": 8, "h": 8, "k": 8, "m": 4, "n": 8, "c": 4, "p": 8}
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 (host) devices"),
]


def axes_of(arrays):
    """Each axis that two devices may share: the operand and its dimension."""
    return [(i, d) for i, x in enumerate(arrays) for d, n in enumerate(x.shape) if n % 2 == 0 < n]


def layout(arrays, *places):
    """PartitionSpecs that shard these axes over "a" and "b", in this order."""
    named = dict(zip(places, "ab", strict=False))
    return [P(*(named.get((i, d)) for d in range(x.ndim))) for i, x in enumerate(arrays)]


def together(arrays):
    """Each dimension of all operands that have as many as the first one."""
    known, rank = axes_of(arrays), arrays[0].ndim
    for dim in range(rank):
        if (0, dim) in known:
            yield [
                P(*("a" if d == dim and x.ndim == rank and (i, d) in known else None
                    for d in range(x.ndim)))
                for i, x in enumerate(arrays)
            ]  # fmt: skip


def layouts(name, arrays, pairs):
    """All axes alone, and a sample of their pairs."""
    known = axes_of(arrays)
    two = [*itertools.combinations(known, 2)]
    chosen = random.Random(name).sample(two, min(pairs, len(two)))
    return [layout(arrays, *places) for places in [*((one,) for one in known), *chosen]]


def differentiated(function, arrays):
    """The results, and gradients of a linear function of them, of a list of arrays."""
    floats = tuple(i for i, x in enumerate(arrays) if is_float(x))

    def weighted(y):
        return (y.astype("float32") * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

    def run(given):
        def total(*moving):
            own = [*given]
            for i, x in zip(floats, moving, strict=True):
                own[i] = x
            results = jax.tree.leaves(function(*own))
            return sum((weighted(y) for y in results if is_float(y)), jnp.float32(0)), results

        try:
            return jax.grad(total, (*range(len(floats)),), has_aux=True)(*(given[i] for i in floats))
        except jc.GraphError:  # it has no derivative
            return function(*given)

    return run if floats else lambda given: function(*given)


def check(function, arrays, kind, specs):
    """All layouts in one program: each has operands of its own, so none determines another."""
    run = differentiated(function, arrays)
    want = jax.tree.leaves(jax.jit(run)(arrays))
    axes = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=axes)
    placed = [
        [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, own, strict=True)]
        for own in specs
    ]
    mapped = run
    if kind == "partly manual":
        mapped = jax.shard_map(
            run, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"c"}, check_vma=False
        )
    made = jax.jit(lambda given: [mapped(own) for own in given])(placed)
    dtypes = {str(x.dtype) for x in jax.tree.leaves((arrays, want))}
    tolerance = 2e-4 if {d for d in dtypes if "float" in d} <= {"float32"} else 2e-2
    if any("float8" in d for d in dtypes):  # a step of float8_e4m3fn is at most 1/8
        tolerance = 0.13
    for own, got in zip(specs, made, strict=True):
        for i, (x, y) in enumerate(zip(jax.tree.leaves(got), want, strict=True)):
            if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
                continue
            x, y = (np.asarray(v, np.float64) for v in (x, y))
            largest = np.max(np.abs(y), initial=0, where=np.isfinite(y))
            # a gradient may be a difference of numbers of about 1
            atol = tolerance * largest + 1e-5
            np.testing.assert_allclose(x, y, tolerance, atol, err_msg=f"{own}, leaf {i}")


def is_first(case, seen=set()):  # noqa: B006
    """Whether a case is the first one of its method."""
    method = case.name.rsplit("_", 2)[0]
    return method not in seen and not seen.add(method)


ANCHORS = ("sdpa", "matmul", "conv", "norm")
REGISTRY = [*all_cases()]
SAMPLE = {case.name for case in REGISTRY if is_first(case)}


def pytest_generate_tests(metafunc):
    every = metafunc.config.getoption("every")
    if "case" in metafunc.fixturenames:
        rows = [
            pytest.param(case, kind, id=f"{case.name}-{kind}")
            for i, case in enumerate(REGISTRY)
            if every or case.name in SAMPLE
            for kind in (KINDS if every and i % 3 == 0 else KINDS[:2] if every else KINDS[i % 2 : i % 2 + 1])
        ]
        metafunc.parametrize(("case", "kind"), rows)


def test_graphs(case, kind, request):
    spec, operands = spec_and_operands(case, SMALL)
    every = request.config.getoption("every")
    anchored = any(call.node.anchor for call in spec.calls)
    if every:
        specs = layouts(case.name, operands, 8 if anchored else 0)
    else:
        specs = layouts(case.name, operands, 1)[-1:] if anchored else [*together(operands)][:1]
    check(lambda *x: bind(spec, case.name, *x), operands, kind, specs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", function_cases.CASES)
def test_functions(name, kind, request):
    case = function_cases.CASES[name]
    operands = [*function_cases.operands(case, SIZES)]
    if request.config.getoption("every"):
        specs = layouts(name, operands, 8)
    else:
        specs = [*together(operands)][:: max(1, operands[0].ndim - 2)]
    check(function_cases.given(case, 0), operands, kind, specs)
