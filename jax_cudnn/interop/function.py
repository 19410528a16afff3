"""A complete Graph as a function of its inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp

from .._core.graph.dtypes import is_floating
from .._core.graph.layout import layout, lies_so
from .._core.graph.options import Options, TraceContext
from .._core.graph.spec import GraphSpec, intern
from .._core.plans.plan import Plan
from .._core.plans.support import Support
from .._core.primitive import bind
from .arrays import Ragged, as_int32, constant, like, number, offsets_of, operand, refusal
from .recorder import Recorder
from .tensors import NamedTensor, canonical_name, is_uid, names

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
    order: Tensors | None  # of the inputs in positional calls

    @classmethod
    def of(cls, name: str, recorder: Recorder, options: Options, inputs: Any, outputs: Any) -> Self:
        """The graph with inputs and outputs in the order of these references, by default with all
        marked outputs. Raises GraphError if one is missing, or listed wrongly."""
        find = recorder.references.find
        marked = [tensor for tensor in recorder.handles.values() if tensor.is_output]
        results = [find(reference) for reference in outputs or ()] or marked
        known = [tensor.name for tensor in results]
        for tensor in results:
            if known.count(tensor.name) > 1:
                fix = f"list {tensor.get_name()} once"
                raise refusal("outputs list a tensor twice", got=names(results), fix=fix)
            recorder.check_result(tensor, "outputs=")
        if not known or any(tensor.name not in known for tensor in marked):
            raise refusal(
                f"{name} has {'outputs that are not listed' if known else 'no output'}",
                expected=names(marked) or "at least one result of an operation",
                got=names(results) or "none",
                fix="mark results by y.set_output(True), or list all of them in outputs=[...]",
            )
        made = cls(name, recorder, options, tuple(results), None)
        if inputs is None and outputs is None:
            return made
        order = made.inputs if inputs is None else tuple(find(reference) for reference in inputs)
        known = [tensor.name for tensor in order]
        wrong = [tensor for tensor in order if recorder.is_result(tensor)]
        missing = [tensor for tensor in made.inputs if tensor.name not in known]
        if wrong or missing:
            raise refusal(
                f"{name}: wrong list of inputs",
                expected=names(made.inputs),
                got=names(order) or "none",
                why=f"the graph computes {names(wrong)}" if wrong else None,
                fix=f"add {names(missing)}" if missing else f"leave out {names(wrong)}",
            )
        made.order = order
        return made

    def copied(self, options: Options) -> Function:
        """The same graph with other options, and with its own tensors."""
        recorder = self.recorder.copied()
        handles = recorder.handles
        outputs = tuple(handles[tensor.name] for tensor in self.outputs)
        order = None if self.order is None else tuple(handles[t.name] for t in self.order)
        return Function(self.name, recorder, options, outputs, order)

    @functools.cached_property
    def inputs(self) -> Tensors:
        """Those that the outputs depend on, in the order of declaration."""
        names = dict.fromkeys(source.of for source in self._sources.values())
        return tuple(self.recorder.handles[name] for name in names)

    @functools.cached_property
    def _sources(self) -> dict[str, Ragged]:
        """The inputs of the spec: those of the graph, and offsets into arrays without gaps."""
        moved = {offset.name: offset for offset in offsets_of(self.recorder.handles).values()}
        return {n: moved.get(n, Ragged(n)) for n in self.recorder.finish(self.outputs).inputs}

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

    def _spec(
        self, context: TraceContext, constants: tuple[tuple[str, str], ...] = ()
    ) -> GraphSpec:
        """In the form of a graph function's: the inputs come first, and no memory order is stated
        that a tensor has by default. Equal graphs then share plans."""
        spec, literals = self.recorder.finish(self.outputs, self.options, context), dict(constants)
        sources = [item for item in self._sources.items() if item[0] not in literals]
        inputs = tuple(n for t in self.in_order for n, source in sources if source.of == t.name)
        places = {name: place for place, name in enumerate(inputs)}
        tensors = sorted(spec.tensors, key=lambda tensor: places.get(tensor.name, len(places)))
        for i, tensor in enumerate(tensors):
            if tensor.name in literals:
                dtype = "float32" if is_floating(tensor.dtype) else "int32"
                tensors[i] = replace(tensor, literal=literals[tensor.name], dtype=dtype)
        silent = tuple(replace(tensor, order=None) for tensor in tensors)
        spec = replace(spec, tensors=silent, inputs=inputs)
        if any(tensor.order is not None for tensor in tensors):
            usual = layout(spec).orders
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
        spec = self.spec(TraceContext.now(), literals)
        operands = []
        for tensor in spec.input_tensors:
            source = self._sources[tensor.name]
            title = self._title(source.of)
            value = source.into_array(values[source.of], title)
            is_numpy = tensor.dtype == "int32" and not isinstance(value, jax.Array)
            if is_numpy or self.recorder.handles[source.of].is_long:  # which JAX would wrap
                value = as_int32(value, title)
            operands.append(operand(tensor, value, title))
        return bind(spec, self.name, *operands)

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
                result[tensor.uid if by_uid else canonical_name(self.recorder.nodes, tensor)] = (
                    array
                )
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

    # -- plans ----------------------------------------------------------------------------------

    def plan(self, gpus: Any = None, numbers: Mapping[Any, float] | None = None) -> Any:
        from .._core.plans.plans import plan

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
