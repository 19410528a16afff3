"""Infer shapes and dtypes of a Graph's tensors again when the user changes some of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .._core.errors import JaxCudnnError
from .._core.graph.builder import GraphBuilder
from .._core.graph.dtypes import beside_integers, is_floating, wide_dtype
from .._core.graph.node import Node
from .._core.graph.options import Options
from .._core.graph.promotion import compute_type, default_compute, inferred, result_dtype
from .._core.graph.spec import Call, Tensor
from .tensors import NamedTensor


class Inferring(GraphBuilder):
    """A builder that distinguishes what the user stated from what it inferred."""

    def __init__(self, options: Options, io_data_type: str | None) -> None:
        super().__init__(options)
        self.handles: dict[str, NamedTensor] = {}
        self._io_data_type = io_data_type
        self._returned: set[str] = set()
        self._computes: dict[str, str] = {}  # calls and their stated compute types
        self._integers: set[str] = set()  # constants that were written as integers

    def _lift(self, value: Any, port: str, beside: Sequence[Any]) -> Tensor:
        lifted = super()._lift(value, port, beside)
        if isinstance(value, int):
            self._integers.add(lifted.name)
        return lifted

    def _infer_all(self) -> None:
        for index, call in enumerate(self._calls):
            try:
                self._infer_call(index)
            except JaxCudnnError as error:
                error.summary = f"{call.name}, after a change of tensors: {error.summary}"
                raise

    def _infer_again(self) -> None:
        """Infers the results of operations after a tensor changed; until :meth:`conclude`, further
        changes may resolve a mismatch."""
        for index in range(len(self._calls)):
            with contextlib.suppress(JaxCudnnError):
                self._infer_call(index)

    def _infer_call(self, index: int) -> None:
        call = self._calls[index]
        inputs = self._inputs_of(call)
        if call.name not in self._computes and not self._is_said(call.node):
            compute = compute_type(default_compute(call.node, inputs), inputs)
            call = replace(call, node=replace(call.node, compute_data_type=compute))
            self._calls[index] = call
        results = inferred(call.node, inputs)
        for port, name in call.outputs:
            shape, dtype = results[port]
            if name in self._typed:
                dtype = self._tensors[name].dtype
            elif name in self._returned and self._io_data_type and is_floating(dtype):
                dtype = dtype if _fixes(call.node, port, inputs) else self._io_data_type
            self._put(replace(self._tensors[name], shape=shape, dtype=dtype))

    def _inputs_of(self, call: Call) -> dict[str, Tensor]:
        """The tensors at the input ports, with constants in a dtype that fits the rest."""
        inputs = {port: self._tensors[name] for port, name in call.inputs}
        arrays = [tensor.dtype for tensor in inputs.values() if tensor.value is None]
        wide = wide_dtype(*(t for t in inputs.values() if t.value is None)).name
        for port, tensor in inputs.items():
            if tensor.name in self._integers and arrays:
                dtype = "int32" if beside_integers(arrays) else wide
                inputs[port] = replace(tensor, dtype=dtype)
                self._put(inputs[port])
        return inputs

    def _is_said(self, node: Node) -> bool:
        """Whether the graph states the node's compute type."""
        return node.product and self._options.compute_data_type is not None

    def _put(self, state: Tensor) -> None:
        self._tensors[state.name] = self.handles[state.name]._state = state


def _fixes(node: Node, port: str, inputs: dict[str, Tensor]) -> bool:
    """Whether the operation fixes the dtype of a result for any operands: statistics of a
    normalization are float32."""
    if node.ports.output_names == (port,):
        return False
    narrow = {
        p: replace(t, dtype="bfloat16") if is_floating(t.dtype) and math.prod(t.shape) > 1 else t
        for p, t in inputs.items()
    }
    try:
        return node.infer(narrow)[port][1] == "float32"
    except JaxCudnnError:  # it does not support such operands
        return node.infer(inputs)[port][1] != result_dtype(inputs)
