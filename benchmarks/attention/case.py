"""One attention on all sides, and what it must compute and move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.commands.agreement import tolerance

from ..models.cases import Operand
from ..sides import BACKWARD, FORWARD, OURS, TRAINING

Array = jax.Array
Named = dict[str, Any]

LIMIT = {
    "tflops": {"bfloat16": 989.5, "float8_e4m3fn": 1979.0},
    "tbytes_s": 4.3,
    "of": "NVIDIA H200",
    "source": "dense peaks of its data sheet, measured copy bandwidth",
}
_BACKWARD = 2.5  # five products instead of two


@dataclass(frozen=True)
class Side:
    """One way to compute it.

    Attributes:
        function: of operands by name. In JAX the results by name, of which "y" is differentiated;
            in PyTorch y alone.
        prepare: operands of the case with "dy", where there is one, as this side takes them.
        finish: results or gradients by name, as all others give them.
        backward: whether there is one.
        captured: whether PyTorch can make a CUDA graph of it. Of its operators for examples of
            several lengths it cannot: it ends the process.
    """

    function: Callable[..., Any]
    prepare: Callable[[Named], Named] | None = None
    finish: Callable[[Named], Named] | None = None
    backward: bool = True
    captured: bool = True

    def given(self, operands: Named) -> Named:
        return operands if self.prepare is None else self.prepare(operands)

    def common(self, results: Named) -> Named:
        return results if self.finish is None else self.finish(results)


Sides = Mapping[str, Side | str]


@dataclass(frozen=True)
class AttentionCase:
    """One attention on all sides.

    Attributes:
        name: kind and shape.
        what: one line for the reader.
        operands: what all sides get, by name: drawn, or as they are.
        learned: the operands that gradients are wanted of; none where there is no backward.
        pairs: of queries and keys whose products are computed, over all examples, as the field
            counts: times 4 H of each head they are FLOPs of the forward.
        ours: by ``jc.ops``, of the name of an implementation, or None for the default.
        others: further sides in JAX that are not XLA's; a text is why there is none.
        xla: formulations in plain JAX, by name.
        exact: the formulation that all sides are held against, in float32.
        torch: sides in PyTorch: the first of several ways that runs.
        kept: rows behind this length of each example are not looked at.
        dtype: of the products.
        tolerance: by program; None for that of the operands' dtype.
        published: TFLOP/s of forward and backward, by "forward" and "backward".
        published_side: the side that these are of.
    """

    name: str
    what: str
    operands: Mapping[str, Operand | np.ndarray]
    learned: tuple[str, ...]
    pairs: float
    ours: Callable[[str | None], Side]
    xla: Mapping[str, Side]
    exact: Side
    torch: Mapping[str, Sequence[Side] | str]
    others: Sides = field(default_factory=dict)
    kept: np.ndarray | None = None
    dtype: str = "bfloat16"
    tolerance: Mapping[str, float] | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    published_side: str = OURS

    @property
    def programs(self) -> tuple[str, ...]:
        return (TRAINING, BACKWARD) if self.learned else (FORWARD,)

    def arrays(self, key: Array) -> dict[str, Array]:
        """Random operands, and with "dy" the gradient of y, where there is a backward."""
        wanted = {n: x for n, x in self.operands.items() if isinstance(x, Operand)}
        if self.learned:
            wanted["dy"] = Operand(wanted["q"].shape, wanted["q"].dtype)
        keys = jax.random.split(key, len(wanted))
        drawn = {n: x.array(k) for (n, x), k in zip(wanted.items(), keys, strict=True)}
        fixed = {n: jnp.asarray(x) for n, x in self.operands.items() if isinstance(x, np.ndarray)}
        found = {**drawn, **fixed}
        return found | self.shown({"dy": found["dy"]}) if self.learned else found

    def shown(self, results: Named) -> Named:
        """Results with zeros in rows that are not looked at."""
        if self.kept is None:
            return results
        return {name: _first_rows(x, jnp.asarray(self.kept)) for name, x in results.items()}

    def flops(self, program: str) -> float:
        heads, size = self._q.shape[2:]
        return 4 * self.pairs * heads * size * (_BACKWARD if program == BACKWARD else 1)

    def bytes(self, program: str) -> int:
        """What must move, each array once: operands and y, and in the backward y, its gradient
        and the others; of pages and of examples only what is used."""
        used = self._used()
        size = {
            n: _bytes(x, self.dtype) * (used if n in ("key_pages", "value_pages") else 1)
            for n, x in self.operands.items()
        }
        if self.kept is not None:
            share = float(self.kept.sum()) / math.prod(self._q.shape[:2])
            size = {n: x * share for n, x in size.items()}
        read, y = sum(size.values()), size["q"]
        if program != BACKWARD:
            return int(read + y)
        return int(read + 2 * y + sum(size[n] for n in self.learned))

    def limit_us(self, program: str) -> float:
        """The time of the products at the peak of the chip, or of the bytes, if that is longer."""
        products = self.flops(program) / LIMIT["tflops"][self.dtype] / 1e6
        return max(products, self.bytes(program) / LIMIT["tbytes_s"] / 1e6)

    def allowed(self, program: str) -> float:
        if self.tolerance is not None:
            return self.tolerance[program]
        return tolerance((self._q.aval,), self._q.aval)

    def described(self) -> dict[str, str]:
        return {
            n: str(x) if isinstance(x, Operand) else f"{x.dtype}[{','.join(map(str, x.shape))}]"
            for n, x in self.operands.items()
        }

    @property
    def _q(self) -> Operand:
        found = self.operands["q"]
        assert isinstance(found, Operand)
        return found

    def _used(self) -> float:
        """The share of the pages' rows that is seen."""
        pages, lengths = self.operands.get("key_pages"), self.operands.get("lengths")
        if not isinstance(pages, Operand) or not isinstance(lengths, np.ndarray):
            return 1.0
        return float(lengths.sum()) / (pages.shape[0] * pages.shape[2])


@jax.jit
def _first_rows(x: Array, lengths: Array) -> Array:
    seen = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(seen[..., None, None], x, 0)


def _bytes(x: Operand | np.ndarray, dtype: str) -> int:
    if isinstance(x, np.ndarray):
        return x.nbytes
    return math.prod(x.shape) * min(jnp.dtype(dtype).itemsize, x.aval.dtype.itemsize)
