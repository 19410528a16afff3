"""Training steps of Flax's models on 1, 2 and 4 GPUs of one host.

    python -m benchmarks.many_gpus --into benchmarks/results/many_gpus_h200.json
    python -m benchmarks.many_gpus --into benchmarks/results/many_gpus_h200.json --absent

The second compiles the steps for H200s that are absent: collectives and memory, no times. Under
data parallelism and FSDP each GPU has the model's batch; under tensor parallelism all have one
batch, and each a part of the heads and features. Runs with other ``--only`` add their cells.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc

from .collectives import KINDS
from .flax.tables import CUDNN, OURS, PLAIN, WHOLE
from .measure import TIMED, TINY, Effort, Entry
from .tables import listed, table, where

ALONE, DATA, FSDP, TENSOR, BOTH = (
    "one GPU",
    "data parallel",
    "FSDP",
    "tensor parallel",
    "data x model",
)
_LAYOUTS = {
    "resnet": (DATA,),
    "vit": (DATA,),
    "gpt2-124m/32x1024": (DATA, FSDP, TENSOR, BOTH),
    "gpt-1.3b": (DATA, FSDP, TENSOR, BOTH),
    "gpt2/tiny": (DATA, FSDP, TENSOR, BOTH),
}
"""Of the models of the Flax benchmark whose names begin so."""
_SPLIT = {
    r"(query|key|value)\.kernel": P(None, "model"),
    r"(query|key|value|up)\.bias": P("model"),
    r"(out|down)\.kernel|tokens\.embedding": P("model"),
    r"up\.kernel": P(None, "model"),
}
"""The dimensions of parameters that tensor parallelism splits."""
_EFFORT = Effort(seconds=2.0, calls=5, rounds=7)
VERSIONS = "jax", "jaxlib", "flax", "cudnn", "nvidia-cudnn-frontend"
"""What programs for absent GPUs share with those that ran."""
_NCCL = {"AllGather": "AG", "AllReduce": "AR", "ReduceScatter": "RS", "AllToAll": "A2A"}
_NCCL |= {"SendRecv": "CP"}
COMPILED = "compiled"
"""The status of a cell that no GPU ran."""


def cells(count: int, tiny: bool) -> Iterator[tuple[str, Any, str, dict[str, int]]]:
    """Name, model, layout and mesh, for up to ``count`` GPUs."""
    from .flax.cases import cases

    for case in cases(tiny):
        layouts = next((each for name, each in _LAYOUTS.items() if case.name.startswith(name)), ())
        for layout in (ALONE, *layouts) if layouts else ():
            for gpus in {ALONE: (1,), BOTH: (4,)}.get(layout, (2, 4)):
                if gpus <= count:
                    mesh = {"model" if layout == TENSOR else "data": gpus}
                    mesh = {"data": 2, "model": 2} if layout == BOTH else mesh
                    yield f"{case.name}, {layout}, {gpus}", case, layout, mesh


def measure(case: Any, layout: str, sizes: dict[str, int], effort: Effort) -> Entry:
    """What the Flax benchmark says of the model's step on a mesh, and how many GPUs it has."""
    from .flax.measure import measure

    mesh, many = _mesh(sizes, jax.devices()), _many(case, sizes)
    found = measure(many, effort, True, _sides(case), partial(_shardings, mesh, layout))
    for side in found["sides"].values():
        del side["mfu"]
        longest = side["profile"].pop("kernels", [])  # none where the profiler failed
        calls = {kernel["kernel"]: kernel["calls"] for kernel in longest}
        side["profile"]["nccl"] = {name: n for name, n in calls.items() if "nccl" in name.lower()}
    settings = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return {"unit": case.unit, "items": many.items, "nccl": settings} | found


def compiled(case: Any, layout: str, sizes: dict[str, int]) -> dict[str, Entry]:
    """Of the step of each side, collectives and memory that XLA's program for absent H200s has."""
    from absent_gpus import OPTIONS, h200s  # of tests/  # pyright: ignore
    from flax import nnx

    from jax_cudnn.flax import accelerate

    from .flax.measure import Forward, Training, facts

    mesh = _mesh(sizes, h200s(math.prod(sizes.values())))
    many, found = _many(case, sizes), {}

    def sharded(arrays: Any) -> Any:
        return jax.tree.map(
            lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own),
            arrays,
            _shardings(mesh, layout, arrays),
        )

    batch = sharded(jax.eval_shape(many.batch, jax.random.key(1)))
    for side in _sides(case):
        model = nnx.eval_shape(partial(case.make, side))
        model = {OURS: accelerate, WHOLE: Forward}.get(side, lambda model: model)(model)
        optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, case.optimizer, wrt=nnx.Param), model)
        nnx.update((model, optimizer), sharded(nnx.state((model, optimizer))))
        training = Training(model, optimizer, batch)
        with jc.target("H200"):
            training.program = training.lower().compile(compiler_options=OPTIONS)
        training.text = training.program.as_text() or ""
        found[side] = facts(training)
    return found


def _mesh(sizes: dict[str, int], devices: Sequence[Any]) -> Mesh:
    grid = np.array(devices[: math.prod(sizes.values())]).reshape(*sizes.values())
    return Mesh(grid, (*sizes,), axis_types=(AxisType.Auto,) * len(sizes))


def _many(case: Any, sizes: dict[str, int]) -> Any:
    """The case with the batches of all GPUs."""
    batches = sizes.get("data", 1)

    def batch(key: jax.Array) -> Any:
        each = [case.batch(key) for key in jax.random.split(key, batches)]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *each)

    return dataclasses.replace(case, batch=batch, items=case.items * batches)


def _sides(case: Any) -> tuple[str, ...]:
    return CUDNN if case.attends else PLAIN, WHOLE, OURS


def _shardings(mesh: Mesh, layout: str, arrays: Any) -> Any:
    """Of a batch (a tuple), or of a model's state."""

    def spec(path: Any, x: Any) -> P:
        if isinstance(arrays, tuple):
            return P("data") if "data" in mesh.shape else P()
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if layout == FSDP and x.ndim:
            size, axis = max((size, -axis) for axis, size in enumerate(x.shape))
            return P(*[None] * -axis, "data") if size % mesh.size == 0 else P()
        if "model" in mesh.shape:
            return next((own for text, own in _SPLIT.items() if re.search(text, name)), P())
        return P()

    return jax.tree.map_with_path(lambda path, x: NamedSharding(mesh, spec(path, x)), arrays)


def efficiency(result: dict[str, Any], name: str, side: str) -> float | None:
    """Items a second of each GPU as a part of those of one GPU alone."""
    entry, found = result["cells"][name], result["cells"][name]["sides"].get(side)
    alone = result["cells"].get(f"{name.split(', ')[0]}, {ALONE}, 1", {}).get("sides", {}).get(side)
    return found["per_s"] / entry["gpus"] / alone["per_s"] if found and alone else None


def render(result: dict[str, Any]) -> str:
    """The table of docs/many_gpus.md."""
    head = ["model", "layout", "GPUs", "by hand, ms", "`jc.accelerate`", "`jnn.accelerate`"]
    head += ["scaling efficiency", "collectives of the program", "NCCL's kernels in a profile"]
    head += ["ms of these", "memory of a GPU, GB"]
    rows, notes = [], []
    for name, entry in result["cells"].items():
        found = entry["sides"]
        facts = found or entry.get("compiled", {}).get("sides", {})
        sides = [CUDNN if CUDNN in facts or CUDNN in entry["not_run"] else PLAIN, WHOLE, OURS]
        spent = [found.get(s, {}).get("profile", {}).get("kinds_ms", {}) for s in sides]
        moved = [
            ", ".join(f"{n} {KINDS[kind]}" for kind, n in _counts(facts.get(side, {})).items())
            for side in sides
        ]
        ran = [_kernels(found.get(side, {})) for side in sides]
        parts = [efficiency(result, name, side) for side in sides]
        rows.append([
            *name.split(", "),
            *(f"{found[s]['ms']['median']:.1f}" if s in found else "-" for s in sides),
            _all(f"{part:.2f}" if part else None for part in parts) if entry["gpus"] > 1 else "",
            *(each[0] if len({*each}) == 1 else " / ".join(each) for each in (moved, ran)),
            _all(f"{s['collectives']:.1f}" if "collectives" in s else None for s in spent),
            _all(f"{facts[s]['memory_gb']:.3g}" if s in facts else None for s in sides),
        ])  # fmt: skip
        notes += [f"{name}, {side} did not run: {why}" for side, why in entry["not_run"].items()]
        if entry["status"] not in (TIMED, COMPILED):
            notes.append(f"{name}, {entry['status']}: {entry['reason']}")
    text = f"{where(result, 'flax')}.\n\n{table(head, rows)}"
    notes += _compared(result)
    return text + (f"\n\n{listed(notes)}" if notes else "")


def _compared(result: dict[str, Any]) -> list[str]:
    """Programs for absent GPUs with those that ran."""
    both = [(name, e) for name, e in result["cells"].items() if "compiled" in e]
    if not both:
        return []
    commits = ", ".join(sorted({entry["compiled"]["commit"][:7] for _, entry in both}))
    notes = [f"Rows without times are programs that XLA compiled for absent H200s, at {commits}"]
    pairs = [
        (name, found, entry["compiled"]["sides"][side])
        for name, entry in both
        for side, found in entry["sides"].items()
    ]
    if pairs:
        other = [name for name, one, two in pairs if _counts(one) != _counts(two)]
        off = max(abs(two["memory_gb"] / one["memory_gb"] - 1) for _, one, two in pairs)
        notes.append(
            f"Of {len(pairs)} programs that ran on several GPUs, {len(pairs) - len(other)} have as "
            f"many collectives as those compiled so, and memory differs by at most {off:.1%}. "
            f"The others are of {'; '.join(dict.fromkeys(other)) or 'no cell'}"
        )
    return notes


def _kernels(side: dict[str, Any]) -> str:
    """How often NCCL's kernels run in a step, by what they do."""
    calls = side.get("profile", {}).get("nccl", {}).items()
    counts = {short: sum(n for name, n in calls if word in name) for word, short in _NCCL.items()}
    return ", ".join(f"{n:.0f} {short}" for short, n in counts.items() if n)


def _counts(side: dict[str, Any]) -> dict[str, int]:
    return {kind: n for kind, (n, _) in side.get("collectives", {}).items()}


def _all(values: Iterator[str | None]) -> str:
    shown = [value or "-" for value in values]
    return " / ".join(shown) if {*shown} != {"-"} else ""


def plot(result: dict[str, Any], path: Path) -> None:
    """Scaling efficiencies of all cells as an SVG."""
    from .plot import drawing

    cells = result["cells"].items()
    names = [name for name, entry in cells if entry["gpus"] > 1 and entry["sides"]]
    with drawing(path, (8, 1.0 + 0.36 * len(names))) as axes:
        ways = (CUDNN, PLAIN), (WHOLE,), (OURS,)
        labels = ("#b0b0b0", "by hand"), ("#76b900", "jc.accelerate"), ("#3a5f00", "jnn.accelerate")
        for at, (sides, (color, label)) in enumerate(zip(ways, labels, strict=True)):
            shown = [
                (row + 0.26 * (at - 1), value)
                for row, name in enumerate(names)
                for side in sides
                if (value := efficiency(result, name, side))
            ]
            if shown:
                axes.barh(*zip(*shown, strict=True), height=0.24, color=color, label=label)
        axes.axvline(1, color="black", lw=0.8)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel("items a second of each GPU / those of one GPU alone (1: perfect scaling)")
        axes.legend(loc="lower left", fontsize=7)
        e = result["environment"]
        axes.set_title(f"{e['device']}, {e['date']}, jax {e['jax']}", fontsize=8)


def main() -> None:
    from .measure import environment, tried

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells with this in their name")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on a CPU, too")
    parser.add_argument("--commit", default="", help="that the cells are of")
    parser.add_argument("--absent", action="store_true", help="compile for H200s, run nothing")
    options = parser.parse_args()
    if not (options.tiny or options.absent) and os.environ.get("NCCL_NVLS_ENABLE") != "0":
        raise SystemExit("set NCCL_NVLS_ENABLE=0: these times are without NVLink multicast")
    found = json.loads(options.into.read_text()) if options.into.exists() else {"cells": {}}
    about, effort = environment("flax"), TINY if options.tiny else _EFFORT
    known = found.setdefault("environment", about)
    keys = VERSIONS if options.absent else {*known, *about} - {"date"}
    if any(known.get(key) != about.get(key) for key in keys):
        raise SystemExit(f"{options.into} is of other GPUs or versions: {known}")
    order = [name for name, *_ in cells(4, options.tiny)]
    count = 4 if options.absent else jax.device_count()
    for name, case, layout, sizes in cells(count, options.tiny):
        if not re.search(options.only, name) or (options.absent and layout == ALONE):
            continue
        began, of = time.perf_counter(), {"date": about["date"], "commit": options.commit}
        entry = {"gpus": math.prod(sizes.values()), "sides": {}, "not_run": {}}
        before = found["cells"].get(name, {"status": COMPILED})
        if options.absent:
            entry |= before
            entry["compiled"] = of | {"sides": compiled(case, layout, sizes)}
        else:
            entry |= tried(measure, case, layout, sizes, effort) | of
            if "compiled" in before:
                entry["compiled"] = before["compiled"]
            entry["seconds"] = round(time.perf_counter() - began, 1)
            known["date"] = about["date"]
        found["cells"][name] = entry
        found["cells"] = {name: found["cells"][name] for name in order if name in found["cells"]}
        ms = {side: each["ms"]["median"] for side, each in entry["sides"].items()}
        print(
            f"{name}: {entry['status']}, {time.perf_counter() - began:.0f} s, ms {ms}", flush=True
        )
        for side, why in {"": entry.get("reason"), **entry["not_run"]}.items():
            print(f"  {side}: {why[:300]}" if why else "", end="\n" if why else "", flush=True)
        options.into.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
