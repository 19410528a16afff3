"""What every layer here adds to the layer of Flax that it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from .._core.errors import GraphError
from .._core.graph.dtypes import FLOATS
from .._core.graph.options import normal_precision
from ..ops import epilogue
from ..ops.epilogue import Activation

_T = TypeVar("_T")

SWAPPED: dict[type[nnx.Module], type[Layer]] = {}
"""A layer of Flax, and the layer here that stands for it."""


def finished(
    y: jax.Array, activation: Activation = None, bias: Any = None, residual: Any = None
) -> jax.Array:
    """``activation(y + bias + residual)`` behind what no epilogue of cuDNN's is behind: computed in
    float32 at least, of the dtype that the sum has. The bias broadcasts."""
    name = epilogue.activation_name(activation)
    if name is None and bias is None and residual is None:
        return y
    out = jnp.result_type(y, *(term for term in (bias, residual) if term is not None))
    wide = y.astype(jnp.promote_types(out, jnp.float32))
    return epilogue.apply_outside(wide, epilogue.Terms(None, bias, residual, name), out.name)


def fusible(*operands: jax.Array | None) -> bool:
    """Whether graphs compute what these hold; Flax's layers take float64 and complex, too."""
    given = [x for x in operands if x is not None]
    return all(x.size and x.dtype.name in FLOATS for x in given)


def unknown(dtype: Any, precision: Any = None) -> str | None:
    """In words that no graph computes in a layer's ``dtype``, or that its precision is one of XLA's
    that cuDNN does not have, or None. A dtype of None is known at the call only."""
    if dtype is not None and (name := jax.dtypes.canonicalize_dtype(dtype).name) not in FLOATS:
        return f"no graph computes in {name}"
    try:
        normal_precision(precision)
    except GraphError:
        return f"cuDNN has no precision {precision!r}"
    return None


class Layer:
    """Stands before Flax's class among the bases of a layer, which it fills in ``SWAPPED``.

    Parameters, their names, shapes and initialisers are Flax's, because its constructor makes them;
    this one takes the arguments of ``own`` beside its, and keeps them as attributes.
    """

    own: ClassVar[Mapping[str, Any]] = {}
    """Arguments that Flax's constructor does not have, and their defaults."""

    def __init_subclass__(cls, **others: Any):
        super().__init_subclass__(**others)
        if Layer not in cls.__bases__:  # a class derived from a layer
            if "__init__" in vars(cls):
                _, *own = inspect.signature(cls.__init__).parameters.values()
                cls.__signature__ = inspect.Signature(own)
            return
        SWAPPED[cls.flaxs()] = cls
        _, *flaxs = inspect.signature(cls.flaxs().__init__).parameters.values()
        own = (
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in cls.own.items()
        )
        cls.__signature__ = inspect.Signature([*flaxs, *own])

    def __init__(self, *args: Any, **named: Any):
        own = {name: named.pop(name, default) for name, default in self.own.items()}
        super().__init__(*args, **named)
        self._keep(own)

    def _keep(self, own: Mapping[str, Any]) -> None:
        for name, value in own.items():
            setattr(self, name, epilogue.activation_name(value) if name == "activation" else value)

    @classmethod
    def flaxs(cls) -> type[nnx.Module]:
        """The layer of Flax: the base behind this one."""
        return cls.__mro__[cls.__mro__.index(Layer) + 1]

    @classmethod
    def of(cls, layer: nnx.Module) -> Self:
        """A layer with the Variables, settings and inner modules of one of Flax's, shared; or of
        one of ours, with what ``own`` names, too. A derived class's constructor is not called.
        GraphError for others: a class derived from Flax's may compute something else; and where
        what ``own`` names is an attribute of a user's own (:func:`taken`)."""
        kinds = cls.__mro__[: cls.__mro__.index(cls.flaxs()) + 1]
        if type(layer) not in kinds:
            raise GraphError(
                f"{cls.__name__}.of takes another layer",
                expected=f"flax.nnx.{cls.flaxs().__name__}, or {cls.__name__} itself",
                got=f"{type(layer).__module__}.{type(layer).__qualname__}",
                why="a derived class may compute something else",
                fix="call the layer as it is",
            )
        if why := taken(layer):
            raise GraphError(
                f"{cls.__name__}.of takes no layer with such an attribute", got=why, fix="rename it"
            )
        made = shallow(layer, cls)
        made._keep({name: getattr(layer, name, default) for name, default in cls.own.items()})
        return made

    @property
    def unfused(self) -> str | None:
        """Why Flax's own way computes this layer whatever its operands are, or None."""
        raise NotImplementedError

    @property
    def remark(self) -> str | None:
        """When Flax's own way computes a part of this layer that a user can have here, or None."""
        return None

    @property
    def kept(self) -> str | None:
        """Why ``accelerate`` leaves Flax's layer in its place, or None."""
        return self.unfused


def shallow(node: Any, cls: type[_T]) -> _T:
    """An object of this class with the attributes of another, which may be changed here."""
    made = object.__new__(cls)
    vars(made).update(vars(node))  # NNX's own entries, too
    if (state := vars(node).get("_pytree__state")) is not None:
        vars(made)["_pytree__state"] = jax.tree.map(lambda x: x, state)  # of the trace of now
    return made


def taken(layer: nnx.Module) -> str | None:
    """In words that one of Flax's layers has an attribute of a user's own that is an argument here:
    it says nothing to Flax's, and other code may read it. Or None."""
    own = SWAPPED[type(layer)].own if type(layer) in SWAPPED else ()
    names = ", ".join(name for name in own if name in vars(layer))
    return f"it has attributes of your own that are arguments here: {names}" if names else None


def stand_in(value: Any) -> Any:
    """The layer that stands for one of Flax's, and any other value itself."""
    if type(value) not in SWAPPED or taken(value):
        return value
    ours = SWAPPED[type(value)].of(value)
    return value if ours.kept else ours
