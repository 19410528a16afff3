"""Runs tests in processes that are one job, with a device each; they share GPUs if there are fewer.

    python tests/in_a_job.py PROCESSES JOBS RESULTS.xml [options of pytest]

divides the tests among some jobs, which run at the same time. NCCL lets processes share a GPU since
2.30, slowly: so one GPU shows that values on many are right, not how fast. A test has the worst
outcome that it has in a process.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

JOB = "JAX_CUDNN_TESTS_JOB"
OUTCOMES = PASSED, _, FAILED = "passed", "skipped", "failure"
SAID = "skipped", "failure", "error"  # in JUnit's files
EMPTY = pytest.ExitCode.NO_TESTS_COLLECTED  # of a job
SECONDS = 120  # that processes wait for the slowest one after a test


if JOB in os.environ:  # in a process (``-p in_a_job``), before anything asks JAX for its devices
    import jax
    from jax._src import distributed

    port, count, rank, *_ = map(int, os.environ[JOB].split())
    jax.distributed.initialize(f"localhost:{port}", count, rank, local_device_ids=[0])


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    """Divides what the options select."""
    yield
    *_, job, jobs = map(int, os.environ[JOB].split())
    items[:] = items[job::jobs]


def pytest_runtest_logfinish(nodeid):
    """No process goes on alone: its collectives would meet those of another test."""
    try:
        distributed.global_state.client.wait_at_barrier(nodeid, 1000 * SECONDS)
    except jax.errors.JaxRuntimeError as error:
        print(f"not all processes ended {nodeid}: {error}", flush=True)
        os._exit(1)  # JAX ends the others


def outcomes(junit):
    """That of each test, by module and name; a failure where the process died."""
    if not junit.exists():
        return {("in_a_job", f"process {junit.stem}"): FAILED}
    return {
        (test.get("classname"), test.get("name")): max(
            (child.tag.replace("error", FAILED) for child in test if child.tag in SAID),
            key=OUTCOMES.index,
            default=PASSED,
        )
        for test in ElementTree.parse(junit).getroot().iter("testcase")
    }


def worst(processes):
    """Of a job's tests, by what they are in each process; one that is missing in some failed."""
    return {
        name: max((each.get(name, FAILED) for each in processes), key=OUTCOMES.index)
        for name in dict.fromkeys(name for each in processes for name in each)
    }


def main(count, jobs, results, *options):
    gpus = len(re.findall("^GPU", subprocess.getoutput("nvidia-smi -L"), re.MULTILINE))
    gpus = 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else gpus
    print(f"{jobs} jobs of {count} processes, {gpus} GPUs", flush=True)
    results.write_text("")  # rather fail now
    command = [sys.executable, "-P", "-m", "pytest", "-p", "in_a_job", "-n0", "--tb=short"]
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    suite, started = ElementTree.Element("testsuite"), {}
    with tempfile.TemporaryDirectory() as folder:
        sockets = [socket.create_server(("localhost", 0)) for _ in range(jobs)]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        for job, port in enumerate(ports):
            for rank in range(count):
                env = os.environ | {
                    JOB: f"{port} {count} {rank} {job} {jobs}",
                    "PYTHONPATH": os.pathsep.join(path),
                    "JAX_PLATFORMS": "cuda,cpu" if gpus else "cpu",
                    "JAX_NUM_CPU_DEVICES": "1",
                    "CUDA_VISIBLE_DEVICES": str((job * count + rank) % max(1, gpus)),
                    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
                    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                }
                base = f"{folder}/{job}-{rank}"
                with Path(f"{base}.log").open("w") as log:
                    started[job, rank] = subprocess.Popen(
                        [*command, "--junitxml", f"{base}.xml", *options],
                        env=env,
                        stdout=log,
                        stderr=log,
                    )
        try:
            codes = [process.wait() for process in started.values()]
        finally:
            for process in started.values():
                process.kill()
        for job, rank in started:
            if started[job, rank].returncode not in (0, EMPTY):
                print(f"== process {rank} of job {job}")
                print(Path(f"{folder}/{job}-{rank}.log").read_text()[-6000:])
        for job in range(jobs):
            files = [Path(f"{folder}/{job}-{rank}.xml") for rank in range(count)]
            for (module, name), outcome in worst([outcomes(file) for file in files]).items():
                test = ElementTree.SubElement(suite, "testcase", classname=module, name=name)
                if outcome != PASSED:
                    ElementTree.SubElement(test, outcome)
    ElementTree.ElementTree(suite).write(results)
    counts = Counter(test[0].tag if len(test) else PASSED for test in suite)
    print(dict(counts))
    return int(not counts or FAILED in counts or not {*codes} <= {0, EMPTY})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("processes", type=int, choices=range(1, 9), metavar="PROCESSES")
    parser.add_argument("jobs", type=int, choices=range(1, 9), metavar="JOBS")
    parser.add_argument("results", type=Path, metavar="RESULTS.xml")
    given, options = parser.parse_known_args()
    sys.exit(main(given.processes, given.jobs, given.results, *options))
