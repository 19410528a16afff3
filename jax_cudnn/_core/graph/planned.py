"""What planning asks of an operation: how cuDNN is given it, and where it is not.

This half of the Node contract has a default for all but ``method``; ``node.py`` holds the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .dims import Shape

if TYPE_CHECKING:
    import jax

    from .node import Node
    from .spec import GraphSpec, Tensor

# Kinds of broadcasts that cuDNN computes rightly, see planning/limits.py.
ANY, ROWS_AND_CHANNELS, ONE_ELEMENT, NUMBERS_ONLY = "any", "rows, channels", "one", "numbers"


class OtherForm(NamedTuple):
    """A node with the results of another one where this very engine of cuDNN's, with these knobs,
    runs it; from this version of cuDNN on."""

    node: Node
    engine: int
    knobs: Mapping[str, int]
    cudnn: int


class View(NamedTuple):
    """A tensor as which cuDNN sees an array at a node's port, or a part of one.

    ``port`` is the one of pygraph's method, ``strides`` are in elements, and ``offset`` is the
    element of the array with which the tensor begins.
    """

    port: str
    dims: Shape
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Planned:
    """What plans of a node are made by; the attributes that hold for a graph are its anchor's."""

    method: ClassVar[str]
    """pygraph's method."""
    requires: ClassVar[str] = ""
    """Minimum cuDNN, SM and shape rules, in words a user can read."""
    anchor: ClassVar[bool] = False
    """Whether cuDNN builds an engine around this node (one anchor a graph)."""
    slow: ClassVar[tuple[int, ...]] = ()
    """Numbers of cuDNN's engines that are measured to be slower than XLA around this anchor."""
    writes_all: ClassVar[bool] = False
    """Whether a plan writes every result of this node, also one that nothing reads."""
    broadcasts_around: ClassVar[str] = ROWS_AND_CHANNELS
    """Which operands pointwise operations around this anchor may broadcast, see :mod:`.limits`."""
    prologue: ClassVar[str] = ""
    """Whether cuDNN computes operands of this anchor in one plan with it: ANY, "" for never, or the
    method of a node that the graph then holds, too."""
    returns_prologue: ClassVar[bool] = False
    """Whether the plan can write what it computes before this anchor, too."""
    masks: ClassVar[tuple[str, ...]] = ()
    """Ports with a mask: bytes to XLA, bits to cuDNN, see ``ops/masks.py``."""
    takes_masks: ClassVar[bool] = False
    """Whether masks of bits may stand beside this anchor, see ``ops/masks.py``."""
    apart: ClassVar[bool] = False
    """Whether an operand at several ports is several tensors to cuDNN: pygraph's attention turns
    the dims of those that it reads transposed, and would for its other ports, too."""
    least_rank: ClassVar[int] = 0
    """cuDNN sees tensors of lower rank with dimensions of 1 put in after the second."""
    channels_last: ClassVar[bool] = False
    """Whether tensors of every rank lie channels-last in memory."""
    row_major: ClassVar[bool] = False
    """Whether tensors lie row-major in memory."""
    merges: ClassVar[bool] = False
    """Whether tensors lie row-major around this anchor, and cuDNN sees neighbouring dimensions that
    no tensor of the graph tells apart as one."""
    matrices: ClassVar[bool] = False
    """Whether the last two dimensions are a matrix around this anchor, tensors lie row-major, and
    cuDNN sees all dimensions in front of a matrix as one."""
    integers: ClassVar[tuple[str, ...]] = ()
    """Input ports of int32 that say where elements of others lie, see :meth:`bounded`."""
    initial: ClassVar[Mapping[str, float]] = {}
    """Results of which a plan may write a part only, and the number that the rest has."""
    leftover: ClassVar[bool] = False
    """Whether XLA runs this node, because cuDNN's graphs have none of its kind. Its results are
    arrays in memory and keep their inferred dtype."""
    keeps_dtypes: ClassVar[bool] = False
    """Whether results keep their inferred dtype inside a graph, too, unless the user names another:
    cuDNN writes no wider ones."""
    outside: ClassVar[bool] = False
    """Whether XLA may run this ``leftover`` also where implementation="cudnn" asks cuDNN for the
    whole of a user's graph."""

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> str | None:
        """Why cuDNN is not to be asked for this node, by its tensors at all ports, or None.

        For what cuDNN would accept and compute wrongly, or otherwise than the options say.
        """
        return None

    def distrusted(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> tuple[int, ...]:
        """Numbers of cuDNN's engines that compute this node wrongly for such tensors."""
        return ()

    def rank(self, engine: int, knobs: Mapping[str, int], tensors: Mapping[str, Tensor]) -> int:
        """Where a candidate is tried among those of cuDNN's heuristics, where measurements show
        them to be wrong: before those of a higher rank, and else in their order. Asked of the
        anchor; the ``slow`` ones come last.
        """
        return 0

    def needs_knob(self, graph: GraphSpec) -> str:
        """The knob without which an engine does not compute this node's graph, or ""."""
        return ""

    def needs(self, ports: Collection[str]) -> str:
        """What a GPU must have for these input ports, where ``requires`` does not say it."""
        return ""

    def instead(self) -> OtherForm | None:
        """What is tried where cuDNN has no plan for this anchor, or none in the workspace that is
        allowed."""
        return None

    def advice(self, tensors: Mapping[str, Tensor]) -> str:
        """What this node costs by an operand that could be said more cheaply, and how; or ""."""
        return ""

    def broadcast_to(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Shape]:
        """Operands that cuDNN would read wrongly in their shapes, by port, and the shapes to which
        XLA broadcasts them before a plan; and results that it would write wrongly, with the shapes
        of what XLA adds up behind it. ``tensors`` are those at all ports."""
        return {}

    def in_bits(self) -> Sequence[tuple[Node, tuple[str | float, ...], str]]:
        """Where the node has ``masks``: the nodes, on operands at these ports or numbers, for the
        result at a port, as which cuDNN is asked for it with booleans."""
        return ()

    def begins(self, tensors: Mapping[str, Tensor], order: Sequence[int]) -> Collection[int]:
        """Where the node ``merges``: dimensions that are never one with those slower in memory,
        also where no tensor tells them apart. ``order`` is that of all, slowest first."""
        return ()

    def view_strides(self, dims: Shape, strides: list[int]) -> list[int] | None:
        """The output's strides, where it is a part of the first input's memory in a plan; None
        where it has memory of its own."""
        return None

    def views(self, port: str, tensors: Mapping[str, Tensor]) -> Sequence[View]:
        """As which tensors cuDNN sees the array at a port, the first of them from its first element
        on; none where it sees the array itself. ``tensors`` are those at all ports."""
        return ()

    def bounded(
        self, given: Mapping[str, jax.Array], tensors: Mapping[str, Tensor]
    ) -> Mapping[str, jax.Array]:
        """What is given at the ports of ``integers``, in the bounds of the arrays that they speak
        of: a plan would read and write foreign memory where they are wrong. ``tensors`` are those
        at all ports."""
        return given

    def keywords(self) -> dict[str, Any]:
        """The attributes as pygraph's method takes them."""
        names = (f.name for f in dataclasses.fields(self) if f.name != "compute_data_type")
        values = {name: getattr(self, name) for name in names}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Adds the node to a cudnn.pygraph; returns one pygraph tensor for each output port, of a
        port with ``views`` one for each of them.

        ``common`` holds the keywords that every method takes: ``name``, ``compute_data_type``.
        """
        out = getattr(pygraph, self.method)(**tensors, **self.keywords(), **common)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)
