"""Derivatives and batches of nodes that define no graph for them: nodes made from the reference.

XLA runs them. As nodes, they can be differentiated, transposed and batched again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..compat import varying_axes
from .dims import Dims, Port, Shape
from .dtypes import is_floating, wide_dtype
from .node import Draws, Indices, Node, frozen
from .planned import XLA_ONLY, About, Work
from .promotion import inferred
from .reference import applied

if TYPE_CHECKING:
    from ..rules import Derivation, GraphTensor, Tensor, Tensors, Values


def moving(ports: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """Port -> the port with its tangent or cotangent, with names that are not in use."""
    names: dict[str, str] = {}
    for port in ports:
        name = f"d({port})"
        while name in (*taken, *names.values()):
            name = f"d({name})"
        names[port] = name
    return names


@frozen
class ByReference(Node):
    """A node computed from the reference of ``base``."""

    base: Node

    kind = ""
    xla_only = XLA_ONLY

    @property
    def method(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"{self.kind}_{self.base.method}"

    @property
    def about(self) -> About:  # pyright: ignore[reportIncompatibleVariableOverride]
        what = f"XLA runs it, from {self.base.method}'s reference: cuDNN has no operation for it"
        return About(requires=what)

    @property
    def indices(self) -> Indices:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Indices(selecting=self.base.indices.selecting)

    def deterministic(self) -> Node | None:
        return self if self.base.deterministic() == self.base else None

    @property
    def draws(self) -> Draws | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.draws

    def keywords(self) -> dict[str, Any]:
        return self.base.keywords()

    def work(self, tensors: Tensors) -> Work:
        return Work(0, self.method)


class Derivative(ByReference):
    """A derivative of ``base``, which has its input ports ``inner``: linear in the ports that
    ``given`` names, with the results that ``made`` names, each by the port or result of ``base``.
    """

    inner: Any
    given: Any
    made: Any

    @property
    def ports(self) -> Dims:  # pyright: ignore[reportIncompatibleVariableOverride]
        return derived_ports((*self.inner, *self.given.values()), self.made.values())

    def linear_in(self, ports: Collection[str]) -> bool:
        return {*ports} <= {*self.given.values()}


@frozen
class Tangent(Derivative):
    """Tangents of the results ``outs`` of ``base``, from those of its ports ``active``."""

    active: tuple[str, ...]
    outs: tuple[str, ...]
    inner: tuple[str, ...]
    """The input ports of ``base``."""

    kind = "jvp"

    @property
    def given(self) -> dict[str, str]:
        """Port of ``base`` -> the port with its tangent."""
        return moving(self.active, (*self.inner, *self.outs))

    @property
    def made(self) -> dict[str, str]:
        """Result of ``base`` -> the result that is its tangent."""
        return moving(self.outs, (*self.inner, *self.outs, *self.given.values()))

    def work(self, tensors: Tensors) -> Work:
        """That of ``base``, as the least."""
        made = {port: tensors[name] for port, name in self.made.items()}
        return Work(self.base.work({**tensors, **made}).flops, self.method)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        results = inferred(self.base, {port: inputs[port] for port in self.inner})
        return {name: results[port] for port, name in self.made.items()}

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        inner = {port: arrays[port] for port in self.inner if port in arrays}
        fixed = {port: x for port, x in inner.items() if port not in self.active}
        function = _function(self.base, fixed, self.active, self.outs)
        kind = wide_dtype(*arrays.values())
        at = [arrays[port].astype(kind) for port in self.active]
        along = [arrays[name].astype(kind) for name in self.given.values()]
        return tuple(jax.jvp(function, at, along)[1])


@frozen
class Transposed(Derivative):
    """Cotangents of the ports in which ``base`` is linear, from those of its results ``outs``."""

    linear: tuple[tuple[str, Shape, str], ...]
    """Each of these ports, with its shape and dtype."""
    outs: tuple[str, ...]
    inner: tuple[str, ...]
    """The other input ports of ``base``."""

    kind = "transpose"

    @property
    def given(self) -> dict[str, str]:
        """Result of ``base`` -> the port with its cotangent."""
        return moving(self.outs, (*self.inner, *self.outs))

    @property
    def made(self) -> dict[str, str]:
        """Port of ``base`` -> the result that is its cotangent."""
        taken = (*self.inner, *self.outs, *self.given.values())
        return moving((port for port, *_ in self.linear), taken)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {self.made[port]: (shape, dtype) for port, shape, dtype in self.linear}

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        names = tuple(port for port, *_ in self.linear)
        fixed = {port: arrays[port] for port in self.inner if port in arrays}
        function = _function(self.base, fixed, names, self.outs)
        names = self.given.values()
        # Inside shard_map a linear port varies over the same mesh axes as its cotangents.
        axes = tuple(frozenset().union(*(varying_axes(jax.typeof(arrays[n])) for n in names)))
        kind = wide_dtype(*arrays.values())
        at = [jnp.zeros(shape, kind) for _, shape, _ in self.linear]
        at = [jax.lax.pcast(x, axes, to="varying") for x in at] if axes else at
        results = jax.eval_shape(function, *at)
        given = [arrays[n].astype(r.dtype) for n, r in zip(names, results, strict=True)]
        return tuple(jax.linear_transpose(function, *at)(given))


@frozen
class Batched(ByReference):
    """``base`` over a new leading dimension of its ports ``mapped`` and of all results."""

    size: int
    mapped: tuple[str, ...]
    inner: tuple[str, ...]
    """All input ports of ``base``."""
    outs: tuple[str, ...]

    kind = "vmap"

    @property
    def ports(self) -> Dims:  # pyright: ignore[reportIncompatibleVariableOverride]
        return derived_ports(self.inner, self.outs)

    def linear_in(self, ports: Collection[str]) -> bool:
        return self.base.linear_in(ports)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        each = {
            port: replace(tensor, shape=tensor.shape[1:]) if port in self.mapped else tensor
            for port, tensor in inputs.items()
        }
        results = inferred(self.base, each)
        return {port: ((self.size, *shape), dtype) for port, (shape, dtype) in results.items()}

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        fixed = {port: x for port, x in arrays.items() if port not in self.mapped}

        def function(mapped: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
            return applied(self.base, fixed | mapped)

        return jax.vmap(function)({port: arrays[port] for port in self.mapped if port in arrays})


def jvp(
    node: Node, g: Derivation, tangents: Values, inputs: Values, outputs: Values
) -> dict[str, GraphTensor]:
    """As ``node.jvp``: by the node itself where it is linear in the tangents, else from its
    reference."""
    if node.linear_in(tangents.keys()):
        still = {
            port: g.zeros(x._state) if node.linear_in({port, *tangents}) else x
            for port, x in inputs.items()
            if port not in tangents
        }
        given = {port: (tangents if port in tangents else still)[port] for port in inputs}
        return dict(zip(outputs, g.apply(node, **given), strict=True))
    found = tangent_node(node, tangents, {port: x._state for port, x in inputs.items()})
    along = {found.given[port]: tangent for port, tangent in tangents.items()}
    return dict(zip(found.outs, g.apply(found, **inputs, **along), strict=True))


def transpose(
    node: Node, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
) -> dict[str, GraphTensor]:
    """As ``node.transpose``, from its reference."""
    linear = [port for port in tensors if port not in (*inputs, *node.ports.output_names)]
    avals = tuple((port, tensors[port].shape, tensors[port].dtype) for port in linear)
    found = Transposed(node, avals, tuple(cotangents), tuple(inputs))
    given = {found.given[port]: cotangent for port, cotangent in cotangents.items()}
    return dict(zip(linear, g.apply(found, **inputs, **given), strict=True))


def tangent_node(node: Node, active: Iterable[str], inputs: Mapping[str, Tensor]) -> Tangent:
    """The node that computes the tangents of another node's results, where they have any."""
    results = inferred(node, inputs)
    outs = tuple(port for port, (_, dtype) in results.items() if is_floating(dtype))
    return Tangent(node, tuple(active), outs, tuple(inputs))


def _function(
    node: Node, fixed: Mapping[str, jax.Array], names: tuple[str, ...], outs: tuple[str, ...]
) -> Callable[..., list[jax.Array]]:
    """The results ``outs`` of a node as a function of the ports ``names``."""

    def function(*values: jax.Array) -> list[jax.Array]:
        results = applied(node, {**fixed, **dict(zip(names, values, strict=True))})
        named = dict(zip(node.results, results, strict=True))
        return [named[port] for port in outs]

    return function


def derived_ports(inputs: Iterable[str], outputs: Iterable[str]) -> Dims:
    """Ports with these names, of any shape."""
    return Dims(
        tuple(Port(name, (f"*{name}",)) for name in inputs),
        tuple(Port(name, (f"*{name}",)) for name in outputs),
    )
