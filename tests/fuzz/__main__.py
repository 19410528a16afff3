"""``python -m fuzz KIND``, in ``tests``: random cases, planned, run, and compared.

- ``graphs``: random graphs with their gradients, tangents and vmaps;
- ``calls``: random calls of the public functions and Flax's layers, with second derivatives, too;
- ``files``: altered entries of the plan cache, archives and serialized plans;
- ``programs``: altered attributes of the custom call, on a GPU;
- ``merge``: one file from several that ``--json`` wrote, in order: a seed that fails and is right
  in a later one is said to be fixed.

Without a GPU they are planned for an H200, or for another profile (``--gpu``; ``none`` plans
nothing), and run on the CPU. Exits with 1 if a case is wrong or ends its process, or is refused
though nothing is altered.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import jax

from jax_cudnn._core.cuda import CudaDevice, device_nodes

from .checks import checks_for, outcome, smallest
from .graphs import random_graph
from .runner import facts, merged, outcomes

ALTERED = ("files", "programs")
# The processes share a GPU and its host, and choosing by measurement would take most of the time.
# As in the reference, what a graph rounds to 16 bits is rounded between XLA's operations, too: by
# default XLA may leave it out (graph 584).
FLAGS = (
    "--xla_gpu_autotune_level=0 --xla_gpu_force_compilation_parallelism=1 "
    "--xla_allow_excess_precision=false"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m fuzz", None, __doc__, formatter_class=formatter)
    parser.add_argument("kind", choices=("graphs", "calls", *ALTERED, "merge"))
    parser.add_argument("parts", nargs="*", type=Path, help="the files to merge")
    parser.add_argument(
        "--seeds",
        default="0:100",
        help="FIRST:END (0:100), several with commas; of one all is printed",
    )
    parser.add_argument("--gpu", help="plan for this profile, run nothing on a GPU; none: no plans")
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after that")
    parser.add_argument("--commit", help="whose files these are, where git does not tell")
    parser.add_argument("--json", type=Path, help="write the outcome there, too")
    options = parser.parse_args(arguments)
    if options.kind == "merge":
        found = merged(json.loads(path.read_text()) for path in options.parts)
    else:
        if options.seeds.isdecimal():
            return _told_in_full(options.kind, options.gpu, int(options.seeds))
        start, seeds = time.monotonic(), [*_seeds(options.seeds)]
        check = functools.partial(outcome, options.gpu, options.kind)
        flags = FLAGS if device_nodes() else "--xla_backend_optimization_level=0"
        flags = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
        each, given = [], {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with mock.patch.dict(os.environ, given):  # of the processes
            for one in outcomes(check, seeds, options.workers, options.seconds):
                each.append(one)
                if one.kind != "right" and (one.kind != "refused" or options.kind not in ALTERED):
                    print(f"seed {one.seed}: {one.kind}: {one.text}\n", flush=True)
        on_gpu = isinstance(checks_for(options.gpu, False).site, CudaDevice)
        gpu = jax.devices("gpu")[0].device_kind if on_gpu else None
        took = time.monotonic() - start
        found = facts(options.kind, each, took, gpu, options.commit)
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    bad = [] if options.kind in ALTERED else found["refused"]
    return 1 if found["failures"] or bad else 0


def _seeds(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, end = part.partition(":")
        yield from range(int(first), int(end or int(first) + 1))


def _told_in_full(kind: str, gpu: str | None, seed: int) -> int:
    """What is wrong with a seed; of a graph also itself, its smallest part that fails, its plan."""
    checks = checks_for(gpu, kind == "graphs")
    found = checks.outcome(kind, seed)
    if kind == "graphs":
        spec = random_graph(seed).spec
        print(spec)
        if found.kind != "right" and checks.problem(spec):
            small = smallest(spec, checks.problem)
            print(f"the smallest part that fails alike:\n{small}")
        elif checks.site is not None and found.kind == "right":
            print(*(p.explain() for p in checks.plans([spec])), sep="\n")
    print(found)
    return int(found.kind in ("wrong", "crashed") or (found.kind, kind) == ("refused", "graphs"))


if __name__ == "__main__":
    sys.exit(main())
