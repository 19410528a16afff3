"""What our layers share: the base class that each puts before the layer of Flax that it replaces,
and the operands of a layer with a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from .._core.errors import GraphError
from .._core.graph.dtypes import CUDNN_FLOATS as FLOATS
from .._core.graph.options import normal_precision
from ..ops import epilogue
from ..ops.epilogue import Activation

_T = TypeVar("_T")
SWAPPED: dict[type[nnx.Module], type[Layer]] = {}
"""Each layer of Flax, and the layer here that replaces it."""


class Layer:
    """The base of a layer that stands before Flax's class; enters the layer in ``SWAPPED``.

    Parameters have Flax's names, shapes and initialisers, because Flax's constructor makes them.
    This constructor also takes the arguments in ``own``, and keeps them as attributes.
    """

    own: ClassVar[Mapping[str, Any]] = {}
    """Arguments in addition to those of Flax's constructor, and their defaults."""

    def __init_subclass__(cls, **others: Any):
        super().__init_subclass__(**others)
        replaces = cls.flaxs() in cls.__bases__
        if replaces:
            SWAPPED[cls.flaxs()] = cls
        elif "__init__" not in vars(cls):
            return  # the signature is inherited
        init = cls.flaxs().__init__ if replaces else cls.__init__
        _, *parameters = inspect.signature(init).parameters.values()
        for name, default in cls.own.items() if replaces else ():
            only = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, only, default=default))
        cls.__signature__ = inspect.Signature(parameters)

    def __init__(self, *args: Any, **named: Any):
        own = {name: named.pop(name, default) for name, default in self.own.items()}
        super().__init__(*args, **named)
        self._keep(own)

    def _keep(self, own: Mapping[str, Any]) -> None:
        for name, value in own.items():
            setattr(self, name, value)

    @classmethod
    def flaxs(cls) -> type[nnx.Module]:
        """The layer of Flax: the next base."""
        return cls.__mro__[cls.__mro__.index(Layer) + 1]

    @classmethod
    def of(cls, layer: nnx.Module) -> Self:
        """Makes this layer from a layer of Flax, whose Variables, settings and inner modules it
        shares; or from one of ours, whose additional arguments it keeps. The constructor of a
        derived class is not called.

        Raises:
            GraphError: the layer has another class (one derived from Flax's may compute something
                else), or has an attribute named like one of our arguments.
        """
        kinds = cls.__mro__[: cls.__mro__.index(cls.flaxs()) + 1]
        if type(layer) not in kinds:
            raise GraphError(
                f"{cls.__name__}.of cannot convert this layer",
                expected=f"flax.nnx.{cls.flaxs().__name__}, or {cls.__name__} itself",
                got=f"{type(layer).__module__}.{type(layer).__qualname__}",
                why="a derived class may compute something else",
                fix="call the layer as it is",
            )
        if why := taken(layer):
            raise GraphError(
                f"{cls.__name__}.of cannot convert this layer",
                got=why,
                fix="rename the attributes",
            )
        made = shallow(layer, cls)
        made._keep({name: getattr(layer, name, default) for name, default in cls.own.items()})
        return made

    @property
    def unfused(self) -> str | None:
        """Why this layer falls back to Flax's implementation for any operands, or None."""
        raise NotImplementedError

    @property
    def remark(self) -> str | None:
        """When a part of this layer falls back although cuDNN could run it, or None."""
        return None

    @property
    def kept(self) -> str | None:
        """Why ``accelerate`` keeps Flax's layer, or None."""
        return self.unfused


class ActivatedLayer(Layer):
    """A layer with an activation."""

    own: ClassVar = {"activation": None}
    activation: Activation

    def _keep(self, own: Mapping[str, Any]) -> None:
        self.activation = epilogue.activation_name(own["activation"])


def shallow(node: Any, cls: type[_T]) -> _T:
    """An object of this class with the attributes of another; both may change independently."""
    made = cls.__new__(cls)  # as in unpickling: Flax's constructor would make new Variables
    vars(made).update(vars(node))  # NNX's own entries, too
    if (state := vars(node).get("_pytree__state")) is not None:
        vars(made)["_pytree__state"] = jax.tree.map(lambda x: x, state)  # of the current trace
    return made


def taken(layer: nnx.Module) -> str | None:
    """Why a layer of Flax cannot be replaced: a user's attribute is named like one of our
    arguments, means nothing to Flax's layer, and may be read by other code. Or None."""
    own = SWAPPED[type(layer)].own if type(layer) in SWAPPED else ()
    names = ", ".join(name for name in own if name in vars(layer))
    why = f"it has attributes named like arguments of jax_cudnn's layer: {names}"
    return why if names else None


def replacement(module: Any) -> Layer | None:
    """Our layer for a layer of Flax, also if it is ``kept``; None for anything else."""
    found = type(module) in SWAPPED and not taken(module)
    return SWAPPED[type(module)].of(module) if found else None


def unknown(dtype: Any, precision: Any = None) -> str | None:
    """Why cuDNN does not support a layer's ``dtype`` or precision, or None. With a dtype of None,
    operands decide at the call."""
    if dtype is not None and (name := jax.dtypes.canonicalize_dtype(dtype).name) not in FLOATS:
        return f"graphs do not support {name}"
    try:
        normal_precision(precision)
    except GraphError:
        return f"cuDNN does not support precision {precision!r}"
    return None


def fusible(*operands: jax.Array | None) -> bool:
    """Whether graphs support these arrays; Flax's layers also take float64, complex, empty."""
    return all(x is None or (x.size and x.dtype.name in FLOATS) for x in operands)


def finished(
    y: jax.Array, activation: Activation = None, bias: Any = None, residual: Any = None
) -> jax.Array:
    """``activation(y + bias + residual)`` for a ``y`` without a cuDNN epilogue: computed in float32
    or wider, and rounded to the dtype of the sum. The bias broadcasts."""
    name = epilogue.activation_name(activation)
    if name is None and bias is None and residual is None:
        return y
    out = jnp.result_type(y, *(term for term in (bias, residual) if term is not None))
    wide = y.astype(jnp.promote_types(out, jnp.float32))
    return epilogue.apply_outside(wide, epilogue.Terms(None, bias, residual, name), out.name)


class Operands(NamedTuple):
    """The operands of a layer with a kernel, promoted as Flax promotes them."""

    x: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    out: str
    """The result's dtype: of the product (or ``preferred_element_type``) plus the bias."""

    @classmethod
    def of(cls, layer: Any, x: jax.Array, kernel: jax.Array) -> Operands | None:
        """None if graphs do not support them: float64, complex and empty arrays."""
        bias = None if layer.bias is None else layer.bias[...]
        x, kernel, bias = layer.promote_dtype((x, kernel, bias), dtype=layer.dtype)
        if not fusible(x, kernel, bias):
            return None
        product = layer.preferred_element_type or jnp.result_type(x, kernel)
        out = jnp.result_type(product, *(() if bias is None else (bias,))).name
        return cls(x, kernel, bias, out) if out in FLOATS else None
