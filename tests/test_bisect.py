"""jc.bisect: which fused operation is off, or makes the first NaN."""

import doctest
import math
import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FUSIONS, dtype_cases
from helpers import assert_same, linear, python
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn._core import ffi, primitive
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.inspection import program
from jax_cudnn._core.inspection.compare import judge, measure
from jax_cudnn._core.inspection.interpret import Interpreter
from jax_cudnn._core.inspection.report import Bisection


@jc.graph
def block(g, x, w):
    return g.relu(g.matmul(x, w))


@jc.graph
def squash(g, x):
    return g.tanh(x) * 0.5


@jc.graph
def logarithm(g, x):
    return g.log(x)


@jc.graph
def plus(g, x, y):
    return x + y


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


def operands(key, *shapes, dtype="float32"):
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def two_layers(x, w):
    return squash(block(x, w)).astype("float32").sum()


X = W = (1, 8, 8)


# -- programs are run as they are ------------------------------------------------------------------


@jax.custom_vjp
def guarded(x):
    return squash(x)


guarded.defvjp(lambda x: (guarded(x), x), lambda x, t: (squash(x) * t,))


@jax.custom_jvp
def scaled(x):
    return squash(x) * 2


scaled.defjvp(lambda p, t: (scaled(*p), t[0] * 3))


@custom_vmap
def doubled_in_batches(x):
    return squash(x)


doubled_in_batches.def_vmap(lambda size, batched, x: (squash(x) * 2, True))


def scanned(x, w):
    def step(carry, each):
        number, row = each
        return squash(carry + row * w[0, 0, 0]), (carry.sum() + number, row)

    return lax.scan(step, x, (jnp.arange(3), jnp.stack([x, 2 * x, -x])))


def scanned_backwards(x, w):
    return lax.scan(lambda c, row: (plus(c, row), c), x, jnp.stack([x, w, -x]), reverse=True)


def looped(x, w):
    def go_on(state):
        return (state[0] > 0) & (squash(state[1]).sum() < 1e9)

    return lax.while_loop(go_on, lambda s: (s[0] - 1, plus(s[1], w)), (3, x))


def decayed(state):
    x, w, count = state
    return squash(x), plus(w, w), count + 1


def branched(x, w):
    branches = [lambda a: squash(a), lambda a: block(a, w), lambda a: -a]
    return [lax.switch(i, branches, x) for i in (0, 1, 2, 9)]


def keyed(x, w):
    def step(key, _):
        key, use = jax.random.split(key)
        return key, squash(x + jax.random.normal(use, x.shape))

    return lax.scan(step, jax.random.key(3), length=2)[1]


PROGRAMS = {
    "plain": lambda x, w: (block(x, w), x),
    "jit": lambda x, w: jax.jit(block)(x, jax.jit(jnp.sin)(w)),
    "grad": jax.grad(two_layers, (0, 1)),
    "scan": scanned,
    "scan_reverse": scanned_backwards,
    "scan_of_nothing": lambda x, w: lax.scan(lambda c, r: (squash(c), r), x, jnp.ones((0, 2))),
    "scan_without_xs": lambda x, w: lax.scan(lambda c, _: (block(c, w), None), x, length=2),
    "grad_of_scan": jax.grad(lambda x, w: scanned(x, w)[0].sum(), (0, 1)),
    "while": looped,
    "fori": lambda x, w: lax.fori_loop(0, 3, lambda i, a: plus(a, w * i), x),
    "cond": branched,
    "grad_of_cond": jax.grad(lambda x, w: sum(y.sum() for y in branched(x, w)), (0, 1)),
    "remat": jax.grad(jax.checkpoint(two_layers), (0, 1)),
    "remat_policy": jax.grad(jax.checkpoint(two_layers, policy=jc.save_cudnn), 1),
    "custom_vjp": jax.value_and_grad(lambda x, w: guarded(x).sum()),
    "custom_vjp_inside": lambda x, w: lax.map(guarded, jnp.stack([x, w])),
    "custom_jvp": lambda x, w: jax.jvp(scaled, (x,), (w,)),
    "custom_jvp_inside": lambda x, w: scaled(x) + w,
    "vmap": lambda x, w: jax.vmap(jax.grad(two_layers), (0, None))(jnp.stack([x, -x]), w),
    "vmap_of_while": jax.vmap(
        lambda x, w: lax.while_loop(lambda s: s[0].sum() > 0.1, decayed, (jnp.abs(x), w, 0))
    ),
    "vmap_of_scan": lambda x, w: jax.vmap(scanned, (0, None))(jnp.stack([x, -x]), w),
    "keys": keyed,
    "custom_vmap": lambda x, w: (doubled_in_batches(x), jax.vmap(doubled_in_batches)(w)),
    "pmap": lambda x, w: jax.pmap(squash)(x.reshape(8, 1, 8)),
    "scalars": lambda x, w: plus(x, w.sum()) + squash(jnp.float32(0.5)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_step_by_step_a_program_gives_what_it_gives(name, key):
    args = operands(key, X, W)
    jaxpr, inputs = program._traced(PROGRAMS[name], tuple(args), {}, name)
    seen = []
    interpreter = Interpreter(lambda *what: seen.append(what[0].params["name"]))
    got = interpreter.run(jaxpr, inputs)
    want = PROGRAMS[name](*args)
    assert_same(got, jax.tree.leaves(want))
    assert not interpreter.unseen
    assert seen or name == "scan_of_nothing"


@pytest.mark.parametrize("name", sorted({*PROGRAMS} - {"scan_of_nothing"}))
def test_right_operations_are_not_suspect(name, key):
    report = jc.bisect(PROGRAMS[name], *operands(key, X, W))
    assert isinstance(report, Bisection)
    assert report.suspects == ()
    assert report.first_nan is None
    assert 0 <= report.worst.times_rounding < 1.5
    assert "none differs" in str(report)


EXAMPLES = [*FUSIONS, *dtype_cases()]
each_example = pytest.mark.parametrize("case", EXAMPLES, ids=lambda case: case.name)


def check_example(case, key):
    report = jc.bisect(case.function, *case.operands(key))
    assert len(report) == 1
    assert report.suspects == ()
    assert report.first_nan is None
    print(case.name, report.worst.times_rounding)


@each_example
def test_an_example_is_not_suspect(case, key):
    check_example(case, key)


@pytest.mark.gpu
@each_example
def test_an_example_is_not_suspect_on_the_gpu(case, key):
    check_example(case, key)


def gradient(case):
    def total(*arrays):
        leaves = jax.tree.leaves(case.function(*arrays))
        return sum(
            jnp.sum(y.astype("float32")) for y in leaves if jnp.issubdtype(y.dtype, jnp.floating)
        )

    return jax.grad(total, tuple(range(len(case.avals))))


DIFFERENTIABLE = [
    case for case in FUSIONS if all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in case.avals)
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
def test_the_gradient_of_an_example_is_not_suspect_on_the_gpu(case, key):
    report = jc.bisect(gradient(case), *case.operands(key))
    assert report.suspects == (), str(report)
    blamed = report.first_nan
    assert blamed is None or any(output.overflows for output in blamed.outputs), str(report)


# -- what is wrong is named ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_wrong_lowering_is_the_worst(dtype, key, wrong):
    wrong("tanh", lambda y: y * 1.1)
    x, w = operands(key, X, W, dtype=dtype)
    report = jc.bisect(two_layers, x, w)
    assert report.worst.name == "squash"
    assert [entry.name for entry in report.suspects] == ["squash"]
    np.testing.assert_allclose(report.worst.worst_output.relative, 0.1, rtol=0.05)
    assert [*report.worst.operands] == ["x"]
    np.testing.assert_allclose(
        np.asarray(report.worst.operands["x"], "float32"),
        np.asarray(jax.jit(block)(x, w), "float32"),
        rtol=1e-2,
    )


def test_a_single_wrong_element_is_seen(key, wrong):
    wrong("matmul", lambda y: y.at[0, 3, 5].add(0.5))
    x, w = operands(key, (1, 64, 64), (1, 64, 64))
    report = jc.bisect(block, x, w)
    assert report.worst.worst_output.relative < 1e-2
    assert report.suspects == (report.worst,)


def test_a_wrong_backward_is_named_as_backward(key, wrong):
    wrong("relu_backward", lambda y: -y)
    report = jc.bisect(jax.jit(jax.grad(two_layers)), *operands(key, X, W))
    assert (report.worst.name, report.worst.role) == ("block", "backward")
    assert len(report.suspects) == 1
    assert "block (backward)" in str(report)


def test_a_wrong_step_of_a_loop_is_named(key, wrong):
    """Too large values alone are wrong, which come up in step 2."""
    wrong("add", lambda y: jnp.where(y > 50, y + 3, y))

    def run(x):
        return lax.scan(
            lambda c, add: (plus(c, add), c.sum()), x, jnp.array([[1.0], [2.0], [90.0], [0.0]])
        )

    report = jc.bisect(run, jnp.ones(4))
    assert [entry.path for entry in report] == [f"scan[{i}]" for i in range(4)]
    assert {entry.path for entry in report.suspects} == {"scan[2]", "scan[3]"}


def test_paths_name_loops_and_branches(key, wrong):
    wrong("tanh", lambda y: y + 1)

    def step(state):
        i, x = state
        return i + 1, lax.cond(i == 2, squash, lambda a: plus(a, a), x)

    def run(x):
        return lax.while_loop(lambda state: state[0] < 4, step, (0, x))

    report = jc.bisect(jax.jit(run), jnp.ones(4))
    assert report.worst.path == "while[2]/cond[1]"
    assert [entry.path for entry in report] == [
        "while[0]/cond[0]",
        "while[1]/cond[0]",
        "while[2]/cond[1]",
        "while[3]/cond[0]",
    ]


def test_the_backward_of_a_scan_is_numbered_as_its_forward(key):
    report = jc.bisect(jax.grad(lambda x, w: scanned(x, w)[0].sum()), *operands(key, X, W))
    roles = [(entry.role, entry.path) for entry in report]
    assert roles == [
        *[("forward", f"scan[{i}]") for i in (0, 1, 2)],
        *[("backward", f"scan[{i}]") for i in (2, 1, 0)],
    ]


def test_an_entry_has_the_users_line(key):
    def here(x):
        return squash(x)  # this line

    (entry,) = jc.bisect(jax.jit(here), *operands(key, X))
    assert re.fullmatch(
        r".*test_bisect\.py:\d+, in .*here: return squash\(x\)  # this line", entry.line
    )
    y = jc.bisect(lambda x, w: jc.ops.matmul(x, w), *operands(key, X, W))
    assert "jc.ops.matmul(x, w)" in y.worst.line


def shows_a_tenth(case):
    """Whether its results are floats of 16 bits and more, and nothing is compared on the way."""
    spec = case.function.trace(*case.avals)[1].spec
    made = [t.dtype for t in spec.tensors if t.name not in spec.inputs and t.value is None]
    return {*made} <= {"float32", "bfloat16", "float16"}


@pytest.mark.parametrize("case", [*filter(shows_a_tenth, EXAMPLES)], ids=lambda case: case.name)
def test_results_that_are_a_tenth_too_large_are_suspect(case, key, monkeypatch):
    def run(spec, *arrays, **options):
        return [(y * 1.1).astype(y.dtype) for y in evaluate(spec, *arrays, **options)]

    monkeypatch.setattr(primitive, "evaluate", run)
    report = jc.bisect(case.function, *case.operands(key))
    assert report.suspects == (report.worst,)


def test_another_order_of_adding_is_not_suspect_even_where_terms_cancel():
    """Of a sum whose terms are a million times larger a good part is rounding."""
    g = jc.graph(lambda g, x: g.reduction(x, mode="ADD", out_dims=[4, 1]))
    half = np.random.default_rng(0).normal(size=(4, 4096)).astype("float32") * 1e3
    x = np.concatenate([half, -half], 1) + np.float32(1e-3)
    spec = g.trace(x)[1].spec
    backwards = np.cumsum(x[:, ::-1], 1, dtype="float32")[:, -1:]

    def times(result):
        figures = jax.tree.map(lambda f: f[None], measure(spec, False)(jnp.asarray(result), x))
        return judge(spec, figures, False).outputs[0]

    (exact,) = evaluate(spec, x)
    assert times(backwards).relative > 1e-4
    assert times(backwards).times_rounding < 4
    assert times(exact * 1.5).times_rounding < 4  # nobody can tell
    assert times(exact + 100.0).times_rounding > 4


# -- NaN and Inf -----------------------------------------------------------------------------------


def test_the_first_nan_is_found_among_several_operations_in_a_scan(key):
    def step(x, shift):
        y = plus(x, shift)
        z = logarithm(y)
        return squash(y), z

    x = jnp.full((4, 8), 2.0)
    shifts = jnp.array([1.0, 0.5, -9.0, 1.0, -9.0])
    report = jc.bisect(lambda x: lax.scan(step, x, shifts), x)
    assert (report.first_nan.name, report.first_nan.path) == ("logarithm", "scan[2]")
    assert report.first_nan.nonfinite == "both"
    assert report.first_nan.outputs[0].nan == 32
    assert report.first_nan.outputs[0].reference_nan == 32
    assert (np.asarray(report.first_nan.operands["x"]) < 0).all()
    assert report.suspects == ()
    assert "first NaN: logarithm in scan[2], made, by the reference too" in str(report)
    assert "whoever computes them" in str(report)


def test_a_nan_that_only_the_fused_operation_makes_is_the_worst(key, wrong):
    wrong("tanh", lambda y: y.at[0, 0, 0].set(jnp.nan))
    report = jc.bisect(two_layers, *operands(key, X, W))
    assert report.worst is report.first_nan
    assert (report.worst.name, report.worst.nonfinite) == ("squash", "fused")
    assert report.worst.times_rounding == math.inf
    assert 'squash.with_options(implementation="xla")' in str(report)
    assert "made by the fused operation alone" in str(report)


def test_a_nan_that_the_fused_operation_swallows_is_said(wrong):
    wrong("log", lambda y: jnp.nan_to_num(y))
    (entry,) = jc.bisect(logarithm, -jnp.ones((2, 4)))
    assert entry.nonfinite == "reference"
    assert entry.outputs[0].reference_nan == 8
    assert entry.outputs[0].nan == 0


def test_a_nan_of_the_arguments_is_nobodys():
    report = jc.bisect(lambda x: squash(plus(x, x)), jnp.array([[1.0, jnp.nan]]))
    assert report.first_nan is None
    assert [entry.nonfinite for entry in report] == ["operands", "operands"]
    assert "came in with the operands, first at plus" in str(report)
    assert "jax_debug_nans" in str(report)


def test_infinite_operands_alone_are_no_news():
    """A mask of -inf is common; a NaN of it is news."""
    report = jc.bisect(squash, jnp.array([[1.0, -jnp.inf]]))
    assert report.worst.nonfinite == ""
    inf = jnp.array([[1.0, jnp.inf]])
    report = jc.bisect(plus, inf, -inf)
    assert (report.first_nan.nonfinite, report.first_nan.outputs[0].nan) == ("both", 1)


def test_what_float16_cannot_hold_is_said():
    x = jnp.full((1, 4, 8), 100, "float16")
    report = jc.bisect(lambda x, w: squash(block(x, w)), x, jnp.full((1, 8, 4), 100, "float16"))
    assert (report.first_nan.name, report.first_nan.nonfinite) == ("block", "both")
    assert report.first_nan.outputs[0].overflows
    assert report.first_nan.outputs[0].reference_largest == 80000
    assert "reaches 8e+04, which float16 cannot hold" in str(report)
    assert not any(o.overflows for e in jc.bisect(squash, x) for o in e.outputs)


def test_debug_nans_does_not_stop_the_search():
    with jax.debug_nans(True):
        report = jc.bisect(lambda x: squash(logarithm(x)), -jnp.ones((2, 4)))
    assert [entry.nonfinite for entry in report] == ["both", "operands"]


def test_empty_arrays_and_other_dtypes_are_compared():
    assert jc.bisect(squash, jnp.ones((0, 4))).worst.times_rounding == 0
    larger = jc.graph(lambda g, x, y: g.cmp_gt(x, y))
    report = jc.bisect(larger, jnp.arange(8.0).reshape(2, 4), jnp.full((2, 4), 3.0))
    assert report.worst.outputs[0].dtype == "bool"
    assert report.worst.times_rounding == 0


def test_wrong_booleans_and_integers_are_suspect(wrong, key):
    wrong("cmp_gt", lambda y: ~y)
    larger = jc.graph(lambda g, x, y: g.cmp_gt(x, y))
    assert jc.bisect(larger, *operands(key, (8, 64), (8, 64))).suspects
    wrong("add", lambda y: y + 7)
    x = jnp.arange(16).reshape(2, 8)
    assert jc.bisect(plus, x, x).suspects


# -- arguments -------------------------------------------------------------------------------------


def test_pytrees_keywords_and_python_values_are_taken(key):
    x, w = operands(key, X, W)

    def apply(params, x, mode, *, scale=1.0, bias=None):
        y = block(x, params["w"]) * scale
        return {"y": squash(y) if mode == "squash" else y, "mode": mode, "bias": bias}

    report = jc.bisect(apply, {"w": w, "none": None}, np.asarray(x), "squash", scale=2.0, bias=w)
    assert [entry.name for entry in report] == ["block", "squash"]
    assert len(jc.bisect(apply, {"w": w}, x, "other")) == 1
    static = jax.jit(apply_static, static_argnums=1)
    assert [e.name for e in jc.bisect(static, x, 3)] == ["squash"] * 3
    assert [e.name for e in jc.bisect(linear, x, w, jnp.ones((1, 1, 8)))] == ["linear"]


def apply_static(x, times):
    for _ in range(times):
        x = squash(x)
    return x


def test_what_no_result_needs_is_not_run(key):
    def run(x):
        logarithm(-jnp.abs(x))
        return squash(x)

    assert [entry.name for entry in jc.bisect(run, *operands(key, X))] == ["squash"]


def test_errors_say_what_is_wrong(key):
    (x,) = operands(key, X)
    with pytest.raises(jc.GraphError, match="<lambda> holds no cuDNN graph"):
        jc.bisect(lambda x: jnp.sin(x), x)
    with pytest.raises(jc.GraphError, match="no result of the program needs"):
        jc.bisect(lambda x: (squash(x), jnp.sin(x))[1], x)

    def branches(x):
        return squash(x) if x.sum() > 0 else x

    with pytest.raises(jc.GraphTypeError, match="branches cannot be traced") as caught:
        jc.bisect(branches, x)
    assert "TracerBoolConversionError" in str(caught.value)
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)
    with pytest.raises(jc.GraphTypeError, match="takes a function"):
        jc.bisect(squash(x), x)
    with pytest.raises(jc.GraphTypeError, match="bisect runs the function"):
        jc.bisect(squash, jax.ShapeDtypeStruct((2, 4), "float32"))
    with pytest.raises(jc.GraphTypeError, match="inside of a traced function"):
        jax.jit(lambda x: jc.bisect(squash, x))(x)
    with pytest.raises(jc.GraphTypeError, match="inside of a traced function"):
        jax.jit(lambda y: jc.bisect(lambda x: plus(x, y), x))(x)
    with pytest.raises(jc.GraphError, match="branches and loops that run none"):
        jc.bisect(lambda x: lax.cond(x.sum() > 1e9, squash, lambda x: x, x), x)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        jc.bisect(two_layers, x)


# -- devices ---------------------------------------------------------------------------------------


def mesh(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("a", "b"), axis_types=(kind,) * 2)


def sharded(check_vma, body, *specs, out, kind=AxisType.Auto):
    return jax.shard_map(body, mesh=mesh(kind), in_specs=specs, out_specs=out, check_vma=check_vma)


def local_loss(x, w):
    def step(c, row):
        y = block(c, w)
        return c * row + lax.pmean(squash(y), "a"), y.sum()

    c, sums = lax.scan(step, x, jnp.arange(2.0))
    return c + lax.psum(sums.sum(), ("a",))


each_check = pytest.mark.parametrize("check_vma", [True, False])


@each_check
@pytest.mark.parametrize("grad", [False, True])
def test_shard_map_is_entered(check_vma, grad, key, wrong):
    x, w = operands(key, (4, 8, 8), (1, 8, 8))
    run = sharded(check_vma, local_loss, P("a"), P(), out=P("a"))
    total = jax.grad(lambda x, w: (run(x, w) ** 2).sum(), (0, 1)) if grad else run
    jaxpr, inputs = program._traced(total, (x, w), {}, "total")
    interpreter = Interpreter(lambda *what: None)
    assert_same(interpreter.run(jaxpr, inputs), jax.tree.leaves(jax.jit(total)(x, w)))
    assert not interpreter.unseen
    report = jc.bisect(total, x, w)
    assert report.suspects == ()
    assert report.entries[0].path == "shard_map/scan[0]"
    assert report.entries[0].outputs[0].shape == (1, 8, 8)
    wrong("tanh", lambda y: y * 1.1)
    assert jc.bisect(total, x, w).worst.name == "squash"


@pytest.mark.parametrize(
    ("check_vma", "start"),
    [(True, lambda i: i * 0), (False, lambda i: i * 0), (False, lambda i: 0)],
)
def test_devices_may_go_different_ways(check_vma, start, key):
    """Then what they do is run, and not looked into, as the report says."""

    def body(x):
        device = lax.axis_index("a")
        y = lax.cond(device == 1, squash, lambda x: x, x)
        count, z = lax.while_loop(
            lambda s: s[0] < 1 + device, lambda s: (s[0] + 1, squash(s[1])), (start(device), y)
        )
        return plus(y, z), count[None] + device * 0

    run = sharded(check_vma, body, P("a"), out=(P("a"), P("a")))
    (x,) = operands(key, (4, 8, 8))
    jaxpr, inputs = program._traced(run, (x,), {}, "run")
    interpreter = Interpreter(lambda *what: None)
    assert_same(interpreter.run(jaxpr, inputs), jax.tree.leaves(jax.jit(run)(x)))
    report = jc.bisect(run, x)
    assert [(entry.name, entry.path) for entry in report] == [
        ("squash", "shard_map/while[0]"),
        ("plus", "shard_map"),
    ]
    assert "devices take different branches" in str(report)
    assert "devices go on for different times" in str(report)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_are_taken(kind, key):
    over = mesh(kind)
    x, w = operands(key, (4, 8, 8), (1, 8, 8))
    placed = [jax.device_put(a, NamedSharding(over, s)) for a, s in ((x, P("a")), (w, P()))]

    def run(x, w):
        mapped = sharded(False, local_loss, P("a"), P(), out=P("a"), kind=kind)(x, w)
        return lax.scan(lambda c, _: (squash(block(c, w)) + mapped, c.sum()), x, length=2)

    with jax.set_mesh(over):
        jaxpr, inputs = program._traced(run, tuple(placed), {}, "run")
        got = Interpreter(lambda *what: None).run(jaxpr, inputs)
        assert_same(got, jax.tree.leaves(jax.jit(run)(*placed)))
        report = jc.bisect(run, *placed)
    assert report.suspects == ()
    assert {entry.path for entry in report} == {
        *(f"{where}scan[{i}]" for i in range(2) for where in ("", "shard_map/"))
    }


def test_what_is_not_entered_is_named(key):
    def solve(x):
        half = lambda v: squash(jnp.zeros_like(v)) + v * 2  # noqa: E731
        return lax.custom_linear_solve(half, x, lambda _, b: squash(b) * 0 + b / 2)

    (x,) = operands(key, X)
    with pytest.raises(jc.GraphError, match="custom_linear_solve"):
        jc.bisect(solve, x)
    report = jc.bisect(lambda x: plus(solve(x), x), x)
    assert [entry.name for entry in report] == ["plus"]
    assert "Not looked into: custom_linear_solve" in str(report)


# -- the report ------------------------------------------------------------------------------------


def test_the_table_has_the_most_suspicious_first_and_one_row_for_a_loop(key, wrong):
    wrong("tanh", lambda y: y * 1.5)

    def run(x, w):
        return lax.scan(lambda c, _: (squash(block(c, w)), None), x, length=30)

    text = str(jc.bisect(run, *operands(key, X, W)))
    assert text.startswith("run: 2 fused operations, run 60 times on ")
    rows = [line.split() for line in text.splitlines() if line.startswith(("squash", "block"))]
    assert [row[0] for row in rows] == ["squash", "block"]
    assert "1 suspect; the worst: squash in scan[" in text
    assert "report.worst.operands" in text
    assert "with_options(implementation=" in text
    assert "No NVIDIA GPU ran this" in text


def test_a_report_is_short_as_a_value(key):
    report = jc.bisect(squash, *operands(key, X))
    assert repr(report).startswith("<squash: 1 fused operation, run 1 time on ")
    assert "operands" not in repr(report.worst)
    assert [*report] == [report.worst]


def test_the_example_runs():
    result = doctest.testmod(sys.modules[jc.bisect.__module__])
    assert (result.attempted, result.failed) == (5, 0)


def test_a_long_table_is_cut(key):
    report = jc.bisect(squash, *operands(key, X))
    many = [replace(entry, name=f"squash_{i}") for entry in report for i in range(30)]
    assert "and 10 less suspicious ones" in str(replace(report, entries=tuple(many)))


def test_import_leaves_it_out():
    python("""
        import sys, jax_cudnn
        assert jax_cudnn.bisect
        lazy = ("program", "interpret", "compare", "report")
        assert not {f"jax_cudnn._core.inspection.{m}" for m in lazy} & {*sys.modules}
    """)


# -- on the GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_wrong_kernel_is_named_on_the_gpu(key, by_cudnn, monkeypatch):
    right = ffi.call

    def call(plan, spec, name, *inputs):
        results = right(plan, spec, name, *inputs)
        return [y * 1.1 for y in results] if name == "squash_rows" else results

    squash_rows = jc.graph(lambda g, x, w: g.tanh(g.matmul(x, w)))
    squash_rows.name = "squash_rows"
    monkeypatch.setattr(ffi, "call", call)

    def loss(x, w):
        def step(c, _):
            return squash_rows(block(c, w), w), None

        return lax.scan(step, x, length=3)[0]

    report = jc.bisect(jax.jit(loss), *operands(key, (1, 64, 64), (1, 64, 64), dtype="bfloat16"))
    assert {entry.name for entry in report.suspects} == {"squash_rows"}
    assert report.on_gpu
    assert "No NVIDIA GPU" not in str(report)
