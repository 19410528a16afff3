"""One random operation more, of any node of the registry.

What a node takes is read off its ports, element types and examples, but for those in ``DRAWS``,
whose attributes depend on their operands' shapes. What does not fit the node refuses.
"""

import numbers
import random
from typing import Any

from jax_cudnn._core.errors import GraphError, GraphTypeError
from jax_cudnn._core.graph.node import Node, registry
from jax_cudnn._core.graph.planned import ROW_MAJOR

from . import layers
from .drawing import Drawing, Operand
from .operands import (
    CHANNELS,
    Proposal,
    beside,
    broadcast,
    layout,
    new_operand,
    pick,
    result_dtype,
    weight,
)

_KINDS = ("product", "each element", "movement", "normalization", "attention", "other")
_SHARES = (0.22, 0.37, 0.11, 0.14, 0.07, 0.09)
_TRIES = 6


def kind(node: type[Node]) -> str:
    """To which share a node belongs; one of no share is not drawn: attention of float8's."""
    if node.anchor.order == ROW_MAJOR:
        return "attention" if node.method in layers.DRAWS else ""
    if node.anchor.product:
        return "product"
    if node.method in layers.DRAWS:
        return "normalization"
    made = node.create(**node.examples[0].attributes)
    if made.algebra.moves or node.xla_only:
        return "movement"
    return "other" if node.method in DRAWS else "each element"


def add_node(drawing: Drawing) -> None:
    """Adds one random operation; of what cannot be written another is drawn."""
    rng = drawing.rng
    while True:
        (share,) = rng.choices(_KINDS, _SHARES)
        nodes = [node for node in registry().values() if kind(node) == share]
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
        if name != main and (dtype := example.dtypes.get(name)):  # a mask
            known = drawing.known(lambda v, of=(dtype, first.shape): (v.dtype, v.shape) == of)
            ports[name] = rng.choice([*known, Operand(broadcast(rng, first.shape), dtype)])
        elif name != main:
            ports[name] = beside(
                drawing, first, [t for t in node.dtypes if t != "float64"], name in example.positive
            )
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


def _matmul(drawing: Drawing, node: type[Node]) -> Proposal:
    rng, a = drawing.rng, pick(drawing, node, (3,))
    batch, _, k = a.shape
    known = drawing.known(lambda v: len(v.shape) == 3 and v.shape[1] == k)
    of = (rng.choice((batch, batch, 1, 4)), k, rng.choice((*CHANNELS, 96, 33)))
    return {"A": a, "B": rng.choice([*known[-1:], weight(drawing, a, of)])}, {}


class Window:
    """The spatial attributes of a convolution, at random."""

    def __init__(self, rng: random.Random, rank: int):
        self.sizes = [rng.choice((1, 1, 2, 3, 3, 3, 5)) for _ in range(rank)]
        if rng.random() < 0.6:
            self.sizes = [rng.choice((1, 3, 3))] * rank
        stride = rng.choice((2, 2, 3)) if rng.random() < 0.25 else 1
        dilation = 2 if rng.random() < 0.12 else 1
        reach = [(r - 1) * dilation for r in self.sizes]
        same = rng.random() < 0.7
        before = after = [size // 2 if same else 0 for size in reach]
        self.attributes: dict[str, Any] = {"padding": before}
        if rng.random() < 0.15:
            after = [rng.randint(0, size) for size in reach]
            self.attributes = {"pre_padding": before, "post_padding": after}
        mode = "CONVOLUTION" if rng.random() < 0.06 else "CROSS_CORRELATION"
        self.attributes |= {"stride": [stride] * rank, "dilation": [dilation] * rank}
        self.attributes["convolution_mode"] = mode
        self.stride = stride
        self.lost = [n + 1 - a - b for n, a, b in zip(reach, before, after, strict=True)]

    def forward(self, image: Any) -> list[int]:
        """The spatial sizes of the result, for those of the image."""
        return [(x - lost) // self.stride + 1 for x, lost in zip(image, self.lost, strict=True)]

    def image(self, result: Any, rng: random.Random) -> list[int]:
        """Spatial sizes of an image that gives this result."""
        extra = [lost + rng.randrange(self.stride) for lost in self.lost]
        return [(y - 1) * self.stride + more for y, more in zip(result, extra, strict=True)]


def _groups(rng: random.Random, *channels: int) -> int:
    """Mostly one group; else as many as the channels allow, or some."""
    fitting = [n for n in (2, 4, 8, *channels) if not any(c % n for c in channels)]
    return rng.choice(fitting) if fitting and rng.random() < 0.25 else 1


def _convolution(drawing: Drawing, node: type[Node]) -> Proposal:
    """An image, a loss for its gradient, or both for the filter's."""
    rng, first = drawing.rng, pick(drawing, node, (3, 4, 5))
    n, c, *sizes = first.shape
    window, count = Window(rng, len(sizes)), _groups(rng, c)
    if node.method == "conv_dgrad":
        i = 1 if count == c else rng.choice((4, 8, 16, 24, 3))
        out = {"out_dims": [n, i * count, *window.image(sizes, rng)]}
        filter = weight(drawing, first, (c, i, *window.sizes))
        return {"loss": first, "filter": filter}, window.attributes | out
    if node.method == "conv_fprop":
        k = count if count == c and rng.random() < 0.7 else count * rng.choice((1, 2, 8, 16))
        of = (rng.choice(CHANNELS) if count == 1 else k, c // count, *window.sizes)
        return {"image": first, "weight": weight(drawing, first, of)}, window.attributes
    y = tuple(window.forward(sizes))
    known = drawing.known(lambda v: v.shape[:1] + v.shape[2:] == (n, *y))
    new = weight(drawing, first, (n, rng.choice((c, *CHANNELS)), *y))
    loss = rng.choice([*known[-1:], new])
    k = loss.shape[1]
    out = {"out_dims": [k, c // _groups(rng, c, k), *window.sizes]}
    return {"image": first, "loss": loss}, window.attributes | out


def _attribute(rng: random.Random, node: type[Node], name: str) -> Any:
    """A value that the examples of a node give an attribute."""
    return rng.choice([*{e.attributes[name]: 0 for e in node.examples if name in e.attributes}])


def _reduction(rng: random.Random, sizes: list[int], node: type[Node]) -> dict[str, Any]:
    gone = rng.sample(range(len(sizes)), rng.randint(1, len(sizes)))
    out = [1 if axis in gone else size for axis, size in enumerate(sizes)]
    return {"mode": _attribute(rng, node, "mode"), "out_dims": out}


def _reshape(rng: random.Random, sizes: list[int], node: type[Node]) -> dict[str, Any]:
    """Dimensions merged or split, to a rank that other operations take."""
    if len(sizes) > 3 or (len(sizes) > 1 and rng.random() < 0.5):
        at = rng.choice((len(sizes) - 2, len(sizes) - 2, rng.randrange(len(sizes) - 1)))
        sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
    else:
        at = rng.randrange(len(sizes))
        part = rng.choice([n for n in (1, 2, 4, 8, 3, 16) if sizes[at] % n == 0])
        sizes[at : at + 1] = [sizes[at] // part, part]
    return {"out_dims": sizes}


def _transpose(rng: random.Random, sizes: list[int], node: type[Node]) -> dict[str, Any]:
    axes = [*range(len(sizes))]
    last = [*axes[:-2], *axes[:-3:-1]]
    return {"permutation": last if rng.random() < 0.5 else rng.sample(axes, len(axes))}


def _slice(rng: random.Random, sizes: list[int], node: type[Node]) -> dict[str, Any]:
    slices, axis = [slice(None)] * len(sizes), rng.randrange(len(sizes))
    start = rng.randrange(sizes[axis])
    end, step = rng.randint(start + 1, sizes[axis]), rng.choice((None, None, 2))
    slices[axis] = slice(start, end, step)
    return {"slices": slices}


def _resample(rng: random.Random, sizes: list[int], node: type[Node]) -> dict[str, Any]:
    window = [rng.choice((1, 2, 2, 3)) for _ in sizes[2:]]
    found = {"resample_mode": _attribute(rng, node, "resample_mode"), "window": window}
    if rng.random() < 0.6:
        found["stride"] = [rng.choice((1, 2, 2, 3)) for _ in window]
    for name in ("pre_padding", "post_padding"):
        if rng.random() < 0.4:
            found[name] = [rng.randrange(size) for size in window]
    return found


_ATTRIBUTES: dict[str, tuple[Any, Any]] = {
    "reduction": (range(9), _reduction),
    "genstats": ((3, 4, 5), lambda rng, sizes, node: {}),
    "gen_index": (range(1, 9), lambda rng, sizes, node: {"axis": rng.randrange(len(sizes))}),
    "reshape": (range(9), _reshape),
    "transpose": (range(2, 9), _transpose),
    "slice": (range(9), _slice),
    "resample": ((3, 4, 5), _resample),
}


def _of_one(drawing: Drawing, node: type[Node]) -> Proposal:
    ranks, attributes = _ATTRIBUTES[node.method]
    value = pick(drawing, node, ranks)
    return {"input": value}, attributes(drawing.rng, [*value.shape], node)


def _concatenate(drawing: Drawing, node: type[Node]) -> Proposal:
    rng, first = drawing.rng, pick(drawing, node, range(1, 9))
    axis = rng.randrange(len(first.shape))
    of = (*first.shape[:axis], rng.choice((1, 8)), *first.shape[axis + 1 :])
    known = drawing.known(lambda v: (v.dtype, v.shape) == (first.dtype, first.shape))
    inputs = [first, *known[-1:], new_operand(drawing, of, (first.dtype,))]
    rng.shuffle(inputs)
    return {"inputs": inputs}, {"axis": rng.choice((axis, axis - len(first.shape)))}


DRAWS = {
    **dict.fromkeys(("conv_fprop", "conv_dgrad", "conv_wgrad"), _convolution),
    **dict.fromkeys(_ATTRIBUTES, _of_one),
    **{"matmul": _matmul, "concatenate": _concatenate},
    **layers.DRAWS,
}
