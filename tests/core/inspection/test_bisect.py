"""jc.bisect: which fused operation is off, or makes the first NaN."""

import doctest
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from helpers import normal as operands
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn._core import primitive
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.inspection import bisect as program
from jax_cudnn._core.inspection.compare import judge, measure
from jax_cudnn._core.inspection.rewrite import Rewriter

block = jc.graph(lambda g, x, w: g.relu(g.matmul(x, w)))
squash = jc.graph(lambda g, x: g.tanh(x) * 0.5)
logarithm = jc.graph(lambda g, x: g.log(x))
plus = jc.graph(lambda g, x, y: x + y)
larger = jc.graph(lambda g, x, y: g.cmp_gt(x, y))
for graph, name in ((block, "block"), (squash, "squash"), (logarithm, "logarithm"), (plus, "plus")):
    graph.name = name


@pytest.fixture
def wrong(monkeypatch):
    """``wrong(method, change)``: what runs graphs with an operation is changed; references of
    ``bisect`` are not."""
    changes = {}

    def run(spec, *operands, **options):
        results = evaluate(spec, *operands, **options)
        for method, change in changes.items():
            if method in [call.node.method for call in spec.calls]:
                results = [change(result) for result in results]
        return results

    monkeypatch.setattr(primitive, "evaluate", run)
    return changes.__setitem__


def two_layers(x, w):
    return squash(block(x, w)).astype("float32").sum()


def rewritten(function, *args):
    """The results of the program with comparisons; and whether all graphs are compared."""
    jaxpr, inputs = program._traced(function, args, {}, "function")
    rewriter = Rewriter(lambda *what: None)
    return jax.jit(lambda *xs: rewriter.run(jaxpr, xs))(*inputs), not rewriter.unseen


X = W = (1, 8, 8)
guarded = jax.custom_vjp(lambda x: squash(x))
guarded.defvjp(lambda x: (guarded(x), x), lambda x, t: (squash(x) * t,))
doubled_in_batches = custom_vmap(lambda x: squash(x))
doubled_in_batches.def_vmap(lambda size, batched, x: (squash(x) * 2, True))


def scanned(x, w):
    def step(carry, each):
        number, row = each
        return squash(carry + row * w[0, 0, 0]), (carry.sum() + number, row)

    return lax.scan(step, x, (jnp.arange(3), jnp.stack([x, 2 * x, -x])))


def branched(x, w):
    branches = [lambda a: squash(a), lambda a: block(a, w), lambda a: -a]
    return [lax.switch(i, branches, x) for i in (0, 1, 2, 9)]


PROGRAMS = {
    "jit": lambda x, w: (jax.jit(block)(x, jax.jit(jnp.sin)(w)), plus(x, w.sum())),
    "scan_reverse": lambda x, w: lax.scan(
        lambda c, row: (plus(c, row), c), x, jnp.stack([x, w, -x]), reverse=True
    ),
    "grad_of_scan": jax.grad(lambda x, w: scanned(x, w)[0].sum(), (0, 1)),
    "vmap_of_while": jax.vmap(
        lambda x, w: lax.while_loop(
            lambda s: s[0].sum() > 0.1, lambda s: (squash(s[0]), plus(s[1], w)), (jnp.abs(x), w)
        )
    ),
    "grad_of_cond": jax.grad(lambda x, w: sum(y.sum() for y in branched(x, w)), (0, 1)),
    "remat_policy": jax.grad(jax.checkpoint(two_layers, policy=jc.save_cudnn), 1),
    "custom_vjp": jax.grad(lambda x, w: lax.map(guarded, jnp.stack([x, w])).sum()),
    "custom_vmap": lambda x, w: (doubled_in_batches(x), jax.vmap(doubled_in_batches)(w)),
    "keys": lambda x, w: lax.map(
        lambda key: squash(x + jax.random.normal(key, w.shape)),
        jax.random.split(jax.random.key(3), 2),
    ),
    "pmap": lambda x, w: jax.pmap(squash)(x.reshape(8, 1, 8)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_with_comparisons_a_program_gives_what_it_gives_and_nothing_is_suspect(name, key):
    args = operands(key, X, W)
    got, entered = rewritten(PROGRAMS[name], *args)
    assert_same(got, jax.tree.leaves(PROGRAMS[name](*args)))
    assert entered
    report = jc.bisect(PROGRAMS[name], *args)
    assert (report.suspects, report.first_nan) == ((), None)
    assert 0 <= report.worst.times_rounding < 1.5


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_wrong_lowering_is_the_worst(dtype, key, wrong):
    wrong("tanh", lambda y: y * 1.1)
    x, w = operands(key, X, W, dtype=dtype)
    report = jc.bisect(two_layers, x, w)
    assert [entry.name for entry in report.suspects] == [report.worst.name] == ["squash"]
    np.testing.assert_allclose(report.worst.worst_output.relative, 0.1, rtol=0.05)
    got, want = report.worst.operands["x"], jax.jit(block)(x, w)
    np.testing.assert_allclose(*(np.asarray(v, "float32") for v in (got, want)), rtol=1e-2)


def test_a_single_wrong_element_and_a_wrong_backward_are_seen(key, wrong):
    wrong("matmul", lambda y: y.at[0, 3, 5].add(0.5))
    report = jc.bisect(block, *operands(key, (1, 64, 64), (1, 64, 64)))
    assert report.worst.worst_output.relative < 1e-2
    assert report.suspects == (report.worst,)
    wrong("matmul", lambda y: y)
    wrong("relu_backward", lambda y: -y)
    report = jc.bisect(jax.jit(jax.grad(two_layers)), *operands(key, X, W))
    assert (report.worst.name, report.worst.role) == ("block", "backward")
    assert len(report.suspects) == 1


def test_paths_name_steps_of_loops_and_branches(wrong):
    wrong("tanh", lambda y: y + 1)
    wrong("add", lambda y: jnp.where(y > 50, y + 3, y))  # too large values, which come up later

    def step(state):
        i, x = state
        return i + 1, lax.cond(i == 2, squash, lambda a: plus(a, a), x)

    report = jc.bisect(lambda x: lax.while_loop(lambda s: s[0] < 4, step, (0, x)), jnp.ones(4))
    found = [f"while[{i}]/cond[{branch}]" for i, branch in enumerate((0, 0, 1, 0))]
    assert ([entry.path for entry in report], report.worst.path) == (found, found[2])
    shifts = jnp.array([[1.0], [2.0], [90.0], [0.0]])
    report = jc.bisect(lambda x: lax.scan(lambda c, s: (plus(c, s), c), x, shifts), jnp.ones(4))
    assert {entry.path for entry in report.suspects} == {"scan[2]", "scan[3]"}


def test_an_entry_has_the_users_line(key):
    def here(x):
        return squash(x)  # this line

    (entry,) = jc.bisect(jax.jit(here), *operands(key, X))
    assert re.search(r"test_bisect\.py:\d+, in .*here: return squash\(x\)  # this", entry.line)


def test_another_order_of_adding_is_not_suspect_even_where_terms_cancel():
    """Of a sum whose terms are a million times larger a good part is rounding."""
    g = jc.graph(lambda g, x: g.reduction(x, mode="ADD", out_dims=[4, 1]))
    half = np.random.default_rng(0).normal(size=(4, 4096)).astype("float32") * 1e3
    x = np.concatenate([half, -half], 1) + np.float32(1e-3)
    spec = g.trace(x)[1].spec
    backwards = np.cumsum(x[:, ::-1], 1, dtype="float32")[:, -1:]

    def times(result):
        return judge(spec, [measure(spec, [x], [jnp.asarray(result)])])[0][0]

    (exact,) = evaluate(spec, x)
    assert times(backwards).relative > 1e-4
    assert times(backwards).times_rounding < 4
    assert times(exact + 100.0).times_rounding > 4


@pytest.mark.parametrize("scale", [1e-100, 1, 1e100])
def test_float64_is_compared_in_float64(scale, wrong):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)) * scale)
        product = lambda x: jc.ops.matmul(x, x.T, activation="relu")  # noqa: E731
        report = jc.bisect(product, x)
        assert (report.suspects, report.first_nan) == ((), None)
        assert "compared with float64" in str(report)
        wrong("matmul", lambda y: y * (1 + 1e-10))
        (suspect,) = jc.bisect(product, x).suspects
        np.testing.assert_allclose(suspect.worst_output.relative, 1e-10, rtol=1e-3)


def test_booleans_and_integers_are_compared(wrong):
    wrong("cmp_gt", lambda y: ~y)
    wrong("add", lambda y: y + 7)
    x = jnp.arange(16).reshape(2, 8)
    assert jc.bisect(larger, x / 2, x * 0 + 3.0).suspects
    assert jc.bisect(plus, x, x).suspects


MINUS = -jnp.ones((1, 2, 4))
NAN, INF = jnp.array([[1.0, jnp.nan]]), jnp.array([[1.0, jnp.inf]])
NONFINITE = {
    # program, operands, how results of an operation are changed -> who makes it for each entry
    "swallowed": (logarithm, [MINUS], ("log", jnp.nan_to_num), ["reference"]),
    "made": (squash, [MINUS], ("tanh", lambda y: y.at[0, 0].set(jnp.nan)), ["fused"]),
    "of the arguments": (lambda x: squash(plus(x, x)), [NAN], None, ["operands"] * 2),
    "of a mask": (plus, [INF, -INF], None, ["both"]),
    "passed on": (lambda x: squash(logarithm(x)), [MINUS], None, ["both", "operands"]),
}


@pytest.mark.parametrize("what", NONFINITE)
def test_who_makes_a_nan_is_said(what, wrong):
    function, arrays, change, who = NONFINITE[what]
    if change:
        wrong(*change)
    with jax.debug_nans(True):  # which does not stop the search
        report = jc.bisect(function, *arrays)
    assert [entry.nonfinite for entry in report] == who
    assert (report.first_nan is None) == ({*who} <= {"operands", "", "reference"})
    if who == ["fused"]:
        assert report.worst is report.first_nan
        assert report.worst.times_rounding == math.inf


def test_pytrees_keywords_and_python_values_are_taken(key):
    x, w = operands(key, X, W)

    def apply(params, x, mode, *, scale):
        logarithm(-jnp.abs(x))  # which no result needs
        y = block(x, params["w"]) * scale
        return {"y": squash(y) if mode == "squash" else y, "mode": mode}

    report = jc.bisect(apply, {"w": w, "none": None}, np.asarray(x), "squash", scale=2.0)
    assert [entry.name for entry in report] == ["block", "squash"]


def test_what_is_wrong_is_said():
    ones = np.ones(X, "float32")
    with pytest.raises(jc.GraphError, match="contains no cuDNN graph"):
        jc.bisect(lambda x: jnp.sin(x), ones)
    with pytest.raises(jc.GraphTypeError, match="inside"):
        jax.jit(lambda x: jc.bisect(squash, x))(ones)


def local_loss(x, w):
    def step(c, row):
        y = block(c, w)
        return c * row + lax.pmean(squash(y), "a"), y.sum()

    c, sums = lax.scan(step, x, jnp.arange(2.0))
    return c + lax.psum(sums.sum(), ("a",))


def test_shard_map_is_entered(key, wrong):
    x, w = operands(key, (4, 8, 8), (1, 8, 8))
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("a", "b"))
    specs = {"in_specs": (P("a"), P()), "out_specs": P("a"), "check_vma": False}
    run = jax.shard_map(local_loss, mesh=mesh, **specs)
    total = jax.grad(lambda x, w: (run(x, w) ** 2).sum(), (0, 1))
    got, entered = rewritten(total, x, w)
    assert_same(got, jax.tree.leaves(jax.jit(total)(x, w)))
    assert entered
    report = jc.bisect(total, x, w)
    assert report.suspects == ()
    assert report.entries[0].path == "shard_map/scan[0]"
    assert report.entries[0].outputs[0].shape == (1, 8, 8)
    wrong("tanh", lambda y: y * 1.1)
    assert jc.bisect(total, x, w).worst.name == "squash"


def test_devices_go_on_for_different_times_and_shard_maps_are_nested():
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("a", "b"))
    half = {"in_specs": P(None, "b"), "out_specs": P(None, "b"), "axis_names": {"b"}}

    def rows(x):
        i = lax.axis_index("a")
        x = lax.cond(i > 1, lambda x: plus(x, x), lambda x: x, x)
        x = lax.while_loop(lambda s: s[0] < i, lambda s: (s[0] + 1, squash(s[1])), (0 * i, x))[1]
        return jax.shard_map(squash, **half)(x)

    run = jax.jit(
        jax.shard_map(rows, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    )
    report = jc.bisect(run, jnp.ones((8, 256, 256)))  # JAX copies smaller arrays at once
    assert (report.suspects, report.notes) == ((), ())
    steps = [f"shard_map/while[{i}]" for i in range(3)]
    assert [e.path for e in report] == ["shard_map/cond[1]", *steps, "shard_map/shard_map"]


def test_the_table_has_the_most_suspicious_first_and_one_row_for_a_loop(key, wrong):
    wrong("tanh", lambda y: y * 1.5)
    run = lambda x, w: lax.scan(lambda c, _: (squash(block(c, w)), None), x, length=30)  # noqa: E731
    text = str(jc.bisect(run, *operands(key, X, W)))
    rows = [line.split() for line in text.splitlines() if line.startswith(("squash", "block"))]
    assert [row[0] for row in rows] == ["squash", "block"]
    assert "1 suspect; the worst: squash in scan[" in text


def test_the_example_runs():
    result = doctest.testmod(sys.modules[jc.bisect.__module__])
    assert (result.attempted, result.failed) == (5, 0)
