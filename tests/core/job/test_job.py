"""One process of a job decides for all: with a store in memory, and with two real processes."""

import json
import logging
import threading
import time
import types
from pathlib import Path

import jax
import pytest
from helpers import two_processes

import jax_cudnn as jc
from jax_cudnn._core import compat
from jax_cudnn._core.job import agreement
from jax_cudnn._core.job import record as job_record

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


class Gone(Store):
    def blocking_key_value_get_bytes(self, key, milliseconds):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset\nmore")


def question(key="graph", processes=(0, 1), identity=VERSIONS, timeout=5.0):
    return agreement.Question(key, processes, "linear", lambda: identity, timeout)


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


def in_thread(work):
    """Starts work; the function returned waits for it and gives its result or exception."""
    result = []

    def run():
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def finish():
        thread.join(20)
        assert not thread.is_alive(), "still waiting"
        return result[0]

    return finish


@pytest.fixture
def job_of_two():
    store = Store()
    return agreement.Job(store, 0), agreement.Job(store, 1)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [((), None), ((3, 3), None), ((0, 1), None), ((3, 1, 3), 1), ((3, 7), 3)],
)
def test_the_lowest_process_leads_where_this_one_takes_part(monkeypatch, processes, expected):
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    assert agreement.leader(devices(*processes)) == expected


def test_the_others_take_what_the_lowest_made(job_of_two):
    zero, one = job_of_two
    made = {"plans": ["{}" * 100_000, "é"], "cut": [[0, 1], [2]], "tuple": (1, 2)}
    assert zero.agreed(question(), lambda: made) == {**made, "tuple": [1, 2]}
    assert one.agreed(question(), never) == {**made, "tuple": [1, 2]}


def test_an_answer_is_the_askers_own(job_of_two):
    for process in job_of_two:
        process.agreed(question(), lambda: {"cut": [1]})["cut"].append(2)
        assert process.agreed(question(), never) == {"cut": [1]}


def test_the_others_wait(job_of_two, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "jax_cudnn")
    monkeypatch.setattr(agreement, "_SLICE", 0.02)
    zero, one = job_of_two
    waiting = in_thread(lambda: one.agreed(question(), never))
    time.sleep(0.2)
    zero.agreed(question(), lambda: {"plan": 1})
    assert waiting() == {"plan": 1}
    messages = [record.getMessage() for record in caplog.records]
    assert "waiting for process 0 to plan linear" in messages
    assert any(message.startswith("process 0 planned linear: waited 0.2") for message in messages)


def test_what_is_agreed_stays(job_of_two):
    zero, _ = job_of_two
    zero.agreed(question(), lambda: {"plan": 1})
    published = dict(zero.client.values)
    assert zero.agreed(question(), never) == {"plan": 1}
    forgetful = agreement.Job(zero.client, 0)
    assert forgetful.agreed(question(), never) == {"plan": 1}
    assert zero.client.values == published


def test_what_differs_is_decided_apart(job_of_two):
    zero, one = job_of_two
    for i, other in enumerate([question(), question("graph 2"), question(processes=(0, 2))]):
        assert zero.agreed(other, lambda i=i: {"plan": i}) == {"plan": i}
    assert one.agreed(question(), never) == {"plan": 0}


@pytest.mark.parametrize("begun", [False, True])
def test_who_waits_in_vain_is_told_for_whom(job_of_two, begun):
    zero, one = job_of_two
    finish = threading.Event()
    if begun:
        planning = in_thread(lambda: zero.agreed(question(), lambda: {"late": finish.wait(20)}))
        while not zero.client.values:
            time.sleep(0.01)
    started = time.monotonic()
    error = error_of(lambda: one.agreed(question(timeout=0.1), never))
    assert 0.1 <= time.monotonic() - started < 5
    assert isinstance(error, jc.JobError)
    text = str(error)
    assert "linear: process 1 waited 0.1 s for process 0 to plan it" in text
    assert "job_timeout=" in text
    assert ("has begun" in text) == begun
    assert ("same program in the same order" in text) != begun
    if begun:  # and the next ask gets it
        finish.set()
        assert planning() == one.agreed(question(), never) == {"late": True}


def test_all_raise_the_error_of_the_lowest(job_of_two):
    zero, one = job_of_two
    refusal = jc.UnsupportedGraphError(
        "linear: no engine", why="odd", graph="matmul", reasons={"eng0": "too odd"}
    )
    refusal.add_note("a note is no part of it")

    def make():
        raise refusal

    assert error_of(lambda: zero.agreed(question(), make)) is refusal
    error = error_of(lambda: one.agreed(question(identity="another"), never))
    assert type(error) is jc.UnsupportedGraphError
    assert error.summary == "in process 0, which plans for this job: linear: no engine"
    assert (error.why, error.graph, error.reasons) == ("odd", "matmul", {"eng0": "too odd"})


@pytest.mark.parametrize("make", [lambda: 1 // 0, lambda: {"no JSON": object()}])
def test_any_other_failure_ends_the_wait_as_well(job_of_two, make):
    zero, one = job_of_two
    original = error_of(lambda: zero.agreed(question(), make))
    error = error_of(lambda: one.agreed(question(), never))
    assert isinstance(error, jc.JobError)
    assert str(original) in error.got
    assert type(original).__name__ in error.got


def test_who_cannot_even_tell_its_versions_is_heard(job_of_two):
    zero, one = job_of_two

    def no_versions():
        raise jc.LibraryError("cuDNN cannot be loaded")

    asked = agreement.Question("graph", (0, 1), "linear", no_versions, 5.0)
    assert error_of(lambda: zero.agreed(asked, dict)).summary == "cuDNN cannot be loaded"
    error = error_of(lambda: one.agreed(question(), never))
    assert isinstance(error, jc.LibraryError)
    assert error.summary.endswith("cuDNN cannot be loaded")


def test_an_error_of_a_users_class_arrives_as_ours(job_of_two):
    class Mine(jc.GraphError):
        pass

    def make():
        raise Mine("mine", got=7)

    zero, one = job_of_two
    error_of(lambda: zero.agreed(question(), make))
    error = error_of(lambda: one.agreed(question(), never))
    assert (type(error), error.got) == (jc.GraphError, 7)


def test_a_retry_is_a_new_try(job_of_two):
    answers = iter([jc.LibraryError("missing"), jc.LibraryError("still missing"), {"plan": 3}])

    def make():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    zero, one = job_of_two
    for text in ("missing", "still missing"):
        assert str(error_of(lambda: zero.agreed(question(), make))) == text
    # The other process is behind: it meets the same failures in the same order.
    for text in ("missing", "still missing"):
        assert str(error_of(lambda: one.agreed(question(), never))).endswith(": " + text)
    error = error_of(lambda: one.agreed(question(timeout=0.01), never))
    assert "(attempt 3)" in str(error)
    assert zero.agreed(question(), make) == one.agreed(question(), never) == {"plan": 3}


def test_an_interrupt_is_no_answer(job_of_two):
    def interrupted():
        raise KeyboardInterrupt

    zero, one = job_of_two
    with pytest.raises(KeyboardInterrupt):
        zero.agreed(question(), interrupted)
    assert isinstance(error_of(lambda: one.agreed(question(timeout=0.01), never)), jc.JobError)
    assert zero.agreed(question(), lambda: {"plan": 1}) == one.agreed(question(), never)


def test_ranks_with_other_libraries_are_refused(job_of_two):
    zero, one = job_of_two
    zero.agreed(question(), lambda: {"plan": 1})
    for _ in range(2):
        other = question(identity=VERSIONS.replace("1.28.0", "1.32.0"))
        error = error_of(lambda other=other: one.agreed(other, never))
        assert isinstance(error, jc.LibraryError)
        assert error.expected == f"process 0: {VERSIONS}"
        assert error.got == "process 1: cuDNN 9.19.0, frontend 1.32.0, NVIDIA H200"


def test_of_long_identities_the_difference_is_told(job_of_two):
    def identity(frontend, memory):
        gpu = json.dumps({"deviceName": "NVIDIA H200", "memory": memory})
        return json.dumps({"GPU": gpu, "frontend": frontend, "cuDNN": 91900})

    zero, one = job_of_two
    zero.agreed(question(identity=identity("1.28.0", 141)), dict)
    error = error_of(lambda: one.agreed(question(identity=identity("1.32.0", 80)), never))
    assert error.expected == "process 0: GPU memory 141, frontend 1.28.0"
    assert error.got == "process 1: GPU memory 80, frontend 1.32.0"


def test_a_rank_with_another_package_is_refused(job_of_two, monkeypatch):
    zero, one = job_of_two
    zero.agreed(question(), lambda: {"plan": 1})
    monkeypatch.setattr(job_record, "_FORMAT", 2)
    error = error_of(lambda: one.agreed(question(), never))
    assert isinstance(error, jc.LibraryError)
    assert "another version of jax_cudnn" in error.expected


def test_threads_of_one_process_share_an_attempt(job_of_two):
    made = []

    def make():
        made.append(1)
        time.sleep(0.1)
        if len(made) < 3:
            raise jc.LibraryError(f"failure {len(made)}")
        return {"plan": len(made)}

    zero, one = job_of_two
    asks = [
        *[in_thread(lambda: one.agreed(question(), never)) for _ in range(4)],
        *[in_thread(lambda: zero.agreed(question(), make)) for _ in range(4)],
    ]
    results = [str(ask()) for ask in asks]
    prefix = "in process 0, which plans for this job: "
    wanted = ["failure 1", "failure 2", "{'plan': 3}", "{'plan': 3}"]
    assert sorted(results[4:]) == sorted(wanted)
    assert sorted(result.removeprefix(prefix) for result in results[:4]) == sorted(wanted)
    assert len(made) == 3


def test_a_thread_behind_another_is_not_kept_longer(job_of_two):
    _, one = job_of_two
    first = in_thread(lambda: one.agreed(question(timeout=3), never))
    time.sleep(0.05)
    started = time.monotonic()
    assert isinstance(error_of(lambda: one.agreed(question(timeout=0.1), never)), jc.JobError)
    assert time.monotonic() - started < 2
    agreement.Job(one.client, 0).agreed(question(), lambda: {})
    assert first() == {}


def test_a_lost_store_is_an_error_of_ours():
    error = error_of(lambda: agreement.Job(Gone(), 1).agreed(question(), never))
    assert isinstance(error, jc.JobError)
    assert error.got == "UNAVAILABLE: connection reset"


def test_without_a_job_everybody_decides(monkeypatch):
    made = {"tuple": (1, 2)}

    def ask(*processes):
        options = {"name": "linear", "identity": lambda: VERSIONS, "timeout": 0.01}
        return agreement.agreed("graph", devices(*processes), lambda: made, **options)

    assert ask(0, 1) is made  # no jax.distributed
    monkeypatch.setattr(compat, "distributed_client", lambda: store)
    store = Store()
    assert ask() is made
    assert ask(0) is made
    assert not store.values
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
        XLA_FLAGS=["--xla_force_host_platform_device_count=2"] * 2,
        XDG_CACHE_HOME=[tmp_path_factory.mktemp(f"cache{rank}") for rank in range(2)],
    )


def test_two_processes_agree(ranks):
    assert [rank["processes"] for rank in ranks] == [[0, 0, 1, 1]] * 2
    assert [rank["leader"] for rank in ranks] == [0, 0]
    assert ranks[0]["agreed"] == ranks[1]["agreed"] == {"decided by": 0, "size": 2_000_000}


def test_two_processes_fail_alike(ranks):
    assert ranks[0]["failure"] == ["UnsupportedGraphError", "linear: no engine"]
    kind, text = ranks[1]["failure"]
    assert kind == "UnsupportedGraphError"
    assert text == "in process 0, which plans for this job: linear: no engine"


def test_a_real_wait_ends(ranks):
    kind, text = ranks[1]["late"]
    assert kind == "JobError"
    assert "process 1 waited 1.2 s for process 0 to plan it" in text
    assert 1.2 <= ranks[1]["waited"] < 6
    assert ranks[1]["ran meanwhile"] > 20, "waiting held Python's lock"
    assert ranks[1]["interrupted after"] < 5


def test_two_processes_with_other_frontends_are_refused(ranks):
    kind, text = ranks[1]["mismatch"]
    assert kind == "LibraryError"
    assert "process 0: frontend 0" in text
    assert "process 1: frontend 1" in text


@pytest.mark.deviceless
def test_two_processes_compile_the_same_program(ranks):
    zero, one = (rank["programs"] for rank in ranks)
    assert zero["together"] == one["together"]
    assert zero["calls"] == one["calls"] == 1
    assert isinstance(zero["another GPU"], str), zero["another GPU"]
    assert zero["another GPU"] == one["another GPU"] != zero["together"]
    # Where each process plans for itself, equal programs differ in a plan's bytes.
    assert zero["alone"] != one["alone"]


@pytest.mark.deviceless
def test_two_processes_with_other_versions_compile_nothing(ranks):
    zero, one = (rank["programs"] for rank in ranks)
    assert zero["other versions"] == 1
    kind, text = one["other versions"]
    assert kind == "LibraryError"
    assert "process 1: nvidia-cudnn-frontend 0.0.1" in text


@pytest.mark.deviceless
def test_who_compiles_another_program_is_told_so(ranks):
    kind, text = ranks[1]["programs"]["another program"]
    assert kind == "JobError"
    assert "linear: process 1 waited 0.5 s for process 0 to plan it" in text
    assert "compiles another program" in text


@pytest.mark.deviceless
def test_the_lowering_sees_the_devices_of_all_processes(ranks):
    for rank in ranks:
        assert rank["programs"]["lowered for"] == [0, 0, 1, 1]
