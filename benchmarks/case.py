"""What is measured: one computation on several sides, its operands by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn._core import agreement
from jax_cudnn.commands.bench import drawn

Array = jax.Array
Named = dict[str, Any]
Function = Callable[..., Any]

WHOLE, OURS, REFERENCE = "cuDNN", "jax_cudnn", "reference"
"""Ours with ``implementation="cudnn"``, by default, and with ``implementation="xla"``, to which
the default may leave it."""
FORWARD, TRAINING, BACKWARD = "forward", "forward that keeps residuals", "backward"
STEP = "forward and backward"
"""The sum of the last two, of one way to compute: what its forward does not keep, its backward
computes again, so neither half alone says which way is faster."""
LIMIT = {
    "tflops": {"bfloat16": 989.5, "float8_e4m3fn": 1979.0},
    "tbytes_s": 4.3,
    "of": "NVIDIA H200",
    "source": "dense peaks of its data sheet, measured copy bandwidth",
}


@dataclass(frozen=True)
class Operand:
    """An array of a case: random normal numbers times ``scale`` plus ``offset``, or integers up
    to 127."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    scale: float = 1.0
    offset: float = 0.0

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.aval.dtype.itemsize

    def array(self, key: Array) -> Array:
        return drawn(key, self.aval, self.scale, self.offset)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Side:
    """One way to compute a case.

    Attributes:
        function: of operands by name. In JAX the results by name, of which "y" is differentiated;
            in PyTorch y alone.
        prepare: operands of the case with "dy", where there is one, as this side takes them.
        finish: results or gradients by name, as all others give them.
        backward: whether there is one.
        captured: whether PyTorch can make a CUDA graph of it. Of its operators for examples of
            several lengths it cannot: it ends the process.
    """

    function: Function
    prepare: Callable[[Named], Named] | None = None
    finish: Callable[[Named], Named] | None = None
    backward: bool = True
    captured: bool = True

    def given(self, operands: Named) -> Named:
        return operands if self.prepare is None else self.prepare(operands)

    def common(self, results: Named) -> Named:
        return results if self.finish is None else self.finish(results)


@dataclass(frozen=True)
class Case:
    """One computation on all sides; each family says what it must compute and move.

    Attributes:
        name: kind and shape.
        what: one line for the reader.
        operands: what all sides get, by name: drawn, or as they are.
        learned: the operands that gradients are wanted of; none where there is no backward.
        ours: by ``jc.ops``, of the name of an implementation, or None for the default.
        xla: formulations in plain JAX, by name.
        exact: the formulation that all sides are held against, in float32.
        torch: sides in PyTorch: the first of several ways that runs; a text is why there is none.
        others: further sides in JAX that are not XLA's.
    """

    name: str
    what: str
    operands: Mapping[str, Operand | np.ndarray]
    learned: tuple[str, ...]
    ours: Callable[[str | None], Side]
    xla: Mapping[str, Side]
    exact: Side
    torch: Mapping[str, Sequence[Side] | str] = field(default_factory=dict)
    others: Mapping[str, Side | str] = field(default_factory=dict)

    ways: ClassVar[tuple[str, ...]] = (WHOLE, OURS, REFERENCE)
    large: ClassVar[bool] = False
    """Whether formulations in plain JAX may need much memory: they do their work once."""
    reference_is_best: ClassVar[bool] = False
    """Whether XLA's best may be the reference."""
    worst: ClassVar[str] = "element"

    @property
    def programs(self) -> tuple[str, ...]:
        return (TRAINING, BACKWARD) if self.learned else (FORWARD,)

    @property
    def whole(self) -> Mapping[str, Callable[[Function], Function]]:
        """Programs that are made of a side's function as a whole, and are cut in no halves."""
        return {}

    def sides(self, program: str) -> tuple[str, ...]:
        """Those of ``xla`` that are another in this program."""
        return (*self.xla,)

    def arrays(self, key: Array) -> Named:
        """Random operands, and with "dy" the gradient of y, where there is a backward."""
        wanted = {n: x for n, x in self.operands.items() if isinstance(x, Operand)}
        if self.learned:
            first = next(iter(wanted.values()))
            wanted["dy"] = Operand(first.shape, first.dtype)
        keys = jax.random.split(key, len(wanted))
        found = {n: x.array(k) for (n, x), k in zip(wanted.items(), keys, strict=True)}
        fixed = {n: jnp.asarray(x) for n, x in self.operands.items() if isinstance(x, np.ndarray)}
        found |= fixed
        return found | (self.shown({"dy": found["dy"]}) if self.learned else {})

    def shown(self, results: Named) -> Named:
        """Results as far as they are looked at."""
        return results

    def flops(self, program: str) -> float:
        return 0.0

    def bytes(self, program: str) -> int:
        """What must move, each array once; 0 where nobody counts."""
        return 0

    def limit_us(self, program: str) -> float:
        """The time of the bytes at the chip's limit."""
        return self.bytes(program) / LIMIT["tbytes_s"] / 1e6

    def allowed(self, program: str) -> float:
        """How far from ``exact`` a side may be."""
        x = next(x for x in self.operands.values() if isinstance(x, Operand))
        return agreement.tolerance((x.aval,), x.aval)

    def difference(self, got: Named, want: Named) -> agreement.Difference:
        return agreement.difference({name: got[name] for name in want}, want)

    def wants_power(self, program: str) -> bool:
        """Whether to measure what the GPU's power limit does to it."""
        return False

    def told(self, program: str, function: Function, operands: tuple[Any, ...]) -> dict[str, Any]:
        """What an entry says of a program besides, which ours is."""
        return {}

    def about(self) -> dict[str, Any]:
        """What an entry says of the case besides."""
        return {}

    def described(self) -> dict[str, str]:
        return {n: f"{x.dtype}[{','.join(map(str, x.shape))}]" for n, x in self.operands.items()}
