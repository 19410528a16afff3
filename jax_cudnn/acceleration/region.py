"""What is found, equations and the function that takes their place, and who runs it: decided while
the function is traced, for the forward alone. Where the region is differentiated, forward and
backward are decided together, except for products."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._core import auto, compat, context
from .._core.cuda import CudaDevice
from .._core.errors import JaxCudnnError
from .._core.graph.source import users_place
from .._core.graph.spec import GraphSpec
from .._core.planning import losses, placement
from .._core.planning.deviceless.profiles import Profile
from .._core.planning.planned_graph import XLA
from .._core.plans.plans import default_devices
from .._core.primitive import in_jaxpr
from .._core.settings import settings
from .._core.user_context import current
from .values import ELEMENTWISE, LAYOUT, Call, Equation, Value, run_together

log = logging.getLogger("jax_cudnn")
Site = Profile | CudaDevice
_CHEAP = {*ELEMENTWISE, *LAYOUT, "iota", "slice"}
NO_BACKWARD = (
    "cuDNN has no backward of attention in float32; cast queries, keys and values to bfloat16"
)
USED = (
    "its {} used elsewhere, too; if that is a backward pass, put accelerate around the function "
    "that is differentiated: jax.grad(jc.accelerate(loss))"
)
FAILED = "jax_cudnn.accelerate could not %s; the function runs as it is there. Please report this"


@dataclass(frozen=True)
class Backward:
    """The derivative of a region, where the program has it: from the cotangent of the result, as
    ``to_output`` brings it to the result's shape, to ``gradients``: values of the program, of which
    input each is the gradient, and what brings that to the value's shape."""

    equations: set[Equation]
    cotangent: Value
    to_output: Callable[[Any], Any]
    gradients: list[tuple[Value, int, Callable[[Any], Any]]]

    @property
    def values(self) -> list[Value]:
        return [value for value, *_ in self.gradients]

    @property
    def first(self) -> Equation:
        made = (value.made_by for value in self.values)
        return min((e for e in made if e is not None), key=lambda e: e.at)


class Region:
    """Equations with one result, ``output``, which ``emit(*inputs)`` computes instead; with
    ``backward`` those of its derivative, too, all together ``replaced``. ``inside``: what they
    compute and nothing else reads. ``outcome``: why XLA runs it as it is, else empty; ``gain``:
    XLA's time over cuDNN's, and whether it was measured; ``on``: what runs it, replaced."""

    outcome = gain = ""
    on = "cuDNN"

    def __init__(
        self,
        kind: str,
        equations: set[Equation],
        inputs: Sequence[Value],
        output: Value,
        emit: Callable[..., Any],
        what: str,
        backward: Backward | None = None,
    ) -> None:
        assert output.made_by is not None
        self.kind, self.equations, self.output, self.what = kind, equations, output, what
        self.backward = backward
        self.first, self.last = min(equations, key=lambda e: e.at), output.made_by
        self.replaced = equations | (backward.equations if backward else set())
        outputs = {output, *(backward.values if backward else ())}
        self.inside = {v for e in self.replaced for v in e.outs} - outputs
        given, everything = [*inputs], {*equations}
        todo = [*equations]
        while todo:  # what the equations read and the inputs are before, as a scale or a mask
            for value in todo.pop().ins:
                made = value.made_by
                if value in given or value.known is not None or made in everything:
                    continue
                if made is not None and made.name in _CHEAP:
                    everything.add(made)
                    todo.append(made)
                else:
                    given.append(value)
        self.inputs = given
        self.emit: Callable[..., Any] = lambda *arrays: emit(*arrays[: len(inputs)])
        self._order = sorted(everything, key=lambda e: e.at)

    def __repr__(self) -> str:
        return f"<{self.kind}: {self.what}>"

    @property
    def reads(self) -> list[Value]:
        """The inputs, and the cotangent of the result."""
        return [*self.inputs, *([self.backward.cotangent] if self.backward else ())]

    @property
    def is_differentiated(self) -> bool:
        """Whether its derivative is a part of the same program."""
        return any(e.is_differentiated for e in self.equations)

    @property
    def rounds(self) -> bool:
        """Whether a value inside has fewer bits than float32."""
        return any(v.is_float and v.dtype.itemsize < 4 for v in self.inside)

    def signature(self) -> Hashable:
        """Equal for regions of which the same is to be decided, and whose results the same function
        computes: those of one line with equal equations."""
        at: dict[Value, Hashable] = {}
        place = users_place(compat.user_frames(self.first.written))
        key: list[Hashable] = [place, self.kind, self.what]
        for i, value in enumerate(self.inputs):
            at[value] = i
            key.append((value.aval, value.varies, id(value) if value.is_known else None))
        for i, e in enumerate(self._order):
            ins = (at[v] if v in at else _identity(v) for v in e.ins)
            key.append((e.name, *e.params.items(), *ins))
            at |= {v: (i, j) for j, v in enumerate(e.outs)}
        if self.backward is not None:
            key += [(v.aval, i) for v, i, _ in self.backward.gradients]
        return *key, at[self.output], self.output.aval

    def differentiated(self, *arrays: Any) -> tuple[Any, Callable[[Any], list[Any]]]:
        """The result, and a function of its cotangent that computes the gradients."""
        assert self.backward is not None
        backward = self.backward
        moving = sorted({i for _, i, _ in backward.gradients})
        out, pull = jax.vjp(_of(self.emit, arrays, moving), *(arrays[i] for i in moving))

        def gradients(cotangent: Any) -> list[Any]:
            pulled = pull(backward.to_output(cotangent).astype(out.dtype))
            found = dict(zip(moving, pulled, strict=True))
            return [as_aval(brought(found[i]), v.aval) for v, i, brought in backward.gradients]

        return out, gradients

    def with_derivative(self, *arrays: Any) -> Any:
        """The result; and the gradients, where the program has them, of the last array."""
        if self.backward is None:
            return self.emit(*arrays)
        out, gradients = self.differentiated(*arrays[:-1])
        return out, gradients(arrays[-1])

    def original(self, *arrays: Any) -> Any:
        """What the equations compute of the inputs; JAX's own functions with their derivative."""
        env = dict(zip(self.inputs, arrays, strict=True))
        done: set[Call] = set()
        for equation in self._order:
            own = next(iter(equation.own_calls), None)
            if own is not None and all(v in env or v.known is not None for v in own.ins):
                if own not in done:
                    run_together([own], env)
                    done.add(own)
            elif not {*equation.outs} <= env.keys():
                run_together([equation], env)
        return env[self.output]


def _identity(value: Value) -> Hashable:
    """Equal for equal numbers, and for one and the same array."""
    known = value.known
    if known is None or value.shape or not isinstance(value.dtype, np.dtype):
        return id(value if known is None else known)
    return value.dtype, np.asarray(known).tobytes()


def as_aval(x: Any, aval: Any) -> Any:
    """An array of the type of the value that it replaces."""
    if x.shape != aval.shape:
        x = jnp.reshape(x, aval.shape)
    axes = compat.varying_axes(aval) - compat.varying_axes(jax.typeof(x))
    x = jax.lax.pcast(x, tuple(axes), to="varying") if axes else x
    return compat.converted(x, aval.dtype, aval.weak_type)


# -- who runs it -----------------------------------------------------------------------------------


def site() -> Site | None:
    """The GPU that a function is traced for: the target, else JAX's default device; None where
    it is not an NVIDIA GPU. GraphError where a setting of the environment is not valid."""
    settings()
    devices = [] if context.targeted() else default_devices()
    if not context.targeted() and not any(map(compat.is_cuda, devices)):
        return None
    return context.site(devices, "accelerate")


def decide(regions: Iterable[Region], where: Site) -> None:
    """Says why XLA runs regions, or gives them functions that decide again when differentiated."""
    decided: dict[Hashable, Region] = {}
    for region in regions:
        try:
            same = decided.setdefault(region.signature(), region)
        except TypeError:  # a key that is not hashable equals no other
            same = region
        if same is region:
            _decide(region, where)
        else:  # as of another layer
            region.outcome, region.gain = same.outcome, same.gain
            region.emit = region.emit if region.backward else same.emit


def _decide(region: Region, where: Site) -> None:
    avals = _of_one_device(value.aval for value in region.reads)
    try:
        with compat.in_place_of(None, region.first.written):
            fused = jax.make_jaxpr(region.with_derivative)(*avals)
    except JaxCudnnError as error:
        region.outcome = error.summary
        return
    except Exception as error:
        log.warning(FAILED, f"build a graph of {region.kind} at {region.what}", exc_info=error)
        region.outcome = f"{type(error).__name__}: {error}"
        return
    region.outcome = refusal(fused, where)
    if region.on != Region.on and current() == "xla":
        region.outcome = "asked for by jax_cudnn.implementation('xla')"
    if region.outcome and region.backward is not None and region.what.startswith("float32"):
        region.outcome = NO_BACKWARD
    region.gain = "" if region.outcome else _gain(fused, where)
    if region.backward is None:
        region.emit = _either(region, fused, where)


def _either(region: Region, jaxpr: Any, where: Site) -> Callable[..., Any]:
    """The fused function, of which ``jaxpr`` is one device's, with the derivative of the original
    equations where cuDNN does not run forward and backward. That of a product is products again:
    each of its graphs runs where it is faster, and the forward alone decides."""
    original, emit, of_forward = region.original, region.emit, region.kind == "product"
    refused: dict[Hashable, bool] = {}  # for equal layers
    together = jax.jit(original)

    @jax.custom_jvp
    def accelerated(*operands: Any) -> Any:
        if any(map(_is_inside, map(jax.typeof, operands))):
            return emit(*operands)  # its equations are of the mesh around
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *operands)[0]

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        fused = accelerated.fun
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        avals = _of_one_device(map(jax.typeof, primals))
        key = *moving, *avals
        if key not in refused:
            refused[key] = bool(refusal(_pair(fused, avals, moving), where, of_forward))
        sharded = any(axis for x in primals for axis in jax.typeof(x).sharding.spec)
        if sharded and not any(isinstance(x, jax.core.Tracer) for x in primals):
            plain = together  # one by one, JAX's derivatives of operations may have other types
        else:
            plain = original
        function = _of(plain if refused[key] else fused, primals, moving)
        return jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])

    accelerated.defjvp(rule, symbolic_zeros=True)
    return accelerated


def _of_one_device(avals: Iterable[Any]) -> list[Any]:
    """Abstract values without a mesh inside of shard_map: they may vary over its axes, and the mesh
    around, where this traces, has other types."""
    return [
        jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
        if _is_inside(aval)
        else aval
        for aval in avals
    ]


def _is_inside(aval: Any) -> bool:
    """Whether an abstract value is one of a shard_map."""
    return bool(compat.varying_axes(aval) or aval.sharding.mesh.manual_axes)


def _pair(function: Callable[..., Any], avals: Sequence[Any], moving: Sequence[int]) -> Any:
    """The jaxpr of a function and of its gradient."""

    def both(*operands: Any) -> Any:
        given = [operands[i] for i in moving]
        out, pull = jax.vjp(_of(function, operands, moving), *given)
        return out, pull(out)

    return jax.make_jaxpr(both)(*avals)


def _of(function: Callable[..., Any], operands: Sequence[Any], moving: Sequence[int]) -> Any:
    """The function of some of its operands alone."""

    def of(*given: Any) -> Any:
        filled = dict(zip(moving, given, strict=True))
        return function(*(filled.get(i, x) for i, x in enumerate(operands)))

    return of


def refusal(jaxpr: Any, where: Site, of_forward: bool = False) -> str:
    """Why cuDNN does not run the products and normalizations of a jaxpr's graphs, or of those of
    the forward alone; else empty."""
    graphs = in_jaxpr(compat.live_program(jaxpr)[0])
    graphs = ((name, spec) for name, spec in graphs if not (of_forward and spec.origin.suffix))
    return next((why for name, spec in graphs if (why := _refused(spec, where, name))), "")


def _refused(spec: GraphSpec, where: Site, name: str) -> str:
    if spec.xla_only:
        return "; ".join(str(spec.xla_only).splitlines()) or "XLA runs it"
    try:
        # Processes of a job trace alike, and none may measure what the others do not.
        several = jax.process_count() > 1
        plan = placement.decide(spec, where, name) if several else None
        segments = plan or auto.plan_graph(spec, where, name).segments
    except JaxCudnnError as error:
        return error.summary
    for segment in segments:
        if segment.plan is None and segment.spec.anchors:
            return segment.reason or "XLA is faster"
    return ""


def _gain(jaxpr: Any, where: Site) -> str:
    """What is known of XLA's time over cuDNN's for the one graph of a jaxpr, or nothing."""
    graphs = [*in_jaxpr(compat.live_program(jaxpr)[0])]
    if len(graphs) != 1:
        return ""
    ((name, spec),) = graphs
    ways = () if jax.process_count() > 1 else auto.plan_graph(spec, where, name).measured
    if ways:
        taken = next((way.seconds for way in ways if way.taken), None)
        xla = next((way.seconds for way in ways if way.what == XLA), None)
        return f"{xla / taken:.2f} measured" if taken and xla else ""
    near = losses.nearest(spec, placement.model(where)[1])
    return f"{near.ratio:.2f} predicted" if near is not None and near.near else ""
