"""jc.tune: what is tried in a step, kept and remembered; its programs are stood in for."""

import jax
import jax.numpy as jnp
import pytest
from test_measured_choice import GPU, fake, spec_of, taken  # noqa: F401

import jax_cudnn as jc
from jax_cudnn._core import auto, compat, context, tuning
from jax_cudnn._core.planning.stored import check_entry
from jax_cudnn._core.plans import tune
from jax_cudnn._core.sharding import work
from jax_cudnn._core.store import archive
from jax_cudnn._core.store.cache import PlanCache
from jax_cudnn._core.user_context import WAYS


class Step:
    """A program whose time follows from its choice: each way of the larger graph in XLA saves."""

    def __init__(self, choice):
        self.choice = choice

    def once(self):
        seconds = 10e-3
        for spec, way in self.choice.items():
            large = spec.input_tensors[0].shape[0] > 8
            seconds += -2e-3 if large and way == 1 else 1e-3
        return seconds

    def seconds(self):
        return self.once()


@pytest.fixture
def stood_in(fake, monkeypatch):  # noqa: F811
    made = []

    def of(function, args, choice):
        made.append(Step(choice))
        return made[-1]

    monkeypatch.setattr(compat, "is_cuda", lambda device: True)
    monkeypatch.setattr(context, "site", lambda devices, name: GPU)
    monkeypatch.setattr(tune._Program, "of", of)
    return made


@jc.graph
def gelu(g, x, y):
    return g.gelu(g.add(x, y))


def step(large, small):
    return gelu(large, large).sum() + gelu(small, small).sum() + gelu(small + 1, small).sum()


LARGE, SMALL = jnp.ones((64, 8)), jnp.ones((8, 8))


def test_what_makes_the_step_faster_is_kept_and_remembered(stood_in, capsys):
    found = jc.tune(step, LARGE, SMALL)
    got = [(one.graph, one.what, one.taken) for one in found.tried]
    assert {*got} == {
        ("gelu 2", "cuDNN eng1", False),
        ("gelu 2", "XLA", False),
        ("gelu", "cuDNN eng1", False),
        ("gelu", "XLA", True),
    }
    assert got[0][0] == "gelu 2"  # it runs twice, and so takes most of the step
    assert found.after < found.before
    assert "taken" in capsys.readouterr().out
    assert len(stood_in) == 5
    large, small = (spec_of(*[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2) for x in (LARGE, SMALL))
    for forget in (lambda: None, auto.clear):  # in this process, and in the next one
        forget()
        assert taken(large)[0] == "XLA"
        assert taken(small)[0] == "eng0"


def test_the_limit_of_time_holds(stood_in):
    found = jc.tune(step, LARGE, SMALL, minutes=0)
    assert not found.finished
    assert not found.tried
    assert "the limit of time was reached" in str(found)


def test_a_step_without_a_choice_is_refused(stood_in):
    jc.configure(tuning="off")
    with pytest.raises(jc.GraphError, match="nothing to choose"):
        jc.tune(step, LARGE, SMALL)


def test_without_a_gpu_it_says_so():
    with pytest.raises(jc.TargetError, match="tune runs a step on an NVIDIA GPU"):
        jc.tune(step, LARGE, SMALL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3,), "expected a function"),
        ((step, jax.ShapeDtypeStruct((8, 8), "float32")), "expected: arrays"),
        ((step, LARGE, SMALL, "x"), "minutes is not valid"),
        ((step, LARGE, SMALL, float("nan")), "minutes is not valid"),
        ((step, LARGE, SMALL, -1), "minutes is not valid"),
    ],
)
def test_wrong_arguments_are_said(arguments, words):
    function, *args = arguments
    minutes = {"minutes": args.pop()} if len(args) > 2 else {}
    with pytest.raises(jc.GraphTypeError, match=words):
        jc.tune(function, *args, **minutes)


@pytest.mark.parametrize("of_nnx", [False, True])
def test_a_step_that_ran_before_is_lowered_anew(stood_in, of_nnx):
    jit = pytest.importorskip("flax.nnx").jit if of_nnx else jax.jit
    traced = []

    @jit
    def counted(large, small):
        traced.append(1)
        return step(large, small)

    counted(LARGE, SMALL)
    counted(LARGE, SMALL)
    jc.tune(counted, LARGE, SMALL)
    before = len(traced)
    for _ in range(2):
        counted(LARGE, SMALL)
    assert len(traced) == before + 1


def test_on_a_mesh_each_choice_is_another_program(fake, monkeypatch):  # noqa: F811
    """There plans are made when XLA partitions a program, by what held when it was lowered."""
    spec = spec_of(*[jax.ShapeDtypeStruct((32, 8), "float32")] * 2).for_planning.canonical()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(LARGE, jax.NamedSharding(mesh, jax.P("data")))
    seen, run, kept = [], work.Work.run, []
    monkeypatch.setattr(
        work.Work, "run", lambda *a, **k: [seen.append(WAYS.value), run(*a, **k)][1]
    )
    function = jax.jit(lambda x: gelu(x, x).sum())
    for way in (0, 1):
        with WAYS.entered(((spec, way),)):
            kept.append(function.lower(x).compile())
    assert seen == [((spec, 0),), ((spec, 1),)]
    for level in ("off", "full"):
        jc.configure(tuning=level)
        kept.append(jax.jit(lambda x: gelu(x, x).sum()).lower(x).compile())
    assert len(seen) == 4
    jc.configure(tuning="fast")
    taken(spec)
    before = tuning.steps()
    tuning.remember(spec, GPU, tuning.measurement(spec, GPU, "f"), 1)
    assert tuning.steps() != before
    chosen = tuning.steps()
    auto.clear()  # and in the next process
    assert tuning.steps() == chosen
    other = spec_of(*[jax.ShapeDtypeStruct((16, 8), "float32")] * 2).for_planning.canonical()
    taken(other)
    tuning.remember(other, GPU, tuning.measurement(other, GPU, "f"), 1)
    auto.clear()
    assert tuning.steps().count("',") == 2  # of both
    assert chosen[1:-1] in tuning.steps()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert tuning.steps() == ""


def test_an_import_brings_what_a_step_has_chosen(fake, tmp_path):  # noqa: F811
    spec = spec_of(*[jax.ShapeDtypeStruct((32, 8), "float32")] * 2)
    canonical, there = spec.for_planning.canonical(), tmp_path / "there"
    assert taken(spec)[0] == "eng0"
    found = tuning.measurement(canonical, GPU, "f")
    (xla,) = [i for i, way in enumerate(found.ways) if way.in_xla]
    tuning.remember(canonical, GPU, found, xla)
    chosen = tuning.steps()
    archive.export(PlanCache(tmp_path), tmp_path / "file.zip")
    for known in (True, False):
        auto.clear()
        jc.configure(plan_cache=there)
        if known:
            assert taken(spec)[0] == "eng0"
            auto.clear()
        archive.import_(PlanCache(there), tmp_path / "file.zip", check_entry)
        assert taken(spec)[0] == "XLA"
        assert tuning.steps() == chosen


def test_what_was_taken_stays_after_an_interruption(stood_in, monkeypatch):
    run, rounds = tune._in_turns, []

    def interrupted(first, second):
        rounds.append(run(first, second))
        if rounds[-1][1] > rounds[-1][0] and len(rounds) > 4:
            raise KeyboardInterrupt
        return rounds[-1]

    monkeypatch.setattr(tune, "_in_turns", interrupted)
    large = spec_of(*[jax.ShapeDtypeStruct(LARGE.shape, LARGE.dtype)] * 2)
    taken(large)
    small = spec_of(*[jax.ShapeDtypeStruct(SMALL.shape, SMALL.dtype)] * 2)
    monkeypatch.setattr(tune, "_LEAST", 1)
    with pytest.raises(KeyboardInterrupt):
        jc.tune(lambda x, y: step(x, y) + gelu(y[:4], y[:4]).sum(), LARGE, SMALL)
    assert taken(large)[0] == "XLA"
    assert taken(small)[0] == "eng0"


def test_a_way_that_does_not_run_is_said(stood_in, monkeypatch, capsys):
    def fails(first, second):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room\nmore")

    monkeypatch.setattr(tune, "_in_turns", fails)
    found = jc.tune(step, LARGE, SMALL)
    assert [one.seconds for one in found.tried] == [None] * 4
    said = capsys.readouterr().out
    assert said.count("(RESOURCE_EXHAUSTED: no room): does not run, not taken") == 4


def test_donated_arguments_are_copied_and_the_others_are_not():
    copied = []
    args, donated = (LARGE, LARGE + 1, 2.0), (True, False, True)
    program = tune._Program(None, lambda *args: copied.append(args), args, donated)
    program.once()
    ((x, y, scale),) = copied
    assert x is not LARGE
    assert (y is program.args[1], scale) == (True, 2.0)
    donating = jax.jit(lambda x, y, z: (x + y, y), donate_argnums=(0, 2))
    program = tune._Program.of(donating, program.args, {})
    assert program.donated == (True, False, True)
    for _ in range(3):
        assert program.once() > 0
    assert not LARGE.is_deleted()


def test_static_arguments_are_refused():
    counted = jax.jit(lambda x, n: x * n, static_argnums=1)
    with pytest.raises(jc.GraphError, match="static arguments") as told:
        tune._Program.of(counted, (LARGE, 2), {})
    assert "functools.partial" in str(told.value)
