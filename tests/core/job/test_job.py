"""One process of a job decides for all: with a store in memory, and with two real processes.

And what one process has planned, a later one takes over: no plan is built, its program is equal.
"""

import concurrent.futures
import json
import threading
import types
from pathlib import Path

import jax
import pytest
from helpers import python, two_processes

import jax_cudnn as jc
from jax_cudnn._core import compat, job

WORKER = Path(__file__).with_name("job_worker.py")
VERSIONS = "cuDNN 9.19.0, frontend 1.28.0, NVIDIA H200"


class Store:
    """The part of the distributed client that agreement uses, for all processes of a test."""

    def __init__(self):
        self.values, self.condition = {}, threading.Condition()

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        with self.condition:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.condition.notify_all()

    def key_value_try_get_bytes(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        with self.condition:
            if not self.condition.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
        return self.values[key]


def question(key="graph", processes=(0, 1), identity=VERSIONS, timeout=5.0):
    return job.Question(key, processes, "linear", lambda: identity, timeout)


def devices(*processes):
    return [types.SimpleNamespace(process_index=process) for process in processes]


def never():
    raise AssertionError("only the lowest process decides")


def error_of(work):
    """What work raises."""
    try:
        result = work()
    except Exception as error:
        return error
    pytest.fail(f"nothing was raised, but returned: {result}")


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def job_of_two():
    store = Store()
    return job.Job(store, 0), job.Job(store, 1)


def test_the_lowest_process_leads_where_this_one_takes_part(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    for processes, found in (((3, 3), []), ((0, 1), []), ((3, 1, 3), [1, 3]), ((3, 7), [3, 7])):
        assert job.participants(devices(*processes)) == found


def test_the_others_take_what_the_lowest_made(job_of_two, monkeypatch):
    zero, one = job_of_two
    made = {"plans": ["{}" * 100_000, "é"], "cut": [[0, 1], [2]], "tuple": (1, 2)}
    assert zero.agreed(question(), lambda: made) == {**made, "tuple": [1, 2]}
    published = dict(zero.client.values)
    one.agreed(question(), never)["cut"].append(3)  # an answer is the asker's own
    for process in (zero, one, job.Job(zero.client, 0)):
        assert process.agreed(question(), never) == {**made, "tuple": [1, 2]}
    assert zero.client.values == published
    assert zero.agreed(question("graph 2"), dict) == {}  # decided apart
    parts = vars(jc.GraphError("x"))
    records = [{"class": "GraphError", "parts": part} for part in (5, {}, {"summary": "x"})]
    records += [{"class": name, "parts": parts} for name in ("rebuild", "Any", "jax", 5)]
    records = [job.pack(error=error) for error in (5, {}, *records)]
    monkeypatch.setattr(job, "_LARGEST", 1000)
    large = job.pack(made={"x": "x" * 40_000}, identity=VERSIONS)
    for record in (b"no record", large, *records):
        for path in zero.client.values:
            zero.client.values[path] = record
        other = error_of(lambda: job.Job(zero.client, 1).agreed(question(), never))
        assert isinstance(other, jc.JobError)
        assert "holds something else" in other.summary, record


def test_who_waits_in_vain_is_told_for_whom(job_of_two, threads):
    zero, one = job_of_two
    started, finish = threading.Event(), threading.Event()

    def make():
        started.set()
        return {"late": finish.wait(20)}

    with pytest.raises(jc.JobError, match="same program in the same order"):
        one.agreed(question(timeout=0.1), never)
    planning = threads.submit(zero.agreed, question(), make)
    assert started.wait(20)
    # Also a second thread, behind one that waits for longer, is kept no longer than it asked for.
    patient = threads.submit(one.agreed, question(timeout=20), never)
    with pytest.raises(jc.JobError, match=r"waited 0\.1 s for process 0(.|\n)*has started"):
        one.agreed(question(timeout=0.1), never)
    finish.set()
    assert planning.result(20) == patient.result(20) == {"late": True}


def test_all_raise_the_error_of_the_lowest(job_of_two):
    zero, one = job_of_two

    reasons = {"eng0": "too odd"}
    refusal = jc.UnsupportedGraphError("no engine", why="odd", graph="matmul", reasons=reasons)

    def refuse():
        raise refusal

    assert error_of(lambda: zero.agreed(question(), refuse)) is refusal
    error = error_of(lambda: one.agreed(question(identity="another"), never))
    assert type(error) is jc.UnsupportedGraphError
    assert error.summary == "in process 0, which plans for this job: no engine"
    assert (error.why, error.graph, error.reasons) == ("odd", "matmul", reasons)
    for key, make in (("error", lambda: 1 // 0), ("no JSON", lambda: {"x": object()})):
        original = error_of(lambda key=key, make=make: zero.agreed(question(key), make))
        error = error_of(lambda key=key: one.agreed(question(key), never))
        assert isinstance(error, jc.JobError)
        assert error.got == f"{type(original).__name__}: {original}"


def test_a_retry_is_a_new_try(job_of_two):
    answers = iter([jc.LibraryError("missing"), KeyboardInterrupt(), jc.LibraryError("still")])

    def make():
        for answer in answers:
            raise answer
        return {"plan": 3}

    zero, one = job_of_two
    assert str(error_of(lambda: zero.agreed(question(), make))) == "missing"
    with pytest.raises(KeyboardInterrupt):  # no answer: the same attempt goes on later
        zero.agreed(question(), make)
    assert str(error_of(lambda: zero.agreed(question(), make))) == "still"
    # The other process is behind: it meets the same failures in the same order.
    for text in ("missing", "still"):
        assert str(error_of(lambda: one.agreed(question(), never))).endswith(": " + text)
    with pytest.raises(jc.JobError, match=r"\(attempt 3\)"):
        one.agreed(question(timeout=0.01), never)
    assert zero.agreed(question(), make) == one.agreed(question(), never) == {"plan": 3}


def test_ranks_with_other_libraries_are_refused(job_of_two, monkeypatch):
    def identity(frontend, memory):
        gpu = json.dumps({"deviceName": "NVIDIA H200", "memory": memory})
        return json.dumps({"GPU": gpu, "frontend": frontend, "cuDNN": 91900})

    zero, one = job_of_two
    zero.agreed(question(identity=identity("1.28.0", 141)), dict)
    for _ in range(2):
        error = error_of(lambda: one.agreed(question(identity=identity("1.32.0", 80)), never))
        assert isinstance(error, jc.LibraryError)
        assert error.expected == "process 0: GPU memory 141, frontend 1.28.0"
        assert error.got == "process 1: GPU memory 80, frontend 1.32.0"
    monkeypatch.setattr(job, "_FORMAT", 2)
    with pytest.raises(jc.LibraryError, match="another version of jax_cudnn"):
        one.agreed(question(), never)


def test_without_a_job_everybody_decides(monkeypatch):
    def ask(*processes):
        among = job.participants(devices(*processes))
        return job.agreed(question(processes=among, timeout=0.01), lambda: made)

    made, store = {"tuple": (1, 2)}, Store()
    assert ask(0, 1) is made  # no jax.distributed
    monkeypatch.setattr(compat, "distributed_client", lambda: store)
    assert ask() is ask(0) is made
    assert ask(0, 1) == {"tuple": [1, 2]}
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    store = Store()  # jax.distributed was shut down and initialised anew
    assert isinstance(error_of(lambda: ask(0, 1)), jc.JobError)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes of a real job on the CPU print, each with a cache of its own."""
    return two_processes(
        WORKER,
        "-W",
        "ignore",
        timeout=120,
        JAX_PLATFORMS=["cpu"] * 2,
        XLA_FLAGS=["--xla_force_host_platform_device_count=4"] * 2,
        XDG_CACHE_HOME=[tmp_path_factory.mktemp(f"cache{rank}") for rank in range(2)],
    )


def test_two_processes_agree(ranks):
    assert [(rank["processes"], rank["leader"]) for rank in ranks] == [([0] * 4 + [1] * 4, 0)] * 2
    assert ranks[0]["agreed"] == ranks[1]["agreed"] == [0, True]
    assert ranks[0]["failure"] == ["UnsupportedGraphError", "linear: no engine"]
    wanted = "in process 0, which plans for this job: linear: no engine"
    assert ranks[1]["failure"] == ["UnsupportedGraphError", wanted]


def test_two_processes_train_with_shared_examples(ranks):
    for collectives, error in (rank["trained"] for rank in ranks):
        assert collectives == ["all-reduce"]
        assert error < 1e-5


@pytest.mark.deviceless
def test_two_processes_compile_the_same_program(ranks):
    zero, one = (rank["programs"] for rank in ranks)
    assert zero["together"] == one["together"]
    assert zero["calls"] == one["calls"] == 1
    # Where planning fails, XLA runs that program in both, and both use cuDNN in the next one.
    assert zero["failed"] == one["failed"]
    assert zero["failed"][1::2] == [0, 1]
    # Where each process plans for itself, equal programs differ in a plan's bytes.
    assert zero["alone"] != one["alone"]
    assert one["another program"][0] == "JobError"


PROGRAM = """if True:
    import hashlib, json, logging
    import jax, jax.numpy as jnp
    import jax_cudnn as jc

    @jc.graph
    def dense(g, x, w, b):  # compiled at run time: the text of its plan differs between builds
        return g.gelu_approx_tanh(g.bias(g.matmul(x, w), b))

    told = []
    logging.Handler.emit = lambda self, record: told.append(record.getMessage())
    logger = logging.getLogger("jax_cudnn")
    logger.addHandler(logging.Handler())
    logger.setLevel(logging.DEBUG)
    jc.configure(plan_cache=FOLDER)
    shapes = (1, 64, 128), (1, 128, 96), (1, 1, 96)
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with jc.target("H200"):
        warm = jc.warmup(lambda x, *more: (dense(x, *more), dense(x * 2, *more)), *avals)
    text = warm.as_text()
    built, known = (sum(w in t for t in told) for w in ("planned in", "read from the cache"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    print(json.dumps([built, known, text.count("custom_call @jax_cudnn"), digest]))
"""


@pytest.mark.deviceless
@pytest.mark.long
def test_a_second_process_builds_no_plan_and_lowers_the_same_program(tmp_path, monkeypatch):
    found = []
    for seed in "12":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        done = python(PROGRAM.replace("FOLDER", repr(str(tmp_path))))
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (*first, text), (*second, same) = found
    assert (first, second, text) == ([1, 0, 2], [0, 1, 2], same)
