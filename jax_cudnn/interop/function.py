"""A complete Graph as a function of its inputs."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError, GraphTypeError, shown
from .._core.graph.bounds import bounded
from .._core.graph.dtypes import WORDS, float32_range, is_floating
from .._core.graph.layout import lies_so
from .._core.graph.options import Options, Surroundings
from .._core.graph.spec import GraphSpec, Tensor, intern
from .._core.graph.tensor import GraphTensor
from .._core.plans.plan import Plan
from .._core.plans.support_value import Support
from .._core.primitive import bind
from .recorder import Recorder, canonical_name
from .tensors import (
    SHAPE_OF_WORDS,
    NamedTensor,
    Template,
    is_array,
    is_uid,
    names,
    number,
    numpy_dtype,
    refusal,
)

Tensors = tuple[NamedTensor, ...]


@dataclass(frozen=True)
class NumberlessPlan(Plan):
    """A plan that can be inspected but not run, because some scalars have no value.

    cuDNN's engines, candidates and workspace do not depend on the values; results do.
    """

    lacking: tuple[str, ...] = ()
    """Names of the scalar inputs without a value."""

    def _refuse(self, what: str, *_: Any, **__: Any) -> NoReturn:
        raise refusal(
            f"{self.name}: cannot {what} a plan without the values of its scalars",
            expected=f"values for {', '.join(self.lacking)}",
            got="none",
            why="a scalar in host memory is a constant of cuDNN's plan",
            fix=f"graph.plan(numbers={{{self.lacking[0]!r}: ...}})",
        )


for _name in ("execute", "populate_cuda_graph", "update_cuda_graph", "serialize", "to_json"):
    setattr(NumberlessPlan, _name, partialmethod(NumberlessPlan._refuse, _name))


@dataclass(eq=False)
class Function:
    """A complete graph as a function of its inputs by name."""

    name: str
    recorder: Recorder
    options: Options
    outputs: Tensors
    order: Tensors | None = None  # of the inputs in positional calls

    def copied(self, options: Options) -> Function:
        """The same graph with other options, and with its own tensors."""
        recorder = self.recorder.copied()
        outputs, order = (
            None if tensors is None else tuple(recorder.handles[t.name] for t in tensors)
            for tensors in (self.outputs, self.order)
        )
        return Function(self.name, recorder, options, outputs or (), order)

    @functools.cached_property
    def inputs(self) -> Tensors:
        """Those that the outputs depend on, in the order of declaration."""
        return self.recorder.needed(self.outputs)

    @property
    def in_order(self) -> list[NamedTensor]:
        """The inputs in the order of positional calls if set."""
        places = [tensor.name for tensor in self.order or self.inputs]
        return sorted(self.inputs, key=lambda tensor: places.index(tensor.name))

    @functools.cached_property
    def spec(self) -> Any:
        """The spec, from JAX's settings and ``float.hex`` of scalar inputs that are constants."""
        return functools.lru_cache(maxsize=64)(self._spec)

    def __getstate__(self) -> dict[str, Any]:
        return {name: held for name, held in vars(self).items() if name != "spec"}

    def _spec(self, around: Surroundings, constants: tuple[tuple[str, str], ...] = ()) -> GraphSpec:
        """In the form of a graph function's: the inputs come first, and no memory order is stated
        that a tensor has by default. Equal graphs then share plans."""
        spec, literals = self.recorder.finish(self.outputs, self.options, around), dict(constants)
        inputs = tuple(t.name for t in self.in_order if t.name not in literals)
        places = {name: place for place, name in enumerate(inputs)}
        tensors = sorted(spec.tensors, key=lambda tensor: places.get(tensor.name, len(places)))
        for i, tensor in enumerate(tensors):
            if tensor.name in literals:
                dtype = "float32" if is_floating(tensor.dtype) else "int32"
                tensors[i] = replace(tensor, literal=literals[tensor.name], dtype=dtype)
        silent = tuple(replace(tensor, order=None) for tensor in tensors)
        spec = replace(spec, tensors=silent, inputs=inputs)
        if any(tensor.order is not None for tensor in tensors):
            usual = spec.layout.orders
            for i, tensor in enumerate(tensors):
                if lies_so(tensor, usual[tensor.name], usual[tensor.name]):
                    tensors[i] = silent[i]
            spec = replace(spec, tensors=tuple(tensors))
        return intern(spec)

    def run(self, values: Mapping[str, Any]) -> list[jax.Array]:
        """The outputs, for inputs by tensor name."""
        self.check_given(values)
        constants = {}
        for tensor in self.inputs:
            if tensor.by_value:
                value = constant(tensor, values[tensor.name], self._title(tensor.name))
                if value is not None:
                    constants[tensor.name] = value
        if constants and len(constants) == len(self.inputs):  # a plan needs an operand
            first = self.inputs[0]
            values = {**values, first.name: jnp.asarray(constants.pop(first.name), first.dtype)}
        literals = tuple((name, value.hex()) for name, value in constants.items())
        spec = self.spec(Surroundings.now(), literals)
        operands = [operand(t, values[t.name], self._title(t.name)) for t in spec.input_tensors]
        return bind(spec, self.name, *bounded(spec, operands))

    def _title(self, name: str) -> str:
        return f"{self.name}: input {name!r}"

    def check_given(self, values: Mapping[str, Any], unknown: Sequence[Any] = ()) -> None:
        """Raises GraphError for missing inputs; ``unknown`` are keys that refer to no tensor."""
        missing = [tensor for tensor in self.inputs if tensor.name not in values]
        if missing:
            raise refusal(
                f"{self.name}: inputs are missing",
                expected=names(self.inputs),
                got=f"none for {names(missing)}",
                why=f"the graph has no tensor {', '.join(map(repr, unknown))}" if unknown else None,
            )

    def by_name(self, given: Mapping[Any, Any]) -> dict[Any, Any]:
        """The given arrays by reference, with the outputs."""
        values: dict[str, Any] = {}
        supplied: dict[str, list[Any]] = {tensor.name: [] for tensor in self.outputs}
        unknown: list[Any] = []
        for key, value in given.items():
            tensor = self.recorder.references.lookup(key)
            if tensor is None:
                unknown.append(key)
            elif tensor.name in supplied:
                supplied[tensor.name].append(key)
            elif not self.recorder.is_result(tensor):
                self.give(values, tensor, value)
        self.check_given(values, unknown)
        result, by_uid = dict(given), all(map(is_uid, given))
        for tensor, array in zip(self.outputs, self.run(values), strict=True):
            keys = supplied[tensor.name]
            result |= {key: like(given[key], array, key) for key in keys}
            if not keys:
                result[tensor.uid if by_uid else canonical_name(self.recorder, tensor)] = array
        return result

    def give(self, values: dict[str, Any], tensor: NamedTensor, value: Any) -> None:
        """Records the value of an input; raises GraphError if it already has another one."""
        had = values.setdefault(tensor.name, value)
        if had is value or (type(had) is type(value) in (int, float) and had == value):
            return
        places = self.recorder.references.places(tensor)
        # The input of an array has the name of the place where it was first passed.
        what = "array" if tensor.name in places else "tensor"
        given = f"the same {what} was passed for {' and '.join(places)} when the graph was built"
        raise refusal(
            f"{self.name} got different values for one input, {tensor.get_name()}",
            expected="one array; under jax.jit and other transformations each argument is a "
            "separate array",
            got=f"{had!r} and {value!r}"[:200],
            why=given if len(places) > 1 else "both references refer to it",
            fix="pass the input once; or build the graph with a separate graph.tensor_like(x) for "
            "each of them",
        )

    # -- plans ------------------------------------------------------------------------------------

    def plan(self, gpus: Any = None, numbers: Mapping[Any, float] | None = None) -> Any:
        from .._core.plans.support import plan

        values, lacking = self._numbers(numbers or {})
        function, avals = self._of_operands(values)
        made = plan(function, *avals, gpus=gpus)
        if not lacking:
            return made
        if gpus is None:
            return NumberlessPlan(**vars(made), lacking=lacking)
        numberless = {gpu: NumberlessPlan(**vars(p), lacking=lacking) for gpu, p in made.items()}
        return type(made)(numberless)

    def support(self, gpus: Any) -> Support:
        from .._core.plans.support import support

        function, avals = self._of_operands(self._numbers({})[0])
        return support(function, *avals, gpus=gpus)

    def _numbers(self, given: Mapping[Any, Any]) -> tuple[dict[str, float], tuple[str, ...]]:
        """The values of the scalars that are constants of the plan, by tensor name, and the names
        of those without a value."""
        said: dict[str, float] = {}
        for reference, value in given.items():
            tensor = self.recorder.references.find(reference)
            if not tensor.by_value or number(value) is None:
                scalar = "a scalar input in host memory (is_pass_by_value)"
                raise refusal(
                    f"{self.name}: numbers={{{reference!r}: ...}}",
                    expected="a Python or NumPy number" if tensor.by_value else scalar,
                    got=repr(value)[:200] if tensor.by_value else f"the tensor {tensor._state}",
                )
            said[tensor.name] = value
        scalars = [tensor for tensor in self.inputs if tensor.by_value]
        if len(scalars) == len(self.inputs):  # a plan needs an operand
            del scalars[0]
        values: dict[str, float] = {}
        lacking: list[str] = []
        for tensor in scalars:
            value = said.get(tensor.name, tensor.number)
            if value is None:
                lacking.append(tensor.get_name())
                value = math.nan if jnp.issubdtype(tensor.dtype, jnp.floating) else 0
            values[tensor.name] = value
        return values, tuple(lacking)

    def _of_operands(self, numbers: Mapping[str, float]) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """A function of the inputs that are not constants, in order, and their shapes."""
        arrays = [tensor for tensor in self.in_order if tensor.name not in numbers]

        def function(*operands: Any) -> list[jax.Array]:
            given = {tensor.name: x for tensor, x in zip(arrays, operands, strict=True)}
            return self.run({**numbers, **given})

        function.__name__ = self.name
        return function, [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in arrays]


def marked(name: str, recorder: Recorder, references: Sequence[Any] | None) -> Tensors:
    """The outputs, in the order of their references. Raises GraphError if there are none, or
    if a marked output is not listed."""
    marked = [tensor for tensor in recorder.handles.values() if tensor.is_output]
    outputs = [recorder.references.find(reference) for reference in references or ()] or marked
    known = [tensor.name for tensor in outputs]
    for tensor in outputs:
        if known.count(tensor.name) > 1:
            fix = f"list {tensor.get_name()} once"
            raise refusal("outputs list a tensor twice", got=names(outputs), fix=fix)
        recorder.check_result(tensor, "outputs=")
    if not known or any(tensor.name not in known for tensor in marked):
        problem = "outputs that are not listed" if known else "no output"
        raise refusal(
            f"{name} has {problem}",
            expected=names(marked) or "at least one result of an operation",
            got=names(outputs) or "none",
            fix="mark results by y.set_output(True), or list all of them in outputs=[...]",
        )
    return tuple(outputs)


def ordered(
    name: str, recorder: Recorder, references: Sequence[Any] | None, needed: Tensors
) -> Tensors:
    """The inputs in the order of positional calls; raises GraphError if one is missing."""
    if references is None:
        return needed
    inputs = [recorder.references.find(reference) for reference in references]
    known = {tensor.name for tensor in inputs}
    results = [tensor for tensor in inputs if recorder.is_result(tensor)]
    missing = [tensor for tensor in needed if tensor.name not in known]
    if results or missing:
        raise refusal(
            f"{name}: wrong list of inputs",
            expected=names(needed),
            got=names(inputs) or "none",
            why=f"the graph computes {names(results)}" if results else None,
            fix=f"add {names(missing)}" if missing else f"leave out {names(results)}",
        )
    return tuple(inputs)


def operand(tensor: Tensor, value: Any, name: str) -> jax.Array:
    """The JAX array for an input of a graph; raises an error if it does not fit."""
    if (tensor.shape, tensor.dtype) == (SHAPE_OF_WORDS, WORDS):
        value = _words(value)
    elif isinstance(value, (np.ndarray, np.generic)):
        value = value.astype(numpy_dtype(value), copy=False)
    array = _as_jax(value, name)
    if math.prod(array.shape) == 1 == math.prod(tensor.shape):
        array = array.reshape(tensor.shape)  # scalars get the rank of the tensors
    if getattr(array, "weak_type", False):  # a Python number, which promotion may convert
        if jnp.result_type(array, jnp.dtype(tensor.dtype)).name == tensor.dtype:
            array = array.astype(tensor.dtype)
    if (array.shape, array.dtype.name) == (tensor.shape, tensor.dtype):
        return array
    raise (GraphError if array.dtype.name == tensor.dtype else GraphTypeError)(
        f"{name} differs from the array that the graph was built for",
        expected=f"{tensor.dtype}{list(tensor.shape)}",
        got=f"{array.dtype.name}{list(array.shape)}",
        why="a cuDNN graph has fixed shapes and dtypes",
        fix="cast or reshape the array, or build one graph per kind of arrays with "
        "@jax_cudnn.graph_cache",
    )


def _words(value: Any) -> Any:
    """One integer as its low and high word; anything else unchanged."""
    if isinstance(value, (int, np.ndarray, np.generic)) and np.size(value) == 1:
        number = np.asarray(value)
        if number.dtype.kind in "iu":
            return np.array([int(number.item()) % 2**64], "<u8").view("<u4").reshape(SHAPE_OF_WORDS)
    if not isinstance(value, jax.Array) or value.size != 1:
        return value
    if not jnp.issubdtype(value.dtype, jnp.integer):
        return value
    bits = jnp.iinfo(value.dtype).bits
    high = value >> (32 if bits > 32 else bits - 1)  # the sign of a narrower one
    return jnp.stack([value.astype(WORDS), high.astype(WORDS)]).reshape(SHAPE_OF_WORDS)


def _as_jax(value: Any, name: str) -> jax.Array:
    known = isinstance(value, (jax.Array, np.ndarray)) or hasattr(value, "__jax_array__")
    try:
        if known or not hasattr(value, "__dlpack__"):
            return jnp.asarray(value)
        # torch does not export tensors that record gradients.
        return jax.dlpack.from_dlpack(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError, BufferError) as error:
        raise GraphTypeError(
            f"{name} is not an array",
            expected="an array of JAX, NumPy or a library with DLPack",
            got=shown(value),
            why=f"{type(error).__name__}: {error}"[:200],
        ) from error


def constant(tensor: GraphTensor, value: Any, name: str) -> float | None:
    """A scalar as a constant of a plan, rounded to the tensor's dtype; None for an array. Raises an
    error if the dtype cannot hold it."""
    given, dtype = number(value), tensor.dtype
    if given is None:
        return None
    if jnp.issubdtype(dtype, jnp.floating):
        given = float32_range(name, given)
        if dtype == np.float32:  # operations round it themselves
            return given
        with np.errstate(over="ignore"):
            rounded = float(np.asarray(given).astype(dtype))
        if math.isfinite(given) and not math.isfinite(rounded):
            raise GraphError(
                f"{name} is too large",
                expected=f"a number in the range of {dtype.name}",
                got=repr(value),
                fix="declare it with data_type=float32",
            )
        return rounded
    if not given.is_integer():
        raise GraphTypeError(
            f"{name} is not an integer",
            expected=f"a value of {dtype.name}",
            got=repr(given),
            fix="declare the input with a floating data_type, or round the number",
        )
    least, most = 0, 1
    if dtype != np.bool_:
        own, int32 = jnp.iinfo(dtype), jnp.iinfo("int32")
        least, most = max(own.min, int32.min), min(own.max, int32.max)
    if not least <= given <= most:
        raise GraphError(
            f"{name} is out of range",
            expected=f"an integer from {least} to {most}",
            got=repr(given),
            why=f"it is a {dtype.name} constant, which a plan stores as int32",
        )
    return given


def like(wanted: Any, array: jax.Array, key: Any) -> jax.Array:
    """A result in the shape and dtype of the array that was passed for it.

    Dimensions may be merged, split, or added with size 1. Raises an error if the elements or their
    order would change, or if the dtype cannot hold them.
    """
    if not is_array(wanted):
        raise refusal(
            f"the value passed for output {key!r} is not an array",
            GraphTypeError,
            expected="an array or jax.ShapeDtypeStruct, for its shape and dtype",
            got=shown(wanted),
        )
    template = Template.of(wanted)
    had, has = _borders(array.shape), _borders(template.shape)
    if math.prod(template.shape) != array.size or not (had <= has or has <= had):
        raise refusal(
            f"the array passed for output {key!r} has another shape",
            expected=f"{list(array.shape)}, or this with adjacent dimensions merged or split",
            got=str(list(template.shape)),
            why="a result can be reshaped, but not transposed",
            fix="leave out the output, and transpose the result with jnp.transpose",
        )
    if not _holds(template.dtype, array.dtype.name):
        raise refusal(
            f"the array passed for output {key!r} cannot hold it",
            GraphTypeError,
            expected=array.dtype.name,
            got=template.dtype,
            why="values would be truncated",
            fix="leave out the output, and cast the result with astype",
        )
    return array.reshape(template.shape).astype(template.dtype)


def _borders(shape: Sequence[int]) -> set[int]:
    """The strides at which dimensions begin; a shape with more of them splits dimensions."""
    return {*itertools.accumulate((size for size in shape if size != 1), operator.mul)}


def _holds(dtype: str, result: str) -> bool:
    """Whether a dtype can hold results of another one; floats of any width can, by rounding."""
    if is_floating(dtype):
        return True
    return not is_floating(result) and jnp.promote_types(dtype, result).name == dtype
