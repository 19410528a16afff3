"""Collectives and memory of training steps on eight H200s that are absent: XLA compiles for them.

    python -m benchmarks.collectives --into benchmarks/results/collectives_h200.json

A step is the loss, its gradients and an update of the parameters (:mod:`.sharded`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn.commands.timing import environment

from .tables import listed, table, where

KINDS = {"all-gather": "AG", "all-reduce": "AR", "reduce-scatter": "RS"}
KINDS |= {"all-to-all": "A2A", "collective-permute": "CP"}
COLUMNS = PLAIN, _, OURS, ONE_LINE = (
    "plain JAX",
    "jax.nn's cuDNN attention",
    "jax_cudnn",
    "plain, in jc.accelerate",
)
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-done)?\(")
_CALL = re.compile(r'= (.*?) custom-call\(.*custom_call_target="jax_cudnn"')
_MUCH = 10**6  # bytes on a device
_ARRAY = re.compile(r"\b[a-z]+(\d+)\w*\[([\d,]*)\]")


def compiled(model: Any, column: str, over: str, way: str) -> Any:
    """The step of a :class:`.sharded.Model`, on the mesh of that name."""
    from absent_gpus import OPTIONS, h200s  # of tests/, with cuDNN  # pyright: ignore

    from .sharded import GIVEN, MESHES

    run, placed, context = program(model, column, over, way, MESHES[over], h200s(8))
    given = model.params, model.state, model.data
    if way != GIVEN:
        given = jax.tree.map(
            lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), given, placed
        )
    with jc.target("H200"), context:
        return run.lower(*given).compile(compiler_options=OPTIONS)


def program(
    model: Any,
    column: str,
    over: str,
    way: str,
    sizes: dict[str, int],
    devices: Sequence[Any],
    update: Callable[[Any, Any], Any] = lambda p, g: (p - 0.1 * g).astype(p.dtype),
) -> tuple[Any, Any, Any]:
    """A step on a mesh: a jitted function of parameters, state and data that returns the loss, what
    ``update`` makes of each parameter and its gradient, and the state; the shardings of its
    operands; and a context for its call."""
    from .sharded import EXPLICIT, GIVEN, MANUAL

    explicit, manual = way == EXPLICIT, way == MANUAL
    mesh = jax.sharding.Mesh(
        np.array(devices).reshape(*sizes.values()),
        (*sizes,),
        axis_types=(AxisType.Explicit if explicit else AxisType.Auto,) * len(sizes),
    )
    data = P("data") if "data" in sizes else P()

    def spec(path: Any, x: Any) -> P:
        own = P(*(axis if axis in sizes else None for axis in model.spec(path)))
        if over != "FSDP" or "data" in own:
            return own
        return P(*[None] * [size % mesh.size for size in x.shape].index(0), "data")

    def read(path: Any, x: Any, own: P) -> Any:
        """FSDP's gather of a parameter, where it is not automatic."""
        if over != "FSDP" or "data" in model.spec(path) or not (explicit or manual):
            return x
        if explicit:
            return jax.sharding.reshard(x, P())
        return jax.lax.all_gather(x, "data", axis=[*own].index("data"), tiled=True)

    def step(params: Any, state: Any, given: Any) -> Any:
        total = (lambda x: jax.lax.psum(x, "model")) if manual and "model" in sizes else None

        def loss(params: Any) -> Any:
            params = jax.tree.map_with_path(read, params, specs[0])
            function = model.losses[PLAIN if column == ONE_LINE else column]
            function = jc.accelerate(function) if column == ONE_LINE else function
            found = function(params, state, *given, total=total)
            return jax.lax.pmean(found, "data") if manual and "data" in sizes else found

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return value, jax.tree.map(update, params, gradients), new

    specs = (
        jax.tree.map_with_path(spec, model.params),
        jax.tree.map(lambda _: P(), model.state),
        jax.tree.map(lambda _: data, model.data),
    )
    placed = jax.tree.map(lambda own: NamedSharding(mesh, own), specs)
    if manual:
        results = P(), *specs[:2]
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=results)
    shardings: dict[str, Any] = {} if explicit or manual else {"out_shardings": (None, *placed[:2])}
    if way == GIVEN:
        shardings["in_shardings"] = placed
    is_set = explicit or (model.constrained and not manual)
    context = jax.set_mesh(mesh) if is_set else contextlib.nullcontext()
    return jax.jit(step, **shardings), placed, context


def collectives(program: str) -> dict[str, list[int]]:
    """Of a compiled program, by kind: how many, and the bytes of their results on a device."""
    found: dict[str, list[int]] = {}
    for arrays, kind in _COLLECTIVE.findall(program):
        each = (int(bits) * math.prod(map(int, shape.split(",") if shape else ())) // 8
                for bits, shape in _ARRAY.findall(arrays))  # fmt: skip
        count, total = found.get(kind, (0, 0))
        found[kind] = [count + 1, total + sum(each)]
    return {kind: found[kind] for kind in KINDS if kind in found}


def measured(*cell: Any) -> dict[str, Any]:
    """Of a step; or why JAX refuses it."""
    try:
        program = compiled(*cell)
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError":  # private
            raise
        return {"refused": str(error)}
    text = program.as_text()
    return {
        "collectives": collectives(text),
        "temp_bytes": program.memory_analysis().temp_size_in_bytes,
        "results_of_calls": Counter(re.sub(r"\{.*?\}", "", made) for made in _CALL.findall(text)),
    }


def render(result: dict[str, Any]) -> str:
    """A row for each model and mesh, shared by ways with the same figures; where we move more."""
    rows, more, cells = [], {}, result["collectives"]
    for (model, over), group in itertools.groupby(cells, lambda cell: cell.split(", ")[:2]):
        same: dict[tuple[str, ...], list[str]] = {}
        for cell in group:
            found, way = cells[cell], cell.split(", ")[2]
            same.setdefault((*map(_shown, map(found.get, COLUMNS)),), []).append(way)
            for column in (OURS, ONE_LINE):
                plain, ours = _bytes(found[PLAIN]), _bytes(found[column])
                if plain and ours >= plain + _MUCH:
                    which = f"{ours / plain:.2f} x, {column}, {model}, {over}"
                    more.setdefault(which, []).append(way)
        rows += [[model, over, ", ".join(ways), *shown] for shown, ways in same.items()]
    count = sum(map(len, more.values()))
    note = (
        f"At least 1 MB more than in plain JAX is moved in {count} of {2 * len(cells)} steps:\n\n"
    )
    note += listed(f"{which} ({', '.join(ways)})" for which, ways in more.items())
    found = table(["model", "mesh", "way", *COLUMNS], rows) + f"\n\n{note}" * bool(more)
    return f"{where(result, 'flax')}.\n\n{found}"


def _shown(found: dict[str, Any] | None) -> str:
    if not found or "refused" in found:
        return "refused" if found else ""
    kinds = [f"{n} {KINDS[kind]} {_size(size)}" for kind, (n, size) in found["collectives"].items()]
    return ", ".join([*kinds, f"temp {_size(found['temp_bytes'])}"])


def _bytes(found: dict[str, Any]) -> int:
    return sum(size for _, size in found.get("collectives", {}).values())


def _size(size: int) -> str:
    power = min(2, (len(str(size)) - 1) // 3)
    number = size / 1000**power
    digits = 3 - len(str(int(number))) if power else 0
    return f"{number:.{max(digits, 0)}f} {('B', 'kB', 'MB')[power]}"


def main() -> None:
    from .sharded import models

    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="cells with this in their names")
    parser.add_argument("--column", choices=COLUMNS, help="this one alone")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put them into this result")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # the absent ones need no device, but layers count
    jax.config.update("jax_num_cpu_devices", 8)
    old = {}
    if given.into and given.into.exists():
        old = json.loads(given.into.read_text())["collectives"]
    for name, model in models().items():
        columns = [c for c in COLUMNS if c in (*model.losses, ONE_LINE)]
        for over, way in model.cells:
            cell = f"{name}, {over}, {way}"
            if given.only in cell:
                chosen = [given.column] if given.column else columns
                found = {c: measured(model, c, over, way) for c in chosen if c in columns}
                old[cell] = old.get(cell, {}) | found
                print(cell, *(f"{c}: {_shown(each)}" for c, each in found.items()), sep="; ")
    if given.into:
        where = environment("flax") | {"device": "8 NVIDIA H200, absent"}
        result = {"environment": where, "collectives": old}
        given.into.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
