"""``python -m fuzz``: random graphs, planned for a GPU and, where there is one, run.

With ``--transforms`` their gradients, tangents and vmaps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

import jax

from jax_cudnn._core.compat import Device
from jax_cudnn._core.cuda import CudaDevice, device_nodes
from jax_cudnn._core.errors import GraphError
from jax_cudnn._core.settings import configure
from jax_cudnn.commands.timing import environment
from jax_cudnn.deviceless import client, profiles

from . import runs, transform_runs
from .graphs import random_graph
from .runs import Checks, smallest, told
from .transform_runs import TransformChecks
from .transforms import draw

_EXAMPLE = """\
examples:
  python -m fuzz --seeds 2000 --gpu H200 --workers 2   # planned without a GPU
  python -m fuzz --seeds 300                           # run on this machine's GPU
  python -m fuzz --seed 4711 --gpu H200                # one graph, told in full
  python -m fuzz --transforms --seeds 300 --workers 6  # their gradients and vmaps
"""
_THREADS = 4  # that compile for a GPU
_OFTEN = 50  # of so many graphs, one is told about
NOWHERE = "none"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz",
        description="Plans random graphs, checks that their segments compute what the graphs do, "
        "and runs them on this machine's GPU beside their references. Exits with 1 if one fails.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seeds", type=_count, default=100, metavar="N", help="how many graphs (100)"
    )
    parser.add_argument(
        "--transforms",
        action="store_true",
        help="grad, jvp, vmap and vmap of grad of each graph: all that is derived is planned, and "
        "run beside the reference, on the CPU where nothing runs on a GPU",
    )
    parser.add_argument("--start", type=int, default=0, metavar="N", help="the first seed (0)")
    parser.add_argument("--seed", type=int, metavar="N", help="this graph only, told in full")
    parser.add_argument(
        "--gpu", metavar="NAME", help="plan for this profile, run nothing (default: this machine's "
        f"GPU; H200 where there is none); {NOWHERE}, with --transforms: plan nothing"
    )  # fmt: skip
    parser.add_argument(
        "--workers",
        type=_count,
        default=1,
        metavar="N",
        help="processes that plan; with --transforms, that do all, also on a GPU",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--render",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="print a table, run nothing",
    )
    return parser


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of things: at least 1")
    return count


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; the exit status."""
    options = _parser().parse_args(arguments)
    if not device_nodes() and "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    if options.render:
        print(runs.render([json.loads(path.read_text()) for path in options.render]))
        return 0
    if options.transforms:  # the GPU's memory is for the processes that use it
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    configure(plan_cache=None)  # planning is what is looked at
    device = None if options.gpu else _gpu()
    site = None
    if options.gpu != NOWHERE:
        site = profiles.get(options.gpu or "H200")
    elif not options.transforms:
        raise GraphError(f"--gpu {NOWHERE} is for --transforms: all else is about plans")
    if device is not None:
        site = CudaDevice(device.local_hardware_id)
    if options.seed is not None:
        if options.transforms or site is None:
            return _one_transformed(options.seed, _transform_checks(site))
        return _one(options.seed, Checks(site, device))
    seeds = range(options.start, options.start + options.seeds)
    if options.transforms or site is None:
        found = transform_runs.fuzz(seeds, _transform_checks(site), options.workers, _tell)
        counted = transform_runs.figures(found)
    else:
        with client.workers(options.workers) if device is None else contextlib.nullcontext():
            threads = options.workers if device is None else _THREADS
            counted = runs.figures(runs.fuzz(seeds, Checks(site, device), threads, _tell))
    facts = {
        "environment": environment(),
        "gpu": options.gpu or ("H200" if device is None else device.device_kind),
        "run_on_the_gpu": device is not None,
        "seeds": [seeds.start, seeds.stop],
        **counted,
    }
    text = json.dumps(facts, indent=1)
    print(text)
    if options.write:
        options.write.write_text(text + "\n")
    return 1 if facts["failures"] else 0


def _transform_checks(site: runs.Site | None) -> TransformChecks:
    if site is None:
        return TransformChecks()
    return TransformChecks(
        site, transform_runs.GPU if isinstance(site, CudaDevice) else transform_runs.CPU
    )


def _gpu() -> Device | None:
    try:
        found = jax.local_devices(backend="gpu")
    except RuntimeError:
        return None
    return next((d for d in found if "cuda" in d.client.platform_version.lower()), None)


def _tell(outcome: runs.Outcome | transform_runs.Transformed) -> None:
    if outcome.problem:
        print(f"seed {outcome.seed}: {outcome.problem}\n{random_graph(outcome.seed).spec}\n")
    elif outcome.seed % _OFTEN == 0:
        print(f"seed {outcome.seed} is done", file=sys.stderr)


def _one(seed: int, checks: Checks) -> int:
    """The graph, how it is planned, and what is wrong with it; its smallest part that fails."""
    spec = random_graph(seed).spec
    print(spec)
    outcome = checks.outcome(seed)
    print(outcome)
    try:
        print(checks.plan(spec, f"random_{seed}").explain())
    except Exception as error:
        print(f"\n{told(error)}\nthe smallest part that fails alike:")
        print(smallest(spec, checks.planning_problem))
    return 1 if outcome.problem else 0


def _one_transformed(seed: int, checks: TransformChecks) -> int:
    """The graph, how all that is derived from it is planned, and its smallest part that fails."""
    graph = random_graph(seed)
    print(graph.spec)
    outcome = checks.outcome(seed)
    print(outcome)
    with contextlib.suppress(Exception):  # it is the outcome's
        for plan in checks.plans(draw(graph.spec, graph.inputs, seed)):
            print(plan.spec, plan.explain(), sep="\n")
    if outcome.problem:
        if checks.problem(graph.spec):
            print(f"the smallest part that fails alike:\n{smallest(graph.spec, checks.problem)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
