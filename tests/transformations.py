"""The transformations that every graph goes through, applied to it and to a plain jnp function."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn._core.graph.dtypes import is_floating
from jax_cudnn._core.graph.reference import evaluate

SIZE = 3  # of the dimensions of vmap


def in_float32(spec):
    """The same graph without any rounding, for operands in float32."""
    tensors = tuple(
        replace(t, dtype="float32") if is_floating(t.dtype) else t for t in spec.tensors
    )
    options = replace(spec.options, precision="highest")
    return replace(spec, tensors=tensors, options=options, _cache={})


def plain(spec):
    """The graph's outputs in jnp, as a list; operands of floats in float32."""
    wide = in_float32(spec)
    return lambda *operands: evaluate(wide, *operands)


def widened(values):
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, values
    )


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


class Checks:
    """Transformations of ``f(*operands) -> list of arrays``.

    Each is a method that takes a function and gives one, so that the same can be done to a graph
    and to its reference. All random directions are drawn once, as floats of the operands' dtypes.
    """

    def __init__(self, operands, outputs, seed=0):
        self.random = np.random.default_rng(seed)
        self.operands, self.outputs = operands, outputs
        self.moving = [i for i, x in enumerate(operands) if is_float(x)]
        self.results = [i for i, x in enumerate(outputs) if is_float(x)]
        self.tangents = [self.like(operands[i]) for i in self.moving]
        self.others = [self.like(operands[i]) for i in self.moving]
        self.cotangents = [self.like(outputs[i]) for i in self.results]
        self.stacks = [self.stack(x) for x in operands]
        self.stacked_cotangents = [self.stack(x, fresh=True) for x in self.cotangents]

    def like(self, x):
        return jnp.asarray(self.random.standard_normal(x.shape, np.float32)).astype(x.dtype)

    def stack(self, x, fresh=False):
        """Several operands like one: itself, and others of the same kind."""
        if fresh:
            return jnp.stack([self.like(x) for _ in range(SIZE)])
        orders = [np.arange(x.size)] + [self.random.permutation(x.size) for _ in range(SIZE - 1)]
        return jnp.stack([x.reshape(-1)[order].reshape(x.shape) for order in orders])

    def data(self):
        """Everything that a check reads, to be passed through jit."""
        return {
            "operands": self.operands,
            "tangents": self.tangents,
            "others": self.others,
            "cotangents": self.cotangents,
            "stacks": self.stacks,
            "stacked_cotangents": self.stacked_cotangents,
        }

    def floats(self, f, operands):
        """``f`` as a function of the operands that move, to the results that do."""

        def function(*moving):
            given = list(operands)
            for i, x in zip(self.moving, moving, strict=True):
                given[i] = x
            outputs = f(*given)
            return [outputs[i] for i in self.results]

        return function, [operands[i] for i in self.moving]

    def forward(self, f, d):
        return f(*d["operands"])

    def vjp(self, f, d):
        function, at = self.floats(f, d["operands"])
        return jax.vjp(function, *at)[1](d["cotangents"])

    def jvp(self, f, d):
        function, at = self.floats(f, d["operands"])
        return jax.jvp(function, at, d["tangents"])

    def vjp_of_one(self, f, d):
        """Of the last operand alone: the others' gradients are not computed."""
        function, at = self.floats(f, d["operands"])
        return jax.vjp(lambda x: function(*at[:-1], x), at[-1])[1](d["cotangents"])

    def linearize(self, f, d):
        function, at = self.floats(f, d["operands"])
        tangents_of = jax.linearize(function, *at)[1]
        return tangents_of(*d["tangents"]), jax.linear_transpose(tangents_of, *at)(d["cotangents"])

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
        for i in range(len(d["operands"])):
            axes = [0 if i == j else None for j in range(len(d["operands"]))]
            chosen = [d["stacks"][j] if i == j else x for j, x in enumerate(d["operands"])]
            results.append(jax.vmap(f, in_axes=axes)(*chosen))
        return results

    def vmap_of_vmap(self, f, d):
        """All operands in turn belong to the inner, the outer or both."""
        kinds = list(itertools.islice(itertools.cycle(((0, None), (None, 0), (0, 0))), 9))
        inner = [kinds[i][0] for i in range(len(d["operands"]))]
        outer = [kinds[i][1] for i in range(len(d["operands"]))]
        chosen = [
            x
            if a is None and b is None
            else s
            if a is None or b is None
            else jnp.stack([s, s[::-1]])
            for x, s, a, b in zip(d["operands"], d["stacks"], inner, outer, strict=True)
        ]
        # The outer dimension of what belongs to it alone has SIZE elements, of both only two.
        chosen = [
            x[:2] if a is None and b is not None else x
            for x, a, b in zip(chosen, inner, outer, strict=True)
        ]
        once = jax.vmap(f, in_axes=inner) if set(inner) != {None} else f
        return (jax.vmap(once, in_axes=outer) if set(outer) != {None} else once)(*chosen)

    def vmap_of_vjp(self, f, d):
        """Gradients by each example."""

        def gradients(operands, cotangents):
            function, at = self.floats(f, operands)
            return jax.vjp(function, *at)[1](cotangents)

        return jax.vmap(gradients)(d["stacks"], d["stacked_cotangents"])

    def vjp_of_vmap(self, f, d):
        mapped = jax.vmap(f)
        function, at = self.floats(lambda *x: mapped(*x), d["stacks"])
        return jax.vjp(function, *at)[1](d["stacked_cotangents"])

    def remat(self, f, d):
        function, at = self.floats(f, d["operands"])
        return jax.vjp(jax.checkpoint(function), *at)[1](d["cotangents"])

    def scan(self, f, d):
        """The gradient of a loop over operands."""
        function, at = self.floats(f, d["operands"])
        stacks = [d["stacks"][i] for i in self.moving]

        def total(*stacks):
            def step(carry, x):
                return carry + sum(
                    jnp.vdot(y, c).astype(jnp.float32)
                    for y, c in zip(function(*x), d["cotangents"], strict=True)
                ), None

            return jax.lax.scan(step, jnp.float32(0), stacks)[0]

        return jax.grad(total, tuple(range(len(at))))(*stacks)


FIRST_ORDER = ("forward", "vjp", "jvp", "vjp_of_one", "linearize")
HIGHER_ORDER = ("jvp_of_vjp", "vjp_of_vjp")
BATCHED = ("vmap", "vmap_of_each", "vmap_of_vmap", "vmap_of_vjp", "vjp_of_vmap")
NESTED = ("remat", "scan")
ALL = (*FIRST_ORDER, *HIGHER_ORDER, *BATCHED, *NESTED)
OF_ANYTHING = ("forward", "vmap", "vmap_of_each", "vmap_of_vmap")


def relative_error(got, want):
    """Of the whole array: the norm of the difference by that of what is wanted."""
    got, want = (np.asarray(x, np.float32).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape, (got.shape, want.shape)
    if not np.isfinite(want).all():
        same = np.isfinite(want) == np.isfinite(got)
        assert same.all(), "infinities or NaN in other places"
        got, want = got[np.isfinite(want)], want[np.isfinite(want)]
    scale = np.linalg.norm(want)
    distance = np.linalg.norm(got - want)
    return float(distance / scale) if scale else float(distance)


def compare(spec, operands, names=None, jit=jax.jit, seed=0):
    """Transformation -> largest relative error over its results, of a graph beside plain jnp."""
    from jax_cudnn._core.primitive import bind

    reference = plain(spec)
    outputs = jax.eval_shape(lambda *x: bind(spec, "graph", *x), *operands)
    checks = Checks(list(operands), outputs, seed)
    movable = checks.moving and checks.results
    chosen = [n for n in names or ALL if movable or n in OF_ANYTHING]

    def run(f):
        return lambda data: {name: getattr(checks, name)(f, data) for name in chosen}

    got = jit(run(lambda *x: bind(spec, "graph", *x)))(checks.data())
    want = jit(run(reference))(widened(checks.data()))
    errors = {}
    for name in chosen:
        pairs = zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True)
        errors[name] = max((relative_error(a, b) for a, b in pairs), default=0.0)
    return errors
