"""Normalizations as users write them: with ``jc.ops``, in plain JAX in several ways, in PyTorch.

Every side is a function of the same operands by name, and returns its results by name: "y", and
for batch normalization the running statistics. Images are NHWC.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn import ops

from ..case import BACKWARD, FORWARD, TRAINING, Array, Case, Named, Operand, Side
from .formulations import MOMENTUM, Norm, formulations, plain

EAGER, COMPILED, TUNED = "torch", "torch.compile", "torch.compile max-autotune"
_MODES = {EAGER: None, COMPILED: "default", TUNED: "max-autotune-no-cudagraphs"}
PROGRAMS = (FORWARD, TRAINING, BACKWARD)


@dataclass(frozen=True)
class NormCase(Case):
    """One normalization on all sides.

    Attributes:
        kept: bytes that a backward needs besides x, scale and the gradient of y: statistics, and a
            bit an element where there is a relu.
        forwards: the formulations that differ in the forward alone, without residuals.
        rereads: whether statistics are of more than a chip holds, so that their operands are read
            again.
    """

    kept: int = 0
    forwards: tuple[str, ...] = ()
    rereads: bool = False

    @property
    def programs(self) -> tuple[str, ...]:
        return PROGRAMS

    def sides(self, program: str) -> tuple[str, ...]:
        return self.forwards if program == FORWARD else (*self.xla,)

    def arrays(self, key: Array) -> Named:
        """What relu gets is far from 0, so that no rounding before it decides whether an element
        has a gradient: a residual is 8 or -8, and without one x keeps away from its mean."""
        drawn = super().arrays(key)
        if "residual" in drawn:
            drawn["residual"] = jnp.where(drawn["residual"] < 0, -8, 8).astype(drawn["x"].dtype)
        elif "-relu" in self.name:
            x = drawn["x"]
            drawn["x"] = jax.jit(lambda x: jnp.where(x < 0, x - 3, x + 3).astype(x.dtype))(x)
        return drawn

    def bytes(self, program: str) -> int:
        size = self._sizes()
        if program == BACKWARD:
            return 2 * size["x"] + size["scale"] + self.kept + sum(size[n] for n in self.learned)
        running = sum(size[name] for name in size if name.startswith("running_"))
        kept = self.kept if program == TRAINING else 0
        return sum(size.values()) + size["x"] + running + kept

    def told(self, program: str, *ours: Any) -> dict[str, Any]:
        if not self.rereads:
            return {}
        again = self._sizes()["x"] * (2 if program == BACKWARD else 1)
        return {"bytes_read_twice": self.bytes(program) + again}

    def _sizes(self) -> dict[str, int]:
        return {name: x.bytes for name, x in self.operands.items() if isinstance(x, Operand)}


def _case(
    name: str,
    what: str,
    norm: Norm,
    operands: dict[str, Operand],
    ours: Callable[..., Any],
    in_torch: Callable[..., Any],
    **more: Any,
) -> NormCase:
    """``ours`` is of operands and an implementation, ``in_torch`` of its functions and tensors."""

    def side(implementation: str | None) -> Side:
        def function(**given: Any) -> Named:
            found = ours(implementation=implementation, **given)
            return found if isinstance(found, dict) else {"y": found}

        return Side(function)

    forwards, others = formulations(norm)
    return NormCase(
        name,
        what,
        operands,
        tuple(name for name in operands if not name.startswith("running_")),
        side,
        {name: Side(function) for name, function in {**forwards, **others}.items()},
        Side(plain(norm)),
        {name: [Side(_in_torch(in_torch, mode))] for name, mode in _MODES.items()},
        forwards=(*forwards,),
        **more,
    )


def _in_torch(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    """As it is or compiled, when it is first called: without PyTorch it is not measured."""
    made: list[Callable[..., Any]] = []

    def run(**tensors: Any) -> Any:
        if not made:
            torch = importlib.import_module("torch")
            whole = partial(function, torch.nn.functional)
            made.append(torch.compile(whole, mode=mode, dynamic=False) if mode else whole)
        return made[0](**tensors)

    return run


def _vector(size: int, dtype: str, bias: bool = True) -> dict[str, Operand]:
    scale = {"scale": Operand((size,), dtype, 0.1, 1.0)}
    return scale | ({"bias": Operand((size,), dtype, 0.1)} if bias else {})


def _rms_norm(rows: int, columns: int) -> NormCase:
    norm = Norm((1,), (0,), centred=False, epsilon=1e-6)
    return _case(
        f"rms_norm/{rows}x{columns}",
        "rows, with a scale; bfloat16",
        norm,
        {"x": Operand((rows, columns), offset=0.5), **_vector(columns, "bfloat16", bias=False)},
        partial(ops.rms_norm, epsilon=norm.epsilon),
        lambda F, x, scale: F.rms_norm(x, (columns,), scale, norm.epsilon),
        kept=4 * rows,
    )


def _layer_norm(rows: int, columns: int) -> NormCase:
    norm = Norm((1,), (0,))
    return _case(
        f"layer_norm/{rows}x{columns}",
        "rows, with scale and bias; bfloat16",
        norm,
        {"x": Operand((rows, columns), offset=0.5), **_vector(columns, "bfloat16")},
        ops.layer_norm,
        lambda F, x, scale, bias: F.layer_norm(x, (columns,), scale, bias, norm.epsilon),
        kept=2 * 4 * rows,
    )


def _batch_norm(shape: tuple[int, ...], relu: bool = False, block: bool = False) -> NormCase:
    """``relu``: with that behind it; ``block``: and a residual in between, as at the end of a block
    of a ResNet."""
    norm, channels = Norm((0, 1, 2), (0, 1, 2), relu=relu), shape[-1]

    def ours(**given: Any) -> Named:
        y, (mean, var) = ops.batch_norm(
            **given, training=True, momentum=MOMENTUM, epsilon=norm.epsilon,
            activation="relu" if relu else None,
        )  # fmt: skip
        return {"y": y, "running_mean": mean, "running_var": var}

    def in_torch(F, x, scale, bias, running_mean, running_var, residual=None):
        x = x.permute(0, 3, 1, 2)
        y = F.batch_norm(x, running_mean, running_var, scale, bias, True, 1 - MOMENTUM, 1e-5)
        y = y.permute(0, 2, 3, 1)
        y = y if residual is None else y + residual
        return F.relu(y) if relu else y

    operands = {
        "x": Operand(shape, offset=0.5),
        **_vector(channels, "float32"),
        **({"residual": Operand(shape)} if block else {}),
        "running_mean": Operand((channels,), "float32"),
        "running_var": Operand((channels,), "float32", 0.1, 1.0),
    }
    return _case(
        f"batch_norm{'-residual' * block}{'-relu' * relu}/{'x'.join(map(str, shape))}",
        "training, NHWC, bfloat16; scale, bias and running statistics in float32"
        + "; relu of it" * relu
        + " and a residual" * block,
        norm,
        operands,
        ours,
        in_torch,
        kept=2 * 4 * channels + relu * math.prod(shape) // 8,
        rereads=True,
    )


def _instance_norm(shape: tuple[int, ...]) -> NormCase:
    norm, channels = Norm((1, 2), (0, 1, 2)), shape[-1]

    def in_torch(F, x, scale, bias):
        x = x.permute(0, 3, 1, 2)
        y = F.instance_norm(x, weight=scale, bias=bias, eps=norm.epsilon)
        return y.permute(0, 2, 3, 1)

    return _case(
        f"instance_norm/{'x'.join(map(str, shape))}",
        "NHWC, bfloat16; scale and bias in float32",
        norm,
        {"x": Operand(shape, offset=0.5), **_vector(channels, "float32")},
        ops.instance_norm,
        in_torch,
        kept=2 * 4 * shape[0] * channels,
    )


_ROWS = ((8192, 4096), (32768, 8192), (16384, 4096), (4096, 16384), (1024, 12288), (8192, 128))
# Rows of a head, as of queries and keys that are normalized: 8192 tokens of 32 heads.
_HEADS = ((262144, 128), (262144, 64))
# Rows of a small transformer, and rows that one engine of cuDNN alone takes.
_NARROW = ((32768, 768), (8192, 1000))
_IMAGES = ((256, 56, 56, 64), (256, 14, 14, 1024))


def cases(tiny: bool = False) -> Iterator[NormCase]:
    """All cases, in the order of the table; or each kind with a small shape, for a CPU."""
    rows = ((128, 32),) if tiny else (*_ROWS, *_HEADS, *_NARROW)
    images = ((4, 6, 6, 16),) if tiny else _IMAGES
    for kind in (_rms_norm, _layer_norm):
        yield from (kind(*shape) for shape in rows)
    yield from map(_batch_norm, images)
    yield from map(partial(_batch_norm, relu=True), images)
    yield from map(partial(_batch_norm, relu=True, block=True), images)
    small = images if tiny else ((32, 64, 64, 256), (64, 32, 32, 128))
    yield from map(_instance_norm, small)
