"""The transformations of JAX that every graph goes through, applied to it and to plain jnp."""

from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_cudnn._core import compat
from jax_cudnn._core.errors import GraphError
from jax_cudnn._core.graph.dtypes import is_floating
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.primitive import bind

SIZE = 3  # of the dimensions of vmap

# Errors of whole results, relative to their norm. One rounding adds at most half a last place:
# 2**-9 of bfloat16, 2**-12 of float16, 2**-4 and 2**-3 of the two float8, 2**-2 of float4. A first
# derivative has up to three of them (residual, cotangent, result), a second one twice as many.
TOLERANCES = {"float32": 2e-5, "float16": 2.5e-3, "bfloat16": 2e-2}
TOLERANCES |= {"float8_e4m3fn": 0.1, "float8_e5m2": 0.2, "float4_e2m1fn": 0.4}
# On a GPU: exp, tanh, erf and powers (1e-5 is seen); products in TF32, whose operands are rounded
# by up to 2**-11; and cuDNN's tan, off by 7e-3 beside its poles, whose cube derivatives have.
FLOAT32_ON_GPU, TF32_ON_GPU, TAN_ON_GPU = 1e-4, 4e-3, 0.1

# Sizes of the cases -> those of the table, which takes less than a second for each case then.
SMALL = {8: 2, 16: 4, 32: 4, 48: 6, 64: 8, 96: 12, 128: 16, 256: 16, 384: 24, 512: 32, 4096: 32}
SMALL |= {14: 3, 28: 6, 784: 36}
# Those of the table on a GPU: there channels keep their sizes, by which cuDNN takes graphs or not.
FEW_PIXELS = {28: 12, 784: 144}


def spec_and_operands(case, sizes=None):
    """A case's graph with its operands; smaller by ``sizes`` (old -> new) where that fits it.

    They are the same in each run: where rounding carries a value across a kink (of relu, of a
    maximum), a derivative jumps by far more than any tolerance.
    """
    arrays = case.operands(jax.random.key(2))
    _, trace = case.function.trace(*arrays)
    values = [*arrays, *trace.captured]
    operands = [
        values[i].reshape(tensor.shape) if values[i].ndim == 0 else values[i]
        for i, tensor in zip(trace.operands, trace.spec.input_tensors, strict=True)
    ]
    spec = smaller(trace.spec, sizes or {})
    corners = [tuple(map(slice, tensor.shape)) for tensor in spec.input_tensors]
    return spec, [x[corner] for x, corner in zip(operands, corners, strict=True)]


def smaller(spec, sizes):
    """The graph of operands with other sizes, or itself where its nodes do not fit them."""

    def shape(dims):
        return tuple(sizes.get(size, size) for size in dims)

    tensors = {t.name: t for t in spec.tensors}
    tensors |= {t.name: replace(t, shape=shape(t.shape)) for t in spec.input_tensors}
    calls = []
    for call in spec.calls:
        node = call.node
        if "out_dims" in {f.name for f in fields(node)} and node.out_dims:
            node = replace(node, out_dims=shape(node.out_dims))
        try:
            results = node.infer({port: tensors[name] for port, name in call.inputs})
        except GraphError:
            return spec
        tensors |= {name: replace(tensors[name], shape=results[p][0]) for p, name in call.outputs}
        calls.append(replace(call, node=node))
    return replace(spec, tensors=tuple(tensors.values()), calls=tuple(calls))


def in_float32(spec):
    """The same graph without any rounding, for operands in float32."""
    tensors = tuple(
        replace(t, dtype="float32") if is_floating(t.dtype) else t for t in spec.tensors
    )
    options = replace(spec.options, precision="highest")
    return replace(spec, tensors=tensors, options=options)


def plain(spec):
    """The graph's outputs in jnp, as a list; operands of floats in float32."""
    wide = in_float32(spec)
    return lambda *operands: evaluate(wide, *operands)


def is_float(x):
    """Powers of two alone (the scales of MXFP8) do not move: they have no signs."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.float8_e8m0fnu


class Transformations:
    """Of ``f(*operands) -> list of arrays``: each a method of the function and of :meth:`data`.

    ``moving`` operands and ``results`` are those of floats.
    """

    def __init__(self, operands, outputs):
        self.random = np.random.default_rng(2)
        self.operands, self.outputs = operands, outputs
        self.moving = [i for i, x in enumerate(operands) if is_float(x)]
        self.results = [i for i, x in enumerate(outputs) if is_float(x)]

    def data(self):
        """Everything that a transformation reads, to be passed through jit."""
        operands, outputs = self.operands, self.outputs
        cotangents = [self.like(outputs[i]) for i in self.results]
        return {
            "operands": operands,
            "tangents": [self.like(operands[i]) for i in self.moving],
            "others": [self.like(operands[i]) for i in self.moving],
            "cotangents": cotangents,
            "stacks": [self.shuffled(x) for x in operands],
            "stacked_cotangents": [
                np.stack([self.like(x) for _ in range(SIZE)]) for x in cotangents
            ],
        }

    def like(self, x):
        return self.random.standard_normal(x.shape, np.float32).astype(x.dtype)

    def shuffled(self, x):
        """SIZE operands like one: itself, and its elements in other orders."""
        flat = np.asarray(x).reshape(-1)
        others = [self.random.permutation(flat).reshape(x.shape) for _ in range(SIZE - 1)]
        return np.stack([np.asarray(x), *others])

    def floats(self, f, operands):
        """``f`` as a function of the operands that move, to the results that do."""

        def function(*moving):
            given = list(operands)
            for i, x in zip(self.moving, moving, strict=True):
                given[i] = x
            outputs = f(*given)
            return [outputs[i] for i in self.results]

        return function, [operands[i] for i in self.moving]

    def applies(self, name):
        return name in OF_ANYTHING or bool(self.moving and self.results)

    def forward(self, f, d):
        return f(*d["operands"])

    def vjp(self, f, d):
        function, at = self.floats(f, d["operands"])
        return jax.vjp(function, *at)[1](d["cotangents"])

    def vjp_of_one(self, f, d):
        """Of the first result by the last operand: nothing else is computed."""
        function, at = self.floats(f, d["operands"])
        return jax.vjp(lambda x: function(*at[:-1], x)[0], at[-1])[1](d["cotangents"][0])

    def jvp(self, f, d):
        function, at = self.floats(f, d["operands"])
        return jax.jvp(function, at, d["tangents"])

    def jvp_of_vjp(self, f, d):
        """Forward over reverse: a product with the Hessian."""
        function, at = self.floats(f, d["operands"])
        return jax.jvp(lambda *x: jax.vjp(function, *x)[1](d["cotangents"]), at, d["tangents"])[1]

    def vjp_of_vjp(self, f, d):
        function, at = self.floats(f, d["operands"])
        return jax.vjp(lambda *x: jax.vjp(function, *x)[1](d["cotangents"]), *at)[1](
            tuple(d["others"])
        )

    def vmap(self, f, d):
        """Of all operands, along several axes."""
        axes = [min(i, x.ndim - 1) for i, x in enumerate(d["stacks"])]
        moved = [jnp.moveaxis(x, 0, axis) for x, axis in zip(d["stacks"], axes, strict=True)]
        return jax.vmap(f, in_axes=tuple(axes), out_axes=-1)(*moved)

    def vmap_of_each(self, f, d):
        """Of one operand at a time."""
        results = []
        for i, stack in enumerate(d["stacks"]):
            axes = [0 if i == j else None for j in range(len(d["operands"]))]
            chosen = [stack if i == j else x for j, x in enumerate(d["operands"])]
            results.append(jax.vmap(f, in_axes=axes)(*chosen))
        return results

    def vmap_of_vjp(self, f, d):
        """Gradients of each example."""

        def gradients(operands, cotangents):
            function, at = self.floats(f, operands)
            return jax.vjp(function, *at)[1](cotangents)

        return jax.vmap(gradients)(d["stacks"], d["stacked_cotangents"])

    def shard_map(self, f, d):
        """Gradients of each example, on a device of its own."""
        mesh = Mesh(jax.devices("cpu")[:SIZE], "examples")

        @partial(jax.shard_map, mesh=mesh, in_specs=P("examples"), out_specs=P("examples"))
        def gradients(operands, cotangents):
            operands, cotangents = jax.tree.map(lambda x: x[0], (operands, cotangents))
            function, at = self.floats(f, operands)
            return jax.tree.map(lambda x: x[None], jax.vjp(function, *at)[1](cotangents))

        return gradients(d["stacks"], d["stacked_cotangents"])


ALL = ("forward", "vjp", "vjp_of_one", "jvp", "jvp_of_vjp", "vjp_of_vjp")
ALL += ("vmap", "vmap_of_each", "vmap_of_vjp", "shard_map")
OF_ANYTHING = ("forward", "vmap", "vmap_of_each")  # also where nothing moves


def tolerance(spec, on_gpu=False):
    """The largest relative error that a transformation of a graph may have, by its dtypes."""
    found = [2e-5] + [TOLERANCES[t.dtype] for t in spec.tensors if is_floating(t.dtype)]
    if any("fp8" in method for method in methods(spec)):  # of attention, rounded inside as well
        found.append(0.25)
    if on_gpu:
        found += [FLOAT32_ON_GPU]
        found += [TF32_ON_GPU] if spec.has_float32_product else []
        found += [TAN_ON_GPU] if "tan" in methods(spec) else []
    return max(found)


def relative_error(got, want):
    """Of the whole array: the norm of the difference by that of what is wanted, in got's range:
    results in float8 and float4 are its largest number where they are more."""
    if str(got.dtype).startswith(("float8", "float4")) and is_float(got):
        most = float(jnp.finfo(got.dtype).max)
        want = jnp.clip(want, -most, most)
    got, want = (np.asarray(x, np.float32).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape, (got.shape, want.shape)
    if not np.isfinite(want).all():
        assert (np.isfinite(want) == np.isfinite(got)).all(), "infinities or NaN in other places"
        got, want = got[np.isfinite(want)], want[np.isfinite(want)]
    scale, distance = np.linalg.norm(want), np.linalg.norm(got - want)
    return float(distance / scale) if scale else float(distance)


def compare(spec, operands, names=ALL):
    """Transformation -> largest relative error over its results, of a graph beside plain jnp,
    which the CPU computes in float32."""
    outputs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in spec.output_tensors]
    transformations = Transformations(operands, outputs)
    data = transformations.data()
    chosen = [name for name in names if transformations.applies(name)]

    def run(f):
        return jax.jit(lambda d: {name: getattr(transformations, name)(f, d) for name in chosen})

    got = run(lambda *x: bind(spec, "graph", *x))(data)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        widened = lambda x: x.astype(jnp.float32) if is_float(x) else x  # noqa: E731
        want = run(plain(spec))(jax.tree.map(widened, jax.device_get(data)))
    errors = {}
    for name in chosen:
        pairs = zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True)
        errors[name] = max((relative_error(a, b) for a, b in pairs), default=0.0)
    return errors


def equations(jaxpr):
    """All equations, those of inner jaxprs (of jit, scan, remat) in place of what holds them."""

    def is_jaxpr(value):
        return hasattr(getattr(value, "jaxpr", value), "eqns")

    found = []
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        values = jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)
        inner = [e for value in filter(is_jaxpr, values) for e in equations(value)]
        found += inner or [equation]
    return found


def primitives(jaxpr):
    """Names of all primitives."""
    return [equation.primitive.name for equation in equations(jaxpr)]


def graphs(jaxpr):
    """The graphs of all cudnn equations."""
    return [e.params["spec"] for e in equations(jaxpr) if e.primitive.name == "cudnn"]


def graphs_of(function, *args):
    """Those of a function, without what it does not need."""
    return graphs(compat.live_program(jax.make_jaxpr(function)(*args))[0])


def methods(spec):
    return [call.node.method for call in spec.calls]


def shapes_of(spec, method):
    """The shapes at the ports of the only node of a method."""
    (call,) = (call for call in spec.calls if call.node.method == method)
    return {port: spec.tensor(name).shape for port, name in (*call.inputs, *call.outputs)}
