"""The tangent of attention, beside its result and statistic; its transpose is cuDNN's backward."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from .._core.graph.by_reference import Tangent, Transposed, derived_ports
from .._core.graph.dims import Dims, Shape
from .attention import Sdpa
from .attention_arranged import Arranged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._core.graph.node import Tensors, Values
    from .._core.graph.spec import Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation

_GRADIENTS = {"q": "dQ", "k": "dK", "v": "dV", "qkv": "dQKV", "bias": "dBias"}


@dataclass(frozen=True)
class AttentionTangent(Tangent):
    """Tangents of O and Stats, from the reference; O and Stats are operands for the transpose."""

    @property
    def _read(self) -> tuple[str, ...]:
        return (*self.inner, *self.outs)

    @property
    def ports(self) -> Dims:  # pyright: ignore[reportIncompatibleVariableOverride]
        return derived_ports((*self._read, *self.given.values()), self.made.values())

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return super().infer({port: inputs[port] for port in self.inner})

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        return super().reference(**{p: x for p, x in arrays.items() if p not in self.outs})

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> dict[str, GraphTensor]:
        out = self.made["O"]
        linear = {port: name for port, name in self.given.items() if name not in inputs}
        if out not in cotangents or not {*inputs} >= {*self._read}:
            return super().transpose(g, cotangents, inputs, tensors)
        assert isinstance(self.base, (Sdpa, Arranged))
        node = self.base.backward("bias" in linear)
        values = {port: inputs[port] for port in self.inner}
        values |= {"o": inputs["O"], "stats": inputs["Stats"], "dO": cotangents[out]}
        made = g.apply(node, **values)
        found = dict(zip(node.results, made, strict=True))
        passed = {name: found[_GRADIENTS[port]] for port, name in linear.items()}
        others = tuple(name for name in cotangents if name != out)
        if others:  # of the statistic, which v does not move
            moved = {port: name for port, name in linear.items() if port != "v"}
            avals = tuple((n, tensors[n].shape, tensors[n].dtype) for n in moved.values())
            if moved:
                plain = dataclasses.replace(self, active=tuple(moved))
                through = Transposed(plain, avals, others, tuple(inputs))
                given = {through.given[name]: cotangents[name] for name in others}
                further = g.apply(through, **inputs, **given)
                for name, more in zip(moved.values(), further, strict=True):
                    passed[name] = g.sum([passed[name], more])
        return passed
