"""The Node contract: the one place where an operation is added, and the registry of all nodes.

A node is a frozen dataclass whose fields are the operation's attributes under pygraph's names.
``builder.register`` checks the contract (contract.py), so a wrong node fails at import.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import numpy as np

from ..errors import GraphError, GraphTypeError
from .dims import Dims, Shape
from .dtypes import NUMBERS, arithmetic
from .example import Example
from .promotion import result_dtype

if TYPE_CHECKING:
    from ..transforms.derivation import Derivation
    from .spec import GraphSpec, Tensor
    from .tensor import GraphTensor

    Values = Mapping[str, GraphTensor]
    Tensors = Mapping[str, Tensor]


# Kinds of broadcasts that cuDNN computes rightly, see planning/limits.py.
ANY, ROWS_AND_CHANNELS, ONE_ELEMENT, NUMBERS_ONLY = "any", "rows, channels", "one", "numbers"
LEAD = -1
"""In :meth:`Node.folds`: a dimension of its own, in front of the others."""


class OtherForm(NamedTuple):
    """A node with the results of another one where this very engine of cuDNN's, with these knobs,
    runs it; from this version of cuDNN on."""

    node: Node
    engine: int
    knobs: Mapping[str, int]
    cudnn: int


@dataclass(frozen=True)
class View:
    """A tensor as which cuDNN sees an array at a node's port, or a part of one.

    ``port`` is the one of pygraph's method, ``strides`` are in elements, and ``offset`` is the
    element of the array with which the tensor begins.
    """

    port: str
    dims: Shape
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Node:
    """An operation of ``cudnn.pygraph`` with its attributes. Subclasses are registered."""

    method: ClassVar[str]
    """pygraph's method."""
    dims: ClassVar[str]
    """Ports and shapes, see :mod:`.dims`."""
    batch: ClassVar[str] = ""
    """Letters of ``dims`` that are batch-like: independent of each other."""
    broadcast: ClassVar[str] = ""
    """Letters of ``dims`` whose size 1 broadcasts."""
    jax_names: ClassVar[tuple[str, ...]] = ()
    """Functions of jnp, jax.nn or lax that this node stands for; used in error messages."""
    dtypes: ClassVar[tuple[str, ...]] = NUMBERS
    """Element types that the ports take."""
    requires: ClassVar[str] = ""
    """Minimum cuDNN, SM and shape rules, in words a user can read."""
    anchor: ClassVar[bool] = False
    """Whether cuDNN builds an engine around this node (one anchor a graph)."""
    slow: ClassVar[tuple[int, ...]] = ()
    """Numbers of cuDNN's engines that are measured to be slower than XLA around this anchor."""
    product: ClassVar[bool] = False
    """Whether this anchor multiplies: its compute type accumulates, float32 may become TF32, and
    the reference takes the operands as they are, with ``precision``."""
    writes_all: ClassVar[bool] = False
    """Whether a plan writes every result of this node, also one that nothing reads."""
    of_all_examples: ClassVar[tuple[str, ...]] = ()
    """Results of all examples together: vmap folds into the node only where nothing reads them."""
    vmaps_by_reference: ClassVar[bool] = False
    """Whether XLA computes the node under vmap from its reference, where no fold is right."""
    broadcasts_around: ClassVar[str] = ROWS_AND_CHANNELS
    """Which operands pointwise operations around this anchor may broadcast, see :mod:`.limits`."""
    prologue: ClassVar[str] = ""
    """Whether cuDNN computes operands of this anchor in one plan with it: ANY, "" for never, or the
    method of a node that the graph then holds, too."""
    masks: ClassVar[tuple[str, ...]] = ()
    """Ports with a mask: bytes to XLA, bits to cuDNN, see ``ops/masks.py``."""
    takes_masks: ClassVar[bool] = False
    """Whether masks of bits may stand beside this anchor, see ``ops/masks.py``."""
    returns_prologue: ClassVar[bool] = False
    """Whether the plan can write what it computes before this anchor, too."""
    least_rank: ClassVar[int] = 0
    """cuDNN sees tensors of lower rank with dimensions of 1 put in after the second."""
    channels_last: ClassVar[bool] = False
    """Whether tensors of every rank lie channels-last in memory."""
    row_major: ClassVar[bool] = False
    """Whether tensors lie row-major in memory."""
    apart: ClassVar[bool] = False
    """Whether an operand at several ports is several tensors to cuDNN: pygraph's attention turns
    the dims of those that it reads transposed, and would for its other ports, too."""
    merges: ClassVar[bool] = False
    """Whether tensors lie row-major around this anchor, and cuDNN sees neighbouring dimensions that
    no tensor of the graph tells apart as one."""
    matrices: ClassVar[bool] = False
    """Whether the last two dimensions are a matrix around this anchor, tensors lie row-major, and
    cuDNN sees all dimensions in front of a matrix as one."""
    moves: ClassVar[bool] = False
    """Whether the node only moves elements: its values keep their dtype, also inside a graph."""
    leftover: ClassVar[bool] = False
    """Whether XLA runs this node, because cuDNN's graphs have none of its kind. Its results are
    arrays in memory and keep their inferred dtype."""
    outside: ClassVar[bool] = False
    """Whether XLA may run this ``leftover`` also where implementation="cudnn" asks cuDNN for the
    whole of a user's graph."""
    deterministic: ClassVar[bool] = True
    """Whether every engine gives equal results in each run (stated on the numerics page)."""
    rounding: ClassVar[str] = ""
    """What the numerics page says about this node besides accumulation and output rounding."""
    initial: ClassVar[Mapping[str, float]] = {}
    """Results of which a plan may write a part only, and the number that the rest has."""
    chooses: ClassVar[bool] = False
    """Whether a result is one of its operands' elements, or that without its sign: then their type
    holds it exactly."""
    recomputed: ClassVar[bool] = False
    """Whether a derivative computes the results again, where that keeps fewer bytes for it."""
    paired: ClassVar[bool] = False
    """Whether forward and derivatives must run by the same implementation (cuDNN or XLA), because
    one reads what only the other's kind writes: a dropout's stream, bit masks, statistics."""
    examples: ClassVar[tuple[Example, ...]] = ()
    ports: ClassVar[Dims]

    compute_data_type: str = dataclasses.field(default="float32", kw_only=True)
    """The dtype in which the node computes and accumulates."""

    @classmethod
    def create(cls, **attributes: Any) -> Node:
        """The node for pygraph's keywords; nodes with other spellings override this.

        ``compute_data_type`` is not among them: the builder sets it afterwards.
        """
        for field in dataclasses.fields(cls):
            value = attributes.get(field.name)
            if value is not None and str(field.type).startswith("float"):
                if not isinstance(value, numbers.Real):
                    raise GraphTypeError(
                        f"attribute {field.name!r} is no number",
                        expected="a Python number: attributes are static",
                        got=f"{type(value).__name__}: {value!r}"[:200],
                    )
                attributes[field.name] = float32_range(field.name, value)
        return cls(**attributes)

    @classmethod
    def prepared(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of pygraph's method, where some of them make others of its ports."""
        return given

    def sizes(self, inputs: Mapping[str, Tensor]) -> dict[str, int | Shape]:
        """The letters of ``dims`` matched against the inputs; checks ranks, sizes and dtypes."""
        for port, tensor in inputs.items():
            if tensor.dtype not in self.dtypes:
                raise GraphTypeError(
                    f"{self.method} does not take {tensor.dtype} for {port!r}",
                    expected=", ".join(self.dtypes),
                    got=f"{port}: {tensor.dtype}{list(tensor.shape)}",
                    fix=f"cast it before the call: {port}.astype(jnp.{self.dtypes[0]})",
                )
        return self.ports.match({port: tensor.shape for port, tensor in inputs.items()})

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        """Shape and dtype of every output port; raises every error a user can make.

        The dtype is the one the output has when it leaves the graph; inside, an intermediate
        is float32 unless the user says otherwise.
        """
        sizes = self.sizes(inputs)
        dtype = result_dtype(inputs)
        return {name: (self.ports.shape(name, sizes), dtype) for name in self.results}

    @property
    def results(self) -> tuple[str, ...]:
        """The output ports that a node with these attributes has."""
        return self.ports.output_names

    def in_bits(self) -> Sequence[tuple[Node, tuple[str | float, ...], str]]:
        """Where the node has ``masks``: the nodes, on operands at these ports or numbers, for the
        result at a port, as which cuDNN is asked for it with booleans."""
        return ()

    def without(self, results: Collection[str]) -> Node:
        """The node that leaves out these results, which nothing reads; itself where there is
        none."""
        return self

    def redraws(self, made: Mapping[str, str]) -> Collection[str]:
        """Input ports that the reference does without where another node's reference computes what
        they hold: from a seed it draws the same numbers again, a part at a time. ``made`` says for
        each input port which node's result that is, by port; "" where it is none."""
        return ()

    def leaving(self, ports: Collection[str]) -> Node:
        """The node without these input ports, of those that it ``redraws``."""
        return self

    def settled(self) -> Node:
        """The node as it is in a graph that is to be deterministic."""
        return self

    def needs(self, ports: Collection[str]) -> str:
        """What a GPU must have for these input ports, where ``requires`` does not say it."""
        return ""

    def instead(self) -> OtherForm | None:
        """What is tried where cuDNN has no plan for this anchor, or none in the workspace that is
        allowed."""
        return None

    @property
    def accumulator(self) -> np.dtype:
        """The dtype in which the reference computes."""
        return arithmetic(self.compute_data_type)

    def default_compute(self, inputs: Mapping[str, Tensor]) -> str:
        """The compute type where the user names none."""
        return "float32"

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

    def begins(self, tensors: Mapping[str, Tensor], order: Sequence[int]) -> Collection[int]:
        """Where the node ``merges``: dimensions that are never one with those slower in memory,
        also where no tensor tells them apart. ``order`` is that of all, slowest first."""
        return ()

    def pattern(self, tensors: Mapping[str, Tensor]) -> str:
        """What measurements of this node are filed under (see :mod:`.losses`), by its tensors at
        all ports, which state their memory order. Empty for what only accompanies other nodes.

        Nodes override this where cuDNN has different kernels for different uses.
        """
        return "" if self.moves else self.method

    def broadcast_to(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Shape]:
        """Operands that cuDNN would read wrongly in their shapes, by port, and the shapes to which
        XLA broadcasts them before a plan."""
        return {}

    def advice(self, tensors: Mapping[str, Tensor]) -> str:
        """What this node costs by an operand that could be said more cheaply, and how; or ""."""
        return ""

    def flops(self, shapes: Mapping[str, Shape]) -> int:
        """Operations, a multiply-add being two, from the shapes of all ports by name."""
        return 0 if self.moves else sum(math.prod(shapes[o]) for o in self.results)

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The node's meaning in jnp: one array for each of ``results``, not yet rounded.

        Arrays arrive in the compute type; those of products and of nodes that move elements as
        they are. Only products get ``precision``.
        """
        raise NotImplementedError

    # -- transformations ------------------------------------------------------------------------

    def linear_in(self, port: str) -> bool:
        """Whether the results are linear in a port, together with all other ports that say so."""
        return False

    def is_linear(self, ports: Collection[str]) -> bool:
        """Whether the results are linear in these input ports together, the others being fixed."""
        return all(map(self.linear_in, ports))

    def jvp(
        self,
        g: Derivation,
        tangents: Values,
        inputs: Values,
        outputs: Values,
    ) -> dict[str, GraphTensor]:
        """Tangents of output ports, from those of the input ports that have any.

        ``inputs`` and ``outputs`` hold the values at all ports; those that are used are kept for
        the derivative. The tangents are added to ``g`` by nodes that are linear in them. Output
        ports without a tangent are left out. By default they come from the reference.
        """
        if all(map(self.linear_in, tangents)):
            still = {
                port: g.zeros(x._state) if self.linear_in(port) else x
                for port, x in inputs.items()
                if port not in tangents
            }
            given = {port: (tangents if port in tangents else still)[port] for port in inputs}
            return dict(zip(outputs, g.apply(self, **given), strict=True))
        from .by_reference import tangent_node

        node = tangent_node(self, tangents, {port: x._state for port, x in inputs.items()})
        along = {node.given[port]: tangent for port, tangent in tangents.items()}
        return dict(zip(node.outs, g.apply(node, **inputs, **along), strict=True))

    def transpose(
        self,
        g: Derivation,
        cotangents: Values,
        inputs: Values,
        tensors: Tensors,
    ) -> dict[str, GraphTensor]:
        """Cotangents of the input ports in which the node is linear here, from those of output
        ports that have any.

        ``inputs`` holds the values at the other input ports, ``tensors`` the shapes and dtypes at
        all ports. By default they come from the reference.
        """
        from .by_reference import Transposed

        linear = [port for port in tensors if port not in (*inputs, *self.ports.output_names)]
        avals = tuple((port, tensors[port].shape, tensors[port].dtype) for port in linear)
        node = Transposed(self, avals, tuple(cotangents), tuple(inputs))
        given = {node.given[port]: cotangent for port, cotangent in cotangents.items()}
        return dict(zip(linear, g.apply(node, **inputs, **given), strict=True))

    def folds(
        self, batched: frozenset[str], tensors: Mapping[str, Tensor]
    ) -> Iterable[Mapping[str, int]]:
        """Ways of taking a dimension of vmap into the node, the best first.

        A way names ports and the axis of each in which the dimension is folded (it stands in
        front of what that axis had), or LEAD. All of ``batched``, the input ports that have the
        dimension, are named; other input ports that are named are repeated along it, unless they
        broadcast; the rest stay as they are. By default the letters of ``batch`` are such axes.
        """
        for letter in self.batch.split():
            ports = {
                port.name: port.axes.index(letter)
                for port in (*self.ports.inputs, *self.ports.outputs)
                if letter in port.axes and port.name in tensors
            }
            if batched <= {*ports}:
                yield ports

    def vmapped(
        self, g: Derivation, size: int, inputs: Values, tensors: Tensors
    ) -> dict[str, GraphTensor] | None:
        """The results over a dimension of ``size`` that all inputs have in front, by other nodes;
        None where only :meth:`folds` applies. ``tensors`` are those of one element."""
        return None

    def broadcasts(self, port: str, axis: int) -> bool:
        """Whether an operand may have size 1 in an axis (or in front) where others have more."""
        axes = next((p.axes for p in self.ports.inputs if p.name == port), ())
        return 0 <= axis < len(axes) and axes[axis] in self.ports.broadcast

    def folded(self, fold: Mapping[str, int], size: int, tensors: Mapping[str, Tensor]) -> Node:
        """The node with attributes for a dimension of ``size`` that is folded in so; ``tensors``
        are those before."""
        return self

    def keywords(self) -> dict[str, Any]:
        """The attributes as pygraph's method takes them."""
        names = (f.name for f in dataclasses.fields(self) if f.name != "compute_data_type")
        values = {name: getattr(self, name) for name in names}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }

    def view_strides(self, dims: Shape, strides: list[int]) -> list[int] | None:
        """The output's strides, where it is a part of the first input's memory in a plan; None
        where it has memory of its own."""
        return None

    def views(self, port: str, tensors: Mapping[str, Tensor]) -> Sequence[View]:
        """As which tensors cuDNN sees the array at a port, the first of them from its first element
        on; none where it sees the array itself. ``tensors`` are those at all ports."""
        return ()

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Adds the node to a cudnn.pygraph; returns one pygraph tensor for each output port, of a
        port with ``views`` one for each of them.

        ``common`` holds the keywords that every method takes: ``name``, ``compute_data_type``.
        """
        out = getattr(pygraph, self.method)(**tensors, **self.keywords(), **common)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def float32_range(name: str, value: Any) -> float:
    """The number itself; GraphError when it is finite and float32, which computes, is not."""
    if float(np.finfo(np.float32).max) < abs(value) < float("inf"):
        raise GraphError(
            f"{name!r} is too large",
            expected="a number in the range of float32, in which graphs compute",
            got=repr(value),
        )
    return float(value)


REGISTRY: dict[str, type[Node]] = {}
"""pygraph's method -> node class."""
