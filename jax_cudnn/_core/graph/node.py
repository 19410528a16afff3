"""The Node contract: the one place where an operation is added, and the registry of all nodes.

A node is a ``frozen`` class whose fields are the operation's attributes under pygraph's names.
``builder.register`` checks the contract, so a wrong node fails at import. This file
defines an operation's meaning and its transformations; planned.py defines how it maps to cuDNN.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import jax

from ..errors import GraphError, GraphTypeError, one_of, shown
from .dims import Dims, Shape, integers
from .dtypes import NUMBERS, float32_range
from .planned import Example, Planned, Work
from .promotion import result_dtype

if TYPE_CHECKING:
    from ..rules import Derivation, GraphTensor, Tensor, Tensors, Values

T = TypeVar("T")

LEAD = -1
"""In :class:`Fold`: a new leading dimension."""


def choice(known: Collection[str], *, default: Any = dataclasses.MISSING) -> Any:
    """A field with one of these names, which pygraph has as members of an enum."""
    return dataclasses.field(default=default, metadata={"known": known})


def int_tuple(least: int = 0, *, default: Any = dataclasses.MISSING, kw_only: bool = False) -> Any:
    """A field with integers of at least this, in a tuple."""
    return dataclasses.field(default=default, kw_only=kw_only, metadata={"least": least})


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, choice, int_tuple))
def frozen(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass with Node's equality and text. Generated ones would
    double the import time of each node."""
    return dataclass(frozen=True, eq=False, repr=False)(cls)


class Fold(NamedTuple):
    """A way to vmap a node: the new dimension becomes part of dimensions that it has.

    Attributes:
        axes: for each port with the dimension, the axis of which it is the slower part, or LEAD.
            It contains all batched input ports. Other input ports in it are repeated along the
            dimension unless they broadcast; the rest stay unchanged.
        node: the node for the larger dimension, where its attributes differ.
        broadcast: the ports that may have size 1 in that axis (or leading) where others have more.
        summed: results over the whole batch: the way applies only if nothing reads them.
        computed: instead of all this, the results by other nodes, from ``g`` and the values at the
            input ports; each has a leading dimension.
    """

    axes: Mapping[str, int]
    node: Node | None = None
    broadcast: Collection[str] = ()
    summed: Collection[str] = ()
    computed: Callable[[Derivation, Values], dict[str, GraphTensor]] | None = None


BY_REFERENCE = Fold({})
"""XLA computes the batched node from its reference, if no other way applies."""


class Algebra(NamedTuple):
    """What transformations and XLA's form may assume of an operation.

    Attributes:
        moves: it only moves elements: its values keep their dtype, even inside a graph.
        chooses: results are selected operand elements (up to sign), hence exact in the operand
            dtype.
        adds, multiplies: it adds, or multiplies, two tensors, of which one may be the bias, or a
            factor, of a product.
        smooth: an operand that is rounded to 16 bits changes the result about as much as rounding
            the result to 16 bits does.
        sums: it adds up elements of its operand.
        recomputed: derivatives recompute the results if that saves memory.
        affine: the operand of which each result is a factor times it plus a summand, if the other
            operands are fixed.
        scaled: the operand of a product that takes a factor of its result, if that varies along
            the only dimension that both have, by the letters of their ports.
        merged: the node for a result of this shape, if merging dimensions (:mod:`.merging`) changes
            the node; a product with it has more dimensions than cuDNN's.
    """

    moves: bool = False
    chooses: bool = False
    adds: bool = False
    multiplies: bool = False
    smooth: bool = False
    sums: bool = False
    recomputed: bool = False
    affine: str = ""
    scaled: str = ""
    merged: Callable[[Any, Shape], Node] | None = None


class Indices(NamedTuple):
    """The input ports whose values say where other operands are read, or how much is computed.

    Attributes:
        positions: int32 ports with the positions of elements in other operands: offsets, lengths,
            pages. :class:`.Edge` clips them.
        offsets: for ports of arrays, that of the offsets into the array: multiples of the number of
            elements of a row, which is less on a shard of the later dimensions.
        selecting: with one of these ports, the least work is to write the results.
    """

    positions: tuple[str, ...] = ()
    offsets: Mapping[str, str] = MappingProxyType({})
    selecting: tuple[str, ...] = ()


class Draws(NamedTuple):
    """The random numbers that a node draws: others in XLA than in cuDNN, so that forward and
    derivatives must both run on one of them. A shard of the batch draws its part.

    Attributes:
        seed: an input port, (1, 1, 1, 2) in uint32, the low word first.
        offset: an input port like it: the place in the random stream at which the batch begins.
        drawn: the input port that may hold what is drawn instead. The reference can draw it again
            from the seed, in parts.
        made: the result that holds what is drawn.
        axes: input port and axis for each dimension of what is drawn, or "" and its size; the first
            is the batch.
        step: what each element of the first two dimensions adds to the offset.
    """

    seed: str
    offset: str
    drawn: str
    made: str
    axes: tuple[tuple[str, int], ...]
    step: int

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of what is drawn, from those of the input ports."""
        return tuple(shapes[port][axis] if port else axis for port, axis in self.axes)


def advanced(words: jax.Array, by: Any) -> jax.Array:
    """An offset in two words of uint32, the low one first, plus ``by``."""
    low = words[..., 0] + by
    return jax.numpy.stack([low, words[..., 1] + (low < words[..., 0])], axis=-1)


def matched(node: Node, inputs: Mapping[str, Tensor]) -> dict[str, int | Shape]:
    """The letters of a node's ports matched against its inputs; checks ranks, sizes and dtypes."""
    for port, tensor in inputs.items():
        dtypes = ("int32",) if port in node.indices.positions else node.dtypes
        if tensor.dtype not in dtypes:
            raise GraphTypeError(
                f"{node.method} does not take {tensor.dtype} for {port!r}",
                expected=", ".join(dtypes),
                got=f"{port}: {tensor.dtype}{list(tensor.shape)}",
                fix=f"cast it before the call: {port}.astype(jnp.{dtypes[0]})",
            )
    return node.ports.match({port: tensor.shape for port, tensor in inputs.items()})


def check_ports(
    inputs: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int | None]],
    dtypes: Mapping[str, Collection[str]] = MappingProxyType({}),
    sources: Collection[str] = (),
) -> None:
    """GraphTypeError or GraphError if operands at these ports, where they are, have other dtypes or
    shapes, in which None is any size; ``sources``: the operands from which the shapes follow."""
    for port, tensor in inputs.items():
        dtype, own = tensor.dtype, tensor.shape
        allowed, shape = dtypes.get(port, (dtype,)), shapes.get(port, own)
        fits = len(shape) == len(own) and all(
            a in (None, b) for a, b in zip(shape, own, strict=True)
        )
        if fits and dtype in allowed:
            continue
        got = f"{port}: {dtype}{list(own)}"
        if dtype not in allowed:
            expected = " or ".join(allowed)
            raise GraphTypeError(f"{port!r} has the wrong dtype", expected=expected, got=got)
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        others = " and ".join(f"{p} {list(inputs[p].shape)}" for p in sources if p in inputs)
        got += f", with {others}" if others else ""
        raise GraphError(f"{port!r} has the wrong shape", expected=f"[{expected}]", got=got)


@frozen
class Node(Planned):
    """An operation of ``cudnn.pygraph`` with its attributes. Subclasses are registered."""

    ports: ClassVar[Dims]
    """Ports and shapes, see :mod:`.dims`."""
    dtypes: ClassVar[tuple[str, ...]] = NUMBERS
    """Element types that the ports take."""
    algebra: ClassVar[Algebra] = Algebra()
    draws: ClassVar[Draws | None] = None
    """The random numbers that the node draws, if the port of the seed is there."""
    indices: ClassVar[Indices] = Indices()
    """The ports of values that index other operands."""
    examples: ClassVar[tuple[Example, ...]] = ()

    compute_data_type: str = dataclasses.field(default="float32", kw_only=True)
    """The dtype in which the node computes and accumulates."""

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        try:
            return hash((type(self), *vars(self).values()))
        except TypeError as error:
            raise GraphTypeError(
                "an attribute is not static",
                expected="Python numbers, strings and lists of them",
                got=str(error),
                fix="attributes determine the plan, so they cannot be arrays or values traced by "
                "JAX: under jax.jit list them in static_argnames",
            ) from None

    def __repr__(self) -> str:
        values = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
        return f"{type(self).__qualname__}({', '.join(values)})"

    @classmethod
    def create(cls, **attributes: Any) -> Node:
        """The node for pygraph's keywords; nodes with other spellings override this.

        The builder sets ``compute_data_type`` afterwards.
        """
        for field in dataclasses.fields(cls):
            value, rule = attributes.get(field.name), field.metadata
            if "known" in rule and field.name in attributes:
                attributes[field.name] = one_of(field.name, value, rule["known"])
            if "least" in rule and value is not None:
                attributes[field.name] = integers(field.name, value, rule["least"])
            if value is not None and str(field.type).startswith("float"):
                if not isinstance(value, numbers.Real):
                    raise GraphTypeError(
                        f"attribute {field.name!r} is not a number",
                        expected="a Python number: attributes are static",
                        got=shown(value),
                    )
                attributes[field.name] = float32_range(field.name, value)
        return cls(**attributes)

    @classmethod
    def prepared(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of pygraph's method, after deriving some ports from other arguments."""
        return given

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        """Shape and dtype of every output port; raises the errors for invalid operands.

        The dtype is that of an output of the graph; an intermediate is float32 unless the user
        sets its type.
        """
        sizes = matched(self, inputs)
        dtype = result_dtype(inputs)
        return {name: (self.ports.shape(name, sizes), dtype) for name in self.results}

    @property
    def results(self) -> tuple[str, ...]:
        """The output ports that a node with these attributes has."""
        return self.ports.output_names

    def without(self, results: Collection[str]) -> Node:
        """The node without these results, which nothing reads; the node itself if it has no such
        form."""
        return self

    def deterministic(self) -> Node | None:
        """The node for a deterministic graph: with every engine it gives equal results in each run;
        None if there is no such node, and only some engines do."""
        return self

    def work(self, tensors: Tensors) -> Work:
        """What it computes, from its tensors at all ports with their memory order."""
        if self.algebra.moves:
            return Work()
        made = (math.prod(tensors[port].shape) for port in self.results if port in tensors)
        return Work(sum(made), self.method)

    def reference(self, *args: Any, **arrays: Any) -> tuple[jax.Array, ...]:
        """The node's definition in jnp: one array for each of ``results``, before rounding.

        Arrays arrive in the compute type, except for products and nodes that move elements, which
        receive them unchanged. They are keyword arguments; only products get ``precision``.
        """
        raise NotImplementedError

    def xla(self, *args: Any, **arrays: Any) -> tuple[jax.Array, ...] | None:
        """How XLA computes the node best on a GPU, where that is not the reference (None).

        Arrays arrive in the dtypes in which they are held. Results may differ from the reference's
        by what the numerics page states.
        """
        return None

    # -- transformations ------------------------------------------------------------------------

    def linear_in(self, ports: Collection[str]) -> bool:
        """Whether the results are jointly linear in these input ports, with the rest fixed."""
        return self.algebra.moves

    def jvp(
        self,
        g: Derivation,
        tangents: Values,
        inputs: Values,
        outputs: Values,
    ) -> dict[str, GraphTensor]:
        """Tangents of output ports, from the tangents of input ports.

        ``inputs`` and ``outputs`` hold the values at all ports; values in use become residuals of
        the derivative. The nodes added to ``g`` must be linear in the tangents. Output ports
        without a tangent are omitted. NotImplemented leaves them to :func:`.by_reference.jvp`.
        """
        return NotImplemented

    def transpose(
        self,
        g: Derivation,
        cotangents: Values,
        inputs: Values,
        tensors: Tensors,
    ) -> dict[str, GraphTensor]:
        """Cotangents of the input ports in which the node is linear, from those of output ports.

        ``inputs`` holds the values at the other input ports, ``tensors`` the shapes and dtypes at
        all ports. NotImplemented leaves them to :func:`.by_reference.transpose`.
        """
        return NotImplemented

    def folds(
        self, batched: frozenset[str], size: int, tensors: Mapping[str, Tensor]
    ) -> Iterable[Fold]:
        """Ways to fold a vmap dimension of ``size`` into the node, best first; ``batched`` are the
        input ports with the dimension, ``tensors`` those of one element."""
        return ()


REGISTRY: dict[str, type[Node]] = {}
FAMILIES: list[str] = []
"""The modules that register nodes; the first graph loads them, as they take most of an import."""


@functools.cache
def registry() -> dict[str, type[Node]]:
    """pygraph's method -> node class, of all nodes."""
    for family in FAMILIES:
        importlib.import_module(family)
    return REGISTRY
