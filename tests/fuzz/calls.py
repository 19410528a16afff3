"""A random call of a public function: its values, derivatives and vmaps beside the same in float64.

What they are compared with is computed by jnp, lax, jax.nn or Flax, and shares no code with the
package. It is computed again and again with every number moved by more than another computation may
round it: what these runs differ by is the tolerance.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from oracle import stored
from transformations import Transformations, is_float

from .comparison import Noise, WrongResult, check_right, compare
from .interpreter import interpreted

FIRST, SECOND = ("vjp", "jvp", "vmap", "vmap_of_vjp"), ("jvp_of_vjp", "vjp_of_vjp")
FLOAT32, TF32 = 2.0**-21, 2.0**-10
"""How far float32 rounds, in a few steps, and the operands of its products on a GPU."""


class Draw:
    """Random choices of one call; ``dtype`` is that of its main operands. ``run`` runs a program
    where the call will run."""

    def __init__(self, seed: int, run: Callable[..., Any] = lambda f, *xs: f(*xs)):
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
    """A function of named arrays, the same in float64, and the transformations of both.

    ``coarse`` is how far the function rounds where that is more than its operands' dtypes say;
    ``inside``: its steps, too, and not only operands and results; ``without`` names transformations
    that it does not have; one that is ``compiled`` has loops, or keys of random numbers.
    """

    def __init__(
        self, seed: int, text: str, function: Callable[..., Any], exact: Callable[..., Any],
        operands: dict[str, Any], coarse: float = 0.0, without: tuple[str, ...] = (),
        transforms: int = 3, inside: bool = False, compiled: bool = False,
    ):  # fmt: skip
        self.text, self.compiled = text, compiled
        names, arrays = zip(*operands.items(), strict=True)
        self._both = [
            lambda *xs, f=f: jax.tree.leaves(f(**dict(zip(names, xs, strict=True))))
            for f in (function, exact)
        ]
        outputs = jax.eval_shape(self._both[0], *arrays)
        self._transformed, rng = _Transformed(arrays, outputs, seed), random.Random(seed)
        chosen = rng.sample(FIRST, transforms) + rng.sample(SECOND, rng.random() < 0.5)
        chosen = [name for name in chosen if name not in without]
        self.names = [n for n in ("forward", *chosen) if self._transformed.applies(n)]
        self.data = (self._transformed.data(),)
        eps = [float(jnp.finfo(x.dtype).eps) for x in (*arrays, *outputs) if is_float(x)]
        self._coarse = max([coarse, *(e for e in eps if e > 2.0**-20)])
        self._amount = max(self._coarse / 2 * inside, FLOAT32)

    def program(self, which: int = 0) -> Callable[[Any], dict[str, Any]]:
        """A function of :attr:`data`: the results of each transformation."""
        transformed, f = self._transformed, self._both[which]
        return lambda data: {name: getattr(transformed, name)(f, data) for name in self.names}

    def check(self, got: dict[str, Any], on_gpu: bool = False) -> None:
        """Raises WrongResult unless these are the results."""
        leaves = [(name, np.asarray(x)) for name in self.names for x in jax.tree.leaves(got[name])]
        run = interpreted(self.program(1))
        operands = self._coarse or FLOAT32
        cut = max(self._coarse, TF32 if on_gpu else FLOAT32)

        def exact(noise: Noise | None = None) -> list[Any]:
            if noise is not None:
                noise = Noise(int(noise.rng.integers(2**32)), self._amount, cut)
            wide = [_wide(x, noise, operands) for x in jax.tree.leaves(self.data)]
            with jax.enable_x64(True):
                found = run(*jax.tree.unflatten(jax.tree.structure(self.data), wide), noise=noise)
            found = [x for name in self.names for x in jax.tree.leaves(found[name])]
            shapes = [(x.shape, y.shape) for x, (_, y) in zip(found, leaves, strict=True)]
            if any(x != y for x, y in shapes):
                raise WrongResult("other shapes", got=str(shapes))
            return [stored(x, str(y.dtype)) for x, (_, y) in zip(found, leaves, strict=True)]

        found = compare([x for _, x in leaves], exact(), exact, 2 * cut)
        names = [f"{i} {name}" for i, (name, _) in enumerate(leaves)]
        check_right({name: [c] for name, c in zip(names, found, strict=True)})


def _wide(x: np.ndarray, noise: Noise | None, amount: float) -> np.ndarray:
    if not is_float(x):
        return np.asarray(x)
    wide = np.asarray(x).astype(np.float64)
    return wide if noise is None else noise.moved(wide, amount)
