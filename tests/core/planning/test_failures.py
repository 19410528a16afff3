"""What planning fails of for a while is nobody's refusal: tried twice, then XLA, nothing kept."""

import os
import pickle
import signal

import jax
import pytest
from helpers import lowered, product, spec_of

import jax_cudnn as jc
from jax_cudnn._core.cuda import CudaDevice
from jax_cudnn._core.planning import build, planner
from jax_cudnn._core.planning.deviceless import client

MATRICES = [jax.ShapeDtypeStruct((1, 64, 64), "bfloat16")] * 2
LIST = '{"engineId":1}\nError: CUDNN_STATUS_%s; Reason: g != 1\nWarning: CUDNN_STATUS_%s; Reason: x'
TEXTS = {  # of the frontend's exceptions, and whether they may pass
    "CUDNN_STATUS_ALLOC_FAILED: out of memory": True,
    "finalize(desc) failed, and code: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED": True,
    "cudnn_status: CUDNN_STATUS_INTERNAL_ERROR": True,
    "cudnn_status: CUDNN_STATUS_EXECUTION_FAILED_CUDART": True,
    "cudnn_status: CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDART": True,
    "libnvrtc.so.13: cannot open shared object file: No such file or directory": True,
    "cudnn_status: CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED": False,
    "cudnn_status: CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN": False,
    "Reason: (CUDNN_STATUS_NOT_INITIALIZED == status)": False,
    LIST % ("INTERNAL_ERROR", "NOT_SUPPORTED"): False,  # so does 9.19 for grouped convolutions
    LIST % ("NOT_SUPPORTED", "INTERNAL_ERROR"): True,
    LIST % ("INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "NOT_SUPPORTED"): True,
}


@pytest.mark.parametrize("text", TEXTS)
def test_what_cudnn_says_of_a_graph_is_told_from_failures_that_may_pass(text):
    class FakeCudnn:
        cudnnGraphNotSupportedError = NotImplementedError

    if not TEXTS[text]:
        assert build.reasons_of(RuntimeError(text), FakeCudnn)
        return
    with pytest.raises(jc.PlanningError):
        build.reasons_of(RuntimeError(text), FakeCudnn)


def dropped(q):
    key = jax.random.key(0)
    return jc.ops.dot_product_attention(q, q, q, dropout_rate=0.1, dropout_rng=key)


FAILURES = [
    jc.PlanningWorkerError("it died"),
    MemoryError(),
    RuntimeError("CUDNN_STATUS_ALLOC_FAILED"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=[type(error).__name__ for error in FAILURES])
def test_a_failure_is_of_one_program_and_leaves_nothing(
    failure, made_up_plans, monkeypatch, tmp_path, caplog
):
    asked, failing = [], True

    def call(function, *args, timeout=0, fresh=False):
        asked.append(fresh)
        if failing:
            raise failure
        raise jc.UnsupportedGraphError("no engine", reasons={"eng0": "too odd"})

    monkeypatch.setattr(planner.client, "call", call)
    monkeypatch.setattr(planner.build, "build_for", lambda *args: call("", *args))
    jc.configure(plan_cache=tmp_path)
    with jc.target("H200"):
        (segment,) = jc.plan(product, *MATRICES).segments
        assert (asked, segment.plan) == ([False, True], None)
        assert segment.reason.startswith("planning failed, for this program alone: ")
        assert caplog.text.count("doctor") == 1
        with pytest.raises(jc.PlanningError), jc.implementation("cudnn"):
            jc.plan(product, *MATRICES)
        with pytest.raises(jc.PlanningError):
            jc.support(product, *MATRICES, gpus=["H200"])
        with pytest.raises(jc.PlanningError, match="related graphs"):  # with another mask
            jc.plan(dropped, jax.ShapeDtypeStruct((1, 64, 2, 64), "bfloat16"))
        asked.clear()
        with pytest.raises(jc.PlanningError):
            planner.plan(spec_of(product.fn, *MATRICES), CudaDevice(0), "by handle")
        assert len(asked) == 2
        assert not [*tmp_path.iterdir()]
        failing = False
        (segment,) = jc.plan(product, *MATRICES).segments
    assert "too odd" in segment.reason
    assert [*tmp_path.iterdir()]


MIDWAY = """
import os, signal, sys
os.write(int(sys.argv[1]), (1000).to_bytes(4, "big") + b"a part")
os.kill(os.getpid(), signal.SIGSTOP)
"""


def harm_by(name, worker):
    if name in ("killed", "stopped", "unread"):
        os.kill(worker.process.pid, signal.SIGKILL if name == "killed" else signal.SIGSTOP)
    elif name == "memory":
        import resource  # not on Windows

        resource.prlimit(worker.process.pid, resource.RLIMIT_AS, (1 << 30, 1 << 30))


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["killed", "stopped", "unread", "midway", "memory", "late"])
def test_another_worker_plans_in_place_of_one_that_fails(name, no_plans, monkeypatch, caplog):
    harmed, ask = [], client._Worker.ask

    def harmful(self, request, deadline):
        if b"build_for" in request and not harmed:
            harm_by(name, self)
            harmed.append(self.process.pid)
            deadline = 0.0 if name == "late" else deadline
            request += bytes(10**7 * (name == "unread"))
            if name == "midway":
                request = pickle.dumps(("builtins:exec", (MIDWAY,), {}))
        return ask(self, request, deadline)

    monkeypatch.setattr(client._Worker, "ask", harmful)
    monkeypatch.setattr(client, "_STUCK", 2)
    assert lowered(product, *MATRICES).count("custom_call @jax_cudnn(") == 1
    assert client._idle[0].process.pid not in harmed
    assert "XLA runs" not in caplog.text
