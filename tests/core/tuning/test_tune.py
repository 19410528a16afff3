"""jc.tune: what is tried in a step, kept and remembered; its programs are stood in for."""

import jax
import jax.numpy as jnp
import pytest
from test_measured_choice import GPU, fake, spec_of, taken  # noqa: F401

import jax_cudnn as jc
from jax_cudnn._core import auto, compat, context
from jax_cudnn._core.plans import tune


class Step:
    """A program whose time follows from its choice: each way of the larger graph in XLA saves."""

    donated = ()

    def __init__(self, choice):
        self.function, self.choice = None, choice

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


def test_donated_arguments_are_copied_and_the_others_are_not():
    donating = jax.jit(lambda x, y: (x + y, y), donate_argnums=0)
    program = tune._Program.of(donating, (LARGE, LARGE + 1), {})
    assert program.donated == (True, False)
    for _ in range(3):
        assert program.once() > 0
    assert not LARGE.is_deleted()
