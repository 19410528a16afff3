"""implementation="auto": which way is taken, what is remembered, when nothing is measured.

A CPU stands in for the GPU: cuDNN's plans are made up, and their calls compute the reference.
"""

import functools
import json
import math
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_cases

import jax_cudnn as jc
from jax_cudnn._core import agreement, auto, compat, execution, ffi, settings, trials, tuning
from jax_cudnn._core.cuda import CudaDevice
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.graph.xla_form import NARROW, evaluate
from jax_cudnn._core.planning import losses, placement, planner, stored
from jax_cudnn._core.planning.build import Candidate
from jax_cudnn._core.planning.execution_plan import ExecutionPlan

GPU = CudaDevice(0)
X = jax.ShapeDtypeStruct((64, 128), "float32")


def spec_of(*avals):
    gelu = jc.graph(lambda g, x, y: g.gelu(g.add(x, y)))
    return gelu.trace(*(avals or (X, X)))[1].spec


OWN = {}, {"deterministic": True}, {"engine": 1}, {"implementation": "split"}
SPEC = spec_of()
TIMES = trials.Bench._times


class Fake:
    """A cuDNN with two engines: their delays in microseconds, and factors of their results."""

    def __init__(self, monkeypatch, tmp_path):
        self.seconds = {"XLA": 20e-6, 0: 10e-6, 1: 10e-6}
        self.factors = {0: 1.0, 1: 1.0}
        self.measured = 0
        cpu = jax.devices("cpu")[0]

        def plan(spec, site, name):
            engine = spec.options.engine or 0
            return ExecutionPlan(
                "{}" + str(engine), f"eng{engine}", 0, "", 0, 0, (), (), b"", 2, engine
            )

        def call(own, spec, name, *operands):
            return [y * self.factors[own.engine_id] for y in evaluate(spec, *operands)]

        def candidates(spec, site, name):
            return tuple(Candidate(i, i, f"eng{i}", {}, {"A": i}) for i in (0, 1))

        def times(bench, programs):
            self.measured += 1
            return {i: self.seconds[self.engine(self.ways[i])] for i in programs}

        def trial(bench, ways):
            self.ways = ways
            return run_trials(bench, ways)

        run_trials = trials.Bench.trials
        patch = monkeypatch.setattr
        patch(planner, "plan", plan)
        patch(planner, "candidates", candidates)
        patch(planner, "identity", functools.cache(lambda site: '{"jax_cudnn": ""}'))
        patch(placement, "model", lambda site: ("a GPU", 90))
        patch(ffi, "call", call)
        patch(losses, "table", dict)
        patch(trials, "roofline", lambda spec, site: 1e-4)
        patch(trials.Bench, "_times", times)
        patch(trials.Bench, "trials", trial)
        patch(trials, "_free", lambda site, device: 2**30)
        patch(tuning, "_device", lambda site: cpu)
        patch(tuning, "_AVERAGE", 1e3)
        patch(settings, "_given", {"plan_cache": tmp_path, "tuning": "fast"})

    def engine(self, segments):
        plans = [s.plan.engine_id for s in segments if s.plan is not None]
        return plans[0] if plans else "XLA"


@pytest.fixture
def fake(monkeypatch, tmp_path):
    auto.clear()
    yield Fake(monkeypatch, tmp_path)
    auto.clear()


def taken(spec=SPEC):
    planned = auto.plan_graph(spec, GPU, "f")
    (segment,) = planned.segments
    return segment.engine, planned


@pytest.mark.parametrize(
    ("seconds", "engine"),
    [
        ({"XLA": 20e-6}, "eng0"),
        ({"XLA": 5e-6}, "XLA"),
        ({"XLA": 9.9e-6}, "eng0"),  # within the noise
        ({1: 4e-6}, "eng1"),
        ({"XLA": 5e-6, 1: 4e-6}, "eng1"),
    ],
)
def test_the_fastest_way_is_taken(fake, seconds, engine):
    fake.seconds |= seconds
    got, planned = taken()
    assert got == engine
    assert {m.what.removeprefix("cuDNN ") for m in planned.measured} == {"eng0", "eng1", "XLA"}
    assert [m.what.removeprefix("cuDNN ") for m in planned.measured if m.taken] == [engine]
    assert planned.segments[0].reason.startswith("measured") == (engine == "XLA")


def test_a_wrong_result_is_never_taken_and_is_remembered(fake, caplog):
    fake.seconds[1], fake.factors[1] = 1e-6, 1.01
    assert taken()[0] == "eng0"
    assert "eng1 is not taken: it differs from the reference" in caplog.text
    auto.clear()
    notes = {m.what: m.note for m in taken()[1].measured}
    assert "differs" in notes["cuDNN eng1"]
    assert not notes["cuDNN eng0"]


@pytest.mark.parametrize("xla_measured", [True, False])
def test_where_all_that_is_measured_is_wrong_xla_runs_the_graph(fake, monkeypatch, xla_measured):
    fake.factors = {0: 1.01, 1: jnp.nan}
    if xla_measured:  # its faster form is wrong, too

        def form(spec, *operands, products="", read=()):
            results = evaluate(spec, *operands)
            return [2 * y for y in results] if products == NARROW else results

        monkeypatch.setattr(execution, "evaluate", form)
    else:
        known = losses.Loss("p", 3.0, "H200", "today", "9.19", (), True)
        monkeypatch.setattr(losses, "nearest", lambda spec, sm_version: known)
    x = np.ones(X.shape, X.dtype)
    for _ in range(2):  # measured, and from the disk
        engine, planned = taken()
        assert engine == "XLA"
        assert [("XLA" in way.what) for way in planned.measured].count(True) == xla_measured
        assert all("differs" in way.note and not way.taken for way in planned.measured)
        (segment,) = planned.segments
        assert segment.strict
        assert segment.reason.startswith("no measured way is right: cuDNN eng0")
        got = execution.run(planned, "f", x, x)
        np.testing.assert_array_equal(got[0], evaluate(SPEC, x, x)[0])
        measured, fake.measured = fake.measured, 0
        auto.clear()
    assert not measured


def test_graphs_far_from_all_measured_ones_measure_xla_too(fake, monkeypatch):
    far = losses.Loss("p", 100.0, "H200", "today", "9.19", (), False)
    monkeypatch.setattr(losses, "nearest", lambda spec, sm_version: far)
    _, planned = taken()
    assert "XLA" in {measured.what for measured in planned.measured}


def test_an_engine_that_fails_when_it_runs_is_not_taken(fake, monkeypatch, caplog):
    def call(*_):
        return [jax.pure_callback(fails, X)]

    def fails():
        raise ValueError("no luck")

    monkeypatch.setattr(ffi, "call", call)
    fake.seconds["XLA"] = 1.0
    assert taken()[0] == "XLA"
    assert "eng0 is not taken" in caplog.text


def test_what_cannot_be_compared_in_memory_is_not_taken(fake, monkeypatch):
    def memory(*_):
        raise MemoryError

    fake.factors[0] = 1.01  # so that the operands one rounding away are needed
    monkeypatch.setattr(agreement, "rounded", memory)
    engine, planned = taken()
    assert engine == "XLA"
    assert "comparing it needs more memory" in planned.measured[0].note


def test_where_cudnn_lists_no_engines_the_measured_ways_stand(fake, monkeypatch):
    def refuses(*_):
        raise jc.UnsupportedGraphError("no list")

    monkeypatch.setattr(planner, "candidates", refuses)
    fake.seconds["XLA"] = 5e-6
    engine, planned = taken()
    assert engine == "XLA"
    assert len(planned.measured) == 2


def test_what_a_step_has_chosen_stays(fake):
    assert taken()[0] == "eng0"
    (xla,) = [i for i, way in enumerate(taken()[1].measured) if way.what == "XLA"]
    canonical = SPEC.for_planning.canonical()
    tuning.remember(canonical, GPU, tuning.measurement(canonical, GPU, "f"), xla)
    assert taken()[0] == "XLA"
    for forget in (lambda: None, auto.clear):
        for level in ("full", "fast"):
            forget()
            jc.configure(tuning=level)
            assert taken()[0] == "XLA"


def test_what_is_known_stands_where_no_more_may_be_measured(fake):
    fake.seconds["XLA"] = 5e-6
    assert taken()[0] == "XLA"
    auto.clear()
    jc.configure(tuning="full", tuning_seconds=1)
    tuning._spent.seconds = 2.0
    assert taken()[0] == "XLA"


def test_rounds_give_each_right_way_a_time(fake, monkeypatch):
    monkeypatch.setattr(trials.Bench, "_times", TIMES)
    monkeypatch.setattr(trials, "_fill", lambda x: x)
    monkeypatch.setattr(trials, "_ROUNDS", 3)
    fake.factors[1] = 2.0
    seconds = {way.what: way.seconds for way in taken()[1].measured}
    assert seconds.pop("cuDNN eng1") is None
    assert seconds.keys() == {"XLA", "cuDNN eng0"}
    assert all(0 < each < 1 for each in seconds.values())


def compared(spec, wrongly, plain=False):
    """What is said of the results of a graph, and of the same changed by ``wrongly``."""
    arrays = [*map(jnp.asarray, trials.operands(spec, plain))]
    run = jax.jit(lambda *x: evaluate(spec, *boundary(spec).clipped(x), products="wide"))
    want, least = run(*arrays), agreement.least_eps(spec)
    figures = lambda got: [*map(agreement.figures, got, want)]  # noqa: E731
    near = lambda: figures(run(*(agreement.rounded(x, least) for x in arrays)))  # noqa: E731
    right = agreement.wrong(spec, figures(want), near)
    return right, [agreement.wrong(spec, figures(got), near) for got in wrongly(want)]


def test_figures_hold_for_values_of_any_size():
    for size in (1.0, 1e25, 1e-30):
        want = jnp.linspace(1, 2, 1000, dtype="float32") * size
        for got, relative in ((want, 0.0), (want * 0, 1.0), (3 * want, 2.0), (want * 1.01, 0.01)):
            found = agreement.figures(got, want)
            np.testing.assert_allclose(found.relative, relative, atol=1e-5)
            np.testing.assert_allclose(found.bias, relative, atol=1e-5)
            assert found.informative
        one = agreement.figures(want.at[7].set(jnp.inf), want)
        assert (one.relative, one.worst, one.larger[-1], one.other) == (math.inf, math.inf, 0, 1)
        assert agreement.figures(want.at[7].set(jnp.nan), want).worst == math.inf
    mostly = jnp.where(jnp.arange(100) < 80, 1.0, jnp.nan)
    for blank in (jnp.ones(100), mostly, jnp.zeros((5, 5), bool)):
        assert not agreement.figures(blank, blank).informative


def changed(want):
    """Results as wrong engines may give them, by name."""

    def tile(y, part):
        size = max(1, int(y.size * part))
        return y.ravel().at[y.size // 2 : y.size // 2 + size].set(0).reshape(y.shape)

    ways = {
        "zeros": jnp.zeros_like,
        "larger": lambda y: (y * 1.1).astype(y.dtype),
        "negated": lambda y: ~y if y.dtype == bool else -y,
        "a tenth of zeros": lambda y: tile(y, 0.1),
        "a part of zeros": lambda y: tile(y, 0.01),
    }
    same = lambda x, y: np.array_equal(*(np.asarray(v, "float32") for v in (x, y)))  # noqa: E731
    for name, way in ways.items():
        got = [way(y) for y in want]
        if not any(same(x, y) for x, y in zip(got, want, strict=True)):
            yield name, got


UNSEEN = {
    # Products of 32 results differ by powers of ten; one of them is the scale of all.
    "matmul_product": {"larger", "a tenth of zeros", "a part of zeros"},
    # They jump in many places.
    **{name: {"a part of zeros"} for name in ("mod", "floor", "ceil", "block_scale_quantize")},
}
UNTOLD = {"tan"}  # of any operands that are drawn, poles jump too far
SURVEY = {case.name.rsplit("_", 2)[0]: case for case in reversed([*all_cases()])}


def is_measured(case):
    spec = case.function.trace(*case.avals)[1].spec
    return not spec.xla_only and spec.is_static


MEASURED = [name for name, case in SURVEY.items() if is_measured(case)]
SAMPLE = {*MEASURED[::4], *UNSEEN, *UNTOLD}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in SAMPLE else pytest.mark.long) for x in MEASURED]
)
def test_wrong_results_of_each_operation_are_seen(name):
    spec = SURVEY[name].function.trace(*SURVEY[name].avals)[1].spec
    names = []

    def wrongly(want):
        for title, got in changed(want):
            names.append(title)
            yield got

    for plain in (False, True):
        names.clear()
        try:
            right, found = compared(spec, wrongly, plain)
        except agreement.UninformativeError:
            continue
        assert not right
        assert len(names) > 1
        assert name not in UNTOLD
        unseen = {title for title, why in zip(names, found, strict=True) if not why}
        assert unseen == UNSEEN.get(name, set())
        return
    assert name in UNTOLD


SWAPPED = [
    (lambda g, x, y: g.sub(x, y), lambda x, y: y - x),
    (lambda g, x, y: g.div(x, y), lambda x, y: y / x),
    (lambda g, x, y: g.cmp_gt(x, y), lambda x, y: x < y),
    (lambda g, x, y: g.add(g.mul(x, y), x), lambda x, y: x * y + y),
    (lambda g, x, y: g.binary_select(x, y, g.cmp_gt(x, 0.0)), lambda x, y: x),
]


@pytest.mark.parametrize(("graph", "wrongly"), SWAPPED)
def test_swapped_operands_are_seen(graph, wrongly):
    spec = jc.graph(graph).trace(X, X)[1].spec
    x, y = trials.operands(spec)
    right, (swapped,) = compared(spec, lambda w: [[jnp.asarray(wrongly(x, y), w[0].dtype)]])
    assert not right
    assert swapped


LARGE = jax.ShapeDtypeStruct((512, 512), "float32")
FP8 = jax.ShapeDtypeStruct((512, 512), "float8_e4m3fn")
HALF = jax.ShapeDtypeStruct((512, 512), "bfloat16")


def first(rows, by=0):
    def wrongly(want):
        (y,) = want
        wrong = (y[:rows].astype("float32") * by).astype(y.dtype)
        return [[y.at[:rows].set(wrong)]]

    return wrongly


WRONG = {
    "a NaN": (lambda g, x, y: g.add(x, y), first(1, jnp.nan), LARGE),
    "roots": (lambda g, x, y: g.matmul(g.sqrt(x), y), first(512, 1.5), LARGE),
    "poles": (lambda g, x, y: g.tan(g.add(x, y)), first(512), LARGE),
    "jumps": (lambda g, x, y: g.binary_select(x, y, g.cmp_gt(x, 0.5)), first(6), HALF),
    "quantized": (lambda g, x, y: g.mul(x, 0.3).set_data_type("int8"), first(512), LARGE),
    "mask": (lambda g, x, y: g.cmp_gt(x, 3.3), first(512), LARGE),
    "equal": (lambda g, x, y: g.cmp_eq(x, y), first(512), LARGE),
    "float8": (lambda g, x, y: g.mul(x, y).set_data_type("float8_e5m2"), first(512, 1.4), LARGE),
    "float8 larger": (
        lambda g, x, y: g.mul(x, y).set_data_type("float8_e5m2"),
        first(512, 1.1),
        LARGE,
    ),
    "float8 rows": (lambda g, x, y: g.mul(x, y).set_data_type(FP8.dtype), first(30), LARGE),
    "16 bits": (
        lambda g, x, y: g.gelu(g.add(x, y)),
        lambda w: [[w[0].astype("bfloat16").astype("float32")]],
        LARGE,
    ),
    "TF32": (
        lambda g, x, y: g.matmul(x, y),
        lambda w: [[w[0].astype("bfloat16").astype("float32")]],
        LARGE,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_is_seen(name):
    graph, wrongly, aval = WRONG[name]
    precision = "highest" if name == "TF32" else None
    spec = jc.graph(graph, precision=precision).trace(aval, aval)[1].spec
    try:
        right, (found,) = compared(spec, wrongly)
    except agreement.UninformativeError:
        right, (found,) = compared(spec, wrongly, plain=True)
    assert not right
    assert found


def not_needed():
    raise AssertionError


BYTES = jax.ShapeDtypeStruct((10, 10), "int8")


@pytest.mark.parametrize(
    ("function", "avals", "exact"),
    [
        (lambda g, x, y: g.add(x, y), (BYTES, BYTES), True),
        (lambda g, x, y: g.matmul(x, y), (BYTES, BYTES), True),
        (lambda g, x, y: g.cmp_gt(x, y), (X, X), True),
        (lambda g, x, y: g.add(x, y).set_data_type("int8"), (X, X), False),
        (lambda g, x, y: g.cmp_gt(g.add(x, y), y), (X, X), False),
        (lambda g, x, y: g.add(x, y).set_data_type("bool"), (X, X), False),
        (lambda g, x, y: g.gen_index(g.add(x, y), axis=1), (X, X), False),
    ],
    ids=["integers", "products", "comparison", "rounded", "mask", "boolean", "index"],
)
def test_integers_are_equal_unless_rounded_floats_explain_it(function, avals, exact):
    spec = jc.graph(function).trace(*avals)[1].spec
    (result,) = spec.output_tensors
    want = (jnp.arange(2000).reshape(100, 20) % 2).astype(result.dtype)

    def right(got):
        figures = jax.device_get(agreement.figures(got.astype(result.dtype), want))
        return not agreement.wrong(spec, [figures], lambda: [agreement.figures(want, want)])

    assert right(want)
    assert right(want.at[0, 0].set(jnp.ones((), want.dtype))) == (not exact)
    assert not right(want.at[0].set(jnp.ones((), want.dtype)))


def test_each_result_has_the_tolerance_of_its_dtype():
    spec = jc.graph(lambda g, x, y: (g.add(x, y), g.mul(x, y).set_data_type("float8_e5m2")))
    spec = spec.trace(X, X)[1].spec
    steps = {t.dtype: 0.02 if "8" in t.dtype else 1e-5 for t in spec.output_tensors}

    def off(want):
        noise = jax.random.normal(jax.random.key(0), X.shape) * 4
        return [
            (y.astype("float32") * (1 + noise * steps[t.dtype])).astype(y.dtype)
            for t, y in zip(spec.output_tensors, want, strict=True)
        ]

    both = lambda want: [off(want), [(y * 1.1).astype(y.dtype) for y in want]]  # noqa: E731
    right, (small, large) = compared(spec, both)
    assert not right
    assert not small
    assert large


def test_float8_on_the_way_to_a_result_explains_its_roundings():
    def graph(g, x, y):
        return g.mul(g.mul(x, y).set_data_type("float8_e5m2"), 0.5).set_data_type("bfloat16")

    def ways(want):
        (y,) = want
        rare = jax.random.uniform(jax.random.key(0), y.shape) < 0.05
        return [[jnp.where(rare, y * 1.25, y)], [y * 1.1]]

    right, (rounded, scaled) = compared(jc.graph(graph).trace(HALF, HALF)[1].spec, ways)
    assert not right
    assert not rounded
    assert scaled


def test_an_engine_that_writes_into_operands_is_seen(fake, monkeypatch, caplog):
    judged = trials.Bench._judged

    def damages(bench, begun):
        trial = judged(bench, begun)
        if bench._xla is begun:  # the last one
            bench._operands = [0.5 * x for x in bench._operands]
        return trial

    monkeypatch.setattr(trials.Bench, "_judged", damages)
    assert not taken()[1].measured
    assert "writes into its operands" in caplog.text


def test_results_that_tell_nothing_are_not_measured(fake, caplog):
    def blank(g, x, y):
        return g.add(g.log(g.sub(g.mul(x, 0.0), 1.0)), y)

    with caplog.at_level("INFO", "jax_cudnn"):
        assert not taken(jc.graph(blank).trace(X, X)[1].spec)[1].measured
    assert "do not tell right results from wrong" in caplog.text
    assert taken(jc.graph(lambda g, x, y: g.add(g.log(x), y)).trace(X, X)[1].spec)[1].measured


def test_a_second_process_measures_nothing_and_plans_the_same(fake):
    fake.seconds[1] = 4e-6
    first = taken()[1]
    auto.clear()
    second = taken()[1]
    assert second == first
    assert second.measured == first.measured
    assert fake.measured == 2  # rounds of the first: the main ways, and other engines


def test_what_is_slower_than_its_share_of_time_is_not_tried(fake, monkeypatch):
    fake.seconds[1] = 4e-6
    monkeypatch.setattr(tuning, "_AVERAGE", 0.0)
    assert taken()[0] == "eng0"


@pytest.mark.parametrize("own", OWN)
def test_where_no_measurement_may_decide(fake, monkeypatch, own):
    monkeypatch.delitem(settings._given, "tuning")
    monkeypatch.setenv("JAX_CUDNN_TUNING", "fast" if own else "off")
    assert not taken(replace(SPEC, options=replace(SPEC.options, **own)))[1].measured
    assert not fake.measured


def test_the_process_measures_for_so_long_and_says_so_once(fake, caplog):
    jc.configure(tuning_seconds=1e-6)
    specs = [spec_of(*[jax.ShapeDtypeStruct((n, 8), "float32")] * 2) for n in (1, 2, 3)]
    assert [bool(taken(spec)[1].measured) for spec in specs] == [True, False, False]
    assert caplog.text.count("jax_cudnn has measured for") == 1
    jc.configure(tuning_seconds=60)
    assert taken(specs[1])[1].measured


def test_what_is_too_large_or_busy_is_decided_without_a_measurement(fake, monkeypatch, caplog):
    monkeypatch.setattr(trials, "_free", lambda site, device: 1000)
    assert not taken()[1].measured
    auto.clear()
    monkeypatch.setattr(tuning, "_PATIENCE", 0.3)
    monkeypatch.setattr(tuning, "_ALL_PATIENCE", 0.5)
    monkeypatch.setattr(tuning, "idle", lambda device: time.sleep(1.0))
    waited = []
    for _ in range(4):
        before = tuning._spent.waited
        assert not taken()[1].measured
        waited.append(tuning._spent.waited - before)
    assert waited[0] >= 0.3
    assert max(waited[2:]) < 0.3  # the limit of all graphs is reached: a tenth of a second
    assert caplog.text.count("the GPU was busy") == 1
    assert tuning._spent.seconds < 0.2  # waiting is not measuring

    def full(device):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(tuning, "idle", full)
    assert taken()[0] == "eng0"
    assert "not measured: RuntimeError: RESOURCE_EXHAUSTED" in caplog.text
    assert not fake.measured


def test_an_allocator_without_a_limit_leaves_what_no_process_uses(monkeypatch):
    monkeypatch.setattr(CudaDevice, "free_memory", lambda self: 2**33)
    stats = {"bytes_limit": 2**32, "bytes_in_use": 2**30}
    for given, free in ((stats, 3 * 2**30), ({"bytes_in_use": 1}, 2**33), (None, 2**33)):
        device = SimpleNamespace(memory_stats=lambda given=given: given)
        assert trials._free(GPU, device) == free


@pytest.mark.parametrize(("words", "times"), [("no luck", 1), ("CUDNN_STATUS_ALLOC_FAILED", 3)])
def test_a_measurement_that_fails_is_said_and_harms_nothing(
    fake, monkeypatch, caplog, words, times
):
    def fails(*_):
        raise ValueError(words)

    monkeypatch.setattr(trials, "operands", fails)
    for _ in range(3):
        assert taken()[0] == "eng0"
    assert caplog.text.count(f"f: not measured: ValueError: {words}") == times


STRICT = {
    "jax_disable_jit": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_debug_nans": True,
    "jax_transfer_guard": "disallow",
}


@pytest.mark.parametrize("setting", [None, *STRICT])
def test_no_setting_or_context_of_the_caller_reaches_a_measurement(fake, setting):
    fake.seconds["XLA"], fake.factors[1] = 1e-6, jnp.nan
    x, before = jnp.ones((2, 3)), getattr(jax.config, setting or "jax_debug_nans")

    def traced(x):
        assert taken()[0] == "XLA"
        return x

    try:
        if setting:
            jax.config.update(setting, STRICT[setting])
        jax.jit(jax.vmap(traced))(x)
    finally:
        if setting:
            jax.config.update(setting, before)


def lacking_xla(monkeypatch):
    judged = trials.Bench._judged

    def lacking(bench, begun):
        return trials.Trial(note="no room") if bench._xla is begun else judged(bench, begun)

    monkeypatch.setattr(trials.Bench, "_judged", lacking)
    return judged


def test_a_wrong_way_is_not_taken_where_the_right_one_is_left_out(fake, monkeypatch):
    fake.factors = {0: 1.5, 1: 1.5}
    lacking_xla(monkeypatch)
    for _ in range(2):
        (segment,) = taken()[1].segments
        assert (segment.engine, segment.strict) == ("XLA", True)
        auto.clear()


def test_a_reference_that_is_too_large_is_met_once(fake, monkeypatch, caplog):
    compiled, compile_ = [], trials._Program.compile

    def large(program, options=None):
        compiled.append(program)
        made = compile_(program, options)
        made.memory = 2**40 if options else made.memory
        return made

    monkeypatch.setattr(trials._Program, "compile", large)
    with caplog.at_level("INFO", "jax_cudnn"):
        for _ in range(3):
            assert not taken()[1].measured
    assert caplog.text.count("too large for what is free") == 1
    assert len(compiled) <= 4


def test_a_way_left_out_for_want_of_memory_is_measured_by_full(fake, monkeypatch):
    fake.seconds["XLA"] = 1e-6
    judged = lacking_xla(monkeypatch)
    assert taken()[0] == "eng0"
    monkeypatch.setattr(trials.Bench, "_judged", judged)
    auto.clear()
    assert taken()[0] == "eng0"  # as in the first process
    auto.clear()
    jc.configure(tuning="full")
    assert taken()[0] == "XLA"
    measured = fake.measured
    auto.clear()
    assert taken()[0] == "XLA"
    assert fake.measured == measured  # a second process measures nothing


@pytest.mark.parametrize("planned", [False, True])
def test_an_engine_that_cannot_be_planned_leaves_what_is_known(fake, monkeypatch, planned):
    def fails(*_):
        raise RuntimeError("no luck")

    fake.seconds["XLA"] = 5e-6
    plan = planner.plan
    monkeypatch.setattr(planner, "candidates", planner.candidates if planned else fails)
    by_engine = lambda spec, *a: fails() if spec.options.engine else plan(spec, *a)  # noqa: E731
    monkeypatch.setattr(planner, "plan", by_engine if planned else plan)
    engine, planned = taken()
    assert engine == "XLA"
    assert planned.measured


def test_an_error_while_other_engines_are_measured_leaves_what_is_known(fake, monkeypatch):
    run, rounds = trials.Bench.trials, []

    def trial(bench, ways):
        rounds.append(ways)
        if len(rounds) > 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: no room")
        return run(bench, ways)

    monkeypatch.setattr(trials.Bench, "trials", trial)
    engine, planned = taken()
    assert engine == "eng0"
    assert len(rounds) == 2
    assert {m.what for m in planned.measured} == {"XLA", "cuDNN eng0"}


def test_where_cudnn_has_no_engine_a_second_process_measures_nothing(fake, monkeypatch):
    def refuses(*_):
        raise jc.UnsupportedGraphError("no engine")

    monkeypatch.setattr(planner, "plan", refuses)
    made, bench = [], trials.Bench.__init__
    monkeypatch.setattr(trials.Bench, "__init__", lambda *a: [made.append(1), bench(*a)][1])
    for _ in range(2):
        engine, planned = taken()
        assert engine == "XLA"
        assert not planned.measured
        auto.clear()
    assert len(made) == 1


def test_an_outcome_holds_for_a_driver_and_xlas_flags(fake, monkeypatch):
    with monkeypatch.context() as unoptimized:
        unoptimized.setattr(compat, "is_unoptimized", lambda: True)
        keys = {tuning._key(SPEC, GPU)}
    for driver, flags in [("1", ""), ("2", ""), ("2", "--xla_gpu_x=1"), ("2", "--xla_dump_to=y")]:
        monkeypatch.setattr(tuning, "kernel_driver", lambda driver=driver: driver)
        monkeypatch.setenv("XLA_FLAGS", flags)
        keys.add(tuning._key(SPEC, GPU))
    assert len(keys) == 4


@pytest.mark.parametrize(
    "change",
    [{"taken": 0.5}, {"taken": 9}, {"taken": None}, {"taken": 2}, {"level": 7}, {"level": "off"}],
)
def test_a_stored_outcome_of_wrong_values_is_not_read(fake, change):
    fake.factors[1] = 1.5
    taken()
    canonical = SPEC.for_planning.canonical()
    found = tuning.measurement(canonical, GPU, "f")
    data = json.loads(json.dumps(asdict(found)))
    assert stored.choice_of(data, canonical) == found
    with pytest.raises((stored.Wrong, TypeError)):
        stored.choice_of(data | change, canonical)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("case", SURVEY.values(), ids=SURVEY)
def test_operands_are_valid_for_their_ports(case, plain):
    spec = case.function.trace(*case.avals)[1].spec
    drawn = trials.operands(spec, plain)
    assert all(np.isfinite(np.asarray(x, "float32")).all() for x in drawn)
    scales = [x for x in drawn if x.size == 1 and jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(x.item() > 0 for x in scales)
    for x, kept, tensor in zip(
        drawn, boundary(spec).clipped(drawn), spec.input_tensors, strict=True
    ):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(kept), tensor.name)
    for call in spec.calls:
        values = {p: drawn[spec.inputs.index(n)] for p, n in call.inputs if n in spec.inputs}
        for port in {*values} & {*call.node.indices.positions}:
            x = values[port].ravel()
            if x.size == len(values[port]) and x.size > 1 and (x[0], x[-1]) != (0, 0):
                assert x[-1] > 0, port
            if "page" in port:
                assert len({*x.tolist()}) > 1 or x.size == 1, port
        offsets = [values[o] for o in call.node.indices.offsets.values() if o in values]
        assert all((np.diff(x.ravel()) > 0).all() and x.ravel()[0] == 0 for x in offsets)


def test_bad_settings_are_refused(monkeypatch):
    with pytest.raises(jc.GraphError, match="did you mean 'fast'"):
        jc.configure(tuning="fas")
    with pytest.raises(jc.GraphError, match="tuning_seconds"):
        jc.configure(tuning_seconds=0)
    monkeypatch.setattr(settings, "_given", {})
    monkeypatch.setenv("JAX_CUDNN_TUNING", "never")
    with pytest.raises(jc.GraphError, match="JAX_CUDNN_TUNING is not valid"):
        settings.settings()
