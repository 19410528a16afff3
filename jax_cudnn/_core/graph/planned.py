"""How an operation maps to cuDNN, and where it does not.

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

    from ..reasons import Reason
    from .node import Node
    from .spec import GraphSpec, Tensor

# Kinds of broadcasts that cuDNN computes rightly, see planning/limits.py.
ANY, ROWS_AND_CHANNELS, ONE_ELEMENT, NUMBERS_ONLY = "any", "rows, channels", "one", "numbers"


class OtherForm(NamedTuple):
    """An alternative node with the same results if this engine runs it with these knobs; from this
    version of cuDNN on."""

    node: Node
    engine: int
    knobs: Mapping[str, int]
    cudnn: int


class View(NamedTuple):
    """The tensor that cuDNN sees for an array at a node's port, or for a part of it.

    ``port`` is that of pygraph's method, ``strides`` are in elements, and ``offset`` is the
    element of the array at which the tensor starts.
    """

    port: str
    dims: Shape
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Planned:
    """The properties of a node for planning; those of the anchor apply to its whole graph."""

    method: ClassVar[str]
    """pygraph's method."""
    requires: ClassVar[str] = ""
    """Minimum cuDNN, SM and shape rules, as text for users."""
    anchor: ClassVar[bool] = False
    """Whether cuDNN builds an engine around this node (one anchor a graph)."""
    slow: ClassVar[tuple[int, ...]] = ()
    """Indices of cuDNN engines that measured slower than XLA around this anchor."""
    writes_all: ClassVar[bool] = False
    """Whether a plan writes every result of this node, even if nothing reads it."""
    broadcasts_around: ClassVar[str] = ROWS_AND_CHANNELS
    """Which operands pointwise operations around this anchor may broadcast, see :mod:`.limits`."""
    prologue: ClassVar[str] = ""
    """Whether cuDNN computes operands of this anchor in the same plan: ANY, "" for never, or the
    method of a node that the graph must then contain."""
    returns_prologue: ClassVar[bool] = False
    """Whether the plan can also write the values that it computes before this anchor."""
    masks: ClassVar[tuple[str, ...]] = ()
    """Ports with a mask: bytes to XLA, bits to cuDNN, see ``ops/pointwise/masks.py``."""
    takes_masks: ClassVar[bool] = False
    """Whether bit masks may be used in a graph with this anchor, see ``ops/pointwise/masks.py``."""
    apart: ClassVar[bool] = False
    """Whether an operand used at several ports must be declared once per port (pygraph's sdpa
    transposes the dims of K in place)."""
    least_rank: ClassVar[int] = 0
    """cuDNN sees tensors of lower rank with dimensions of 1 inserted after the second."""
    channels_last: ClassVar[bool] = False
    """Whether tensors of every rank are channels-last in memory."""
    row_major: ClassVar[bool] = False
    """Whether tensors are row-major in memory."""
    merges: ClassVar[bool] = False
    """Whether tensors are row-major around this anchor, and cuDNN sees adjacent dimensions as one
    if no tensor of the graph distinguishes them."""
    matrices: ClassVar[bool] = False
    """Whether the last two dimensions are a matrix around this anchor, tensors are row-major, and
    cuDNN sees all leading dimensions of a matrix as one."""
    integers: ClassVar[tuple[str, ...]] = ()
    """int32 input ports with the positions of elements in other operands, see :meth:`bounded`."""
    initial: ClassVar[Mapping[str, float]] = {}
    """Results of which a plan may write only a part, with the value of the rest."""
    leftover: ClassVar[bool] = False
    """Whether XLA runs this node, because cuDNN graphs lack it. Its results are arrays in memory
    and keep their inferred dtype."""
    keeps_dtypes: ClassVar[bool] = False
    """Whether results keep their inferred dtype even inside a graph, unless the user sets another:
    cuDNN writes no wider ones."""
    outside: ClassVar[bool] = False
    """Whether XLA may run this ``leftover`` even under implementation="cudnn"."""

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        """Why cuDNN must not run this node, from its tensors at all ports, or None.

        For cases that cuDNN would accept and compute wrongly, or not as the options require.
        """
        return None

    def distrusted(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> tuple[int, ...]:
        """Indices of cuDNN engines that compute this node wrongly for such tensors."""
        return ()

    def rank(self, engine: int, knobs: Mapping[str, int], tensors: Mapping[str, Tensor]) -> int:
        """The rank of a candidate, where measurements contradict cuDNN's heuristics: candidates
        are tried by rank, and in the order of the heuristics within one rank. Only the anchor's
        ranks count; ``slow`` engines come last.
        """
        return 0

    def needs_knob(self, graph: GraphSpec) -> str:
        """The knob without which an engine does not compute this node's graph, or ""."""
        return ""

    def needs(self, ports: Collection[str]) -> Reason | None:
        """GPU requirements of these input ports, in addition to ``requires``."""
        return None

    def instead(self) -> OtherForm | None:
        """The alternative if cuDNN has no plan for this anchor, or none within the workspace
        limit."""
        return None

    def advice(self, tensors: Mapping[str, Tensor]) -> str:
        """Advice on an operand with a cheaper form, and the cost of the present one; or ""."""
        return ""

    def broadcast_to(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Shape]:
        """Operands, by port, that cuDNN would read wrongly in their shapes, with the shapes to
        which XLA broadcasts them before a plan; and results that it would write wrongly, with
        the shapes that XLA sums after the plan. ``tensors`` are those at all ports."""
        return {}

    def in_bits(self) -> Sequence[tuple[Node, tuple[str | float, ...], str]]:
        """For a node with ``masks``: the equivalent nodes on booleans, each with its operands
        (ports or scalars) and the port of its result."""
        return ()

    def begins(self, tensors: Mapping[str, Tensor], order: Sequence[int]) -> Collection[int]:
        """For a node that ``merges``: dimensions that never merge with slower ones, even if no
        tensor distinguishes them. ``order`` is the order of all dimensions, slowest first."""
        return ()

    def view_strides(self, dims: Shape, strides: list[int]) -> list[int] | None:
        """The output's strides if it shares the memory of the first input in a plan; None if it has
        its own memory."""
        return None

    def views(self, port: str, tensors: Mapping[str, Tensor]) -> Sequence[View]:
        """The tensors that cuDNN sees for the array at a port, the first of them from its first
        element; empty if it sees the array itself. ``tensors`` are those at all ports."""
        return ()

    def bounded(
        self, given: Mapping[str, jax.Array], tensors: Mapping[str, Tensor]
    ) -> Mapping[str, jax.Array]:
        """The operands at the ports of ``integers``, clipped to the bounds of the arrays that they
        index: a plan would access other memory with wrong ones. ``tensors`` are those at all
        ports."""
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
