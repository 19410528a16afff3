"""implementation="auto": which way is taken, what is remembered, when nothing is measured.

A CPU stands in for the GPU: cuDNN's plans are made up, and their calls compute the reference.
"""

import functools
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_cases

import jax_cudnn as jc
from jax_cudnn._core import agreement, auto, ffi, settings, trials, tuning
from jax_cudnn._core.cuda import CudaDevice
from jax_cudnn._core.graph.bounds import bounded
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.planning import losses, placement, planner
from jax_cudnn._core.planning.candidates import Candidate
from jax_cudnn._core.planning.execution_plan import ExecutionPlan

GPU = CudaDevice(0)
X = jax.ShapeDtypeStruct((64, 128), "float32")


def spec_of(*avals):
    gelu = jc.graph(lambda g, x, y: g.gelu(g.add(x, y)))
    return gelu.trace(*(avals or (X, X)))[1].spec


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
    planned = auto.place(spec, GPU, "f")
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
    if not xla_measured:
        far = losses.Loss("p", 3.0, "H200", "today", "9.19", (), True)
        monkeypatch.setattr(losses, "nearest", lambda spec, sm_version: far)
    for _ in range(2):  # measured, and from the disk
        engine, planned = taken()
        assert engine == "XLA"
        assert "differs" in planned.measured[0].note
        if not xla_measured:
            assert planned.segments[0].reason.startswith("no measured way is right: cuDNN eng0")
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
    tuning.remember(SPEC.for_planning.canonical(), GPU, xla)
    for level in ("full", "fast"):
        auto.clear()
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


def test_what_roundings_of_the_operands_explain_is_right():
    def near(relative):
        return lambda: [(relative, relative, 0.0)]

    def not_needed():
        raise AssertionError

    assert agreement.wrong(SPEC, [(1e-4, 1e-4, 0.0)], not_needed) == ""
    assert agreement.wrong(SPEC, [(0.1, 0.1, 0.0)], near(0.03)) == ""
    assert "4 roundings" in agreement.wrong(SPEC, [(0.1, 0.1, 0.0)], near(0.02))
    assert agreement.wrong(SPEC, [(math.nan, math.nan, 0.0)], near(math.inf))


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


@pytest.mark.parametrize("how", ["off", "variable", "deterministic", "engine", "split"])
def test_where_no_measurement_may_decide(fake, monkeypatch, how):
    options = SPEC.options
    if how == "off":
        jc.configure(tuning="off")
    elif how == "variable":
        monkeypatch.delitem(settings._given, "tuning")
        monkeypatch.setenv("JAX_CUDNN_TUNING", "off")
    elif how == "deterministic":
        options = replace(options, deterministic=True)
    elif how == "engine":
        options = replace(options, engine=1)
    else:
        options = replace(options, implementation="split")
    planned = taken(replace(SPEC, options=options))[1]
    assert not planned.measured
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
    monkeypatch.setattr(tuning, "_PATIENCE", 0.05)
    monkeypatch.setattr(tuning, "idle", lambda device: time.sleep(0.3))
    assert not taken()[1].measured
    assert "the GPU was busy" in caplog.text

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


def test_a_measurement_that_fails_is_said_and_harms_nothing(fake, monkeypatch, caplog):
    def fails(*_):
        raise ValueError("no luck")

    monkeypatch.setattr(trials, "operands", fails)
    assert taken()[0] == "eng0"
    assert "f: not measured: ValueError: no luck" in caplog.text


def test_no_context_of_the_caller_reaches_a_measurement(fake):
    fake.seconds["XLA"] = 1e-6

    def traced(x):
        with jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
            assert taken()[0] == "XLA"
        return x

    jax.jit(jax.vmap(traced))(jnp.ones((2, 3)))


INDEXING = [
    case
    for case in all_cases()
    if any(call.node.integers for call in case.function.trace(*case.avals)[1].spec.calls)
]


@pytest.mark.parametrize("case", INDEXING, ids=lambda case: case.name)
def test_operands_are_valid_for_their_ports(case):
    spec = case.function.trace(*case.avals)[1].spec
    drawn = trials.operands(spec)
    for x, kept, tensor in zip(drawn, bounded(spec, drawn), spec.input_tensors, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(kept), tensor.name)
    for call in spec.calls:
        values = {p: drawn[spec.inputs.index(n)] for p, n in call.inputs if n in spec.inputs}
        for port in {*values} & {*call.node.integers}:
            x = values[port].ravel()
            if x.size == len(values[port]) and x.size > 1 and (x[0], x[-1]) != (0, 0):
                assert x[-1] > 0, port
            if "page" in port:
                assert len({*x.tolist()}) > 1 or x.size == 1, port
        offsets = [values[o] for o in call.node.offsets.values() if o in values]
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
