"""Calls of batch_norm and conv_batch_norm, and what they mean in plain jnp."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz import functions
from transformations import methods

import jax_cudnn as jc

S = jax.ShapeDtypeStruct
MOMENTUM = np.float32(0.7)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A call; operands are x, w (of a convolution), running_mean, running_var, momentum and then
    ``given``, as far as it has them."""

    x: tuple[int, ...]
    axis: int = -1
    training: bool = True
    given: str = "scale bias"
    """Of scale, bias and residual."""
    activation: str | None = None
    epsilon: Any = 1e-3
    w: tuple[int, ...] = ()
    numbers: Any = ("NHWC", "HWIO", "NHWC")
    conv: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self):
        return (self.x, self.w) if self.w else (self.x,)

    @property
    def y(self):
        shapes = [S(shape, "float32") for shape in self.arrays]
        return jax.eval_shape(self.convolved, *shapes).shape

    @property
    def channels(self):
        return self.y[self.axis]

    def operands(self, dtype="float32", parameters="float32", seed=0):
        random = np.random.default_rng(seed)

        def drawn(shape, dtype):
            return jnp.asarray(random.standard_normal(shape) + 0.5, dtype)

        mean = drawn((self.channels,), parameters)
        given = [
            drawn(self.y, dtype) if name == "residual" else drawn((self.channels,), parameters)
            for name in self.given.split()
        ]
        x = [drawn(shape, dtype) for shape in self.arrays]
        return [*x, mean, jnp.abs(mean[::-1]) + 0.5, jnp.asarray(MOMENTUM), *given]

    def avals(self, dtype="bfloat16", parameters="float32"):
        return [S(a.shape, a.dtype) for a in self.operands(dtype, parameters)]

    def split(self, operands):
        count = len(self.arrays)
        mean, var, momentum, *given = operands[count:]
        given = dict(zip(self.given.split(), given, strict=True))
        return operands[:count], mean, var, momentum, {"scale": None, "bias": None, **given}

    def __call__(self, *operands, **keywords):
        """[y, mean, var]"""
        arrays, mean, var, momentum, given = self.split(operands)
        own = {"training": self.training, "epsilon": self.epsilon, "momentum": momentum}
        own |= {"activation": self.activation, "running_mean": mean, "running_var": var, **given}
        if self.w:
            own |= {"dimension_numbers": self.numbers, **self.conv}
            y, new = jc.ops.conv_batch_norm(*arrays, **{**own, **keywords})
        else:
            y, new = jc.ops.batch_norm(*arrays, axis=self.axis, **{**own, **keywords})
        return [y, *new]

    def convolved(self, x, w=None):
        if w is None:
            return x
        ones = (1,) * (x.ndim - 2)
        given = {"strides": ones, "padding": "SAME", "dilation": ones, "groups": 1, **self.conv}
        return functions._conv(x, w, **given, dimension_numbers=self.numbers)

    def plain(self, *operands):
        """The same in jnp, in the precision of its operands."""
        arrays, mean, var, momentum, given = self.split(operands)
        own = {"training": self.training, "momentum": momentum, "epsilon": self.epsilon}
        own |= {"axis": self.axis, "activation": self.activation, **given}
        y, new = functions._batch_norm(self.convolved(*arrays), mean, var, **own)
        return [y, *new]


def with_(case, **changes):
    return dataclasses.replace(case, **changes)


def loss(case):
    return lambda *a: jnp.sum(case(*a)[0].astype(jnp.float32))


def moving(case):
    """Positions of all but statistics and momentum."""
    count = len(case.arrays)
    return (*range(count), *range(count + 3, len(case.avals())))


def planned(function, *avals):
    """Name of a graph -> for each segment, whether cuDNN runs it, and the operations."""
    with jc.target("H200"):
        found = jc.plans(function, *avals)
    return {
        name: [(s.plan is not None, methods(s.spec)) for s in plan.segments]
        for name, plan in found.items()
    }


IMAGE = Case((4, 5, 3, 6))
