"""A Graph as JSON: context, nodes and tensors, with the keys of cuDNN's frontend."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

from .._core.graph.dtypes import cudnn_name
from .recorder import Recorder
from .references import result_name
from .tensors import NamedTensor


def as_json(recorder: Recorder, context: Mapping[str, Any]) -> str:
    """Indented JSON, with tensors and nodes in the order of creation."""
    nodes = [_node(recorder, name) for name in recorder.nodes]
    tensors = {
        label(recorder, tensor): _tensor(recorder, tensor)
        for tensor in recorder.handles.values()
        if tensor._state.value is None
    }
    content = {"context": context, "nodes": nodes, "tensors": tensors}
    return json.dumps(content, indent=2, allow_nan=False)


def _node(recorder: Recorder, name: str) -> dict[str, Any]:
    call = recorder.nodes[name]

    def operand(tensor: str) -> Any:
        handle = recorder.handles[tensor]
        number = handle._state.value
        return label(recorder, handle) if number is None else _plain(number)

    return {
        "name": name,
        "tag": call.node.method.upper(),
        "compute_data_type": cudnn_name(call.node.compute_data_type),
        **{key: _plain(value) for key, value in call.node.keywords().items()},
        "inputs": {port: operand(tensor) for port, tensor in call.inputs},
        "outputs": {
            result_name(call.node.method, port): operand(tensor) for port, tensor in call.outputs
        },
    }


def _tensor(recorder: Recorder, tensor: NamedTensor) -> dict[str, Any]:
    return {
        "data_type": cudnn_name(recorder.dtype(tensor)),
        "dim": tensor.get_dim(),
        "stride": recorder.strides(tensor),
        "is_pass_by_value": tensor.get_is_pass_by_value(),
        "is_virtual": recorder.is_virtual(tensor),
        "uid": tensor.uid,
    }


def label(recorder: Recorder, tensor: NamedTensor) -> str:
    """The tensor's name if it is unique, else its canonical name."""
    same = [t for t in recorder.handles.values() if t.label == tensor.label]
    return tensor.label if tensor.label and len(same) == 1 else canonical_name(recorder, tensor)


def canonical_name(recorder: Recorder, tensor: NamedTensor) -> str:
    """``node::port`` of the node that computes a tensor; for an input, the declared name."""
    for node, call in recorder.nodes.items():
        for port, name in call.outputs:
            if name == tensor.name:
                return f"{node}::{result_name(call.node.method, port)}"
    return tensor.name


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        # JSON has no infinities: write "inf", "-inf", "nan", which float() reads.
        return float(value) if math.isfinite(value) else str(float(value))
    return value if isinstance(value, (str, bool)) else str(value)
