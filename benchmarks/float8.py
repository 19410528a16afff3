"""Training in float8 beside bfloat16: layers, attention, steps of a GPT, and curves of its loss.

    python -m benchmarks.float8 --into benchmarks/results/float8_h200.json
    python -m benchmarks.float8 --losses --into benchmarks/results/float8_h200.json

Delayed scaling is of all three tensors: its state is differentiated. Runs with other ``--only`` add
their cases. Curves are of Python's own sources, byte by byte: the mean of each ten steps.
"""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_cudnn as jc
import jax_cudnn.flax as jnn
from jax_cudnn.commands import timing

from .flax.measure import Training
from .measure import balanced, environment, short
from .tables import table, where

WIDE, CURRENT, DELAYED = "bfloat16", "float8, current", "float8, delayed"
KINDS: dict[str, Any] = {WIDE: None, CURRENT: "current", DELAYED: "delayed"}
FLAX = "Flax's `Fp8DirectDotGeneralOp`"
TRAINED = nnx.Any(nnx.Param, jnn.ScalingState)
_DTYPE = "bfloat16"
Sides = dict[str, tuple[Callable[..., Any], Any]]
"""Functions of variables and x, and their variables; gradients are by both."""


class Block(nnx.Module):
    """Of GPT-2: causal attention and a feed-forward layer, each after a norm; x (N, T, width)."""

    def __init__(self, width: int, heads: int, float8: Any, rngs: nnx.Rngs):
        linear = partial(jnn.Linear, dtype=_DTYPE, float8=float8, rngs=rngs)
        self.heads = heads
        self.norm1 = jnn.LayerNorm(width, dtype=_DTYPE, rngs=rngs)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)
        self.norm2 = jnn.LayerNorm(width, dtype=_DTYPE, rngs=rngs)
        self.up = linear(width, 4 * width, activation="gelu")
        self.down = linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = self.qkv(self.norm1(x)).reshape(*x.shape[:-1], 3, self.heads, -1)
        y = jc.ops.dot_product_attention_qkv(qkv, is_causal=True)
        x = x + self.out(y.reshape(x.shape))
        return x + self.down(self.up(self.norm2(x)))


class GPT(nnx.Module):
    """The mean loss of tokens (N, T); the blocks' products are in float8, the last one is not."""

    def __init__(
        self, vocabulary: int, length: int, model: tuple[int, ...], float8: Any, rngs: nnx.Rngs
    ):
        width, depth, heads = model
        how: Any = {"embedding_init": nnx.initializers.normal(0.02), "dtype": _DTYPE, "rngs": rngs}
        self.tokens = nnx.Embed(vocabulary, width, **how)
        self.positions = nnx.Embed(length, width, **how)
        self.blocks = nnx.List(Block(width, heads, float8, rngs) for _ in range(depth))
        self.norm = jnn.LayerNorm(width, dtype=_DTYPE, rngs=rngs)

    def __call__(self, tokens: jax.Array, following: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        weight = self.tokens.embedding[...].T.astype(_DTYPE)
        return jc.ops.linear_cross_entropy(self.norm(x), weight, following)


def step(model: GPT, optimizer: nnx.Optimizer, *batch: jax.Array) -> jax.Array:
    """An update of parameters and scales; the loss before it."""
    by = nnx.DiffState(0, TRAINED)
    loss, gradients = nnx.value_and_grad(lambda model: model(*batch), argnums=by)(model)
    gradients, scaling = nnx.split_state(gradients, nnx.Param, jnn.ScalingState)
    optimizer.update(model, gradients)
    nnx.update(model, scaling)
    return loss


def linear(seconds: float, rows: int, features: int, out: int) -> Any:
    """One product without a bias, all arrays in bfloat16."""
    x, dy = _normal((rows, features), (rows, out))
    how: Any = {"use_bias": False, "dtype": _DTYPE, "param_dtype": _DTYPE}

    def make(float8: Any) -> nnx.Module:
        return jnn.Linear(features, out, float8=float8, rngs=nnx.Rngs(0), **how)

    dense: Any = nn.Dense(out, dot_general_cls=nn.Fp8DirectDotGeneralOp, **how)
    variables = jax.jit(dense.init)(jax.random.key(0), x)
    return _times({**_layers(make), FLAX: (dense.apply, variables)}, x, dy, seconds)


def gated(seconds: float, rows: int, features: int, hidden: int) -> Any:
    x, dy = _normal((rows, features), (rows, features))
    how: Any = {"dtype": _DTYPE, "param_dtype": _DTYPE}

    def make(float8: Any) -> nnx.Module:
        return jnn.GatedMLP(features, hidden, float8=float8, rngs=nnx.Rngs(0), **how)

    return _times(_layers(make), x, dy, seconds)


def attention(seconds: float, batch: int, length: int, heads: int, shared: int, size: int) -> Any:
    """Causal, with ``shared`` heads of keys and values."""
    shapes = [(batch, length, count, size) for count in (heads, shared, shared, heads)]
    *x, dy = _normal(*shapes)

    def narrow(state: Any, x: Any, fp8_backward: bool = False) -> Any:
        how: Any = {"is_causal": True, "fp8_backward": fp8_backward}
        return jc.ops.dot_product_attention_fp8(*x, state, **how)

    state, both = jc.ops.DelayedScaling.create(16), partial(narrow, fp8_backward=True)
    sides: Sides = {
        WIDE: (lambda _, x: jc.ops.dot_product_attention(*x, is_causal=True), None),
        CURRENT: (narrow, None),
        DELAYED: (narrow, state),
        f"{CURRENT}, backward, too": (both, None),
        f"{DELAYED}, backward, too": (both, state),
    }
    return _times(sides, x, dy, seconds)


def _normal(*shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s, _DTYPE) for k, s in zip(keys, shapes, strict=True)]


def _layers(make: Callable[[Any], nnx.Module]) -> Sides:
    sides: Sides = {}
    for side, float8 in KINDS.items():
        graph, state = nnx.split(nnx.jit(partial(make, float8))())
        sides[side] = lambda state, x, graph=graph: nnx.merge(graph, state)(x), state
    return sides


def _times(sides: Sides, x: Any, dy: jax.Array, seconds: float) -> Any:
    """The microseconds of each side, forward and backward."""
    calls = {}
    for side, (function, variables) in sides.items():

        def run(variables: Any, x: Any, dy: Any, function: Any = function) -> Any:
            y, vjp = jax.vjp(function, variables, x)
            return y, vjp(dy)

        began = time.perf_counter()
        program = jax.jit(run).lower(variables, x, dy).compile()
        print(f"{side}: compiled in {time.perf_counter() - began:.1f} s", flush=True)
        calls[side] = partial(program, variables, x, dy)
    times = timing.interleaved(calls, (), rounds=15, calls=5, seconds=seconds, order=balanced)
    return {side: {"us": timing.summary(times[side], 1e6)} for side in sides}


def _trainings(
    vocabulary: int, model: tuple[int, ...], batch: Any, rate: Any
) -> dict[str, Training]:
    """Steps of each side from the same parameters, compiled."""
    made: dict[str, Training] = {}
    lowered: dict[str, Any] = {}
    for side, float8 in KINDS.items():
        key = jax.random.key(0, impl="rbg")  # whose many draws compile in a quarter of the time
        make = partial(GPT, vocabulary, batch[0].shape[-1], model, float8)
        first = nnx.jit(lambda make=make, key=key: make(nnx.Rngs(key)))()
        optimizer = nnx.Optimizer(first, optax.adamw(rate, weight_decay=0.1), wrt=nnx.Param)
        made[side] = Training(first, optimizer, batch, update=step)
        lowered[side] = made[side].lower()
    began = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        compiling = {side: pool.submit(each.compile) for side, each in lowered.items()}
    print(f"steps compiled in {time.perf_counter() - began:.1f} s", flush=True)
    for side, program in compiling.items():
        made[side].program = program.result()
    return made


def steps(seconds: float, model: tuple[int, ...], batch: int, length: int, vocabulary: int) -> Any:
    """Of each side the microseconds of a step with AdamW, gigabytes, and the first losses."""
    drawn = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, vocabulary)
    ready = _trainings(vocabulary, model, (drawn[:, :-1], drawn[:, 1:]), 1e-4)
    found: dict[str, Any] = {}
    for side, training in ready.items():
        memory = training.program.memory_analysis()
        held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        losses = [short(float(training()), 6) for _ in range(3)]
        found[side] = {"gb": short(held / 1e9), "losses": losses}
    times = timing.interleaved(ready, (), rounds=9, calls=3, seconds=seconds, order=balanced)
    return {side: found[side] | {"us": timing.summary(times[side], 1e6)} for side in ready}


def text() -> np.ndarray:
    """The bytes of the sources of Python's standard library, without its tests."""
    root, others = Path(sysconfig.get_path("stdlib")), {"site-packages", "test", "tests"}
    files = [file for file in sorted(root.rglob("*.py")) if not others & {*file.parts}]
    return np.frombuffer(b"\n".join(map(Path.read_bytes, files)), np.uint8)


def curves(model: tuple[int, ...], batch: int, length: int, count: int) -> Any:
    """The loss of each side over so many steps of the same excerpts."""
    given, drawn = text(), np.random.default_rng(0)
    starts = drawn.integers(0, len(given) - length, (count, batch, 1))
    batches = [jnp.asarray(given[each + np.arange(length + 1)], "int32") for each in starts]
    rate = optax.warmup_cosine_decay_schedule(0.0, 6e-4, count // 10, count)
    pairs = [(each[:, :-1], each[:, 1:]) for each in batches]
    found: dict[str, Any] = {}
    for side, training in _trainings(256, model, pairs[0], rate).items():
        began, losses = time.perf_counter(), []
        for training.batch in pairs:
            losses.append(training())
        means = np.mean(np.reshape(jax.device_get(losses), (-1, 10)), 1)
        found[side] = {
            "losses": [short(float(mean)) for mean in means],
            "seconds": short(time.perf_counter() - began),
        }
    return found


CASES: dict[str, Callable[[float], Any]] = {
    "linear, 8192 x 4096 x 16384": partial(linear, rows=8192, features=4096, out=16384),
    "gated MLP, 8192 x 4096 x 14336": partial(gated, rows=8192, features=4096, hidden=14336),
    "attention, 4 x 2048, 16 heads": partial(
        attention, batch=4, length=2048, heads=16, shared=16, size=128
    ),
    "attention, 1 x 16384, 32 heads on 8": partial(
        attention, batch=1, length=16384, heads=32, shared=8, size=128
    ),
    "GPT 1.3B, 4 x 2048": partial(
        steps, model=(2048, 24, 16), batch=4, length=2048, vocabulary=50304
    ),
}
TINY: dict[str, Callable[[float], Any]] = {
    "linear": partial(linear, rows=32, features=16, out=32),
    "gated MLP": partial(gated, rows=32, features=16, hidden=32),
    "attention": partial(attention, batch=1, length=32, heads=2, shared=1, size=16),
    "GPT": partial(steps, model=(16, 1, 2), batch=2, length=16, vocabulary=64),
}


def render(result: Mapping[str, Any]) -> str:
    """A row for each case and side, with its ratio to bfloat16; and one for each curve."""
    rows, ends = [], []
    for case, sides in result["cases"].items():
        for side, found in sides.items():
            us, base = (each["us"]["median"] for each in (found, sides[WIDE]))
            memory = f"{found['gb']:.3g}" if "gb" in found else ""
            rows.append([case, side, f"{us:.0f}", f"{us / base:.2f}", memory])
    for case, sides in result.get("curves", {}).items():
        for side, found in sides.items():
            losses = found["losses"]
            shown = [losses[len(losses) * part // 4 - 1] for part in (1, 2, 3, 4)]
            ends.append([case, side, *(f"{each:.3f}" for each in shown)])
    text = f"{where(result)}.\n\n" + table(["", "", "us", "over bfloat16's", "GB"], rows)
    if ends:
        head = ["loss", "", "after a quarter", "half", "three quarters", "all steps"]
        text += "\n\n" + table(head, ends)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases with this in their name")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on a CPU, too")
    parser.add_argument("--losses", action="store_true", help="curves of the loss instead")
    size = {"type": int, "nargs": 3, "metavar": ("WIDTH", "DEPTH", "HEADS")}
    parser.add_argument("--model", default=[768, 12, 12], help="of the curves", **size)
    parser.add_argument("--batch", default=[8, 1024], type=int, nargs=2, metavar=("N", "T"))
    parser.add_argument("--steps", default=500, type=int, help="of the curves")
    options = parser.parse_args()
    cases, kind = (TINY if options.tiny else CASES), "cases"
    if options.losses:
        kind, model, batch = "curves", tuple(options.model), options.batch
        name = "width {}, {} layers, {} heads, batches of {} x {}, {} steps"
        run = partial(curves, model, *batch, options.steps)
        cases = {name.format(*model, *batch, options.steps): lambda seconds: run()}
    into, about = options.into, environment()
    found = json.loads(into.read_text()) if into.exists() else {"cases": {}, "curves": {}}
    if found.setdefault("environment", about) | {"date": ""} != about | {"date": ""}:
        raise SystemExit(f"{into} is of another GPU or versions: {found['environment']}")
    for name, case in cases.items():
        if re.search(options.only, name):
            began = time.perf_counter()
            found[kind][name] = case(0.1 if options.tiny else 1.5)
            print(name, f"{time.perf_counter() - began:.1f} s", json.dumps(found[kind][name]))
            into.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
