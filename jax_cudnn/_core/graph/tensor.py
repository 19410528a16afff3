"""GraphTensor: the symbolic tensor inside a graph function, with errors for use as an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from ..errors import GraphAttributeError, GraphError, GraphTypeError, JaxCudnnError
from .dims import Shape, integers
from .dtypes import canonical
from .layout import order_of_strides
from .node import REGISTRY
from .source import in_jax_operator, jax_caller, user_line
from .spec import Tensor

if TYPE_CHECKING:
    from .builder import GraphBuilder


@dataclass(eq=False, repr=False, slots=True)
class GraphTensor:
    """A tensor of the graph under construction: methods of ``g`` take and return these.

    Operators call methods of g: ``+ - * / ** @``, ``< <= > >=``, unary minus and ``abs``. jnp
    functions do not apply, because the graph runs in cuDNN and holds no JAX values.
    """

    _builder: GraphBuilder
    _state: Tensor

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def shape(self) -> Shape:
        return self._state.shape

    @property
    def ndim(self) -> int:
        return len(self._state.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tensor as an output of the graph (inside it may be float32)."""
        return jax.numpy.dtype(self._state.dtype)

    def get_dim(self) -> list[int]:
        return list(self.shape)

    def set_data_type(self, data_type: Any) -> GraphTensor:
        """Round the tensor to this dtype, as an output and as an input of later operations."""
        dtype = canonical(data_type)
        return self._builder._set_dtype(self, dtype)

    def set_stride(self, stride: Sequence[int]) -> GraphTensor:
        """Set the memory layout of the tensor by its element strides (packed, in any order).

        XLA passes operands and results in that layout, so a transposed array costs no copy. By
        default, arrays of rank four and five are channels-last, others row-major.
        """
        try:
            strides = list(integers("set_stride", stride))
            if len(strides) != self.ndim:
                order = None
            else:
                order = order_of_strides(self.shape, strides)
        except JaxCudnnError as error:
            error.where = user_line()
            raise
        if order is None:
            raise GraphError(
                "set_stride: these strides do not pack the tensor",
                expected=f"{self.ndim} strides that visit each of {list(self.shape)} once",
                got=str(strides),
                why="XLA arrays have no gaps and no overlaps",
                where=user_line(),
            )
        return self._builder._set_order(self, order)

    def set_dim(self, dim: Sequence[int]) -> GraphTensor:
        """Set the output shape of an operation that does not determine it (a reduction)."""
        return self._builder._set_dim(self, dim)

    def set_output(self, is_output: bool = True) -> GraphTensor:
        """No effect, as in code for pygraph: the tensors that are returned are the outputs."""
        return self

    def set_name(self, name: str) -> GraphTensor:
        """No effect, as in code for pygraph: printed graphs use the operations' names."""
        return self

    def __array_ufunc__(self, ufunc: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        # NumPy array + graph tensor arrives here, and so does np.tanh(graph tensor).
        if kind == "__call__" and not kwargs and ufunc.__name__ in _UFUNCS:
            return self._builder._apply(_UFUNCS[ufunc.__name__], *args)
        raise self._refusal(jax_caller() or ufunc.__name__)

    @property
    def __jax_array__(self) -> Any:
        # For JAX array + graph tensor this is not an array: JAX's operator then defers to
        # __radd__. Everywhere else JAX gets the error.
        if in_jax_operator():
            raise AttributeError("__jax_array__")
        raise self._refusal(jax_caller())

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise self._refusal(jax_caller())

    __array__ = _raise
    __hash__ = object.__hash__

    def _refusal(self, called: str | None) -> GraphTypeError:
        return refusal(called, user_line(), str(self._state))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # protocols that libraries look up
            raise AttributeError(name)
        error = refusal(name, user_line(), str(self._state))
        raise GraphAttributeError(
            f".{error.summary}", got=error.got, why=error.why, fix=error.fix, where=error.where
        )

    def __repr__(self) -> str:
        return f"<graph tensor {self._state}>"


# jnp's spellings and their equivalents here.
_INSTEAD = {
    "astype": "x.set_data_type(...)",
    "T": "g.transpose(x, permutation)",
    "mT": "g.transpose(x, permutation)",
    "indexing": "g.slice(x, slices)",
    "or)": "g.binary_select(x, y, mask), or a static argument",
}


def refusal(called: str | None, where: str, got: str | None = None) -> GraphTypeError:
    """The error for a graph tensor passed to something that is not a method of g."""
    name = (called or "").rpartition(" ")[2]  # "operator matmul" -> "matmul"
    instead = _INSTEAD.get(name)
    # jnp.max is a reduction, pygraph's max is not: a node's ``jax_names`` come first.
    methods = [m for m, node in REGISTRY.items() if name in node.about.jax_names]
    methods += [name] if name in REGISTRY else []
    return GraphTypeError(
        f"{called or 'an array function'} got a graph tensor",
        got=got,
        why="values inside @jax_cudnn.graph are symbolic: only methods of g apply to them; under "
        "jax.jit a Python value stays static only if listed in static_argnames",
        fix=(
            f"use {instead}"
            if instead
            else f"use g.{methods[0]}(...)"
            if methods
            else f"g offers {', '.join(sorted(REGISTRY))}"
        )
        + "; or return the tensor and apply jnp outside the graph",
        where=where,
    )


# Python's operators and NumPy's functions (its arrays' operators) -> g's methods.
_OPERATORS = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow"}
_OPERATORS |= {"matmul": "matmul"}
_COMPARISONS = {"lt": "cmp_lt", "le": "cmp_le", "gt": "cmp_gt", "ge": "cmp_ge"}
_UFUNCS = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "power": "pow"}
_UFUNCS |= {"matmul": "matmul", "less": "cmp_lt", "less_equal": "cmp_le"}
_UFUNCS |= {"greater": "cmp_gt", "greater_equal": "cmp_ge"}


def _apply(name: str, method: str, swap: bool = False) -> None:
    def apply(self: GraphTensor, *other: Any) -> Any:
        operands = (*other, self) if swap else (self, *other)
        return self._builder._apply(method, *operands)

    setattr(GraphTensor, f"__{name}__", apply)


for _name, _method in _OPERATORS.items():
    _apply(_name, _method)
    _apply(f"r{_name}", _method, swap=True)
for _name, _method in {**_COMPARISONS, "neg": "neg", "abs": "abs"}.items():
    _apply(_name, _method)

_BINARY = ("mod", "floordiv", "divmod")
_REFUSED = {
    **{f"__{side}{name}__": f"operator {name}" for name in _BINARY for side in ("", "r")},
    **{f"__{name}__": f"operator {name}" for name in ("pos", "invert")},
    **{f"__{name}__": f"comparison {name}" for name in ("eq", "ne")},
    **{f"__{name}__": f"{name}()" for name in ("float", "int", "complex", "len", "iter")},
    "__bool__": "a condition (if, while, and, or)",
    "__index__": "range() or an index",
    "__getitem__": "indexing",
}


def _refuse(method: str, called: str) -> None:
    def refuse(self: GraphTensor, *_: Any) -> NoReturn:
        raise self._refusal(called)

    setattr(GraphTensor, method, refuse)


for _method, _called in _REFUSED.items():
    _refuse(_method, _called)
