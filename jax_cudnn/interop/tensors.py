"""The tensors of a Graph: graph tensors with pygraph's names, uids and output flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._core.errors import GraphAttributeError, GraphError
from .._core.graph.source import user_line
from .._core.graph.spec import Tensor
from .._core.graph.tensor import GraphTensor
from .checks import refuse_reordered, whole
from .templates import dtype_name

if TYPE_CHECKING:
    from .recorder import Recorder

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
        raise GraphError(
            f"is_pass_by_value of {name}, which is not a scalar",
            expected="a tensor of one element",
            got=str(list(shape)),
            why="cuDNN reads such a tensor as one scalar in host memory",
            fix="leave out is_pass_by_value",
            where=user_line(),
        )


class NamedTensor(GraphTensor):
    """A tensor of a :class:`jax_cudnn.Graph`.

    In addition to a graph tensor's methods, it has the setters of ``cudnn.tensor``, which return
    the tensor: ``set_output``, ``set_name``, ``set_uid``, ``set_data_type``, ``set_dim``,
    ``set_stride``. Call them before the graph's ``with`` ends, even after the tensor was used; but
    set dtype and shape of an input before an operation uses it.
    """

    __slots__ = ("by_value", "is_output", "label", "number", "uid")

    _builder: Recorder

    def __init__(self, recorder: Recorder, state: Tensor, uid: int):
        super().__init__(recorder, state)
        self.uid, self.label = uid, ""
        self.is_output = self.by_value = False
        self.number: float | None = None  # the declared value of one passed by value

    def of(self, recorder: Recorder) -> NamedTensor:
        """The same tensor in a copy of its graph."""
        made = NamedTensor(recorder, self._state, self.uid)
        made.label, made.is_output = self.label, self.is_output
        made.by_value, made.number = self.by_value, self.number
        return made

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
        self._builder.give_uid(self, whole(f"set_uid({uid!r})", uid))
        return self

    def set_is_pass_by_value(self, value: bool) -> NamedTensor:
        """Mark the tensor as a scalar in host memory: passed as a Python number or a NumPy array,
        it is a constant of the plan."""
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
        """Set the memory order, as packed element strides."""
        self._builder.check_open("set_stride")
        super().set_stride(stride)
        return self

    def set_ragged_offset(self, ragged_offset: Any) -> NamedTensor:
        """Declare that the tensor, (B, H, S, D) with strides [S*H*D, D, H*D, 1], holds
        variable-length sequences packed along the token axis, without padding.

        ``ragged_offset`` is an int32 input (B + 1, 1, 1, 1): the element at which each sequence
        begins, followed by the end of the last one. All of q, k, v and O of ``sdpa`` and
        ``sdpa_backward`` need it, and statistics that are read; also pass seq_len_q and seq_len_kv.
        Offsets and lengths past the tensor are clipped, and offsets inside of a token are rounded
        down to its start.
        """
        self._builder.check_open("set_ragged_offset")
        self._builder.give_ragged_offset(self, ragged_offset)
        return self

    def set_reordering_type(self, reordering_type: Any) -> NamedTensor:
        """Accepts only "NONE"."""
        refuse_reordered(reordering_type)
        return self

    def get_reordering_type(self) -> str:
        return "NONE"

    def set_alignment_value(self, value: int) -> NamedTensor:
        """Accepted for compatibility with pygraph, without effect: a promise that all values are
        multiples of this."""
        return self

    def validate(self) -> None:
        """Does nothing: tensors are checked when they are declared and changed."""

    def set_ragged_offset_multiplier(self, multiplier: int) -> NamedTensor:
        """Sets the unit of ragged offsets in elements, which must be 1."""
        if multiplier != 1:
            raise GraphError(
                "tensors of a Graph do not support ragged_offset_multiplier",
                expected="1",
                got=repr(multiplier),
                fix="multiply the offsets before the call",
                where=user_line(),
            )
        return self

    def get_ragged_offset_multiplier(self) -> int:
        return 1

    def get_ragged_offset(self) -> NamedTensor | None:
        return self._builder.ragged_offset(self)

    def get_name(self) -> str:
        return self.label or self.name

    def get_uid(self) -> int:
        return self.uid

    def get_stride(self) -> list[int]:
        """Element strides as passed to cuDNN; before the graph's ``with`` ends, the stated strides,
        or else those of a row-major array."""
        return self._builder.strides(self)

    def get_data_type(self) -> Any:
        """The JAX dtype; None for an input without a dtype so far."""
        return None if self._builder.is_untyped(self) else self.dtype

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
            raise GraphAttributeError(
                f"tensors of a Graph do not support .{name}",
                got=str(self._state),
                fix=_NOT_HERE[name],
                where=user_line(),
            )
        return super().__getattr__(name)
