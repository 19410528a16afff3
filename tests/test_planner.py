"""The plans in memory: one build however many ask, nothing kept of a failure; cuDNN's refusals."""

import re
import threading

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core import planner
from jax_cudnn._core.plan import Plan
from jax_cudnn.deviceless import profiles

H200 = profiles.get("H200")
PLAN = Plan("{}", "eng0", 91900, "NVIDIA H200", 0, 0, (), (), b"", 1)


def spec(name="x", slope=None):
    function = {
        "x": lambda g, x: g.relu(x, negative_slope=slope),
        "y": lambda g, y: g.relu(y, negative_slope=slope),
    }[name]
    return jc.graph(function).trace(jax.ShapeDtypeStruct((8, 8), jnp.float32))[1].spec


@pytest.fixture(autouse=True)
def no_plans():
    planner.clear()
    yield
    planner.clear()


def in_threads(count, work):
    results = [None] * count
    start = threading.Barrier(count)

    def run(i):
        start.wait()
        try:
            results[i] = work()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_eight_threads_share_one_build(monkeypatch):
    built = []

    def slow(spec, site):
        built.append(spec)
        threading.Event().wait(0.2)
        return PLAN

    monkeypatch.setattr(planner, "_build", slow)
    results = in_threads(8, lambda: planner.plan(spec(), H200, "f"))
    assert len(built) == 1
    assert all(result is PLAN for result in results)


def test_names_do_not_matter_but_attributes_and_profiles_do(monkeypatch):
    built = []
    monkeypatch.setattr(planner, "_build", lambda spec, site: built.append((spec, site)) or PLAN)
    other = jc.Profile("other", 90, "NVIDIA Other", H200.properties_json)
    for s, site in (
        (spec("x"), H200),
        (spec("y"), H200),
        (spec("x", 0.5), H200),
        (spec("x"), other),
    ):
        planner.plan(s, site, "f")
    assert len(built) == 3


def test_failure_reaches_every_waiter_and_is_not_kept(monkeypatch):
    attempts = []

    def fail(spec, site):
        attempts.append(spec)
        threading.Event().wait(0.2)
        raise jc.LibraryError("no cuDNN")

    monkeypatch.setattr(planner, "_build", fail)
    results = in_threads(4, lambda: planner.plan(spec(), H200, "f"))
    assert all(isinstance(result, jc.LibraryError) for result in results)
    assert len(attempts) == 1
    monkeypatch.setattr(planner, "_build", lambda spec, site: PLAN)
    assert planner.plan(spec(), H200, "f") is PLAN


def test_failure_after_clear_is_still_the_failure(monkeypatch):
    def fail(spec, site):
        planner.clear()
        raise jc.LibraryError("no cuDNN")

    monkeypatch.setattr(planner, "_build", fail)
    with pytest.raises(jc.LibraryError):
        planner.plan(spec(), H200, "f")


def test_plan_names_the_function_in_its_error(monkeypatch):
    def fail(spec, site):
        raise jc.UnsupportedGraphError("no engine", reasons={"engine 1": "because"})

    monkeypatch.setattr(planner, "_build", fail)
    with pytest.raises(jc.UnsupportedGraphError, match=r"^mine: no engine") as caught:
        planner.plan(spec("y"), H200, "mine")
    assert "graph(y: float32[8,8])" in str(caught.value)


# -- what cuDNN refuses ----------------------------------------------------------------------------

IMAGE, WEIGHT = ((2, 64, 8, 8), jnp.bfloat16), ((64, 64, 3, 3), jnp.bfloat16)
MATRIX = ((1, 64, 64), jnp.bfloat16)


def conv(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1])


UNSUPPORTED = {
    "two convolutions": (
        lambda g, x, w: conv(g, g.relu(conv(g, x, w)), w),
        [IMAGE, WEIGHT],
        [r"engine \d+: ", r"conv_fprop\.1::Y: bfloat16\[2,64,8,8\]"],
    ),
    "two matmuls": (
        lambda g, x, w: g.matmul(g.matmul(x, w), w),
        [MATRIX, MATRIX],
        [
            r"engine \d+: this pattern of operations is not supported",
            "one convolution or matmul each",
        ],
    ),
    "mixed dtypes": (
        conv,
        [IMAGE, (WEIGHT[0], jnp.float16)],
        [r"engine \d+: ", "bfloat16 or float16 inputs"],
    ),
    "rounded reduction": (
        lambda g, x, w: g.reduction(g.relu(x), out_dims=[1, 1, 64]).set_data_type("bfloat16"),
        [MATRIX, MATRIX],
        ["leave a reduction's result float32", "must be the last node"],
    ),
    "broadcast over channels and batch": (
        lambda g, x, w, b: g.add(conv(g, x, w), b),
        [IMAGE, WEIGHT, ((1, 1, 8, 8), jnp.bfloat16)],
        [
            r"add: broadcasting \[1, 1, 8, 8\] to \[2, 64, 8, 8\]",
            r"\[1, 64, 1, 1\]",
            "jnp.broadcast_to",
        ],
    ),
    "broadcast over space": (
        lambda g, x, w, b: g.bias(conv(g, x, w), b),
        [IMAGE, WEIGHT, ((2, 64, 1, 1), jnp.bfloat16)],
        [r"bias: broadcasting \[2, 64, 1, 1\]", "jnp.broadcast_to"],
    ),
    "both operands broadcast": (
        lambda g, x, w: g.mul(g.relu(x), w),
        [((2, 64, 1, 1), jnp.bfloat16), ((1, 64, 8, 8), jnp.bfloat16)],
        [r"mul: broadcasting"],
    ),
}


@pytest.mark.deviceless
@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_graph_is_printed_with_reasons_and_advice(what):
    function, avals, patterns = UNSUPPORTED[what]
    with pytest.raises(jc.UnsupportedGraphError) as caught, jc.target("H200"):
        jc.plan(jc.graph(function), *(jax.ShapeDtypeStruct(*aval) for aval in avals))
    error, text = caught.value, str(caught.value)
    assert isinstance(error, NotImplementedError)
    assert error.reasons
    assert error.fix
    assert error.graph.startswith("graph(x: bfloat16[")
    for pattern in (*patterns, "what to do: ", "cuDNN's reasons:", "return "):
        assert re.search(pattern, text), f"{pattern!r} is not in\n{text}"


@pytest.mark.deviceless
def test_two_convolutions_are_explained_in_words():
    function, avals, _ = UNSUPPORTED["two convolutions"]
    with pytest.raises(jc.UnsupportedGraphError) as caught, jc.target("H200"):
        jc.plan(jc.graph(function), *(jax.ShapeDtypeStruct(*aval) for aval in avals))
    assert "one convolution or matmul each" in caught.value.fix
    assert not any(reason.startswith("mmaNodeCount") for reason in caught.value.reasons.values())


@pytest.mark.deviceless
def test_plan_of_a_supported_graph_describes_itself():
    with jc.target("H200"):
        plan = jc.plan(jc.graph(conv), *(jax.ShapeDtypeStruct(*aval) for aval in (IMAGE, WEIGHT)))
    assert plan.candidates >= 1
    assert str(plan).startswith(plan.engine)
    assert "NVIDIA H200" in str(plan)
