"""How an operation maps to cuDNN, and where it does not.

This half of the Node contract has a default for all but ``method``; ``node.py`` holds the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .dims import Shape

if TYPE_CHECKING:
    import jax

    from ..reasons import Reason
    from .node import Node
    from .spec import GraphSpec, Tensor

Handles = Mapping[str, Any]
"""pygraph's tensors by port, or keywords of its methods."""

# Kinds of broadcasts that cuDNN computes rightly, see planning/limits.py.
ANY, ROWS_AND_CHANNELS, ONE_ELEMENT, NUMBERS_ONLY = "any", "rows, channels", "one", "numbers"

XLA_ONLY, EVEN_IF_STRICT = "XLA only", "XLA, even if strict"

# Orders of the tensors around a node in memory, and how cuDNN sees them.
ROW_MAJOR = "row-major"
CHANNELS_LAST = "channels-last"
"""Of every rank; cuDNN sees at least four dimensions: those of size 1 are after the second."""
MATRICES = "matrices"
"""Row-major; the last two dimensions are a matrix, and cuDNN sees all leading ones as one."""
MERGED = "merged"
"""Row-major; cuDNN sees adjacent dimensions as one if no tensor of the graph tells them apart."""


class About(NamedTuple):
    """What users read of an operation, besides its docstring.

    Attributes:
        requires: the versions, GPUs and shapes that cuDNN requires, for messages and the support
            table.
        jax_names: functions of jnp, jax.nn or lax that it replaces, for messages.
        rounding: what the numerics page says of it, besides accumulation and output rounding.
    """

    requires: str = ""
    jax_names: tuple[str, ...] = ()
    rounding: str = ""


class Anchor(NamedTuple):
    """What cuDNN builds an engine around, one in a graph, and what it computes with it; false
    without an ``order``: nothing is built around a node with ``Anchor()``.

    Attributes:
        product: whether it multiplies: it accumulates in its compute type, float32 may become TF32,
            and the reference gets the operands unchanged, with ``precision``.
        prologue: whether cuDNN computes its operands in the same plan: ANY, "" for never, or the
            method of a node that the graph must then contain.
        returns_prologue: whether the plan can also write the values that it computes before it.
        broadcasts: which operands pointwise operations around it may broadcast, see
            :mod:`..planning.limits`.
        bit_masks: whether its graph may have masks of bits, see ``ops/pointwise/masks.py``.
        writes_all: whether a plan writes every result of it, even if nothing reads it.
        keeps_dtypes: whether results keep their inferred dtype even inside a graph, unless the user
            sets another: cuDNN writes no wider ones.
        slow: indices of engines that measured slower than XLA; they are tried last.
        order: how the tensors of its graph lie in memory: ROW_MAJOR, CHANNELS_LAST, MATRICES or
            MERGED.
    """

    product: bool = False
    prologue: str = ""
    returns_prologue: bool = False
    broadcasts: str = ROWS_AND_CHANNELS
    bit_masks: bool = False
    writes_all: bool = False
    keeps_dtypes: bool = False
    slow: tuple[int, ...] = ()
    order: str = ""

    def __bool__(self) -> bool:
        return bool(self.order)


class OtherForm(NamedTuple):
    """An alternative node with the same results if this engine runs it with these knobs; from this
    version of cuDNN on."""

    node: Node
    engine: int
    knobs: Mapping[str, int]
    cudnn: int


class Engines(NamedTuple):
    """What measurements say of cuDNN's engines for a node, with its tensors and in its graph.

    Attributes:
        wrong: indices of engines that compute it wrongly.
        knob: the knob without which an engine does not compute its graph.
        rank: the rank of an engine with knobs, where measurements contradict the heuristics: lower
            ones are tried first, equal ones in the order of the heuristics. Only an anchor's count.
        otherwise: what to try if cuDNN has no plan, or none within the workspace limit.
        needs: what these tensors require of the GPU or of cuDNN, beyond ``About.requires``.
    """

    wrong: tuple[int, ...] = ()
    knob: str = ""
    rank: Callable[[int, Mapping[str, int]], int] = lambda engine, knobs: 0
    otherwise: OtherForm | None = None
    needs: Reason | None = None


class Work(NamedTuple):
    """What a node computes, for measurements and the least time of its graph.

    Attributes:
        flops: operations, a multiply-add being two.
        pattern: the key of its measurements (see :mod:`..planning.losses`): of one for each use for
            which cuDNN has other kernels. Empty for nodes that only accompany others.
    """

    flops: int = 0
    pattern: str = ""


class View(NamedTuple):
    """The tensor that cuDNN sees for an array at a node's port, or for a part of it.

    ``port`` is that of pygraph's method, ``strides`` are in elements, and ``offset`` is the
    element of the array at which the tensor starts.
    """

    port: str
    dims: Shape
    strides: tuple[int, ...]
    offset: int = 0


class Seen(NamedTuple):
    """How cuDNN sees the tensors of a node, where that differs from their arrays.

    Attributes:
        views: by port, the tensors that cuDNN sees for its array, the first of them from its first
            element.
        separate: whether an operand used at several ports must be declared once per port (pygraph's
            sdpa transposes the dims of K in place).
        begins: around a MERGED node, dimensions that never merge with slower ones, even if no
            tensor tells them apart.
        steps: the output is the memory of the first input, with these steps along its dimensions.
    """

    views: Mapping[str, Sequence[View]] = MappingProxyType({})
    separate: bool = False
    begins: Collection[int] = ()
    steps: Sequence[int] | None = None


class Edge(NamedTuple):
    """What XLA does around a plan for the tensors of a node.

    Attributes:
        shapes: operands, by port, that cuDNN would read wrongly in their shapes, with the shapes to
            which XLA broadcasts them; and results that it would write wrongly, with the shapes that
            XLA sums.
        initial: results of which a plan may write only a part, with the value of the rest.
        clipped: the operands at ``Indices.positions``, clipped to the bounds of the arrays that
            they index: a plan would access other memory with wrong ones.
        bits: for a node with a port of masks, bytes to XLA and bits to cuDNN: the equivalent nodes
            on booleans, each with its operands (ports or scalars) and the port of its result.
        masks: the ports of these masks.
        advice: on an operand with a cheaper form, with the cost of the present one.
    """

    shapes: Mapping[str, Shape] = MappingProxyType({})
    initial: Mapping[str, float] = MappingProxyType({})
    clipped: Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]] = dict
    bits: Sequence[tuple[Node, tuple[str | float, ...], str]] = ()
    masks: tuple[str, ...] = ()
    advice: Callable[[], str] = str


@dataclass(frozen=True)
class Planned:
    """The properties of a node for planning; those of the anchor apply to its whole graph."""

    method: ClassVar[str]
    """pygraph's method."""
    about: ClassVar[About] = About()
    """What users read of it."""
    anchor: ClassVar[Anchor] = Anchor()
    """What cuDNN computes around this node, if it builds an engine around it."""
    xla_only: ClassVar[str] = ""
    """Whether XLA runs this node, because cuDNN graphs lack it: XLA_ONLY, or EVEN_IF_STRICT under
    implementation="cudnn", too. Its results are arrays in memory and keep their inferred dtype."""

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        """Why cuDNN must not run this node, from its tensors at all ports, or None.

        For cases that cuDNN would accept and compute wrongly, or not as the options require.
        """
        return None

    def engines(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Engines:
        """What is known of cuDNN's engines for this node."""
        return Engines()

    def layout(self, tensors: Mapping[str, Tensor], order: Sequence[int]) -> Seen:
        """How cuDNN sees the tensors at all ports; ``order`` is that of the dimensions in memory,
        slowest first, where all tensors share one."""
        return Seen()

    def boundary(self, tensors: Mapping[str, Tensor]) -> Edge:
        """What XLA does around a plan for the tensors at all ports."""
        return Edge()

    def keywords(self) -> dict[str, Any]:
        """The attributes as pygraph's method takes them."""
        names = (f.name for f in dataclasses.fields(self) if f.name != "compute_data_type")
        values = {name: getattr(self, name) for name in names}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        """Adds the node to a cudnn.pygraph; returns one pygraph tensor for each output port, of a
        port with several views one for each of them.

        ``common`` holds the keywords that every method takes: ``name``, ``compute_data_type``.
        """
        out = getattr(pygraph, self.method)(**tensors, **self.keywords(), **common)
        made = out if isinstance(out, (tuple, list)) else (out,)
        return tuple(x for x in made if x is not None)  # pygraph's word for a result left out


class Example(NamedTuple):
    """Shapes and dtypes that tests, benchmarks and the support table share.

    ``dtypes`` names the ports whose dtype is not ``dtype``; for a variadic port ``inputs`` holds
    a list of shapes, for a number (an epsilon) that. ``out`` is the dtype of the result, where it
    is not the inferred one.
    ``positive`` names ports whose operands are at least 0.25 (for logarithms and divisors).
    ``alone`` is False if cuDNN has no engine for this node alone, only together with others.
    """

    inputs: Mapping[str, Any]
    dtype: str = "bfloat16"
    attributes: Mapping[str, Any] = {}
    dtypes: Mapping[str, str] = {}
    out: str | None = None
    alone: bool = True
    positive: tuple[str, ...] = ()

    @classmethod
    def of(cls, inputs: str, dtype: str = "bfloat16", **more: Any) -> Example:
        """From text: ``"x: 4 8, mask: int8 4 8, epsilon: 1e-5"`` has two arrays, the second in
        another dtype, and a number. ``more``: other fields, and attributes."""
        given, dtypes = {}, {}
        for port, *words in (part.replace(":", "").split() for part in inputs.split(",")):
            if words[0].isidentifier():
                dtypes[port] = words.pop(0)
            number = "." in words[0] or "e" in words[0]
            given[port] = float(words[0]) if number else tuple(map(int, words))
        fields = {name: more.pop(name) for name in ("out", "alone", "positive") if name in more}
        return cls(given, dtype, more, dtypes, **fields)
