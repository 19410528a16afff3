"""Where a step runs: on whole arrays, or on the shard of each device inside shard_map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import compat


class Place(Protocol):
    """``lead`` is the number of dimensions that precede those of its values."""

    lead: int

    def jit(
        self, function: Callable[..., list], inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> Callable[..., list]:
        """The compiled function for values of this place, from their avals."""
        ...

    def measured(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        """The same for a function that returns a pytree of scalars; each gets a leading dimension
        with one element per device."""
        ...

    def kinds(self, avals: Sequence[Any]) -> tuple[Any, ...]:
        """The key of compiled functions of this place, in addition to shapes and dtypes."""
        ...

    def lifted(self, value: Any, aval: Any) -> Any:
        """A constant as a value of this place."""
        ...

    def common(self, value: Any) -> Any:
        """A scalar that is equal on all devices; None if they differ."""
        ...


class Here:
    """On whole arrays."""

    lead = 0

    def jit(
        self, function: Callable[..., list], inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> Callable[..., list]:
        return jax.jit(function)

    def measured(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        return jax.jit(lambda *xs: jax.tree.map(lambda x: jnp.asarray(x)[None], function(*xs)))

    def kinds(self, avals: Sequence[Any]) -> tuple[Any, ...]:
        return ()

    def lifted(self, value: Any, aval: Any) -> Any:
        return value

    def common(self, value: Any) -> Any:
        return np.asarray(value)[()]


class Mapped:
    """Inside shard_map over ``axes`` of a mesh. A value is the stack of the devices' shards, along
    the axes over which it varies."""

    lead = 1

    def __init__(self, params: Any) -> None:
        """The place of a shard_map equation, from its parameters."""
        self._mesh, self._check = params["mesh"], params["check_vma"]
        self._axes = compat.manual_axes(params)
        stacks = [
            [self._spec(v.aval) for v in variables]
            for variables in (params["jaxpr"].invars, params["jaxpr"].outvars)
        ]
        self.enter = self._map(_stacked, params["in_specs"], stacks[0], self._check)
        """Whole arrays to values of this place."""
        self.leave = self._map(_parts, stacks[1], params["out_specs"], self._check)
        """Values of this place to whole arrays."""

    def jit(
        self, function: Callable[..., list], inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> Callable[..., list]:
        def each(*stacks: Any) -> list[Any]:
            return _stacked(*function(*_parts(*stacks)))

        return self._map(each, map(self._spec, inputs), map(self._spec, outputs), self._check)

    def measured(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        def each(*stacks: Any) -> Any:
            results = function(*_parts(*stacks))
            return jax.tree.map(lambda x: jnp.asarray(x)[None], results)

        return self._map(each, map(self._spec, inputs), PartitionSpec(self._axes), False)

    def kinds(self, avals: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(self._varying, avals))

    def lifted(self, value: Any, aval: Any) -> Any:
        sizes = dict(self._mesh.shape)
        copies = int(np.prod([sizes[axis] for axis in self._varying(aval)], dtype=int))
        stack = jnp.broadcast_to(jnp.asarray(value)[None], (copies, *np.shape(value)))
        if isinstance(self._mesh, Mesh):  # one with explicit axes does not do it automatically
            stack = jax.device_put(stack, NamedSharding(self._mesh, self._spec(aval)))
        return stack

    def common(self, value: Any) -> Any:
        values = np.asarray(value)
        return values[0] if (values == values[0]).all() else None

    def _map(self, function: Any, inputs: Any, outputs: Any, check: bool) -> Callable[..., Any]:
        outputs = outputs if isinstance(outputs, PartitionSpec) else [*outputs]
        return jax.jit(
            jax.shard_map(
                function,
                mesh=self._mesh,
                in_specs=tuple(inputs),
                out_specs=outputs,
                axis_names={*self._axes},
                check_vma=check,
            )
        )

    def _spec(self, aval: Any) -> PartitionSpec:
        varying = self._varying(aval)
        return PartitionSpec(varying) if varying else PartitionSpec()

    def _varying(self, aval: Any) -> tuple[str, ...]:
        """The axes over which a value varies: all axes if JAX does not track them."""
        known = compat.varying_axes(aval) if self._check else {*self._axes}
        return tuple(axis for axis in self._axes if axis in known)


def _stacked(*parts: Any) -> list[Any]:
    return [part[None] for part in parts]


def _parts(*stacks: Any) -> list[Any]:
    return [stack[0] for stack in stacks]


HERE = Here()
