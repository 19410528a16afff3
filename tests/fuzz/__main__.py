"""``python -m fuzz``, in ``tests``: random graphs, planned and, on a GPU, run beside references.

Without a GPU they are planned for an H200, or for another profile (``--gpu``; ``none`` plans
nothing). With ``--transforms`` their gradients, tangents and vmaps are planned and run, too: on the
GPU, or interpreted. Exits with 1 if a graph fails.
"""

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence

from .checks import Checks, checks_for, outcome, smallest
from .graphs import random_graph


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m fuzz", None, __doc__, formatter_class=formatter)
    parser.add_argument("--seeds", type=int, default=100, help="how many graphs (100)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seed", type=int, help="this graph only, told in full")
    parser.add_argument("--transforms", action="store_true", help="also grad, jvp and vmap of each")
    parser.add_argument("--gpu", help="plan for this profile, run nothing on a GPU; none: no plans")
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _told_in_full(checks_for(options.gpu, options.transforms), options.seed)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # they share the GPU
    spawn = multiprocessing.get_context("spawn")
    seeds = range(options.start, options.start + options.seeds)
    check = functools.partial(outcome, options.gpu, options.transforms)
    outcomes = []
    with concurrent.futures.ProcessPoolExecutor(options.workers, spawn) as pool:
        for found in pool.map(check, seeds):
            outcomes.append(found)
            if found.problem:
                print(f"seed {found.seed}: {found.problem}\n{random_graph(found.seed).spec}\n")
    facts = {
        "seeds": [seeds.start, seeds.stop],
        "by_segments_of_cudnn": dict(sorted(Counter(sum(o.segments) for o in outcomes).items())),
        "without_comparable_derivatives": sum(o.skipped for o in outcomes),
        "failures": [[o.seed, o.problem] for o in outcomes if o.problem],
    }
    print(json.dumps(facts, indent=1))
    return 1 if facts["failures"] else 0


def _told_in_full(checks: Checks, seed: int) -> int:
    """The graph, what is wrong with it, and its smallest part that fails, or its plan."""
    spec, found = random_graph(seed).spec, checks.outcome(seed)
    print(spec, found, sep="\n")
    if found.problem and checks.problem(spec):
        print(f"the smallest part that fails alike:\n{smallest(spec, checks.problem)}")
    elif checks.site is not None and not found.problem:
        print(*(plan.explain() for plan in checks.plans({f"random_{seed}": spec})), sep="\n")
    return 1 if found.problem else 0


if __name__ == "__main__":
    sys.exit(main())
