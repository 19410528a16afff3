"""A random call of a public function: its values, derivatives and vmaps beside the same in float64.

What they are compared with is computed by jnp, lax, jax.nn or Flax, and shares no code with the
package. It is computed again and again with every number moved by more than another computation may
round it: what these runs differ by is the tolerance.
"""

import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from oracle import stored
from transformations import Transformations, is_float

from .comparison import Noise, WrongResult, check_right, compare
from .interpreter import interpreted

FIRST, SECOND = ("vjp", "jvp", "vmap", "vmap_of_vjp"), ("jvp_of_vjp", "vjp_of_vjp")
CPU, GPU = (2.0**-21, 2.0**-21), (2.0**-16, 2.0**-10)
"""How far float32 may be off: a function's result, and an operand of a product (TF32)."""


class Draw:
    """Random choices of one call; ``dtype`` is that of its main operands. ``run`` runs a program
    where the call will run."""

    def __init__(self, seed: int, run: Callable[..., Any]):
        self.run = run
        self.rng, self.noise = random.Random(seed), np.random.default_rng(seed)
        self.dtype = self.of("float32", "float32", "bfloat16", "float16")

    def of(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def size(self, *usual: int) -> int:
        """One of these, or of those that are special: 1, and seldom 0."""
        return self.of(*usual) if self.chance(0.9) else self.of(0, 1, 1, 1)

    def some(self, probability: float, **given: Any) -> dict[str, Any]:
        return {name: x for name, x in given.items() if self.chance(probability)}

    def floats(self, *shape: int, dtype: Any = None, scale: float = 1.0) -> np.ndarray:
        values = self.noise.standard_normal(shape) * scale
        return np.asarray(values).astype(jnp.dtype(dtype or self.dtype))

    def integers(self, low: int, high: int, *shape: int) -> np.ndarray:
        return np.asarray(self.noise.integers(low, high + 1, shape), "int32")

    def booleans(self, *shape: int, share: float = 0.7) -> np.ndarray:
        return np.asarray(self.noise.random(shape) < share)


Entry = dict[str, Any]
"""The arguments of :class:`Call`."""


def entry(function: Any, exact: Any, operands: Any, options: Any, **more: Any) -> Entry:
    """Both functions take the same names."""
    shapes = {name: f"{x.dtype}{[*x.shape]}" for name, x in operands.items()}
    text = f"{getattr(function, '__name__', function)}({shapes}, {options})"
    function, exact = (functools.partial(f, **options) for f in (function, exact))
    return {"text": text, "function": function, "exact": exact, "operands": operands, **more}


class _Transformed(Transformations):
    """Along random axes of random operands."""

    def __init__(self, operands: Any, outputs: Any, seed: int):
        super().__init__(operands, outputs)
        self.random, rng = np.random.default_rng(seed), random.Random(seed)
        self.axes = [rng.randint(0, x.ndim) if rng.random() < 0.6 else None for x in operands]
        if not any(axis is not None for axis in self.axes):
            self.axes[0] = 0

    def _moved(self, d: Any) -> list[Any]:
        each = zip(self.axes, d["operands"], d["stacks"], strict=True)
        return [x if axis is None else jnp.moveaxis(xs, 0, axis) for axis, x, xs in each]

    def vmap(self, f: Any, d: Any) -> Any:
        return jax.vmap(f, in_axes=self.axes)(*self._moved(d))

    def vmap_of_vjp(self, f: Any, d: Any) -> Any:
        def gradients(cotangents: Any, *operands: Any) -> Any:
            function, at = self.floats(f, operands)
            return jax.vjp(function, *at)[1](cotangents)

        stacks = d["stacked_cotangents"], *self._moved(d)
        return jax.vmap(gradients, in_axes=(0, *self.axes))(*stacks)


class Call:
    """A function of named arrays, the same with wide floats, and the transformations of both.

    ``names``: of the transformations, besides the values themselves. ``coarse``: how far the
    function rounds, if not as its operands' dtypes; ``inside``: its steps, too, and not only
    operands and results. One that is ``compiled`` has loops, or keys of random numbers. Derivatives
    beyond ``largest`` are not compared.
    """

    def __init__(
        self, seed: int, text: str, function: Callable[..., Any], exact: Callable[..., Any],
        operands: dict[str, Any], names: Sequence[str] = (), coarse: float | None = None,
        inside: bool = False, compiled: bool = False, wide: str = "float64",
        largest: float = math.inf,
    ):  # fmt: skip
        self.text, self.compiled, self._wide, self._largest = text, compiled, wide, largest
        keys, arrays = zip(*operands.items(), strict=True)
        self._both = [
            lambda *xs, f=f: jax.tree.leaves(f(**dict(zip(keys, xs, strict=True))))
            for f in (function, exact)
        ]
        outputs = jax.eval_shape(self._both[0], *arrays)
        self._transformed = _Transformed(arrays, outputs, seed)
        self.names = [n for n in ("forward", *names) if self._transformed.applies(n)]
        self.data = (self._transformed.data(),)
        eps = [float(jnp.finfo(x.dtype).eps) for x in (*arrays, *outputs) if is_float(x)]
        self._coarse = max([0.0, *(e for e in eps if e > 2.0**-20)]) if coarse is None else coarse
        self._inside = self._coarse / 2 * inside

    def program(self, which: int = 0) -> Callable[[Any], dict[str, Any]]:
        """A function of :attr:`data`: the results of each transformation."""
        transformed, f = self._transformed, self._both[which]
        return lambda data: {name: getattr(transformed, name)(f, data) for name in self.names}

    def check(self, got: dict[str, Any], on_gpu: bool = False) -> int:
        """Raises WrongResult unless these are the results; gives how many say nothing."""
        leaves = [(name, np.asarray(x)) for name in self.names for x in jax.tree.leaves(got[name])]
        run, least = interpreted(self.program(1)), GPU if on_gpu else CPU
        amount, cut = (max(a, b) for a, b in zip((self._inside, self._coarse), least, strict=True))

        def exact(noise: Noise | None = None) -> list[Any]:
            if noise is not None:
                noise = Noise(int(noise.rng.integers(2**32)), amount, cut)
            data = jax.tree.map(lambda x: self._widened(x, noise), self.data)
            with jax.enable_x64(self._wide == "float64"):
                found = run(*data, noise=noise)
            found = [x for name in self.names for x in jax.tree.leaves(found[name])]
            shapes = [(x.shape, y.shape) for x, (_, y) in zip(found, leaves, strict=True)]
            if any(x != y for x, y in shapes):
                raise WrongResult("other shapes", got=str(shapes))
            return [stored(x, str(y.dtype)) for x, (_, y) in zip(found, leaves, strict=True)]

        want = exact()
        said = self._said([name for name, _ in leaves], want)
        disturbed = lambda noise: [x for i, x in enumerate(exact(noise)) if i in said]  # noqa: E731
        found = compare([leaves[i][1] for i in said], [want[i] for i in said], disturbed, 2 * cut)
        check_right({f"{i} {leaves[i][0]}": [c] for i, c in zip(said, found, strict=True)})
        return len(leaves) - len(said)

    def _said(self, names: Sequence[str], want: Sequence[np.ndarray]) -> list[int]:
        """Which results are compared: of derivatives those within ``largest``, and none of a
        transformation that gives NaN: what becomes of the others depends on the way."""
        each = [*enumerate(zip(names, (np.abs(x.astype(np.float64)) for x in want), strict=True))]
        values = names if math.isinf(self._largest) else ("forward", "vmap")
        lost = {name for _, (name, x) in each if np.isnan(x).any()}
        within = lambda name, x: name not in lost and bool(np.all(x <= self._largest))  # noqa: E731
        return [i for i, (name, x) in each if name in values or within(name, x)]

    def _widened(self, x: Any, noise: Noise | None) -> np.ndarray:
        if not is_float(x):
            return np.asarray(x)
        wide = np.asarray(x).astype(self._wide)
        return wide if noise is None else noise.moved(wide, self._coarse or CPU[0])
