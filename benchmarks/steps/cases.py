"""Training steps of models as users write them: with ``jc.ops``, and the same in plain JAX.

A step is a whole program: the loss, the loss with its gradients, or a derivative along a direction.
Parameters are bfloat16, images NHWC, weights OHWI; both sides get the same arrays.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_cudnn import ops
from jax_cudnn._core import agreement, auto, compat, context
from jax_cudnn._core.errors import TargetError
from jax_cudnn._core.user_context import implementation
from jax_cudnn.commands import bench

from ..case import OURS, REFERENCE, Array, Case, Operand, Side
from ..planning import nothing_planned

PLAIN = "XLA"

Loss = Callable[..., Array]
Program = Callable[[Loss], Callable[[tuple[Any, ...], tuple[Any, ...]], Any]]
"""Of a loss: a function of its operands and of a direction in each of them."""

_LAYOUT = ("NHWC", "OHWI", "NHWC")
FORWARD, TRAINING, JVP = "forward", "forward and backward", "jvp"


@dataclass(frozen=True)
class StepCase(Case):
    """A model's loss on both sides; its operands are trees, one for each argument of the loss, and
    programs take a direction in each of them, too.

    Attributes:
        made: what is made of a loss and timed, by name.
    """

    made: Mapping[str, Program] = field(default_factory=dict)

    ways: ClassVar[tuple[str, ...]] = (OURS, REFERENCE)
    worst: ClassVar[str] = "array"

    @property
    def programs(self) -> tuple[str, ...]:
        return (*self.made,)

    @property
    def whole(self) -> Mapping[str, Program]:
        return self.made

    def arrays(self, key: Array) -> dict[str, Any]:
        """Random operands and a direction in them, drawn on the device.

        The direction is the operands themselves with a tenth of noise: along it the loss of a
        model of products and relus grows, so that its derivative is no difference of large terms.
        """
        drawn, structure = jax.tree.flatten(self.operands)

        def draw(key: Array) -> Any:
            values, along = [], []
            for d, k in zip(drawn, jax.random.split(key, len(drawn)), strict=True):
                normal, noise = jax.random.normal(k, (2, *d.shape))
                value = d.offset + d.scale * normal
                values.append(value.astype(jnp.bfloat16))
                along.append((value + 0.1 * d.scale * noise).astype(jnp.bfloat16))
            trees = (jax.tree.unflatten(structure, leaves) for leaves in (values, along))
            return dict(zip(("operands", "direction"), trees, strict=True))

        return jax.jit(draw)(key)

    def allowed(self, program: str) -> float:
        return 2.0**-6  # two roundings

    def difference(self, got: Any, want: Any) -> agreement.Difference:
        """In the norm over all arrays of the trees together, and the largest of one array."""
        pairs = [(float(a), float(b)) for a, b in jax.device_get(_squares(got, want))]
        tiny = float(jnp.finfo(jnp.float32).tiny)
        whole = sum(a for a, _ in pairs) / (sum(b for _, b in pairs) + tiny)
        arrays = [math.sqrt(a / (b + tiny)) if a == a else math.nan for a, b in pairs]
        return agreement.Difference(math.sqrt(whole), agreement.largest(arrays))

    def told(self, program: str, function: Any, operands: tuple[Any, ...]) -> dict[str, Any]:
        """How many different graphs it holds; its loops over graphs (one that vmap folds is in
        none); and with a GPU, or ``jax_cudnn.target``, how long all take to plan where nothing is
        known."""
        live, _ = compat.live_program(jax.make_jaxpr(function)(*operands))
        specs = {spec: name for spec, name, _ in bench.of_jaxpr(live)}
        entry: dict[str, Any] = {"different_graphs": len(specs), "loops": loops(live)}
        try:
            site = context.site(jax.local_devices(), "bench")
        except TargetError:  # references run
            return entry
        with nothing_planned():
            began = time.perf_counter()
            for spec, name in specs.items():
                auto.plan_graph(spec, site, name)
            return entry | {"cold_planning_s": round(time.perf_counter() - began, 2)}

    def described(self) -> dict[str, str]:
        return {}


def loops(jaxpr: Any) -> int:
    """The number of loops in a jaxpr whose bodies hold graphs."""
    count = 0
    for equation in jaxpr.eqns:
        inner = list(compat.inner_jaxprs(equation))
        if equation.primitive.name in ("scan", "while"):
            count += any(map(bench.of_jaxpr, inner))
        else:
            count += sum(map(loops, inner))
    return count


@jax.jit
def _squares(got: Any, want: Any) -> list[tuple[Array, Array]]:
    """Of each leaf the squared norms of the difference and of what is wanted."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    return [(jnp.sum((a - b) ** 2), jnp.sum(b * b)) for a, b in wide]


def _step(
    name: str,
    what: str,
    ours: Loss,
    plain: Loss,
    operands: tuple[Any, ...],
    made: Mapping[str, Program],
) -> StepCase:
    def by_ours(way: str | None) -> Side:
        def loss(*given: Any) -> Array:
            with implementation(way) if way else contextlib.nullcontext():
                return ours(*given)

        return Side(loss)

    sides: Any = (by_ours, {PLAIN: Side(plain)}, Side(plain))
    return StepCase(name, what, operands, (), *sides, made=made)  # type: ignore[arg-type]


# -- programs of a loss ----------------------------------------------------------------------------


def forward(loss: Loss) -> Any:
    return lambda operands, direction: loss(*operands)


def training(*arguments: int) -> Program:
    """The loss with its gradients by these arguments."""

    def program(loss: Loss) -> Any:
        return lambda operands, direction: jax.value_and_grad(loss, arguments)(*operands)

    return program


def along(loss: Loss) -> Any:
    """The loss with its derivative along the direction, by forward mode."""
    return lambda operands, direction: jax.jvp(loss, operands, direction)


def of_each(function: Loss) -> Any:
    """Of each example; the first argument is shared by all."""
    return lambda operands, direction: jax.vmap(function, (None, 0))(*operands)


def mean_square(y: Array) -> Array:
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


# -- convolutions of a residual network ------------------------------------------------------------


def _conv(x: Array, layer: Any, stride: int = 1, relu: bool = True, residual: Any = None) -> Array:
    """``relu(conv(x) * scale + bias + residual)``, a layer without ``scale`` has none."""
    return ops.conv(
        x,
        layer["weight"],
        scale=layer.get("scale"),
        bias=layer["bias"],
        residual=residual,
        activation="relu" if relu else None,
        strides=stride,
        padding=layer["weight"].shape[1] // 2,
        dimension_numbers=_LAYOUT,
    )


def _plain_conv(
    x: Array, layer: Any, stride: int = 1, relu: bool = True, residual: Any = None
) -> Array:
    pad = layer["weight"].shape[1] // 2
    y = jax.lax.conv_general_dilated(
        x, layer["weight"], (stride, stride), [(pad, pad)] * 2, dimension_numbers=_LAYOUT
    )
    y = y * layer["scale"] if "scale" in layer else y
    y = y + layer["bias"]
    y = y if residual is None else y + residual
    return jax.nn.relu(y) if relu else y


def _layer(channels: int, features: int, window: int, scale: float | None = 1.0) -> Any:
    """Weights that keep the size of what relu gives; the scale is that of a frozen batch norm."""
    fan_in = window * window * channels
    weight = Operand((features, window, window, channels), scale=(2 / fan_in) ** 0.5)
    layer = {"weight": weight, "bias": Operand((features,), scale=0.1)}
    if scale is not None:
        layer["scale"] = Operand((features,), scale=0.1 * scale, offset=scale)
    return layer


def _bottleneck(channels: int, width: int, features: int) -> dict[str, Any]:
    """1x1, 3x3, 1x1, and a projection where the residual's shape changes. The last scale is small:
    else what 16 blocks add up to would grow from block to block."""
    block = {
        "reduce": _layer(channels, width, 1),
        "spatial": _layer(width, width, 3),
        "expand": _layer(width, features, 1, 0.25),
    }
    return block | ({"project": _layer(channels, features, 1)} if channels != features else {})


def _apply_block(conv: Loss, block: Any, x: Array, stride: int = 1) -> Array:
    y = conv(x, block["reduce"])
    y = conv(y, block["spatial"], stride)
    if "project" in block:
        x = conv(x, block["project"], stride, relu=False)
    return conv(y, block["expand"], residual=x)


def _case(name: str, what: str, loss: Loss, operands: Any, made: Any) -> StepCase:
    """Of a loss that takes the convolution of either side."""
    return _step(name, what, partial(loss, _conv), partial(loss, _plain_conv), operands, made)


def _residual_network(batch: int, size: int, width: int, depths: tuple[int, ...]) -> StepCase:
    """The stages of ResNet-50 behind its stem (which is XLA's on either side), each of which but
    the first begins with stride 2."""

    def loss(conv: Loss, stages: Any, x: Array) -> Array:
        for number, stage in enumerate(stages):
            for place, block in enumerate(stage):
                x = _apply_block(conv, block, x, 2 if number and not place else 1)
        return mean_square(x)

    stages, channels = [], width
    for number, depth in enumerate(depths):
        inner = width << number
        inputs = [channels, *[4 * inner] * (depth - 1)]
        stages.append([_bottleneck(each, inner, 4 * inner) for each in inputs])
        channels = 4 * inner
    return _case(
        f"resnet50/batch-{batch}",
        f"{sum(depths)} bottlenecks ({'-'.join(map(str, depths))}) of convolutions with scale, "
        "bias, residual and relu, all trained; image of "
        f"{size} x {size} after the stem",
        loss,
        (stages, Operand((batch, size, size, width))),
        {FORWARD: forward, TRAINING: training(0)},
    )


def _block(batch: int, size: int, width: int) -> StepCase:
    return _case(
        f"resnet50/bottleneck-{4 * width}-at-{size}",
        f"one bottleneck, batch {batch}, by its parameters and its image",
        lambda conv, block, x: mean_square(_apply_block(conv, block, x)),
        (_bottleneck(4 * width, width, 4 * width), Operand((batch, size, size, 4 * width))),
        {FORWARD: forward, TRAINING: training(0, 1), JVP: along},
    )


def _small_network(batch: int, size: int, widths: tuple[int, ...]) -> StepCase:
    """Convolutions with bias and relu, every second with stride 2, on one example."""

    def loss(conv: Loss, layers: Any, x: Array) -> Array:
        y = x[None]
        for number, layer in enumerate(layers):
            y = conv(y, layer, 1 + number % 2)
        return mean_square(jnp.mean(y.astype(jnp.float32), (1, 2)))

    layers = [_layer(c, k, 3, None) for c, k in itertools.pairwise(widths)]
    return _case(
        f"per-example/batch-{batch}",
        f"vmap of grad over {len(layers)} convolutions with bias and relu, images of {size} x "
        f"{size}, {'-'.join(map(str, widths))} channels",
        loss,
        (layers, Operand((batch, size, size, widths[0]))),
        {FORWARD: of_each, "gradient of each example": lambda loss: of_each(jax.grad(loss))},
    )


# -- products --------------------------------------------------------------------------------------


def _mlp(rows: int, model: int, hidden: int) -> StepCase:
    def ours(p: Any, x: Array) -> Array:
        h = ops.matmul(x, p["up"], bias=p["up_bias"], activation="gelu")
        return mean_square(ops.matmul(h, p["down"], bias=p["down_bias"], residual=x))

    def plain(p: Any, x: Array) -> Array:
        h = jax.nn.gelu(x @ p["up"] + p["up_bias"])
        return mean_square(h @ p["down"] + p["down_bias"] + x)

    parameters = {
        "up": Operand((model, hidden), scale=model**-0.5),
        "up_bias": Operand((hidden,), scale=0.1),
        "down": Operand((hidden, model), scale=hidden**-0.5),
        "down_bias": Operand((model,), scale=0.1),
    }
    return _step(
        f"mlp/{rows}x{model}x{hidden}",
        "feed-forward of a transformer: gelu, biases and residual, by its parameters and its rows",
        ours,
        plain,
        (parameters, Operand((rows, model))),
        {FORWARD: forward, TRAINING: training(0, 1), JVP: along},
    )


def cases(tiny: bool = False) -> Iterator[StepCase]:
    """All cases, in the order of the table; or the same programs with small shapes, for a CPU."""
    if tiny:
        yield _residual_network(2, 8, 8, (1, 1))
        yield _block(2, 6, 8)
        yield _mlp(16, 8, 32)
        yield _small_network(4, 6, (8, 8, 16))
        return
    yield _residual_network(128, 56, 64, (3, 4, 6, 3))
    yield _block(128, 28, 128)
    yield _mlp(8192, 4096, 16384)
    yield _small_network(64, 32, (64, 64, 128, 128, 256))
