"""One random operation more, of any node of the registry.

What a node takes is read off its ports, element types and examples, but for those in ``DRAWS``,
whose attributes depend on their operands' shapes. What does not fit the node refuses.
"""

from __future__ import annotations

import numbers
import random
from typing import Any

from jax_cudnn._core.errors import GraphError, GraphTypeError
from jax_cudnn._core.graph.dims import Shape
from jax_cudnn._core.graph.node import REGISTRY, Node

from . import layers
from .drawing import Drawing, Operand, Value
from .operands import (
    CHANNELS,
    Array,
    Proposal,
    beside,
    broadcast,
    layout,
    new_operand,
    pick,
    result_dtype,
    weight,
)

_SHARES = {
    "product": 0.22,
    "each element": 0.43,
    "movement": 0.13,
    "normalization": 0.1,
    "attention": 0.04,
    "other": 0.12,
}
_TRIES = 6


def kind(node: type[Node]) -> str:
    """To which share a node belongs; one of no share is not drawn: attention of float8's."""
    if node.row_major:
        return "attention" if node.method in layers.DRAWS else ""
    if node.product:
        return "product"
    if node.method in layers.DRAWS:
        return "normalization"
    if node.moves or node.leftover:
        return "movement"
    return "other" if node.method in DRAWS else "each element"


def add_node(drawing: Drawing) -> None:
    """Adds one random operation; of what cannot be written another is drawn."""
    rng = drawing.rng
    while True:
        (share,) = rng.choices(list(_SHARES), list(_SHARES.values()))
        nodes = [node for node in REGISTRY.values() if kind(node) == share]
        (node,) = rng.choices(nodes, [len(node.examples) ** 0.5 for node in nodes])
        draw = DRAWS.get(node.method) or (_elementwise if node.ports.is_elementwise else _example)
        for _ in range(_TRIES):  # then another node: this one may be impossible here
            try:
                ports, attributes = draw(drawing, node)
                dtype = result_dtype(drawing)
                if share == "attention" and rng.random() < 0.6:  # cuDNN writes no other
                    dtype = ports["q"].dtype
                drawing.add(node.method, ports, attributes, dtype, layout(rng))
                return
            except (GraphError, GraphTypeError):
                continue


def _elementwise(drawing: Drawing, node: type[Node]) -> Proposal:
    rng, names = drawing.rng, node.ports.input_names
    example = rng.choice(node.examples)
    main = rng.choice([name for name in names if name not in example.dtypes])
    ports: dict[str, Any] = {main: pick(drawing, node, positive=main in example.positive)}
    first = ports[main]
    for name in names:
        if name == main:
            continue
        if dtype := example.dtypes.get(name):  # a mask
            rank = len(first.shape)
            known = drawing.known(lambda v, of=(dtype, rank): (v.dtype, len(v.shape)) == of)
            known = known if rng.random() < 0.8 else []
            ports[name] = rng.choice([*known, Operand(broadcast(rng, first.shape), dtype)])
        else:
            ports[name] = beside(drawing, first, node.dtypes, name in example.positive)
    return {name: ports[name] for name in names}, dict(example.attributes)


def _example(drawing: Drawing, node: type[Node]) -> Proposal:
    """Operands of an example's shapes, and its numbers."""
    example = drawing.rng.choice(node.examples)

    def operand(name: str, of: Any) -> Any:
        if isinstance(of, numbers.Number | list):
            return [operand(name, one) for one in of] if isinstance(of, list) else of
        dtype = example.dtypes.get(name, example.dtype)
        return Operand(of, dtype, positive=name in example.positive)

    ports = {name: operand(name, of) for name, of in example.inputs.items()}
    return ports, dict(example.attributes)


# -- products --------------------------------------------------------------------------------------


def _is_image(rank: int) -> bool:
    return 3 <= rank <= 5


def _matmul(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    a = pick(drawing, node, lambda rank: rank == 3)
    batch, _, k = a.shape
    known = drawing.known(lambda v: len(v.shape) == 3 and v.shape[1] == k)
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
        stride = [rng.choice((2, 2, 3)) if rng.random() < 0.25 else 1] * rank
        dilation = [2 if rng.random() < 0.12 else 1] * rank
        reach = [(r - 1) * d for r, d in zip(self.sizes, dilation, strict=True)]
        same = rng.random() < 0.7
        before = after = [size // 2 if same else 0 for size in reach]
        if rng.random() < 0.15:
            after = [rng.randint(0, size) for size in reach]
        mode = "CONVOLUTION" if rng.random() < 0.06 else "CROSS_CORRELATION"
        self.attributes: dict[str, Any] = {"padding": before}
        if after != before:
            self.attributes = {"pre_padding": before, "post_padding": after}
        self.attributes |= {"stride": stride, "dilation": dilation, "convolution_mode": mode}
        lost = [d * (r - 1) + 1 for d, r in zip(dilation, self.sizes, strict=True)]
        self._lost = [x - a - b for x, a, b in zip(lost, before, after, strict=True)]
        self._stride = stride

    def forward(self, image: Shape) -> list[int]:
        """The spatial sizes of the result, for those of the image."""
        columns = zip(image, self._lost, self._stride, strict=True)
        return [(x - lost) // s + 1 for x, lost, s in columns]

    def image(self, result: Shape, rng: random.Random) -> list[int]:
        """Spatial sizes of an image that gives this result."""
        columns = zip(result, self._lost, self._stride, strict=True)
        return [(y - 1) * s + lost + rng.randrange(s) for y, lost, s in columns]


def _groups(rng: random.Random, *channels: int) -> int:
    """Mostly one group; else as many as the channels allow, or some."""
    fitting = [n for n in (2, 4, 8, *channels) if not any(c % n for c in channels)]
    return rng.choice(fitting) if fitting and rng.random() < 0.25 else 1


def _conv_fprop(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    image = pick(drawing, node, _is_image)
    c = image.shape[1]
    count = _groups(rng, c)
    k = count if count == c and rng.random() < 0.7 else count * rng.choice((1, 2, 8, 16))
    k = rng.choice(CHANNELS) if count == 1 else k
    window = Window(rng, len(image.shape) - 2)
    of = (k, c // count, *window.sizes)
    known = drawing.known(lambda v: (v.shape, v.dtype) == (of, image.dtype))
    filter = rng.choice(known) if known and rng.random() < 0.5 else weight(drawing, image, of)
    return {"image": image, "weight": filter}, window.attributes


def _conv_dgrad(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    loss = pick(drawing, node, _is_image)
    n, k, *y = loss.shape
    count = _groups(rng, k)
    i = 1 if count == k else rng.choice((4, 8, 16, 24, 3))
    window = Window(rng, len(y))
    image = [n, i * count, *window.image(tuple(y), rng)]
    filter = weight(drawing, loss, (k, i, *window.sizes))
    return {"loss": loss, "filter": filter}, window.attributes | {"out_dims": image}


def _conv_wgrad(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    image = pick(drawing, node, _is_image)
    n, c, *x = image.shape
    window = Window(rng, len(x))
    y = tuple(window.forward(tuple(x)))
    known = drawing.known(lambda v: v.shape[:1] + v.shape[2:] == (n, *y))
    loss: Array = weight(drawing, image, (n, rng.choice((c, *CHANNELS)), *y))
    loss = rng.choice(known) if known and rng.random() < 0.6 else loss
    count = _groups(rng, c, loss.shape[1])
    out = [loss.shape[1], c // count, *window.sizes]
    return {"image": image, "loss": loss}, window.attributes | {"out_dims": out}


# -- reductions and movement -----------------------------------------------------------------------


def _attribute(drawing: Drawing, node: type[Node], name: str) -> Any:
    """A value that the examples of a node give an attribute."""
    examples = [e.attributes[name] for e in node.examples if name in e.attributes]
    return drawing.rng.choice(list(dict.fromkeys(examples)))


def _reduction(drawing: Drawing, node: type[Node]) -> Proposal:
    rng, value = drawing.rng, pick(drawing, node)
    kept = rng.randrange(2 ** len(value.shape) - 1)  # a bit for each dimension; never all
    if rng.random() < 0.3:
        kept = rng.choice((0, 2, 1, 2 ** (len(value.shape) - 1) - 1))
    out = [size if kept >> axis & 1 else 1 for axis, size in enumerate(value.shape)]
    return {"input": value}, {"mode": _attribute(drawing, node, "mode"), "out_dims": out}


def _genstats(drawing: Drawing, node: type[Node]) -> Proposal:
    return {"input": pick(drawing, node, lambda rank: rank >= 3)}, {}


def _gen_index(drawing: Drawing, node: type[Node]) -> Proposal:
    value = pick(drawing, node)
    return {"input": value}, {"axis": drawing.rng.randrange(len(value.shape))}


def _reshape(drawing: Drawing, node: type[Node]) -> Proposal:
    """Dimensions merged or split, to a rank that other operations take."""
    rng, value = drawing.rng, pick(drawing, node)
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
    value = pick(drawing, node, lambda rank: rank >= 2)
    axes = list(range(len(value.shape)))
    if drawing.rng.random() < 0.5:
        axes[-2:] = axes[:-3:-1]
    else:
        drawing.rng.shuffle(axes)
    return {"input": value}, {"permutation": axes}


def _slice(drawing: Drawing, node: type[Node]) -> Proposal:
    rng, value = drawing.rng, pick(drawing, node)
    slices = [slice(None)] * len(value.shape)
    for axis in rng.sample(range(len(slices)), rng.choice((1, 1, min(2, len(slices))))):
        start = rng.randrange(value.shape[axis])
        stop = rng.randint(start + 1, value.shape[axis])
        slices[axis] = slice(start, stop, rng.choice((None, None, 2)))
    return {"input": value}, {"slices": slices}


def _concatenate(drawing: Drawing, node: type[Node]) -> Proposal:
    rng, first = drawing.rng, pick(drawing, node)
    axis = rng.randrange(len(first.shape))

    def fits(v: Value) -> bool:
        pairs = [*zip(v.shape, first.shape, strict=False)]
        same = (v.dtype, len(v.shape)) == (first.dtype, len(first.shape))
        return same and all(a == b or i == axis for i, (a, b) in enumerate(pairs))

    inputs: list[Array] = [first]
    for _ in range(rng.choice((1, 1, 2))):
        size = rng.choice((1, 8, first.shape[axis]))
        of = (*first.shape[:axis], size, *first.shape[axis + 1 :])
        known = drawing.known(fits) if rng.random() < 0.6 else []
        inputs.append(rng.choice(known or [new_operand(drawing, of, (first.dtype,))]))
    rng.shuffle(inputs)
    return {"inputs": inputs}, {"axis": rng.choice((axis, axis - len(first.shape)))}


def _resample(drawing: Drawing, node: type[Node]) -> Proposal:
    rng, value = drawing.rng, pick(drawing, node, _is_image)
    window = [rng.choice((1, 2, 2, 3)) for _ in value.shape[2:]]
    mode = _attribute(drawing, node, "resample_mode")
    attributes: dict[str, Any] = {"resample_mode": mode, "window": window}
    if rng.random() < 0.6:
        attributes["stride"] = [rng.choice((1, 2, 2, 3)) for _ in window]
    for name in ("pre_padding", "post_padding"):
        if rng.random() < 0.4:
            attributes[name] = [rng.randrange(size) for size in window]
    return {"input": value}, attributes


DRAWS = {
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
    **layers.DRAWS,
}
