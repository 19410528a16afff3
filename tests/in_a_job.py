"""Runs tests in processes that are one job, with a device each; they share GPUs if there are fewer.

    python tests/in_a_job.py PROCESSES JOBS RESULTS.xml [options of pytest]

divides the tests among some jobs, which run at the same time. NCCL lets processes share a GPU since
2.30, slowly: so one GPU shows that values on many are right, not how fast. A test has the worst
outcome that it has in a process; it failed if it did not end in all.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

JOB = "JAX_CUDNN_TESTS_JOB"
OUTCOMES = PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


def _of_this_process():
    *numbers, name = os.environ[JOB].split()
    return *map(int, numbers), Path(name)


def pytest_configure():
    """In a process of a job (``-p in_a_job``), before a test file asks JAX for its devices."""
    import jax

    port, count, rank, *_ = _of_this_process()
    jax.distributed.initialize(f"localhost:{port}", count, rank, local_device_ids=[0])


def pytest_collection_modifyitems(items):
    *_, job, jobs, _ = _of_this_process()
    items[:] = items[job::jobs]


def _note(name, outcome):
    with _of_this_process()[-1].with_suffix(".txt").open("a") as file:
        file.write(f"{name}\t{outcome}\n")


def pytest_runtest_logstart(nodeid):
    _note(nodeid, "started")


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != PASSED:
        _note(report.nodeid, report.outcome)


def worst(process_notes):
    """The outcome of each test that started; of a job's processes the notes of each."""
    found = {}
    for notes in process_notes:
        ended = {}
        for name, outcome in notes:
            ended.setdefault(name, [])
            ended[name] += [OUTCOMES.index(outcome)] if outcome in OUTCOMES else []
        for name, each in ended.items():
            found.setdefault(name, []).append(max(each, default=OUTCOMES.index(FAILED)))
    return {
        name: OUTCOMES[max(each)] if len(each) == len(process_notes) else FAILED
        for name, each in found.items()
    }


def as_junit(outcomes):
    suite = ElementTree.Element("testsuite")
    for name, outcome in outcomes.items():
        module, _, test = name.partition("::")
        classname = module.removesuffix(".py").replace("/", ".")
        case = ElementTree.SubElement(suite, "testcase", classname=classname, name=test)
        if outcome != PASSED:
            ElementTree.SubElement(case, "failure" if outcome == FAILED else outcome)
    return ElementTree.ElementTree(suite)


def _started(base, port, count, rank, job, jobs, gpu, options):
    env = os.environ | {
        JOB: f"{port} {count} {rank} {job} {jobs} {base}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]]),
        "JAX_NUM_CPU_DEVICES": "1",
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-m", "pytest", "-p", "in_a_job", "-n0", "-v", "--tb=short"]
    with base.with_suffix(".log").open("w") as log:
        return subprocess.Popen([*command, *options], env=env, stdout=log, stderr=log)


def main(count, jobs, results, *options):
    gpus = len(re.findall("^GPU", subprocess.getoutput("nvidia-smi -L"), re.MULTILINE))
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        bases = [[Path(folder, f"{job}-{rank}") for rank in range(count)] for job in range(jobs)]
        processes = []
        for job, each in enumerate(bases):
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            for rank, base in enumerate(each):
                gpu = (job * count + rank) % max(1, gpus)
                processes.append(_started(base, port, count, rank, job, jobs, gpu, options))
        try:
            with contextlib.suppress(KeyboardInterrupt):
                for process in processes:
                    process.wait()
        finally:
            for process in processes:
                process.kill()
        for each in bases:
            notes = []
            for base in each:
                text = base.with_suffix(".txt")
                lines = text.read_text().splitlines() if text.exists() else []
                notes.append([line.split("\t") for line in lines])
            found = worst(notes)
            outcomes |= found
            if FAILED in found.values() or not found:
                for base in each:
                    print(f"== {base.name}\n{base.with_suffix('.log').read_text()[-4000:]}")
    as_junit(outcomes).write(results)
    print({outcome: [*outcomes.values()].count(outcome) for outcome in OUTCOMES})
    return FAILED in outcomes.values() or not outcomes


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
