"""What a random graph's operations stand on: new operands, values so far, dtypes, shapes."""

import random
from typing import Any

from jax_cudnn._core.errors import GraphError
from jax_cudnn._core.graph.dims import Shape
from jax_cudnn._core.graph.dtypes import CUDNN_FLOATS as FLOATS

from .drawing import LAYOUTS, Drawing, Operand, Value

Array = Value | Operand
Proposal = tuple[dict[str, Any], dict[str, Any]]
"""What stands at the ports of a method, and its attributes."""

CHANNELS = (8, 8, 16, 16, 24, 32, 32, 64, 3, 5, 7)
HEADS = (1, 2, 3), (1, 2, 4, 6), (16, 24, 32, 48, 33), (8, 16, 32, 64)
"""Of arrays with heads: examples, heads, tokens, and sizes of a head."""
_BATCHES = (1, 2, 2, 4, 8, 3)
_SPATIAL = {1: (12, 16, 27, 32), 2: (6, 7, 8, 10, 12, 14), 3: (3, 4, 5, 6)}
_COLUMNS = (16, 32, 40, 64, 96, 33)
_NUMBERS = (0.5, 2.0, -1.0, 0.125, 3, 1, 1.5, -0.25)
_RESULTS = (None, *FLOATS, "int8", "float8_e4m3fn", "float8_e5m2")


def shape(rng: random.Random) -> Shape:
    """An image's, matrices', a row's, one with heads."""
    rank = rng.choice((4, 4, 4, 4, 3, 3, 3, 5, 2, 1))
    if rank == 4 and rng.random() < 0.2:
        return heads(rng)
    if rank < 3:
        return tuple(rng.choice(_COLUMNS) for _ in range(rank))
    if rank == 3 and rng.random() < 0.7:
        return rng.choice(_BATCHES), rng.choice(_COLUMNS), rng.choice(_COLUMNS)
    spatial = [rng.choice(_SPATIAL[rank - 2]) for _ in range(rank - 2)]
    return rng.choice(_BATCHES), rng.choice(CHANNELS), *spatial


def heads(rng: random.Random) -> Shape:
    """Tokens by head: (B, H, S, D)."""
    return tuple(map(rng.choice, HEADS))


def broadcast(rng: random.Random, full: Shape) -> Shape:
    """The shape itself, or one that broadcasts to it: a bias's, a row's, a scalar's."""
    rank = len(full)
    some = [axis for axis in range(rank) if rng.random() < 0.5]
    usual = (range(rank), (1,), (0, *range(2, rank)), (rank - 1,), (0, 1), (), some)
    (kept,) = rng.choices(usual, (8, 4, 1, 1, 1, 1, 1))
    if rng.random() < 0.03:
        return ()
    return tuple(size if axis in kept else 1 for axis, size in enumerate(full))


def layout(rng: random.Random) -> str | None:
    """How a tensor lies in memory: nearly always nothing is stated."""
    return rng.choice(list(LAYOUTS)) if rng.random() < 0.04 else None


def result_dtype(drawing: Drawing) -> str | None:
    """What a result is rounded to: mostly nothing is stated, or the graph's main dtype."""
    if drawing.rng.random() < 0.3:
        return drawing.dtype
    return drawing.rng.choices(_RESULTS, (40, 1, 1, 1, 0.5, 0.5, 0.5))[0]


def new_operand(drawing: Drawing, of: Shape, dtypes: Any = FLOATS, positive: Any = 0) -> Operand:
    """A new operand, mostly of the graph's main dtype."""
    rng, kind = drawing.rng, drawing.rng.random()
    choice = [drawing.dtype] if kind < 0.86 else FLOATS if kind < 0.94 else dtypes
    allowed = [dtype for dtype in choice if dtype in dtypes] or dtypes
    allowed = [dtype for dtype in allowed if dtype != "int64"]  # JAX's arrays have 32 bits
    return Operand(of, rng.choice(allowed), positive=bool(positive), layout=layout(rng))


def weight(drawing: Drawing, beside: Array, of: Shape) -> Operand:
    """A new operand of a product, nearly always of the dtype of the other one."""
    rng = drawing.rng
    dtype = beside.dtype if rng.random() < 0.94 else rng.choice(FLOATS)
    return Operand(of, dtype, layout=layout(rng))


def rather_new(rng: random.Random, values: list[Value]) -> Value:
    """One of some values, rather one that nothing uses yet."""
    weights = [0.2 if v.operand else 1.0 if v.uses or v.aside else 5.0 for v in values]
    return rng.choices(values, weights)[0]


def pick(drawing: Drawing, node: Any, ranks: Any = range(9), positive: bool = False) -> Array:
    """A value so far, or a new operand, or GraphError: where no value fits, other operations are
    mostly better."""
    rng = drawing.rng
    found = drawing.known(lambda v: v.dtype in node.dtypes and len(v.shape) in ranks)
    found = [value for value in found if value.positive >= positive]
    if found and rng.random() > 0.06:
        return rather_new(rng, found)
    if drawing.steps and not found and rng.random() < 0.6:
        raise GraphError("no value fits")
    wanted = drawing.shape if rng.random() < 0.8 else shape(rng)
    while len(wanted) not in ranks:
        wanted = shape(rng)
    return new_operand(drawing, wanted, [t for t in node.dtypes if t != "float64"], positive)


def beside(drawing: Drawing, first: Array, dtypes: tuple[str, ...], positive: bool) -> Any:
    """What an operation on each element takes beside its first operand."""
    rng, kind = drawing.rng, drawing.rng.random()
    if kind < 0.15 and "bool" not in dtypes:
        return rng.choice([n for n in _NUMBERS if n > 0 or not positive])

    found = drawing.known(lambda v: v.dtype in dtypes and v.positive >= positive)
    found = [value for value in found if alike(value.shape, first.shape)]
    if kind < 0.65 and found:
        return rng.choice(found)
    return new_operand(drawing, broadcast(rng, first.shape), dtypes, positive)


def alike(a: Shape, b: Shape) -> bool:
    """Whether shapes of one rank broadcast."""
    return len(a) == len(b) and all(x == y or 1 in (x, y) for x, y in zip(a, b, strict=True))
