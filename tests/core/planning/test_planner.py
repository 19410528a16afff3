"""The plans in memory: one build however many ask, nothing kept of a failure."""

import dataclasses
import functools
import json
import os
import signal
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core import package
from jax_cudnn._core.planning import placement, planner, single_flight
from jax_cudnn._core.planning.deviceless import client, profiles
from jax_cudnn._core.planning.execution_plan import ExecutionPlan
from jax_cudnn._core.planning.planner import identity
from jax_cudnn._core.planning.stored import key_text
from jax_cudnn._core.store.cache import configured

pytestmark = pytest.mark.usefixtures("made_up_plans")

H200 = profiles.get("H200")
ROWS = (1, 0, 0, 256), (2, 1, 0, 256)
TEXT = '{"cudnnVersion":91900,"GPUProfile":{"deviceName":"NVIDIA H200"}}'
PLAN = ExecutionPlan(TEXT, "eng0", 91900, "NVIDIA H200", 0, 0, ROWS, (), b"", 1)


def spec(name="x", slope=None):
    function = {
        "x": lambda g, x: g.relu(x, negative_slope=slope),
        "y": lambda g, y: g.relu(y, negative_slope=slope),
    }[name]
    return jc.graph(function).trace(jax.ShapeDtypeStruct((8, 8), jnp.float32))[1].spec


@pytest.fixture
def waiting(monkeypatch):
    """A semaphore: one for each thread that begins to wait for another one's plan."""
    waiting = threading.Semaphore(0)

    class Counted(Future):
        def result(self, timeout=None):
            waiting.release()
            return super().result(timeout)

    monkeypatch.setattr(single_flight, "Future", Counted)
    return waiting


@pytest.mark.parametrize(
    ("error", "left"),
    [(None, [PLAN] * 6), (jc.LibraryError("no cuDNN"), []), (KeyboardInterrupt(), [PLAN] * 5)],
    ids=["made", "failed", "interrupted"],
)
def test_threads_share_one_build(error, left, monkeypatch, waiting):
    """A failure is everybody's and not kept; an interrupt is its own thread's alone."""
    built = []

    def build(spec, site):
        built.append(spec)
        if len(built) == 1:
            for _ in range(5):
                assert waiting.acquire(timeout=60)
            if error is not None:
                raise error
        return PLAN

    monkeypatch.setattr(planner, "_build", build)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(planner.plan, spec(), H200, "f") for _ in range(6)]
    results = [each.exception() or each.result() for each in asked]
    assert [result for result in results if result is PLAN] == left
    assert all(result is PLAN or type(result) is type(error) for result in results)
    assert len(built) == (2 if isinstance(error, KeyboardInterrupt) else 1)
    assert planner.plan(spec(), H200, "f") is PLAN


@pytest.mark.parametrize("on_disk", [False, True])
def test_names_do_not_matter_but_attributes_and_profiles_do(on_disk, monkeypatch, tmp_path):
    built = []
    jc.configure(plan_cache=tmp_path if on_disk else None)
    monkeypatch.setattr(planner, "_build", lambda spec, site: built.append((spec, site)) or PLAN)
    other = jc.Profile.from_json(H200.properties_json.replace("NVIDIA H200", "NVIDIA Other"))
    for s, site in ((spec(), H200), (spec("y"), H200), (spec("x", 0.5), H200), (spec(), other)):
        assert planner.plan(s, site, "f") == PLAN
        if on_disk:
            planner.clear()
    assert len(built) == 3


@pytest.mark.deviceless
def test_what_a_plan_depends_on_is_the_gpu_and_the_libraries_and_no_name():
    assert identity(dataclasses.replace(H200, name="mine", measured=False)) == identity(H200)
    assert identity(profiles.get("H100")) != identity(H200)
    memory = json.loads(H200.properties_json)["totalGlobalMem"]
    for other, same in ((memory - 2**20, True), (2**31, False)):  # a part of it limits workspaces
        like = H200.properties_json.replace(str(memory), str(other))
        assert (identity(dataclasses.replace(H200, properties_json=like)) == identity(H200)) == same
    for version in client.call("jax_cudnn._core.planning.frontend:versions"):
        assert f'"{version}"' in identity(H200)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_child_of_a_fork_does_not_wait_for_its_parents_plans(monkeypatch):
    entered, leave = threading.Event(), threading.Event()

    def slow(spec, site):
        entered.set()
        leave.wait(30)
        return PLAN

    monkeypatch.setattr(planner, "_build", slow)
    planner.clear()
    thread = threading.Thread(target=planner.plan, args=(spec(), H200, "f"))
    thread.start()
    entered.wait(30)
    child = os.fork()
    if child == 0:
        planner._build = lambda spec, site: PLAN
        signal.alarm(20)
        os._exit(0 if planner.plan(spec(), H200, "f") is PLAN else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    leave.set()
    thread.join()


def test_an_entry_of_the_plan_cache_that_is_no_plan_is_replaced(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(planner, "_build", lambda spec, site: PLAN)
    jc.configure(plan_cache=tmp_path)
    key = key_text("plan", spec().for_planning.canonical(), planner.identity(H200))
    configured().put(key, {"engine": "of another kind"})
    assert planner.plan(spec(), H200, "f") == PLAN
    assert configured().get(key) == json.loads(json.dumps(PLAN.to_json()))
    assert caplog.text.count("is ignored (foreign") == 1


def test_what_another_version_of_the_rules_decided_is_not_used(monkeypatch):
    texts = set()
    for code in ("one", "one", "another"):
        monkeypatch.setattr(planner, "fingerprint", lambda code=code: code)
        texts.add(planner._text("by handle", "{}", {"cuDNN": "9"}))
    assert len(texts) == 2
    assert len(package.fingerprint()) == 16


def test_graphs_that_differ_in_constants_share_a_plan(monkeypatch):
    """An epsilon is read when the plan runs: with another one nothing is planned."""
    built, of_the_frontend = [], bytes(range(16))

    def build(spec, site):
        built.append(spec)
        return dataclasses.replace(PLAN, scalars=bytes(16) + of_the_frontend)

    monkeypatch.setattr(planner, "_build", build)

    def norm(epsilon):
        return jc.graph(lambda g, x, scale: g.rmsnorm(x, scale, epsilon=epsilon)[0])

    x, scale = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((64, 256), (1, 256)))
    with jc.target("H200"):
        plans = [jc.plan(norm(e), x, scale).execution_plans[0] for e in (1e-5, 0.25)]
    assert len(built) == 1
    for plan, epsilon in zip(plans, (1e-5, 0.25), strict=True):
        assert plan.scalars == struct.pack("<f", epsilon).ljust(16, b"\0") + of_the_frontend


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(3))


def lowered(implementation=None):
    """A program of three different graphs, each in two layers."""

    @functools.partial(jc.graph, implementation=implementation)
    def layer(g, x):
        return g.relu(x)

    avals = [jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (8, 16, 24)]
    with jc.target("H200"):
        traced = jax.jit(lambda *xs: [layer(layer(x)) for x in xs]).trace(*avals)
        return traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("count", [1, 3])
def test_graphs_of_a_program_are_planned_at_once_and_equal_layers_once(count, monkeypatch, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(count))
    built, together = [], threading.Barrier(count, timeout=120)

    def build(spec, site):
        together.wait()
        built.append((spec.inputs, threading.current_thread()))
        return PLAN

    monkeypatch.setattr(planner, "_build", build)
    lowered()
    assert len(built) == 3
    own = [thread is threading.main_thread() for _, thread in built]
    assert own == [count == 1] * 3


def test_a_system_without_affinity_plans_one_graph_after_the_other(monkeypatch, cores):
    monkeypatch.delattr(os, "sched_getaffinity")
    built = []

    def build(spec, site):
        built.append(threading.current_thread())
        return PLAN

    monkeypatch.setattr(planner, "_build", build)
    lowered()
    assert built == [threading.main_thread()] * 3


def test_what_fails_ahead_is_told_for_its_function_when_its_turn_comes(monkeypatch, cores):
    def build(spec, site):
        raise jc.UnsupportedGraphError("no engine", why="it is a test")

    monkeypatch.setattr(planner, "_build", build)
    with pytest.raises(jc.UnsupportedGraphError, match="layer: no engine"):
        lowered("cudnn")


def test_an_interrupt_drops_the_graphs_that_wait(monkeypatch, cores):
    begun, two = [], threading.Barrier(3)

    def build(spec, site):
        begun.append(spec)
        two.wait(60)
        time.sleep(0.3)
        return PLAN

    monkeypatch.setattr(planner, "_build", build)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(2))

    def interrupted(futures):
        two.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(placement, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lowered()
    assert len(begun) == 2
