"""Operands and attributes of the nodes whose attributes depend on their operands' shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from jax_cudnn._core.graph.dims import Shape
from jax_cudnn._core.graph.node import Node

from . import attentions, normalizations
from .drawing import Drawing, Operand, Value
from .operands import CHANNELS, Proposal, new_operand, pick, weight


def attribute_values(node: type[Node], name: str) -> list[Any]:
    """The values that the examples of a node give an attribute, each once."""
    return list(dict.fromkeys(e.attributes[name] for e in node.examples if name in e.attributes))


def _is_image(rank: int) -> bool:
    return 3 <= rank <= 5


# -- products --------------------------------------------------------------------------------------


def _matmul(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    a = pick(drawing, node, lambda rank: rank == 3)
    batch, _, k = a.shape
    known = [v for v in drawing.values if len(v.shape) == 3 and v.shape[1] == k]
    if known and rng.random() < 0.5:
        return {"A": a, "B": rng.choice(known)}, {}
    of = (rng.choice((batch, batch, 1, 4)), k, rng.choice((*CHANNELS, 96, 33)))
    return {"A": a, "B": weight(drawing, a, of)}, {}


class Window:
    """The spatial attributes of a convolution, at random."""

    def __init__(self, rng: random.Random, rank: int):
        self.sizes = [rng.choice((1, 1, 2, 3, 3, 3, 5)) for _ in range(rank)]
        if rng.random() < 0.6:
            self.sizes = [rng.choice((1, 3, 3))] * rank
        self.stride = [rng.choice((2, 2, 3)) if rng.random() < 0.25 else 1] * rank
        self.dilation = [2 if rng.random() < 0.12 else 1] * rank
        reach = [(r - 1) * d for r, d in zip(self.sizes, self.dilation, strict=True)]
        same = rng.random() < 0.7
        self.before = [size // 2 if same else 0 for size in reach]
        self.after = self.before
        if rng.random() < 0.15:
            self.after = [rng.randint(0, size) for size in reach]
        self.mode = "CONVOLUTION" if rng.random() < 0.06 else "CROSS_CORRELATION"

    @property
    def attributes(self) -> dict[str, Any]:
        padding: dict[str, Any] = {"padding": self.before}
        if self.after != self.before:
            padding = {"pre_padding": self.before, "post_padding": self.after}
        return padding | {
            "stride": self.stride,
            "dilation": self.dilation,
            "convolution_mode": self.mode,
        }

    def forward(self, image: Shape) -> list[int]:
        """The spatial sizes of the result, for those of the image."""
        return [
            (x + a + b - d * (r - 1) - 1) // s + 1
            for x, r, a, b, s, d in zip(image, *self._columns, strict=True)
        ]

    def image(self, result: Shape, rng: random.Random) -> list[int]:
        """Spatial sizes of an image that gives this result."""
        return [
            (y - 1) * s + d * (r - 1) + 1 - a - b + rng.randrange(s)
            for y, r, a, b, s, d in zip(result, *self._columns, strict=True)
        ]

    @property
    def _columns(self) -> tuple[list[int], ...]:
        return self.sizes, self.before, self.after, self.stride, self.dilation


def groups(rng: random.Random, *channels: int) -> int:
    """Mostly one group; else as many as the channels allow, or some."""
    fitting = [n for n in (2, 4, 8, *channels) if not any(c % n for c in channels)]
    return rng.choice(fitting) if fitting and rng.random() < 0.25 else 1


def _conv_fprop(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    image = pick(drawing, node, _is_image)
    c = image.shape[1]
    count = groups(rng, c)
    k = count if count == c and rng.random() < 0.7 else count * rng.choice((1, 2, 8, 16))
    k = rng.choice(CHANNELS) if count == 1 else k
    window = Window(rng, len(image.shape) - 2)
    of = (k, c // count, *window.sizes)
    known = [v for v in drawing.values if v.shape == of and v.dtype == image.dtype]
    filter = rng.choice(known) if known and rng.random() < 0.5 else weight(drawing, image, of)
    return {"image": image, "weight": filter}, window.attributes


def _conv_dgrad(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    loss = pick(drawing, node, _is_image)
    n, k, *y = loss.shape
    count = groups(rng, k)
    i = 1 if count == k else rng.choice((4, 8, 16, 24, 3))
    window = Window(rng, len(y))
    image = (n, i * count, *window.image(tuple(y), rng))
    filter = weight(drawing, loss, (k, i, *window.sizes))
    return {"loss": loss, "filter": filter}, window.attributes | {"out_dims": list(image)}


def _conv_wgrad(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    image = pick(drawing, node, _is_image)
    n, c, *x = image.shape
    window = Window(rng, len(x))
    y = tuple(window.forward(tuple(x)))
    known = [v for v in drawing.values if v.shape[:1] + v.shape[2:] == (n, *y)]
    loss: Value | Operand | None = rng.choice(known) if known and rng.random() < 0.6 else None
    if loss is None:
        loss = weight(drawing, image, (n, rng.choice((c, *CHANNELS)), *y))
    count = groups(rng, c, loss.shape[1])
    out = [loss.shape[1], c // count, *window.sizes]
    return {"image": image, "loss": loss}, window.attributes | {"out_dims": out}


# -- reductions ------------------------------------------------------------------------------------


def _reduction(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    value = pick(drawing, node)
    mode = rng.choice(attribute_values(node, "mode"))
    kept = rng.randrange(2 ** len(value.shape) - 1)  # a bit for each dimension; never all
    if rng.random() < 0.3:
        kept = rng.choice((0, 2, 1, 2 ** (len(value.shape) - 1) - 1))
    out = [size if kept >> axis & 1 else 1 for axis, size in enumerate(value.shape)]
    return {"input": value}, {"mode": mode, "out_dims": out}


def _genstats(drawing: Drawing, node: type[Node]) -> Proposal:
    return {"input": pick(drawing, node, lambda rank: rank >= 3)}, {}


def _gen_index(drawing: Drawing, node: type[Node]) -> Proposal:
    value = pick(drawing, node)
    return {"input": value}, {"axis": drawing.rng.randrange(len(value.shape))}


# -- movement --------------------------------------------------------------------------------------


def _reshape(drawing: Drawing, node: type[Node]) -> Proposal:
    """Dimensions merged or split, to a rank that other operations take."""
    rng = drawing.rng
    value = pick(drawing, node)
    sizes = list(value.shape)
    if len(sizes) > 3 or (len(sizes) > 1 and rng.random() < 0.5):
        at = rng.choice((len(sizes) - 2, len(sizes) - 2, rng.randrange(len(sizes) - 1)))
        sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
    else:
        at = rng.randrange(len(sizes))
        part = rng.choice([n for n in (1, 2, 4, 8, 3, 16) if sizes[at] % n == 0])
        sizes[at : at + 1] = [sizes[at] // part, part]
    return {"input": value}, {"out_dims": sizes}


def _transpose(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    value = pick(drawing, node, lambda rank: rank >= 2)
    axes = list(range(len(value.shape)))
    if rng.random() < 0.5:
        axes[-2:] = axes[:-3:-1]
    else:
        rng.shuffle(axes)
    return {"input": value}, {"permutation": axes}


def _slice(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    value = pick(drawing, node)
    slices = [slice(None)] * len(value.shape)
    for axis in rng.sample(range(len(slices)), rng.choice((1, 1, min(2, len(slices))))):
        start = rng.randrange(value.shape[axis])
        stop = rng.randint(start + 1, value.shape[axis])
        slices[axis] = slice(start, stop, rng.choice((None, None, 2)))
    return {"input": value}, {"slices": slices}


def _concatenate(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    first = pick(drawing, node)
    axis = rng.randrange(len(first.shape))

    def others(of: Shape) -> Shape:
        return (*of[:axis], *of[axis + 1 :])

    inputs: list[Value | Operand] = [first]
    for _ in range(rng.choice((1, 1, 2))):
        known = [v for v in drawing.values if v.dtype == first.dtype]
        known = [v for v in known if len(v.shape) == len(first.shape)]
        known = [v for v in known if others(v.shape) == others(first.shape)]
        size = rng.choice((1, 8, first.shape[axis]))
        of = (*first.shape[:axis], size, *first.shape[axis + 1 :])
        inputs.append(
            rng.choice(known)
            if known and rng.random() < 0.6
            else new_operand(drawing, of, (first.dtype,))
        )
    rng.shuffle(inputs)
    return {"inputs": inputs}, {"axis": rng.choice((axis, axis - len(first.shape)))}


def _resample(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    value = pick(drawing, node, _is_image)
    window = [rng.choice((1, 2, 2, 3)) for _ in value.shape[2:]]
    attributes: dict[str, Any] = {
        "resample_mode": rng.choice(attribute_values(node, "resample_mode")),
        "window": window,
    }
    if rng.random() < 0.6:
        attributes["stride"] = [rng.choice((1, 2, 2, 3)) for _ in window]
    for name in ("pre_padding", "post_padding"):
        if rng.random() < 0.4:
            attributes[name] = [rng.randrange(size) for size in window]
    return {"input": value}, attributes


DRAWS: dict[str, Callable[[Drawing, type[Node]], Proposal]] = {
    "matmul": _matmul,
    "conv_fprop": _conv_fprop,
    "conv_dgrad": _conv_dgrad,
    "conv_wgrad": _conv_wgrad,
    "reduction": _reduction,
    "genstats": _genstats,
    "gen_index": _gen_index,
    "reshape": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "concatenate": _concatenate,
    "resample": _resample,
    **attentions.DRAWS,
    **normalizations.DRAWS,
}
"""What may stand at the ports of a method, with attributes; what does not fit the node refuses."""
