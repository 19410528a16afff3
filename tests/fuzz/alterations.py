"""What is stored, and what a program tells the executor, altered at random.

An alteration is refused in words, or harmless: what has read it goes on, and is right.
"""

import contextlib
import functools
import io
import json
import random
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from helpers import lowered

import jax_cudnn as jc
from jax_cudnn.__main__ import main
from jax_cudnn._core import auto, ffi
from jax_cudnn._core.errors import GraphError
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.planning.execution_plan import SCALAR_STRIDE, ExecutionPlan, graph_rows
from jax_cudnn._core.planning.stored import _listed
from jax_cudnn._core.plans.plan import Plan
from jax_cudnn._core.plans.record import sealed
from jax_cudnn._core.store.entry import Content, decode, encode

from .comparison import WrongResult

_VALUES = (
    *(0, 1, -1, 7, 2**31, 2**63, -(2**63), 10**30, 1.5, float("nan"), True, None),
    *("", "x", "\ud800", "é" * 500, [], [[]], {}, [None], {"x": 1}),
)
_LAST = ("NHWC", "OHWI", "NHWC")
_NUMBERS = (0, 1, -1, 2, 8, 16, 255, 2**31, 2**40, 2**62, -(2**62))
Told = tuple[str, str]
"""A kind of :class:`runner.Outcome`, and what is said."""


def altered(rng: random.Random, value: Any) -> Any:
    """JSON with one value, item or character changed, exchanged, repeated or missing."""
    value = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []

    def visit(x: Any) -> None:
        items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
        for key, item in items:
            places.append((x, key))
            visit(item)

    visit(value)
    (holder, key), how = rng.choice(places), rng.random()
    old = holder[key]
    if how < 0.15:
        del holder[key]
    elif how < 0.3 and isinstance(holder, list):
        other = rng.randrange(len(holder))
        holder[key], holder[other] = holder[other], old
    elif how < 0.4 and isinstance(holder, list):
        holder.insert(key, old)
    elif how < 0.6 and isinstance(old, str) and old:
        at = rng.randrange(len(old))
        holder[key] = rng.choice((old[:at], old[:at] + chr(rng.randrange(32, 127)) + old[at + 1 :]))
    elif how < 0.6 and isinstance(old, int):
        holder[key] = rng.choice((old + 1, old - 1, 2 * old, -old))
    else:
        holder[key] = rng.choice(_VALUES)
    return value


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes cut, with some changed, or repeated."""
    found, at = bytearray(data), rng.randrange(len(data))
    if rng.random() < 0.3:
        return bytes(found[:at])
    if rng.random() < 0.2:
        return bytes(found[:at] + found[at // 2 :])
    for _ in range(rng.choice((1, 1, 4))):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def _causal(q: jax.Array) -> Any:
    attend = functools.partial(jc.ops.dot_product_attention, is_causal=True)
    return jax.vjp(lambda q: attend(q, q, q), q)[1](q)


def _shapes(*shapes: tuple[int, ...]) -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]


FILED: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "norm and more": (lambda x: jc.ops.layer_norm(jnp.sin(x), epsilon=0.1), _shapes((64, 128))),
    "attention and its gradient": (_causal, _shapes((2, 128, 4, 64))),  # with parts of workspace
    "attention of one array": (jc.ops.dot_product_attention_qkv, _shapes((2, 64, 3, 4, 64))),
}


@functools.cache
def _stored(name: str) -> tuple[dict[str, Content], bytes, list[Plan]]:
    """The entries that planning a function leaves, their archive, and its plans."""
    folder = Path(tempfile.mkdtemp(prefix="jax_cudnn-fuzz-"))
    jc.configure(plan_cache=folder)
    auto.clear()
    plans = _planned(name)
    entries = {path.stem: decode(path.read_bytes(), path.stem) for path in folder.glob("*.plan")}
    archive = folder / "archive"
    _command("export", folder, archive)
    return entries, archive.read_bytes(), plans


def _planned(name: str) -> list[Plan]:
    function, avals = FILED[name]
    with jc.target("H200"):
        return [*jc.plans(function, *avals).values()]


def _checked(plan: Plan) -> list[Any]:
    """What docs/trust.md says is checked of it."""
    found: list[Any] = []
    for made, spec in ((s.plan, boundary(s.spec.for_planning).planned) for s in plan.segments):
        if made is not None:
            listed = _listed(json.loads(made.text)["operationGraph"])
            own = ((i, t) for i, t in listed if i in graph_rows(spec) and not t["isByValue"])
            found += sorted(made.bindings), {(i, t["dataType"], *sorted(t["dim"])) for i, t in own}
            found += made.fills, made.plan_workspace_offset, made.cudnn_version, made.device_name
            found.append(made.scalars[: SCALAR_STRIDE * len(spec.constants)])
    return found


def _check_same(found: Plan, want: Plan) -> None:
    cut, wanted = ([(s.calls, s.plan is None) for s in plan.segments] for plan in (found, want))
    if cut == wanted and (got := _checked(found)) != (expected := _checked(want)):
        raise WrongResult("an altered plan is taken", expected=str(expected), got=str(got))


def _command(action: str, folder: Path, *more: Any) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        main(["cache", action, *map(str, more), "--folder", str(folder)])
    return text.getvalue()


def of_files(seed: int) -> Told:
    """One altered file: an entry with a sound checksum or without, an archive, or a plan."""
    rng = random.Random(seed)
    name, how = rng.choice([*FILED]), rng.choice((*["entry"] * 5, "bytes", "archive", "plan"))
    entries, archive, plans = _stored(name)
    if how == "plan":
        sound, want = rng.random() < 0.7, rng.choice(plans)
        plan = want.serialize()
        data = {key: value for key, value in json.loads(plan).items() if key != "checksum"}
        content = sealed(json.dumps(altered(rng, data)).encode()) if sound else plan
        try:
            read = jc.Plan.deserialize(content if sound else damaged(rng, plan))
        except GraphError as error:
            return "refused", str(error)
        _check_same(read, want)
        return "right", f"{read!r}{read.explain()}{len(read.serialize())}"
    digest = rng.choice(sorted(entries))
    with tempfile.TemporaryDirectory(prefix="jax_cudnn-fuzz-") as folder:
        here = Path(folder) / "plans"
        here.mkdir()
        if how == "archive":
            (Path(folder) / "archive").write_bytes(damaged(rng, archive))
            try:
                _command("import", here, Path(folder) / "archive")
            except jc.JaxCudnnError as error:
                return "refused", str(error)
        else:
            for stem, content in entries.items():
                if stem == digest and how == "entry":
                    value = content.value
                    if "text" in value and rng.random() < 0.4:
                        text = json.loads(value["text"])
                        graph = text["operationGraph"]
                        graph["tensors"] = altered(rng, graph["tensors"])
                        value = value | {"text": json.dumps(text, separators=(",", ":"))}
                    else:
                        value = altered(rng, value)
                    content = content._replace(value=value)
                data = encode(content)
                data = damaged(rng, data) if (stem, how) == (digest, "bytes") else data
                (here / f"{stem}.plan").write_bytes(data)
        verified = _command("verify", here)
        jc.configure(plan_cache=here)
        auto.clear()
        found = _planned(name)
        for plan, want in zip(found, plans, strict=True):
            _check_same(plan, want)
        left = _command("verify", here)
    if " 0 unusable" not in left:
        raise WrongResult("what is unusable stays", got=left)
    taken = " 0 unusable" in verified
    if taken and [x.serialize() for x in found] != [x.serialize() for x in plans]:
        lowered(FILED[name][0], *FILED[name][1])
        return "right", "taken, with another plan"
    return ("right", "taken") if taken else ("refused", verified.replace(folder, "")[-300:])


class Program:
    """A call of the executor with its operands, and what is right."""

    def __init__(self, function: Callable[..., Any], *operands: Any):
        self.function, self.operands = function, operands
        self.compiled = self.compile()
        self.results = self.run()
        self.given = jax.device_get(operands)

    def compile(self) -> Any:
        with jc.implementation("cudnn"):
            return jax.jit(lambda *xs: self.function(*xs)).lower(*self.operands).compile()

    def run(self, compiled: Any = None) -> Any:
        return jax.device_get((compiled or self.compiled)(*self.operands))

    def check(self) -> None:
        """Raises WrongResult unless it still is right, but for the order of sums, and its operands
        what they were."""
        got = jax.tree.leaves((self.run(), jax.device_get(self.operands)))
        for a, b in zip(got, jax.tree.leaves((self.results, self.given)), strict=True):
            if not np.allclose(a.astype(float), b.astype(float), 0.02, 0.02):
                raise WrongResult("a sound program is no longer right")


@functools.cache
def _programs() -> list[Program]:
    noise = np.random.default_rng(0)
    warnings.simplefilter("ignore")

    def floats(*shape: int) -> jax.Array:
        return jnp.asarray(noise.standard_normal(shape), "bfloat16")

    q = floats(2, 128, 4, 64)
    attend = functools.partial(jc.ops.dot_product_attention, is_causal=True, return_residual=True)
    return [
        Program(lambda a, b, c: jc.ops.matmul(a, b, bias=c, activation="relu"),
                floats(64, 64), floats(64, 32), floats(32)),
        Program(functools.partial(jc.ops.conv, scale=0.5, dimension_numbers=_LAST),
                floats(2, 8, 8, 16), floats(32, 3, 3, 16)),
        Program(lambda x, s: jc.ops.layer_norm(x, s, return_statistics=True),
                floats(64, 256), floats(256)),
        Program(attend, q, q, q),
        Program(lambda q, b: jax.vjp(lambda *x: attend(x[0], *x)[0], q, q, b)[1](q),
                q, floats(1, 4, 128, 128)),
    ]  # fmt: skip


def _of_plan(rng: random.Random, plan: ExecutionPlan) -> ExecutionPlan:
    """Another plan, whose attributes have a sound checksum."""
    space = plan.workspace_bytes
    sizes = (*_NUMBERS[:8], space - 1, space // 2, space + 1, space + 1024)

    def rows(found: list[list[int]]) -> tuple[Any, ...]:
        at = rng.randrange(len(found)) if found else 0
        row, how = found[at] if found else [0, 1, 1, 0], rng.random()
        if how < 0.15:
            del found[at : at + 1]
        elif how < 0.3:
            found.insert(at, [*row])
        elif how < 0.5 and found:
            other = rng.choice(found)
            column = rng.randrange(4)
            row[column], other[column] = other[column], row[column]
        else:
            column = rng.randrange(4)
            row[column] = rng.choice((*_NUMBERS, row[column] + 1, row[column] - 1, space))
            found[at : at + 1] = [row]
        return tuple(map(tuple, found))

    field = rng.choice(("bindings",) * 5 + ("workspace_bytes", "plan_workspace_offset") * 2
                       + ("fills", "scalars", "cudnn_version", "device_name", "text"))  # fmt: skip
    value: Any = getattr(plan, field)
    if field in ("bindings", "fills"):
        value = rows([[*row] for row in value])
    elif field == "text":
        value = rng.choice(("", "{}", "[]", value[: rng.randrange(len(value))]))
    elif field in ("scalars", "device_name"):
        value = rng.choice((value[:-1], value + value, value[:0]))
    else:
        value = rng.choice(sizes if "workspace" in field else (value + 1, value - 1, 0, -1))
    return replace(plan, **{field: value})


def _of_attributes(rng: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    """One attribute damaged, missing or of another type, without another checksum."""
    name = rng.choice([*given])
    value, how = given[name], rng.random()
    if how < 0.1:
        return {other: x for other, x in given.items() if other != name}
    if how < 0.25:
        return given | {name: rng.choice((np.int32(7), "x", np.float64(1.5), np.zeros(3), True))}
    if isinstance(value, str):
        data = damaged(rng, value.encode() or b"x")
        return given | {name: data.decode("ascii", "replace").replace("\ufffd", "?")}
    data = np.asarray(value)
    if data.ndim and how < 0.5:
        return given | {name: data[: rng.randrange(data.size + 1)]}
    if not data.size:
        return given | {name: np.ones(5, data.dtype)}
    changed = np.frombuffer(bytearray(data.tobytes()), np.uint8)
    changed[rng.randrange(changed.size)] ^= 1 << rng.randrange(8)
    changed = changed.view(data.dtype)
    return given | {name: changed if data.ndim else changed[0]}


def of_programs(seed: int) -> Told:
    """One altered call, then all sound ones in the same process."""
    rng, programs = random.Random(seed), _programs()
    program, in_plan = rng.choice(programs), rng.random() < 0.7
    whole, attributes = ffi.outputs_and_workspace, ffi.attributes

    def call(plan: ExecutionPlan, *more: Any, **how: Any) -> Any:
        return whole(_of_plan(rng, plan) if in_plan else plan, *more, **how)

    def given(plan: ExecutionPlan, *more: Any) -> dict[str, Any]:
        found = attributes(plan, *more)
        return found if in_plan else _of_attributes(rng, found)

    try:
        with (
            mock.patch.object(ffi, "outputs_and_workspace", call),
            mock.patch.object(ffi, "attributes", given),
        ):
            compiled = program.compile()
        program.run(compiled)
        told = "right", "ran"
    except Exception as error:  # of XLA, the executor, or NumPy where a number does not fit
        told = "refused", f"{type(error).__name__}: {error}"
    for sound in programs:
        sound.check()
    return told
