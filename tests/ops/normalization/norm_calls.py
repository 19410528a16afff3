"""Calls of jax_cudnn.ops' normalizations, and what they mean in plain jnp."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz import functions

import jax_cudnn as jc

S = jax.ShapeDtypeStruct
# Rounded once, relative to the array; and of sums in float32.
ROUNDED = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}
IN_FLOAT32 = 4e-6

rms, layer, ada = jc.ops.rms_norm, jc.ops.layer_norm, jc.ops.ada_layer_norm
instance, group = jc.ops.instance_norm, jc.ops.group_norm
PLAIN = {rms: functions._of_rows(centred=False), layer: functions._of_rows(centred=True)}
PLAIN |= {ada: functions._ada, **dict.fromkeys((instance, group), functions._grouped)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call; its operands are x and those that are given."""

    function: Callable[..., Any]
    x: tuple[int, ...]
    own: tuple[int, ...]
    """The axes that scale and bias have."""
    given: str = "scale bias"
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def names(self):
        return [n for n in self.given.split() if n == "scale" or self.function is not rms]

    @property
    def shapes(self):
        one = tuple(self.x[axis] for axis in self.own)
        return (self.x, *(one for _ in self.names))

    def operands(self, dtype="float32"):
        random = np.random.default_rng(0)
        return [jnp.asarray(random.standard_normal(s) + 0.5, dtype) for s in self.shapes]

    def avals(self, dtype="bfloat16"):
        return [S(shape, dtype) for shape in self.shapes]

    def __call__(self, x, *parameters, **keywords):
        """y and the statistics, as a list."""
        given = dict(zip(self.names, parameters, strict=True))
        keywords = {"return_statistics": True, **self.keywords, **keywords}
        return jax.tree.leaves(self.function(x, **given, **keywords))

    def y(self, *operands, **keywords):
        return self(*operands, return_statistics=False, **keywords)[0]

    def plain(self, x, *parameters, epsilon=None):
        """The same in jnp, in the precision of its operands."""
        given = dict(zip(self.names, parameters, strict=True)) | {"return_statistics": True}
        given |= {"epsilon": 1e-6 if self.function is rms else 1e-5, **self.keywords}
        given |= {} if epsilon is None else {"epsilon": epsilon}
        if self.function in (instance, group):
            given = {"axis": -1} | given
        return jax.tree.leaves(PLAIN[self.function](x, **given))


def case(function, x, own, given="scale bias", **keywords):
    return Case(function, x, own, given, keywords)


KINDS = {
    "rms": case(rms, (6, 10), (1,)),
    "layer": case(layer, (6, 10), (1,)),
    "ada": case(ada, (3, 4, 10), (0, 2)),
    "instance": case(instance, (2, 3, 5, 7), (3,)),
    "group": case(group, (2, 3, 4, 8), (3,), num_groups=4),
}
PLANNED = {  # sizes at which cuDNN has engines for all of them
    "rms": case(rms, (64, 256), (1,)),
    "rms, 1 + scale": case(rms, (4, 6, 8, 128), (3,), zero_centered_scale=True),
    "layer, middle": case(layer, (4, 64, 6, 10), (1,), axis=-3),
    "ada": case(ada, (4, 32, 128), (0, 2)),
    "instance": case(instance, (1, 8, 10, 32), (3,)),
    "group, one": case(group, (4, 10, 32), (2,), "scale", num_groups=1),
    "group, of each channel": case(group, (1, 30, 16), (2,), num_groups=16),
}


def assert_close(got, want, slack=1.0):
    """All of it finite, and hardly farther from what is wanted than that is, rounded once."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        a, rounded = (np.asarray(v, np.float64) for v in (a, np.asarray(b).astype(a.dtype)))
        assert np.isfinite(a).all()
        allowed = 1.3 * np.linalg.norm(rounded - b) + IN_FLOAT32 * np.linalg.norm(b)
        assert np.linalg.norm(a - b) <= slack * allowed + 1e-30, (a, b)
