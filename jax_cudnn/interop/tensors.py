"""The tensors of a Graph: graph tensors with pygraph's names, uids and marks of outputs."""

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

# Members of cuDNN's tensors that say what XLA's arrays are not, and what to do instead.
_VECTORS = "XLA's arrays have no vectors of channels; cuDNN's int8 engines take plain channels-last"
_NOT_HERE = {
    "get_alignment": "XLA aligns arrays by itself",
    "set_alignment": "XLA aligns arrays by itself",
    "get_vector_count": _VECTORS,
    "get_vector_dimension": _VECTORS,
    "set_vector_count_and_dimension": _VECTORS,
    "get_has_compile_time_constant": "a Python number given to an operation is a constant",
}


def one_element(name: str, shape: Sequence[int]) -> None:
    """GraphError for the shape of a tensor that is passed by value, but is no single number."""
    if math.prod(shape) != 1:
        raise GraphError(
            f"is_pass_by_value of {name}",
            expected="a tensor of one element",
            got=str(list(shape)),
            why="cuDNN takes such a tensor as one number in the host's memory",
            fix="leave is_pass_by_value out",
            where=user_line(),
        )


class NamedTensor(GraphTensor):
    """A tensor of a :class:`jax_cudnn.Graph`.

    Beside a graph tensor's own, it has the setters of ``cudnn.tensor``, which return the tensor:
    ``set_output``, ``set_name``, ``set_uid``, ``set_data_type``, ``set_dim``, ``set_stride``; each
    may be called until the graph's ``with`` ends, whether the tensor was used or not, but for
    dtype and shape of an input: they are to be said before an operation takes it.
    """

    __slots__ = ("by_value", "is_output", "label", "number", "uid")

    _builder: Recorder

    def __init__(self, recorder: Recorder, state: Tensor, uid: int):
        super().__init__(recorder, state)
        self.uid, self.label = uid, ""
        self.is_output = self.by_value = False
        self.number: float | None = None  # with which it was declared, of one by value

    def of(self, recorder: Recorder) -> NamedTensor:
        """The same tensor of a copy of its graph."""
        made = NamedTensor(recorder, self._state, self.uid)
        made.label, made.is_output = self.label, self.is_output
        made.by_value, made.number = self.by_value, self.number
        return made

    def set_output(self, is_output: bool = True) -> NamedTensor:
        """Have the graph return the tensor."""
        self._builder.check_open("set_output")
        self._builder.check_result(self, "set_output")
        self.is_output = is_output
        return self

    def set_is_virtual(self, value: bool) -> NamedTensor:
        """The opposite of :meth:`set_output`."""
        return self.set_output(not value)

    def set_name(self, name: str) -> NamedTensor:
        """Give the tensor a name by which it can be referred to."""
        self._builder.check_open("set_name")
        self.label = str(name)
        return self

    def set_uid(self, uid: int) -> NamedTensor:
        """Give the tensor a number by which it can be referred to."""
        self._builder.check_open("set_uid")
        self._builder.give_uid(self, whole(f"set_uid({uid!r})", uid))
        return self

    def set_is_pass_by_value(self, value: bool) -> NamedTensor:
        """Say that the tensor is one number in the host's memory: given as a Python number or as
        a NumPy array, it is a constant of the plan."""
        self._builder.check_open("set_is_pass_by_value")
        if value:
            one_element(self.get_name(), self.shape)
        self.by_value = value
        return self

    def set_data_type(self, data_type: Any) -> NamedTensor:
        """Round the tensor to this dtype: one of JAX, NumPy, torch or cuDNN, or its name."""
        self._builder.check_open("set_data_type")
        super().set_data_type(dtype_name(data_type))
        return self

    def set_dim(self, dim: Sequence[int]) -> NamedTensor:
        """Give the output's shape to an operation that leaves it open (a reduction, a reshape), or
        a declared input another one; its strides are to be said after that."""
        self._builder.check_open("set_dim")
        super().set_dim(dim)
        return self

    def set_stride(self, stride: Sequence[int]) -> NamedTensor:
        """State how the tensor lies in memory, by packed element strides in any order."""
        self._builder.check_open("set_stride")
        super().set_stride(stride)
        return self

    def set_ragged_offset(self, ragged_offset: Any) -> NamedTensor:
        """Say that the tensor, (B, H, S, D) with strides of [S*H*D, D, H*D, 1], holds its examples
        behind each other at its beginning, without padding.

        ``ragged_offset`` is an input (B + 1, 1, 1, 1) in int32: the element at which each example
        begins, and behind them the end of the last. It is for all of q, k, v and O of ``sdpa`` (of
        statistics that are read, too), and of ``sdpa_backward``; with seq_len_q and seq_len_kv.
        Offsets and lengths that go beyond the tensor are brought into it, those inside of a token
        to its begin.
        """
        self._builder.check_open("set_ragged_offset")
        self._builder.give_ragged_offset(self, ragged_offset)
        return self

    def set_reordering_type(self, reordering_type: Any) -> NamedTensor:
        """Say in which order blocks lie: none but "NONE"."""
        refuse_reordered(reordering_type)
        return self

    def get_reordering_type(self) -> str:
        return "NONE"

    def set_alignment_value(self, value: int) -> NamedTensor:
        """Accepted for pygraph's sake: no operation here reads the promise that all values are
        multiples of this."""
        return self

    def validate(self) -> None:
        """Nothing is left to check: tensors are checked where they are declared and changed."""

    def set_ragged_offset_multiplier(self, multiplier: int) -> NamedTensor:
        """Elements in which ragged offsets count: 1."""
        if multiplier != 1:
            raise GraphError(
                "ragged_offset_multiplier is not for tensors of a Graph",
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
        """Element strides as cuDNN is given them; before the graph's ``with`` has ended those that
        were stated, else those of a row-major array."""
        return self._builder.strides(self)

    def get_data_type(self) -> Any:
        """The dtype, as JAX has it; None for an input that was given none yet."""
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
                f".{name} is not for tensors of a Graph",
                got=str(self._state),
                fix=_NOT_HERE[name],
                where=user_line(),
            )
        return super().__getattr__(name)
