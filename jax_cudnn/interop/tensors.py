"""The tensors of a Graph: pygraph's names, uids and output flags; and what refers to them."""

from __future__ import annotations

import json
import math
import numbers
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._core.errors import GraphAttributeError, GraphTypeError, nearest, shown
from .._core.graph.dtypes import cudnn_name
from .._core.graph.spec import Call, Tensor
from .._core.graph.tensor import GraphTensor
from .arrays import dtype_name, refusal, without_gaps

_HELD: Any = GraphTensor._state  # its slot: reading it here adds what is pending to the graph

# Members of cuDNN's tensors that do not apply to XLA's arrays, and what to do instead.
_VECTORS = "XLA has no vectorized channels; cuDNN's int8 engines take plain channels-last arrays"
_NOT_HERE = {
    "get_alignment": "leave it out: XLA aligns arrays",
    "set_alignment": "leave it out: XLA aligns arrays",
    "get_vector_count": _VECTORS,
    "get_vector_dimension": _VECTORS,
    "set_vector_count_and_dimension": _VECTORS,
    "get_has_compile_time_constant": "pass a Python number to an operation: it is a constant",
}


def one_element(name: str, shape: Sequence[int]) -> None:
    """Raises GraphError if a tensor that is passed by value has several elements."""
    if math.prod(shape) != 1:
        raise refusal(
            f"is_pass_by_value of {name}, which is not a scalar",
            expected="a tensor of one element",
            got=str(list(shape)),
            why="cuDNN reads such a tensor as one scalar in host memory",
            fix="leave out is_pass_by_value",
        )


def refuse_reordered(reordering_type: Any) -> None:
    """Raises GraphError for a memory order that strides cannot express."""
    if getattr(reordering_type, "name", reordering_type) not in (None, "NONE"):
        raise refusal(
            "tensors of a Graph do not support reordering_type",
            got=str(reordering_type),
            why="strides describe the memory order of XLA's arrays",
            fix="leave it out: scales of blocks are in the order F8_128x4, as of quantize_mxfp8",
        )


class NamedTensor(GraphTensor):
    """A tensor of a :class:`jax_cudnn.Graph`.

    In addition to a graph tensor's methods, it has the setters of ``cudnn.tensor``, which return
    the tensor: ``set_output``, ``set_name``, ``set_uid``, ``set_data_type``, ``set_dim``,
    ``set_stride``. Call them before the graph's ``with`` ends, even after the tensor was used; but
    set dtype and shape of an input before an operation uses it.
    """

    _builder: Any  # the Recorder that made it
    _state: Any = property(lambda t: t._builder.follow() or _HELD.__get__(t), _HELD.__set__)
    name: Any = property(lambda self: _HELD.__get__(self).name)

    def __init__(self, recorder: Any, state: Tensor, uid: int):
        super().__init__(recorder, state)
        self.uid, self.is_own_uid, self.label = uid, False, ""
        self.is_declared = False  # by its shape: setters may change it until it is used
        self.is_output = self.by_value = self.is_untyped = self.is_long = False
        self.window: tuple[int, ...] | None = None  # its strides if they have gaps
        self.number: float | None = None  # the declared value of one passed by value
        self.offset: str | None = None  # the name of its ragged offset

    def set_output(self, is_output: bool = True) -> NamedTensor:
        """Make the tensor an output of the graph."""
        self._builder.check_open("set_output")
        self._builder.check_result(self, "set_output")
        self.is_output = is_output
        return self

    def set_is_virtual(self, value: bool) -> NamedTensor:
        """The opposite of :meth:`set_output`."""
        return self.set_output(not value)

    def set_name(self, name: str) -> NamedTensor:
        """Set a name to refer to the tensor."""
        self._builder.check_open("set_name")
        self.label = str(name)
        return self

    def set_uid(self, uid: int) -> NamedTensor:
        """Set an integer to refer to the tensor."""
        self._builder.check_open("set_uid")
        if not is_uid(uid):
            expected, got = "an integer", shown(uid)
            raise refusal(f"set_uid({uid!r})", GraphTypeError, expected=expected, got=got)
        self._builder.give_uid(self, int(uid))
        return self

    def set_is_pass_by_value(self, value: bool) -> NamedTensor:
        """Mark it as a scalar in host memory: a Python number or NumPy array is a constant."""
        self._builder.check_open("set_is_pass_by_value")
        if value:
            one_element(self.get_name(), self.shape)
        self.by_value = value
        return self

    def set_data_type(self, data_type: Any) -> NamedTensor:
        """Round the tensor to this dtype: a dtype of JAX, NumPy, torch or cuDNN, or its name."""
        self._builder.check_open("set_data_type")
        super().set_data_type(dtype_name(data_type))
        return self

    def set_dim(self, dim: Sequence[int]) -> NamedTensor:
        """Set the shape of a result whose operation leaves it open (a reduction, a reshape), or of
        a declared input. Set strides after that."""
        self._builder.check_open("set_dim")
        super().set_dim(dim)
        return self

    def set_stride(self, stride: Sequence[int]) -> NamedTensor:
        """Set the memory order, as element strides. Gaps, as of a window into a larger buffer, are
        dropped: the array that a call takes or returns has none."""
        self._builder.check_open("set_stride")
        stride, self.window = without_gaps(self.shape, stride)
        super().set_stride(stride)
        return self

    def set_ragged_offset(self, ragged_offset: Any) -> NamedTensor:
        """Declare that the tensor, (B, H, S, D) with strides [S*H*D, D, H*D, 1], holds
        variable-length sequences packed along the token axis, without padding.

        ``ragged_offset`` is an int32 input (B + 1, 1, 1, 1): the element at which each sequence
        begins, followed by the end of the last one. All of q, k, v and O of ``sdpa`` and
        ``sdpa_backward`` need it, and statistics that are read; also pass seq_len_q and seq_len_kv.
        Offsets and lengths past the tensor are clipped, offsets inside of a token rounded down.
        With a token stride T > H*D, as of q, k and v side by side, offsets count elements of that
        buffer; the array has no gaps. Sequences must be S*T apart there, else it is a GraphError.
        """
        self._builder.check_open("set_ragged_offset")
        self._builder.give_ragged_offset(self, ragged_offset)
        return self

    def set_reordering_type(self, reordering_type: Any) -> NamedTensor:
        """Accepts only "NONE"."""
        refuse_reordered(reordering_type)
        return self

    def set_alignment_value(self, value: int) -> NamedTensor:
        """Accepted for compatibility, without effect: a promise that values are multiples of it."""
        return self

    def validate(self) -> None:
        """Does nothing: tensors are checked when they are declared and changed."""

    def set_ragged_offset_multiplier(self, multiplier: int) -> NamedTensor:
        """Sets the unit of ragged offsets in elements, which must be 1."""
        if multiplier != 1:
            raise refusal(
                "tensors of a Graph do not support ragged_offset_multiplier",
                expected="1",
                got=repr(multiplier),
                fix="multiply the offsets before the call",
            )
        return self

    def get_ragged_offset_multiplier(self) -> int:
        return 1

    def get_reordering_type(self) -> str:
        return "NONE"

    def get_ragged_offset(self) -> NamedTensor | None:
        return self._builder.handles.get(self.offset)

    def get_name(self) -> str:
        return self.label or self.name

    def get_uid(self) -> int:
        return self.uid

    def get_stride(self) -> list[int]:
        """Element strides without gaps: as of cuDNN once the ``with`` ends, before as stated."""
        return self._builder.strides(self)

    def get_data_type(self) -> Any:
        """The JAX dtype; None for an input without a dtype so far."""
        return None if self.is_untyped else self.dtype

    def get_is_virtual(self) -> bool:
        return self._builder.is_virtual(self)

    def get_is_pass_by_value(self) -> bool:
        return self.by_value or self._state.value is not None

    dim = property(lambda self: self.get_dim())
    stride = property(get_stride)
    data_type = property(get_data_type)
    is_virtual = property(get_is_virtual)
    is_pass_by_value = property(get_is_pass_by_value)
    pass_by_value = property(lambda self: self._state.value)
    ragged_offset = property(get_ragged_offset)
    ragged_offset_multiplier = property(get_ragged_offset_multiplier)
    reordering_type = property(get_reordering_type)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_HERE:
            raise refusal(
                f"tensors of a Graph do not support .{name}",
                GraphAttributeError,
                got=str(self._state),
                fix=_NOT_HERE[name],
            )
        return super().__getattr__(name)


def names(tensors: Iterable[NamedTensor]) -> str:
    """Names of tensors for a message."""
    return ", ".join(tensor.get_name() for tensor in tensors)


# -- references ---------------------------------------------------------------------------------

# Names of results in cuDNN's frontend that differ from the port's name.
_PYGRAPH = {
    "inv_var": "INV_VARIANCE",
    "mean": "MEAN",
    "next_running_mean": "NEXT_RUNNING_MEAN",
    "next_running_var": "NEXT_RUNNING_VAR",
    "DScale": "DSCALE",
    "DBias": "DBIAS",
}


def result_name(method: str, port: str) -> str:
    """The frontend's name of an operation's result."""
    if method == "reduction":
        return "OUT_0"
    if method == "rmsnorm_backward":
        return {"DScale": "Dscale", "DBias": "Dbias"}.get(port, port)
    return _PYGRAPH.get(port, port)


def is_uid(reference: Any) -> bool:
    """Whether a reference is a Python or NumPy integer."""
    return isinstance(reference, numbers.Integral) and not isinstance(reference, bool)


@dataclass
class References:
    """Finds the tensor of a reference: a node and port, name, uid, tensor, or array.

    Arrays are identified by identity and are not kept alive: a graph needs only their shapes.
    """

    tensors: dict[str, NamedTensor]
    named: dict[str, str] = field(default_factory=dict)  # "conv2d::image" -> tensor
    aliases: dict[str, str] = field(default_factory=dict)  # what errors do not list, in lower case
    arrays: dict[int, tuple[Any, str]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "arrays": {}}  # not valid in other processes

    def copied(self, tensors: dict[str, NamedTensor]) -> References:
        """The same references to the tensors of a copied graph."""
        return References(tensors, {**self.named}, {**self.aliases}, {**self.arrays})

    def add(self, tensor: str, name: str, *aliases: str) -> None:
        """Makes names refer to a tensor, unless they refer to another one."""
        self.named.setdefault(name, tensor)
        for alias in aliases:
            self.aliases.setdefault(alias.lower(), tensor)

    def remember(self, array: Any, tensor: NamedTensor) -> None:
        """Makes an array or a tensor of pygraph refer to a tensor, as long as it lives."""
        try:
            self.arrays[id(array)] = weakref.ref(array), tensor.name
        except TypeError:  # a few types, which hold no large memory
            self.arrays[id(array)] = lambda: array, tensor.name

    def recall(self, array: Any) -> NamedTensor | None:
        """The tensor for which an array was passed, or None."""
        alive, name = self.arrays.get(id(array), (lambda: None, ""))
        return self.tensors[name] if name and alive() is array else None

    def places(self, tensor: NamedTensor) -> list[str]:
        """The nodes and ports that read or compute a tensor."""
        return [n for n, named in self.named.items() if named == tensor.name and "::" in n]

    def find(self, reference: Any) -> NamedTensor:
        """The tensor; raises GraphError that lists the known references if there is none."""
        found = self.lookup(reference)
        if found is not None:
            return found
        labels = [tensor.label for tensor in self.tensors.values() if tensor.label]
        known = [*dict.fromkeys((*labels, *self.named))]
        plain = isinstance(reference, (str, numbers.Integral))
        got = reference if plain else f"a {type(reference).__name__}"
        raise refusal(
            f"the graph has no tensor {got!r}",
            expected=f"one of {', '.join(known)}; a uid, a tensor of this graph, or an array that "
            "was passed while building it",
            fix=nearest(reference, known),
        )

    def lookup(self, reference: Any) -> NamedTensor | None:
        """The tensor, or None; raises GraphError for an ambiguous name."""
        if isinstance(reference, NamedTensor):
            found = self.tensors.get(reference.name)
            if found is None or found._builder.family is not reference._builder.family:
                return None  # copies of a graph, with other options, share its references
            return found
        if is_uid(reference):
            return next((t for t in self.tensors.values() if t.uid == reference), None)
        if not isinstance(reference, str):
            return self.recall(reference)
        if reference in self.named:
            return self.tensors[self.named[reference]]
        labelled = [tensor for tensor in self.tensors.values() if tensor.label == reference]
        if len(labelled) > 1:
            raise refusal(
                f"several tensors are named {reference!r}",
                got=", ".join(tensor.name for tensor in labelled),
                fix="refer to them by node and port, by uid, or by the tensor itself",
            )
        alias = self.aliases.get(reference.lower(), "")
        return labelled[0] if labelled else self.tensors.get(alias)


# -- names and JSON -----------------------------------------------------------------------------


def canonical_name(nodes: Mapping[str, Call], tensor: NamedTensor) -> str:
    """``node::port`` of the node that computes a tensor; for an input, the declared name."""
    for node, call in nodes.items():
        for port, name in call.outputs:
            if name == tensor.name:
                return f"{node}::{result_name(call.node.method, port)}"
    return tensor.name


def labels(nodes: Mapping[str, Call], tensors: Iterable[NamedTensor]) -> dict[str, NamedTensor]:
    """The tensors that are not numbers by unique name, or else by canonical name."""
    counts = Counter(tensor.label for tensor in tensors)
    return {
        x.label if x.label and counts[x.label] == 1 else canonical_name(nodes, x): x
        for x in tensors
        if x._state.value is None
    }


def as_json(
    nodes: Mapping[str, Call], tensors: Mapping[str, NamedTensor], context: Mapping[str, Any]
) -> str:
    """Indented JSON, with the keys of cuDNN's frontend, and tensors and nodes in the order of
    creation."""
    named = labels(nodes, tensors.values())
    shown_as = {tensor.name: label for label, tensor in named.items()}
    shown_as |= {n: _plain(t._state.value) for n, t in tensors.items() if n not in shown_as}
    content = {
        "context": context,
        "nodes": [
            {
                "name": name,
                "tag": call.node.method.upper(),
                "compute_data_type": cudnn_name(call.node.compute_data_type),
                **{key: _plain(value) for key, value in call.node.keywords().items()},
                "inputs": {port: shown_as[x] for port, x in call.inputs},
                "outputs": {result_name(call.node.method, p): shown_as[x] for p, x in call.outputs},
            }
            for name, call in nodes.items()
        ],
        "tensors": {
            label: {
                "data_type": cudnn_name(tensor._state.dtype),
                "dim": tensor.get_dim(),
                "stride": tensor.get_stride(),
                "is_pass_by_value": tensor.get_is_pass_by_value(),
                "is_virtual": tensor.get_is_virtual(),
                "uid": tensor.uid,
            }
            for label, tensor in named.items()
        },
    }
    return json.dumps(content, indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (str, bool)) or not isinstance(value, numbers.Real):
        return value if isinstance(value, (str, bool)) else str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if math.isfinite(value) else str(float(value))  # JSON has no infinity
