"""ExecutionPlan: a cuDNN execution plan as text, with all data that the executor needs."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import LibraryError
from ..graph.boundary import stored
from ..graph.dtypes import itemsize
from ..graph.layout import layout
from ..graph.spec import GraphSpec, Tensor

# Kinds of a binding; csrc/executor.h has the same numbers.
OPERAND, RESULT, SLOT, CONSTANT, VIEW = range(5)
UNBOUND = -1
Row = tuple[int, int, int]  # of a binding, without the uid
SCALAR_STRIDE = 16  # bytes between by-value constants

# Properties that differ between GPUs of one model and that no kernel depends on. With them
# fixed, equal GPUs get equal plans, programs and cache keys.
_PER_DEVICE = re.compile(r'("(?:pciDeviceId|cudaDeviceId|totalGlobalMem)"\s*:\s*)\d+')


def canonical_properties(text: str) -> str:
    """Plan or property text without the fields that differ between GPUs of one model."""
    return _PER_DEVICE.sub(r"\g<1>0", text)


@dataclass(frozen=True)
class ExecutionPlan:
    """The plan that cuDNN built for a graph on one GPU model.

    Attributes:
        text: the backend's plan (JSON). Valid for ``cudnn_version`` and ``device_name`` only.
        engine: the engine with its knobs, as cuDNN names it.
        workspace_bytes: device memory in use during the call.
        bindings: rows (uid, kind, value, bytes): what each tensor of the plan points to.
        fills: rows (offset, unit bytes, count, word) of workspace to set before each run.
        tables: constants that kernels read from device memory, such as the slopes of ALiBi:
            float32 operands after those of the graph.
        scalars: the by-value constants, 16 bytes each, those of the graph first.
        candidates: how many plans cuDNN's heuristics proposed.
        engine_id, knobs: the index of the engine and the values of its knobs;
            ``fn.with_options(**plan.pinned)`` selects the same plan again.
        behavior_notes: cuDNN's notes on the engine, "RUNTIME_COMPILATION" for example.
    """

    text: str
    engine: str
    cudnn_version: int
    device_name: str
    workspace_bytes: int
    plan_workspace_offset: int
    bindings: tuple[tuple[int, int, int, int], ...]
    fills: tuple[tuple[int, int, int, int], ...]
    scalars: bytes
    candidates: int
    engine_id: int = -1
    knobs: tuple[tuple[str, int], ...] = ()
    tables: tuple[tuple[float, ...], ...] = ()
    behavior_notes: tuple[str, ...] = ()

    @property
    def pinned(self) -> dict[str, Any]:
        """The options that select this engine with its knobs."""
        return {"engine": self.engine_id, "knobs": dict(self.knobs)}

    def with_constants(self, spec: GraphSpec) -> ExecutionPlan:
        """The plan for an equal graph with other constants, such as epsilon, which it reads at
        each run."""
        own = b"".join(map(_packed, spec.constants))
        scalars = own + self.scalars[len(own) :]
        return self if scalars == self.scalars else dataclasses.replace(self, scalars=scalars)

    def to_json(self) -> dict[str, Any]:
        """Everything as data for ``json.dumps``."""
        return {**dataclasses.asdict(self), "scalars": self.scalars.hex()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ExecutionPlan:
        """The plan that ``to_json`` wrote; KeyError, TypeError or ValueError for other data."""
        held = {field.name: _tuples(data[field.name]) for field in dataclasses.fields(cls)}
        return cls(**{**data, **held, "scalars": bytes.fromhex(data["scalars"])})

    def __repr__(self) -> str:
        return f"<ExecutionPlan {self}>"  # the text is up to 100 KB

    def __str__(self) -> str:
        return f"{self.engine} for {self.device_name}, {self.workspace_bytes} bytes of workspace"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def uids(spec: GraphSpec) -> dict[tuple[str, int], int]:
    """The uids that emission gives to operands, results and constants, in this order, by name and
    0; then those of their further parts, by name and position. The first part has the uid of the
    whole."""
    arrays = *spec.inputs, *spec.outputs
    whole = [(name, 0) for name in (*arrays, *(constant.name for constant in spec.constants))]
    shown = layout(spec).shown
    parts = [(name, i) for name in arrays for i in range(1, len(shown[name]))]
    return {place: uid for uid, place in enumerate([*whole, *parts], 1)}


def graph_rows(spec: GraphSpec) -> dict[int, Row]:
    """What each of a graph's tensors points to, by uid: first its operands and results."""
    inputs, arrays = len(spec.inputs), len(spec.inputs) + len(spec.outputs)
    places, rows = uids(spec), {}
    for (name, i), uid in places.items():
        tensor = spec.tensor(name)
        if i:
            start = layout(spec).parts[name][i].offset * itemsize(tensor.dtype)
            rows[uid] = VIEW, places[name, 0] - 1, start
        elif uid > arrays:
            rows[uid] = CONSTANT, (uid - 1 - arrays) * SCALAR_STRIDE, 0
        else:
            shape, dtype = stored(tensor)
            kind, place = (RESULT, uid - 1 - inputs) if uid > inputs else (OPERAND, uid - 1)
            rows[uid] = kind, place, math.prod(shape) * itemsize(dtype)
    return rows


def decode(
    spec: GraphSpec,
    blob: dict[str, Any],
    engine: str,
    workspace: int,
    candidates: int,
    engine_id: int = -1,
    knobs: tuple[tuple[str, int], ...] = (),
    behavior_notes: tuple[str, ...] = (),
) -> ExecutionPlan:
    """The ExecutionPlan from the frontend's serialized form of a backend plan. By-value constants,
    initialised workspace and slices, which the frontend resolves in every execution, become rows.
    """
    try:
        text = canonical_properties(blob["cudnn_backend_data"])
        used, constants = set(blob["variant_pack_uids"]), blob["pass_by_values"]
        modified, space = blob["workspace_modifications"], blob["fe_workspace_size"]
    except KeyError as error:
        raise _unknown(f"the frontend's plan has no {error}") from error
    rows = graph_rows(spec)
    views = {uid: rows.pop(uid) for uid, row in [*rows.items()] if row[0] == VIEW}
    scalars = bytearray().join(map(_packed, spec.constants))
    more: dict[int, Row] = {}  # of the frontend: it may use the uid of an operand that it omits
    for uid, value in constants.items():
        more[int(uid)] = (CONSTANT, len(scalars), 0)
        scalars.extend(_by_value(value).ljust(SCALAR_STRIDE, b"\0"))
    fills: list[tuple[int, int, int, int]] = []
    tables: list[tuple[float, ...]] = []
    for uid, (kind, offset, floats) in modified.items():
        floats = tuple(map(_float, floats))
        if kind == 0:  # the frontend copies these there
            more[int(uid)] = (OPERAND, len(spec.inputs) + len(tables), 4 * len(floats))
            tables.append(floats)
            continue
        more[int(uid)] = (SLOT, offset, 0)
        if kind == 1:  # it sets floats[0] bytes to zero
            fills.append((offset, 1, int(floats[0]), 0))
    own = used - more.keys()
    bindings: list[tuple[int, int, int, int]] = []
    places: dict[int, int] = {}
    for known, bound in ((rows, own), (more, used)):
        for uid, row in known.items():
            if uid in bound or row[0] in (OPERAND, RESULT):
                places[uid] = len(bindings)
                bindings.append((uid if uid in bound else UNBOUND, *row))
    # Before cuDNN could slice, the frontend did: it binds these to parts of the memory of others.
    sliced = blob.get("variant_pack_replacements") or []  # a map, or a list of pairs
    for source, (uid, offset) in sliced.items() if isinstance(sliced, dict) else sliced:
        if uid in used:
            views[uid] = VIEW, places.get(int(source), UNBOUND), offset
    bindings += [(uid, *row) for uid, row in views.items() if uid in own]
    unknown = own - rows.keys() - views.keys()
    unknown |= {uid for uid, (_, place, _) in views.items() if place == UNBOUND}
    if unknown:
        what = "the frontend's plan has tensors that are not in the graph"
        raise _unknown(what, f"uids {sorted(unknown)}")
    start = -(-space // SCALAR_STRIDE) * SCALAR_STRIDE  # cuDNN's own part begins aligned
    return ExecutionPlan(
        text=text,
        engine=engine,
        cudnn_version=version_in(text),
        device_name=device_in(text),
        workspace_bytes=workspace + start - space,
        plan_workspace_offset=start,
        bindings=tuple(bindings),
        fills=tuple(fills),
        scalars=bytes(scalars),
        candidates=candidates,
        engine_id=engine_id,
        knobs=knobs,
        tables=tuple(tables),
        behavior_notes=behavior_notes,
    )


def _packed(tensor: Tensor) -> bytes:
    """A by-value constant as the kernels read it."""
    assert tensor.value is not None
    if tensor.dtype == "int32":
        return struct.pack("<i12x", int(tensor.value))
    return struct.pack("<f12x", tensor.value)


def _by_value(given: dict[str, Any]) -> bytes:
    """A constant of the frontend's own, as the kernels read it. Floats are serialised as the
    hexadecimal of the big-endian value, integers as themselves; ``index`` is the type's."""
    value = given["value"]
    if isinstance(value, str):
        return bytes.fromhex(value)[::-1]
    if given["index"] not in (0, 1):
        raise _unknown("the frontend's plan has a constant of an unknown type", repr(given))
    return struct.pack("<i" if given["index"] else "<q", value)


def _float(given: Any) -> float:
    """A float32 of the frontend's own: itself, or the hexadecimal of the big-endian value."""
    return struct.unpack(">f", bytes.fromhex(given))[0] if isinstance(given, str) else float(given)


def version_in(text: str) -> int:
    """The version of cuDNN that wrote a plan's text."""
    return int(_field("cudnnVersion", r"(\d+)", text))


def device_in(text: str) -> str:
    """The GPU that a plan's text, or a GPU's properties, are of."""
    return _field("deviceName", r'"([^"]*)"', text)


def _field(name: str, pattern: str, text: str) -> str:
    if match := re.search(f'"{name}":{pattern}', text):
        return match[1]
    raise _unknown(f"cuDNN's plan text has no {name}")


def _unknown(what: str, got: str | None = None) -> LibraryError:
    return LibraryError(
        what,
        got=got,
        why="this version of cuDNN or of nvidia-cudnn-frontend writes plans in an unknown format",
        fix="install a tested version (see newest.txt) or a newer jax_cudnn",
    )


_NUMBERS = {"i": ">b", "U": ">B", "I": ">h", "l": ">i", "L": ">q", "d": ">f", "D": ">d"}
_CONSTANTS = {"Z": None, "T": True, "F": False}


def from_ubjson(data: bytes) -> Any:
    """The value of a UBJSON document as ``graph.serialize()`` writes it, with containers without
    counts and types; ValueError when it is not one."""
    file = io.BytesIO(data)
    try:
        value = _value(file, _marker(file))
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"not a UBJSON document: {error!r} at byte {file.tell()}") from error
    if file.read(1):
        raise ValueError(f"not a UBJSON document: bytes follow byte {file.tell() - 1}")
    return value


def _marker(file: io.BytesIO) -> str:
    return file.read(1).decode("latin1")


def _value(file: io.BytesIO, marker: str) -> Any:
    if marker == "[":
        return [_value(file, kind) for kind in iter(lambda: _marker(file), "]")]
    if marker == "{":
        names = (_text(file, kind) for kind in iter(lambda: _marker(file), "}"))
        return {name: _value(file, _marker(file)) for name in names}
    if marker in ("S", "H"):
        return _text(file, _marker(file))
    return _CONSTANTS[marker] if marker in _CONSTANTS else _number(file, marker)


def _number(file: io.BytesIO, marker: str) -> Any:
    form = _NUMBERS[marker]
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _text(file: io.BytesIO, marker: str) -> str:
    size = _number(file, marker)
    return struct.unpack(f"{size}s", file.read(size))[0].decode()
