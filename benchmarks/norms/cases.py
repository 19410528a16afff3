"""Normalizations as users write them: with ``jc.ops``, in plain JAX in several ways, in PyTorch.

Every side is a function of the same operands by name, and returns its results by name: "y", and
for batch normalization the running statistics. Images are NHWC.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn import ops

from ..models.cases import Operand
from ..sides import BACKWARD, FORWARD, TRAINING
from .formulations import MOMENTUM, Array, Function, Norm, formulations

PROGRAMS = (FORWARD, TRAINING, BACKWARD)


@dataclass(frozen=True)
class NormCase:
    """One normalization on all sides.

    Attributes:
        name: kind and shape.
        what: one line for the reader.
        operands: what all sides get, by name.
        learned: the operands that gradients are wanted of; x is the first.
        kept: bytes that a backward needs besides x, scale and the gradient of y: statistics, and a
            bit an element where there is a relu.
        ours: by ``jc.ops``, of the name of an implementation, or None for the default.
        xla: formulations in plain JAX, by name.
        forwards: those of them that differ in the forward alone, without residuals.
        exact: the formulation that all sides are held against, in float32.
        torch: y of ``torch.nn.functional`` and tensors; running statistics are written in place.
    """

    name: str
    what: str
    operands: Mapping[str, Operand]
    learned: tuple[str, ...]
    kept: int
    ours: Callable[[str | None], Function]
    xla: Mapping[str, Function]
    forwards: tuple[str, ...]
    exact: Function
    torch: Callable[..., Any]
    rereads: bool = False
    """Whether statistics are of more than a chip holds, so that their operands are read again."""

    def arrays(self, key: Array) -> tuple[dict[str, Array], Array]:
        """Random operands, and a gradient of y.

        What relu gets is far from 0, so that no rounding before it decides whether an element has
        a gradient: a residual is 8 or -8, and without one x keeps away from its mean.
        """
        keys = iter(jax.random.split(key, len(self.operands) + 1))
        drawn = {name: operand.array(next(keys)) for name, operand in self.operands.items()}
        if "residual" in drawn:
            drawn["residual"] = _far_from_zero(drawn["residual"])
        elif "-relu" in self.name:
            drawn["x"] = _apart(drawn["x"])
        x = self.operands["x"]
        return drawn, Operand(x.shape, x.dtype).array(next(keys))

    def bytes(self, program: str, twice: bool = False) -> int:
        """What a program must read and write, each array once; or ``twice`` what statistics are
        of: x, and in the backward the gradient."""
        if twice:
            again = _bytes(self.operands["x"]) * (2 if program == BACKWARD else 1)
            return self.bytes(program) + again
        size = {name: _bytes(operand) for name, operand in self.operands.items()}
        if program == BACKWARD:
            return 2 * size["x"] + size["scale"] + self.kept + sum(size[n] for n in self.learned)
        running = sum(size[name] for name in size if name.startswith("running_"))
        kept = self.kept if program == TRAINING else 0
        return sum(size.values()) + size["x"] + running + kept


@jax.jit
def _far_from_zero(x: Array) -> Array:
    return jnp.where(x < 0, -8, 8).astype(x.dtype)


@jax.jit
def _apart(x: Array) -> Array:
    return jnp.where(x < 0, x - 3, x + 3)


def _bytes(operand: Operand) -> int:
    return math.prod(operand.shape) * operand.aval.dtype.itemsize


# -- the cases -------------------------------------------------------------------------------------


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _rms_norm(rows: int, columns: int) -> NormCase:
    norm = Norm((1,), (0,), centred=False, epsilon=1e-6)

    def ours(implementation: str | None) -> Function:
        def function(x, scale):
            epsilon = norm.epsilon
            return {"y": ops.rms_norm(x, scale, epsilon=epsilon, implementation=implementation)}

        return function

    def in_torch(F, x, scale):
        return F.rms_norm(x, (columns,), scale, norm.epsilon)

    operands = {"x": Operand((rows, columns), offset=0.5), "scale": _scale(columns, "bfloat16")}
    return NormCase(
        f"rms_norm/{rows}x{columns}",
        "rows, with a scale; bfloat16",
        operands,
        tuple(operands),
        4 * rows,
        ours,
        **formulations(norm),
        torch=in_torch,
    )


def _layer_norm(rows: int, columns: int) -> NormCase:
    norm = Norm((1,), (0,))

    def ours(implementation: str | None) -> Function:
        def function(x, scale, bias):
            return {"y": ops.layer_norm(x, scale, bias, implementation=implementation)}

        return function

    def in_torch(F, x, scale, bias):
        return F.layer_norm(x, (columns,), scale, bias, norm.epsilon)

    operands = {
        "x": Operand((rows, columns), offset=0.5),
        "scale": _scale(columns, "bfloat16"),
        "bias": Operand((columns,), scale=0.1),
    }
    return NormCase(
        f"layer_norm/{rows}x{columns}",
        "rows, with scale and bias; bfloat16",
        operands,
        tuple(operands),
        2 * 4 * rows,
        ours,
        **formulations(norm),
        torch=in_torch,
    )


def _batch_norm(shape: tuple[int, ...], relu: bool = False, block: bool = False) -> NormCase:
    """``relu``: with that behind it; ``block``: and a residual in between, as at the end of a block
    of a ResNet."""
    norm, channels = Norm((0, 1, 2), (0, 1, 2)), shape[-1]

    def ours(implementation: str | None) -> Function:
        def function(x, scale, bias, running_mean, running_var, **residual):
            y, (mean, var) = ops.batch_norm(
                x, scale, bias, running_mean, running_var, training=True, momentum=MOMENTUM,
                epsilon=norm.epsilon, implementation=implementation, **residual,
                activation="relu" if relu else None,
            )  # fmt: skip
            return {"y": y, "running_mean": mean, "running_var": var}

        return function

    def in_torch(F, x, scale, bias, running_mean, running_var, residual=None):
        y = F.batch_norm(
            _nchw(x), running_mean, running_var, scale, bias, True, 1 - MOMENTUM, norm.epsilon
        )
        y = _nhwc(y)
        y = y if residual is None else y + residual
        return F.relu(y) if relu else y

    operands = {
        "x": Operand(shape, offset=0.5),
        "scale": _scale(channels, "float32"),
        "bias": Operand((channels,), "float32", 0.1),
        **({"residual": Operand(shape)} if block else {}),
        "running_mean": Operand((channels,), "float32"),
        "running_var": Operand((channels,), "float32", 0.1, 1.0),
    }
    return NormCase(
        f"batch_norm{'-residual' * block}{'-relu' * relu}/{_shown(shape)}",
        "training, NHWC, bfloat16; scale, bias and running statistics in float32"
        + "; relu of it" * relu
        + " and a residual" * block,
        operands,
        tuple(name for name in operands if not name.startswith("running_")),
        2 * 4 * channels + relu * math.prod(shape) // 8,
        ours,
        **formulations(dataclasses.replace(norm, relu=relu)),
        torch=in_torch,
        rereads=True,
    )


def _instance_norm(shape: tuple[int, ...]) -> NormCase:
    norm, channels = Norm((1, 2), (0, 1, 2)), shape[-1]

    def ours(implementation: str | None) -> Function:
        def function(x, scale, bias):
            return {"y": ops.instance_norm(x, scale, bias, implementation=implementation)}

        return function

    def in_torch(F, x, scale, bias):
        return _nhwc(F.instance_norm(_nchw(x), weight=scale, bias=bias, eps=norm.epsilon))

    operands = {
        "x": Operand(shape, offset=0.5),
        "scale": _scale(channels, "float32"),
        "bias": Operand((channels,), "float32", 0.1),
    }
    return NormCase(
        f"instance_norm/{_shown(shape)}",
        "NHWC, bfloat16; scale and bias in float32",
        operands,
        tuple(operands),
        2 * 4 * shape[0] * channels,
        ours,
        **formulations(norm),
        torch=in_torch,
    )


def _scale(size: int, dtype: str) -> Operand:
    return Operand((size,), dtype, 0.1, 1.0)


def _nchw(x: Any) -> Any:
    return x.permute(0, 3, 1, 2)


def _nhwc(x: Any) -> Any:
    return x.permute(0, 2, 3, 1)


_ROWS = ((8192, 4096), (32768, 8192), (16384, 4096), (4096, 16384), (1024, 12288), (8192, 128))
# Rows of a head, as of queries and keys that are normalized: 8192 tokens of 32 heads.
_HEADS = ((262144, 128), (262144, 64))
# Rows of a small transformer, and rows that one engine of cuDNN alone takes.
_NARROW = ((32768, 768), (8192, 1000))
_IMAGES = ((256, 56, 56, 64), (256, 14, 14, 1024))


def norm_cases() -> Iterator[NormCase]:
    """All cases, in the order of the table."""
    for kind in (_rms_norm, _layer_norm):
        yield from (kind(*shape) for shape in (*_ROWS, *_HEADS, *_NARROW))
    yield from map(_batch_norm, _IMAGES)
    yield from map(functools.partial(_batch_norm, relu=True), _IMAGES)
    yield from map(functools.partial(_batch_norm, relu=True, block=True), _IMAGES)
    yield from map(_instance_norm, ((32, 64, 64, 256), (64, 32, 32, 128)))


def tiny_cases() -> Iterator[NormCase]:
    """The same with small shapes, for a CPU."""
    yield _rms_norm(128, 32)
    yield _layer_norm(128, 32)
    yield _batch_norm((4, 6, 6, 16))
    yield _batch_norm((4, 6, 6, 16), relu=True)
    yield _batch_norm((4, 6, 6, 16), relu=True, block=True)
    yield _instance_norm((4, 6, 6, 16))
