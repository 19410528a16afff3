"""Runs the mutations of ``mutations.py`` against the test suite of a clone.

    python tests/mutations/run.py --out outcome.json [--workers 4] [--only TEXT] [-- PYTEST OPTIONS]
    python tests/mutations/run.py --render    # the committed outcomes, into docs/testing.md

Works on copies of the installed package. One run of the whole suite, with a probe in front of each
statement that is mutated, says which tests execute it; then each mutation has only these run on
it, up to the first failure and for at most five minutes, those first that execute the fewest of
the mutated statements; a test that then fails without the mutation, too, has found nothing. Each
process has one core. Mutations of C++ have the executor's tests instead (CMake, Ninja, and
``--build-python``, an interpreter whose jaxlib is the oldest supported one).
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "testing.md"
OUTCOMES = {  # files here, and the suites whose outcomes they hold
    "before": "the suite of b0f9574, three cases of each test",
    "after": "this suite",
}
MOST = 300  # seconds for one mutation
USAGE, NONE = 4, "ERROR: not found: "  # what pytest says where it has no such test
PROBES = '''
import os

seen = set()
cores = sorted(os.sched_getaffinity(0))
worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
os.sched_setaffinity(0, {cores[worker % len(cores)]})


def hit(number):
    """Notes that the test which runs now, in this process or its parent, executes a statement."""
    try:
        with open(os.environ["MUTATION_TEST"]) as file:
            test = file.read()
    except (KeyError, OSError):
        return
    if (number, test) not in seen:
        seen.add((number, test))
        with open(os.environ["MUTATION_HITS"], "a") as file:
            file.write(f"{number}\\t{test}\\n")


def pytest_configure(config):
    os.environ["MUTATION_TEST"] = f"{os.environ['MUTATION_HITS']}.{os.getpid()}"


def pytest_runtest_logstart(nodeid, location):
    with open(os.environ["MUTATION_TEST"], "w") as file:
        file.write(nodeid)


def pytest_runtest_logreport(report):
    if report.failed:
        with open(os.environ["MUTATION_HITS"] + ".failed", "a") as file:
            file.write(report.nodeid + "\\n")
'''


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--render", action="store_true", help="write the table of docs/testing.md")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--build-python", default=sys.executable)
    parser.add_argument("--only", default="", help="these mutations again, into the same file")
    parser.add_argument("--hits", type=Path, help="keep, or take from here, which tests to run")
    parser.add_argument("pytest", nargs="*", help="options of pytest for the whole suite")
    options = parser.parse_args()
    if options.render:
        PAGE.write_text(rendered(PAGE.read_text()))
        return
    if not options.out:
        parser.error("--out FILE is missing")
    chosen = {name: m for name, m in MUTATIONS.items() if options.only in name}
    python = {name: m for name, m in chosen.items() if m[0].endswith(".py")}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        work = Path(folder)
        hits = executed(work, python, options) if python else {}
        count = collections.Counter(test for tests in hits.values() for test in tests)
        orders = {n: sorted(tests, key=lambda t: (count[t], t)) for n, tests in hits.items()}
        original = copied(work, "original")
        cores = iter(sorted(os.sched_getaffinity(0)) * options.workers)

        def pin():  # this thread and the processes that it starts
            os.sched_setaffinity(0, {next(cores)})

        with concurrent.futures.ThreadPoolExecutor(options.workers, initializer=pin) as pool:
            runs = {
                n: pool.submit(mutated, work, n, m, orders[n], original) for n, m in python.items()
            }
            runs |= {
                n: pool.submit(compiled, work, n, m, options.build_python)
                for n, m in chosen.items()
                if n not in runs
            }
            outcome = {name: run.result() for name, run in runs.items()}
    kept = json.loads(options.out.read_text()) if options.only and options.out.exists() else {}
    outcome = {n: {**kept, **outcome}[n] for n in MUTATIONS if n in kept or n in outcome}
    options.out.write_text(json.dumps(outcome, indent=1) + "\n")
    found = sum(entry["found"] for entry in outcome.values())
    print(f"{found} of {len(outcome)} mutations found")


def rendered(page):
    """The page with the outcomes between its marks."""
    outcomes = {n: json.loads(Path(__file__).with_name(f"{n}.json").read_text()) for n in OUTCOMES}
    head = ["mutation", "file", *(f"{title}: tests, found by" for title in OUTCOMES.values())]
    rows = [head, ["---"] * len(head)]
    for name, (file, _, _) in MUTATIONS.items():
        found = [_cell(outcome.get(name)) for outcome in outcomes.values()]
        rows.append([name, f"`{file}`", *found])
    counts = [
        f"{sum(entry['found'] for entry in outcome.values())} of {len(outcome)} by {title}"
        for outcome, title in zip(outcomes.values(), OUTCOMES.values(), strict=True)
    ]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    before, mark, rest = page.partition("<!-- mutations -->\n")
    assert mark, "docs/testing.md has no place for the outcomes"
    end = rest[rest.index("<!-- /mutations -->") :]
    folded = f"<details markdown><summary>Each mutation</summary>\n\n{table}\n\n</details>"
    return f"{before}{mark}Found: {', '.join(counts)}.\n\n{folded}\n{end}"


def _cell(entry):
    if entry is None:
        return "not run"
    by = entry["by"].partition("[")[0].rpartition("::")[2] or entry["by"]
    return f"{entry['tests']}, {f'`{by}`' if entry['found'] else '**not found**'}"


def package():
    spec = importlib.util.find_spec("jax_cudnn")
    return Path(spec.origin).parent


def copied(work, name):
    to = work / name
    shutil.copytree(package(), to / "jax_cudnn", ignore=shutil.ignore_patterns("__pycache__"))
    return to


def executed(work, mutations, options):
    """Mutation -> the tests that execute it, without those that fail without any mutation."""
    if options.hits and options.hits.exists():
        return json.loads(options.hits.read_text())
    to = copied(work, "probed")
    numbers = {name: i for i, name in enumerate(mutations)}
    by_file = collections.defaultdict(list)
    for name, (file, old, _) in mutations.items():
        by_file[file].append((numbers[name], old))
    for file, found in by_file.items():
        path = to / "jax_cudnn" / file
        path.write_text(probed(path.read_text(), found))
    (to / "mutation_probes.py").write_text(PROBES)
    log = work / "hits"
    run_pytest(to, ["-p", "mutation_probes", *options.pytest], {"MUTATION_HITS": str(log)})
    failed = {*lines(Path(f"{log}.failed"))}
    names = dict(enumerate(mutations))
    hits = {name: set() for name in mutations}
    for line in lines(log):
        number, test = line.split("\t", 1)
        hits[names[int(number)]].add(test)
    hits = {name: sorted(tests - failed) for name, tests in hits.items()}
    print(f"{len(failed)} tests fail without any mutation:", *sorted(failed), sep="\n  ")
    if options.hits:
        options.hits.write_text(json.dumps(hits))
    return hits


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def probed(text, mutations):
    """The source with a probe in front of the statement of each mutation, or in its expression."""
    inserts = []
    for number, old in mutations:
        probe = f'__import__("mutation_probes").hit({number})'
        at = text.index(old)
        line = text.count("\n", 0, at + len(old) - len(old.lstrip())) + 1
        within = [s for s in ast.walk(ast.parse(text)) if isinstance(s, ast.stmt)]
        within = [s for s in within if s.lineno <= line <= s.end_lineno]
        for statement in sorted(within, key=lambda s: s.lineno - s.end_lineno, reverse=True):
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                continue
            source = text.splitlines()
            indent = source[statement.lineno - 1][: statement.col_offset]
            source.insert(statement.lineno - 1, f"{indent}{probe}")
            if indent.strip() == "" and indent and is_valid("\n".join(source)):
                inserts.append((statement.lineno, f"{indent}{probe}"))
                break
        else:
            text = text.replace(old, f"({probe} or {old})")
            assert is_valid(text), old
    source = text.splitlines()
    for line, probe in sorted(inserts, reverse=True):
        source.insert(line - 1, probe)
    return "\n".join(source) + "\n"


def is_valid(text):
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def run_pytest(to, options, environment=(), timeout=None):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    # The folder of the clone is not on the path: its package is not the one that is mutated.
    path = os.pathsep.join([str(to), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **dict(environment)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=timeout, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def mutated(work, name, mutation, tests, original):
    file, old, new = mutation
    to = copied(work, f"mutated-{list(MUTATIONS).index(name)}")
    path = to / "jax_cudnn" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{name}: not once in {file}"
    path.write_text(text.replace(old, new))
    started = time.monotonic()
    options = ["-x", "-n0", "-m", "", "--timeout=300"]
    run, by = tests, ""
    while run and not by:
        (to / "tests.txt").write_text("\n".join(run))
        left = MOST - (time.monotonic() - started)
        status, output = run_pytest(to, [*options, f"@{to / 'tests.txt'}"], timeout=left)
        gone = {line.rpartition("/tests/")[2] for line in output.splitlines() if NONE in line}
        failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if status == USAGE and gone:  # ids differ from process to process, or by the mutation
            run = [test for test in run if test.removeprefix("tests/") not in gone]
        elif status in (1, 2) or failed:
            by = failed[0].partition(" - ")[0].partition(" ")[2] if failed else "collection"
            if by in run and run_pytest(original, [*options, by], timeout=MOST)[0]:
                by, run = "", run[run.index(by) + 1 :]
        else:
            break
    shutil.rmtree(to)
    return told(name, len(tests), by, started)


def told(name, tests, by, started):
    seconds = round(time.monotonic() - started)
    print(f"{'found' if by else 'NOT FOUND'}: {name} ({tests} tests, {seconds} s) {by[:120]}")
    return {"found": bool(by), "tests": tests, "by": by, "seconds": seconds}


def compiled(work, name, mutation, build_python):
    """A mutation of the executor: built with its tests in a copy of the clone, and these run."""
    file, old, new = mutation
    started, to = time.monotonic(), work / f"compiled-{list(MUTATIONS).index(name)}"
    for part in ("jax_cudnn", "tests"):
        shutil.copytree(ROOT / part, to / part, ignore=shutil.ignore_patterns("__pycache__"))
    path = to / "jax_cudnn" / file
    assert path.read_text().count(old) == 1, f"{name}: not once in {file}"
    path.write_text(path.read_text().replace(old, new))
    flags = ["-DJAX_CUDNN_TESTS=ON", f"-DPython_EXECUTABLE={build_python}", "-G", "Ninja"]
    flags += ["-DJAX_CUDNN_WERROR=OFF"]  # a mutation may leave something unused
    build = ["cmake", "-S", to / "jax_cudnn/csrc", "-B", to / "build", *flags]
    for command in (build, ["cmake", "--build", to / "build"]):
        subprocess.run(command, check=True, capture_output=True)
    test = ["ctest", "--test-dir", to / "build", "--no-tests=error"]
    done = subprocess.run(test, capture_output=True, text=True, check=False)
    return told(name, 1, "executor" if done.returncode else "", started)


if __name__ == "__main__":
    main()
