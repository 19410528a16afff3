"""Models that :mod:`.collectives` compiles, with how their arrays are sharded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn.flax import accelerate

from .collectives import COLUMNS
from .flax.models import GPT2, ResNet

PLAIN, JAX_NN, OURS, _ = COLUMNS
WAYS = AUTOMATIC, GIVEN, EXPLICIT, MANUAL = "automatic", "in_shardings", "explicit", "shard_map"
MESHES = {
    "data parallel": {"data": 8},
    "FSDP": {"data": 8},
    "tensor parallel": {"model": 8},
    "data x model": {"data": 2, "model": 4},
}
_ONLY_DATA = (*itertools.product(("data parallel", "FSDP"), WAYS),)
_DIMS = ("NHWC", "HWIO", "NHWC")
_ROWS, _COLUMNS = P("model"), P(None, "model")

Total = Callable[[Any], Any] | None
"""The sum over the model axis, in ``shard_map``; None where arrays are whole."""
_aval = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)


@dataclass(frozen=True)
class Model:
    """A loss in several ways.

    Attributes:
        losses: of parameters, other state, data and :data:`Total`: the loss and the new state.
        cells: meshes and ways that make sense.
        specs: of parameters, by the end of their path; the others are replicated.
        constrained: whether it states how activations are sharded, for the mesh that is set.
    """

    losses: Mapping[str, Callable[..., Any]]
    params: Any
    state: Any = ()
    data: tuple[Any, ...] = ()
    specs: Mapping[str, P] = field(default_factory=dict)
    constrained: bool = False
    cells: Sequence[tuple[str, str]] = (*itertools.product(MESHES, WAYS),)

    def spec(self, path: Any) -> P:
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        return next((spec for end, spec in self.specs.items() if name.endswith(end)), P())


def models() -> dict[str, Model]:
    """Left out, as it has no use or no meaning: ResNet and norms over a model axis; FSDP of
    attention, which has no parameters; and Flax's models over a model axis in ``shard_map``, where
    the model itself would have to sum."""
    image, tokens = (256, 56, 56, 64), (64, 1024, 512)
    known = jnp.zeros(64), jnp.ones(64)
    heads = P("data", None, "model")
    conv: Any = {"padding": "SAME", "dimension_numbers": _DIMS}
    return {
        "transformer": transformer(),
        "transformer with remat and scan": transformer(scanned=True),
        "NNX GPT": _gpt(),
        "ResNet": _flax(
            {PLAIN: partial(ResNet, (1, 1), classes=16)},
            (_aval((256, 112, 112, 3)), jax.ShapeDtypeStruct((256,), jnp.int32)),
            cells=_ONLY_DATA,
        ),
        "attention": _call(
            partial(_attention, PLAIN),
            partial(_attention, OURS),
            [((64, 1024, 8, 64), heads)] * 3,
            cells=[cell for cell in Model.cells if cell[0] != "FSDP"],
        ),
        "matmul + bias + gelu": _call(
            lambda x, w, b: jax.nn.gelu(x @ w + b),
            lambda x, w, b: jc.ops.matmul(x, w, bias=b, activation="gelu"),
            [(tokens, P("data")), ((512, 2048), _COLUMNS), ((2048,), _ROWS)],
        ),
        "conv + relu": _call(
            lambda x, w: jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), **conv)),
            lambda x, w: jc.ops.conv(x, w, activation="relu", **conv),
            [(image, P("data")), ((3, 3, 64, 64), P(None, None, None, "model"))],
        ),
        "rms_norm": _call(
            _rms, jc.ops.rms_norm, [(tokens, P("data")), ((512,), P())], cells=_ONLY_DATA
        ),
        "batch_norm": _call(
            _batch_norm,
            lambda x, s, b: jc.ops.batch_norm(x, s, b, *known, training=True)[0],
            [(image, P("data")), ((64,), P()), ((64,), P())],
            cells=_ONLY_DATA,
        ),
    }


def transformer(scanned: bool = False) -> Model:
    """Two layers written with functions; or ``scanned``, each recomputed for its gradient."""
    d, head, wide = 256, (256, 8, 32), 1024
    layer = {"n1": (d,), "q": head, "k": head, "v": head, "o": (d, d)}
    layer |= {"n2": (d,), "w1": (d, wide), "b1": (wide,), "w2": (wide, d), "b2": (d,)}
    one, stacked = ({n: _aval((*lead, *s)) for n, s in layer.items()} for lead in ((), (2,)))
    params = {"layers": stacked if scanned else [one] * 2}
    params |= {"embedding": _aval((512, d)), "norm": _aval((d,))}
    specs = {f"/{name}": _COLUMNS for name in ("q", "k", "v", "w1")}
    specs |= {f"/{name}": _ROWS for name in ("o", "b1", "w2")}
    specs = {name: P(None, *spec) for name, spec in specs.items()} if scanned else specs
    losses = {column: partial(_language, column) for column in (PLAIN, JAX_NN, OURS)}
    data = (jax.ShapeDtypeStruct((64, 1025), jnp.int32),)
    return Model(losses, params, (), data, specs, constrained=scanned)


def _language(column: str, p: Any, state: Any, tokens: Any, total: Total) -> Any:
    before = tokens[:, :-1]
    x = p["embedding"].at[before].get(**_typed(before, None))

    @jax.checkpoint
    def block(x: Any, layer: Any) -> tuple[Any, None]:
        return _constrained(_block(column, layer, _constrained(x), total)), None

    if isinstance(p["layers"], dict):
        x, _ = lax.scan(block, x, p["layers"])
    else:
        for layer in p["layers"]:
            x = _block(column, layer, x, total)
    return _entropy(_rms(x, p["norm"]) @ p["embedding"].T, tokens[:, 1:]), state


def _constrained(x: Any) -> Any:
    """Loops need it: XLA would shard what they carry as it shards a parameter."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names or not mesh.are_all_axes_auto:
        return x
    return lax.with_sharding_constraint(x, P("data" if "data" in mesh.axis_names else None))


def _block(column: str, p: Any, x: Any, total: Total) -> Any:
    ours, whole, total = column == OURS, total is None, total or (lambda y: y)
    norm = jc.ops.rms_norm if ours else _rms
    einsum = partial(jnp.einsum, _dot_general=jc.ops.dot_general if ours else lax.dot_general)
    y = norm(x, p["n1"])
    y = _attention(column, *(einsum("btd,dnh->btnh", y, p[name]) for name in "qkv"))
    y = y.reshape(*x.shape[:2], -1)
    x = x + total(jc.ops.matmul(y, p["o"]) if ours else jnp.matmul(y, p["o"], **_typed(x)))
    y = norm(x, p["n2"])
    if not ours:
        y = jax.nn.gelu(y @ p["w1"] + p["b1"])
        return x + total(jnp.matmul(y, p["w2"], **_typed(x))) + p["b2"]
    y = jc.ops.matmul(y, p["w1"], bias=p["b1"], activation="gelu")
    if whole:
        return jc.ops.matmul(y, p["w2"], bias=p["b2"], residual=x)
    return x + total(jc.ops.matmul(y, p["w2"])) + p["b2"]


def _typed(x: Any, *more: Any) -> dict[str, Any]:
    """On explicit axes jnp asks how a result is sharded: as x, and more dimensions."""
    sharding = jax.typeof(x).sharding
    typed = sharding.mesh.are_all_axes_explicit
    return {"out_sharding": P(*sharding.spec, *more)} if typed else {}


def _attention(column: str, q: Any, k: Any, v: Any) -> Any:
    if column == OURS:
        return jc.ops.dot_product_attention(q, k, v, is_causal=True)
    way = "cudnn" if column == JAX_NN else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=way)


def _rms(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, -1, keepdims=True)
    return (wide * lax.rsqrt(mean + 1e-6) * scale).astype(x.dtype)


def _batch_norm(x: Any, scale: Any, bias: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean, var = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
    return ((wide - mean) * lax.rsqrt(var + 1e-5) * scale + bias).astype(x.dtype)


def _entropy(logits: Any, labels: Any) -> Any:
    wanted = jax.nn.one_hot(labels, logits.shape[-1])
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits.astype(jnp.float32)) * wanted, -1))


def _gpt() -> Model:
    split = "query", "key", "value", "up"
    specs = {f"{name}/kernel": _COLUMNS for name in split} | {f"{n}/bias": _ROWS for n in split}
    specs |= {"out/kernel": _ROWS, "down/kernel": _ROWS}
    tokens = jax.ShapeDtypeStruct((64, 512), jnp.int32)
    gpt = partial(GPT2, 512, 512, 256, 2, 8)
    cudnn = partial(gpt, attention_fn=lambda *qkv, **_: _attention(JAX_NN, *qkv))
    cells = [
        (over, way) for over, way in Model.cells if "model" not in MESHES[over] or way != MANUAL
    ]
    return _flax({PLAIN: gpt, JAX_NN: cudnn}, (tokens, tokens), specs=specs, cells=cells)


def _flax(made: Any, data: Any, **more: Any) -> Model:
    """Ours is what ``accelerate`` makes of the plain one."""
    nets = {
        c: nnx.eval_shape(lambda m=m: m(dtype="bfloat16", rngs=nnx.Rngs(0)))
        for c, m in made.items()
    }
    nets[OURS] = accelerate(nets[PLAIN])

    def loss(graphdef: Any, params: Any, state: Any, x: Any, labels: Any, total: Total) -> Any:
        net = nnx.merge(graphdef, params, state, copy=True)
        value = _entropy(net(x, **(_typed(x, None) if x.ndim == 2 else {})), labels)
        return value, nnx.state(net, nnx.Not(nnx.Param))

    losses = {column: partial(loss, nnx.graphdef(net)) for column, net in nets.items()}
    _, params, state = nnx.split(nets[PLAIN], nnx.Param, ...)
    return Model(losses, params, state, data, **more)


def _call(plain: Any, ours: Any, operands: Sequence[tuple[Any, P]], **more: Any) -> Model:
    """One call, and its gradients by all operands."""
    names = [*map(str, range(len(operands)))]

    def loss(call: Any, params: Any, state: Any, total: Total) -> Any:
        value = jnp.mean(call(*map(params.get, names)).astype(jnp.float32) ** 2)
        return (total(value / lax.axis_size("model")) if total else value), state

    params = {name: _aval(shape) for name, (shape, _) in zip(names, operands, strict=True)}
    specs = {name: spec for name, (_, spec) in zip(names, operands, strict=True)}
    return Model(
        {PLAIN: partial(loss, plain), OURS: partial(loss, ours)}, params, specs=specs, **more
    )
