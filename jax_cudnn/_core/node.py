"""The Node contract: the one place where an operation is added, and the registry of all nodes.

A node is a frozen dataclass whose fields are the operation's attributes under pygraph's names.
``builder.register`` checks the contract, so a wrong node fails at import.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from .dims import Dims, Shape
from .dtypes import FLOATS
from .errors import GraphError, GraphTypeError

if TYPE_CHECKING:
    from .spec import Tensor


@dataclass(frozen=True)
class Example:
    """Shapes and dtypes that tests, benchmarks and the support table share."""

    inputs: Mapping[str, Shape]
    dtype: str = "bfloat16"
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    """Element types that the ports take."""
    requires: ClassVar[str] = ""
    """Minimum cuDNN, SM and shape rules, in words a user can read."""
    anchor: ClassVar[bool] = False
    """Whether cuDNN builds an engine around this node (one anchor a graph)."""
    broadcasts_any: ClassVar[bool] = False
    """Whether pointwise operations around this anchor may broadcast any dimension."""
    examples: ClassVar[tuple[Example, ...]] = ()
    ports: ClassVar[Dims]

    @classmethod
    def create(cls, **attributes: Any) -> Node:
        """The node for pygraph's keywords; nodes with other spellings override this."""
        for field in dataclasses.fields(cls):
            value = attributes.get(field.name)
            if value is not None and "float" in str(field.type):
                if not isinstance(value, numbers.Real):
                    raise GraphTypeError(
                        f"attribute {field.name!r} is no number",
                        expected="a Python number: attributes are static",
                        got=f"{type(value).__name__}: {value!r}"[:200],
                    )
                attributes[field.name] = float32_range(field.name, value)
        return cls(**attributes)

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
        return {name: (self.ports.shape(name, sizes), dtype) for name in self.ports.output_names}

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The node's meaning in jnp, float32 inside: one array for each output port."""
        raise NotImplementedError

    def keywords(self) -> dict[str, Any]:
        """The attributes as pygraph's method takes them."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }

    def emit(self, pygraph: Any, tensors: Mapping[str, Any], name: str) -> tuple[Any, ...]:
        """Adds the node to a cudnn.pygraph; returns one pygraph tensor for each output port."""
        out = getattr(pygraph, self.method)(**tensors, **self.keywords(), name=name)
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


def result_dtype(inputs: Mapping[str, Tensor]) -> str:
    """JAX's promotion of the array inputs; by-value constants do not take part."""
    arrays = [jax.numpy.dtype(t.dtype) for t in inputs.values() if t.value is None]
    return jax.numpy.result_type(*arrays).name if arrays else "float32"


REGISTRY: dict[str, type[Node]] = {}
"""pygraph's method -> node class."""


def check_contract(cls: type[Node]) -> None:
    """TypeError when a node class does not keep the contract; fills in ``cls.ports``."""

    def check(condition: object, problem: str) -> None:
        if not condition:
            raise TypeError(f"node {cls.__name__}: {problem}")

    check(isinstance(getattr(cls, "method", None), str), "method must name pygraph's method")
    check(cls.method not in REGISTRY, f"{cls.method!r} is registered twice")
    check(dataclasses.is_dataclass(cls) and cls.__hash__, "must be a frozen dataclass")
    check(cls.reference is not Node.reference, "reference is missing")
    own = (cls.__dict__.get("__doc__") or "").strip()
    generated = f"{cls.__name__}("  # what dataclass writes where there is none
    check(own and not own.startswith(generated), "docstring is missing")
    check(cls.examples, "at least one example is needed")
    cls.ports = Dims.parse(cls.dims, cls.broadcast)
    letters = {axis for port in cls.ports.inputs for axis in port.axes}
    check(set(cls.batch.split()) <= letters, f"batch letters {cls.batch!r} are not in dims")
    for example in cls.examples:
        check(set(example.inputs) == set(cls.ports.input_names), "an example's ports are wrong")
