"""The tangent of attention, beside its result and statistic; its transpose is cuDNN's backward."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from .._core.graph.by_reference import Tangent, Transposed, derived_ports
from .._core.graph.dims import Dims, Shape
from .._core.graph.node import Node
from .attention import Sdpa, SdpaBackward
from .attention_base import Attending
from .attention_extras import sink_gradient

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._core.graph.node import Tensors, Values
    from .._core.graph.spec import Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation

_GRADIENTS = {"q": "dQ", "k": "dK", "v": "dV", "bias": "dBias", "sink_token": "dSink_token"}


@dataclass(frozen=True)
class SinkGradient(Node):
    """dSink_token of sdpa_backward in one order of its sum, by XLA."""

    method = "sdpa_sink_gradient"
    leftover = True
    ports = derived_ports(("o", "dO", "stats", "sink_token"), ("dSink_token",))
    requires = "XLA adds up the gradient of sinks: cuDNN's sum has no fixed order, and no padding"

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {"dSink_token": (inputs["sink_token"].shape, "float32")}

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        return (sink_gradient(*(arrays[port] for port in self.ports.input_names)),)

    def linear_in(self, port: str) -> bool:
        return port == "dO"


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
        assert isinstance(self.base, Sdpa)
        shared = {f.name: getattr(self.base, f.name) for f in dataclasses.fields(Attending)}
        # Of padding the statistic is -inf, which cuDNN's sum over all queries does not pass over.
        apart = g.options.deterministic or "seq_len_q" in inputs
        node = SdpaBackward(
            **shared, dBias="bias" in linear, dSink_token="sink_token" in linear and not apart
        )
        drawn = "seed" in inputs  # then the mask of weights is drawn again
        inner = [port for port in self.inner if port != "dropout_mask" or not drawn]
        values = {port: inputs[port] for port in inner}
        values |= {"o": inputs["O"], "stats": inputs["Stats"], "dO": cotangents[out]}
        made = g.apply(node, **values)
        found = dict(zip(node.results, made, strict=True))
        if "sink_token" in linear and apart:
            read = {port: values[port] for port in ("o", "dO", "stats", "sink_token")}
            (found["dSink_token"],) = g.apply(SinkGradient(), **read)
        passed = {name: found[_GRADIENTS[port]] for port, name in linear.items()}
        others = tuple(name for name in cotangents if name != out)
        if others:  # of the statistic, which v does not move
            for x in made:  # cuDNN writes no wider ones
                g.fixed(x, x._state.dtype)
            moved = {port: name for port, name in linear.items() if port != "v"}
            avals = tuple((n, tensors[n].shape, tensors[n].dtype) for n in moved.values())
            if moved:
                plain = dataclasses.replace(self, active=tuple(moved), inner=tuple(inner))
                read = {port: inputs[port] for port in plain._read}
                through = Transposed(plain, avals, others, tuple(read))
                given = {through.given[name]: cotangents[name] for name in others}
                further = g.apply(through, **read, **given)
                for name, more in zip(moved.values(), further, strict=True):
                    passed[name] = g.sum([passed[name], more])
        return passed
