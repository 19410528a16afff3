"""Functions of attention's scores that tests write, and what they mean, in jnp."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn as jc

S = jax.ShapeDtypeStruct
softcap, prefix, documents = (
    getattr(jc.ops.score_mods, name) for name in ("softcap", "prefix", "documents")
)
B, T, K, N = 2, 20, 24, 4  # examples, queries, keys, heads


def plain(q, k, v, *operands, change, scale=None, seen=True, bias=0.0):
    """Attention with a function of the scores; a query that sees no key gives 0."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
    changed = change(scores, *places(scores.shape), *operands)
    scores = jnp.where(seen, changed + bias, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    each = jnp.exp(scores - jnp.where(jnp.isneginf(largest), 0, largest))
    total = each.sum(-1, keepdims=True)
    weights = each / jnp.where(total > 0, total, 1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")


def places(shape):
    return [jnp.arange(n).reshape([-1 if i == j else 1 for j in range(4)])
            for i, n in enumerate(shape)]  # fmt: skip


def causal(score, b, h, q, kv):
    return jnp.where(q >= kv, score, -jnp.inf)


def alibi(score, b, h, q, kv):
    return score - 2.0 ** (-8 * (h + 1) / N) * (q - kv)


def biased(score, b, h, q, kv, table):
    return score + table


def scaled(score, b, h, q, kv, scale):
    return score * jnp.exp(scale)


def of_score(f):
    return lambda score, *_: f(score)


def where(f):
    """Scores where integers make it true."""
    return lambda s, b, h, q, kv: jnp.where(f(q, kv), s, -jnp.inf)


OF_EACH_ELEMENT = {
    "softcap": softcap(2.0),
    "blocks": where(lambda q, kv: q // 4 >= kv // 4),
    "negative quotients": where(lambda q, kv: (q - kv) // 3 >= -2),
    "remainders": where(lambda q, kv: (kv % 3 == 0) | ((q - kv) % 5 < 3)),
    "not and xor": where(lambda q, kv: ~((q < kv) ^ (kv % 2 == 1)) | (kv == 0)),
    "not equal": where(lambda q, kv: (kv != q) & (abs(kv - q) < 7)),
    "sign": where(lambda q, kv: jnp.sign(q - kv) >= 0),
    "a number as truth": where(lambda q, kv: (kv % 4).astype(bool)),
    "a truth as number": where(lambda q, kv: (q > kv).astype("int32") + (kv > 3) >= 1),
    "towards zero": where(lambda q, kv: ((q - kv) / 4).astype("int32") > -2),
    "lax": where(lambda q, kv: jax.lax.rem(q - kv, 4) + jax.lax.div(q - kv, 3) >= -1),
    "arithmetic": of_score(lambda s: 1 - s + 2 * s / 3 - (-s) + 1 / (2 + s * s) + s**0),
    "powers": of_score(lambda s: s**3 - s**2 + (1 + s * s) ** -2 + (2 + abs(s)) ** 1.5 + 1.5**s),
    "exponentials": of_score(lambda s: jnp.exp(s) + jnp.exp2(s) + jnp.expm1(s)),
    "logarithms": of_score(lambda s: jnp.log(2 + s * s) + jnp.log1p(s * s)),
    "roots": of_score(lambda s: jnp.sqrt(1 + s * s) + jax.lax.rsqrt(1 + s * s)),
    "waves": of_score(lambda s: jnp.sin(s) + jnp.cos(s) + jnp.tan(0.1 * s)),
    "activations": of_score(lambda s: jax.nn.gelu(s) + jax.nn.silu(s) + jax.nn.softplus(s)),
    "exact gelu": of_score(lambda s: jax.nn.gelu(s, approximate=False) + jax.nn.relu(s)),
    "sigmoid": of_score(lambda s: s * jax.nn.sigmoid(s) + jnp.tanh(s)),
    "bounds": of_score(lambda s: jnp.clip(s, -1, 0.7) + jnp.minimum(s, 0.3) + jnp.maximum(0.1, s)),
    "cases": of_score(lambda s: jnp.where(s > 0.2, jnp.where(s < 1, s, 2 * s), -s / 2)),
    "steps": of_score(lambda s: s + jnp.floor(s) + jnp.ceil(s) + jnp.sign(s)),
    "finite": of_score(lambda s: jnp.where(jnp.isfinite(s), 2 * s, 0.0)),
    "folded": of_score(lambda s: s * jnp.sqrt(2.0) + jnp.arange(4.0).reshape(4, 1, 1)),
    "jitted": of_score(jax.jit(lambda s: 2 * jnp.tanh(s))),
}  # fmt: skip

# Of -inf, which cuDNN gives its backward where tiles are not full, these make infinity or NaN.
HEADS = ((1, 4, 1, 1), "float32")
OF_INFINITY = {
    "negative": (of_score(jnp.negative), ()),
    "silu": (of_score(jax.nn.silu), ()),
    "of late keys": (lambda s, b, h, q, kv: s * jnp.where(kv < 60, 1.0, -1.0), ()),
    "of some heads": (lambda s, b, h, q, kv: s * jnp.where(h < 2, 1.0, -1.0), ()),
    "by distance": (lambda s, b, h, q, kv: s * jnp.cos(0.02 * (q - kv)), ()),
    "times an operand": (lambda s, b, h, q, kv, a: s * a, (HEADS,)),
    "times an integer": (
        lambda s, b, h, q, kv, a: s * (a + 1).astype("float32"),
        (((1, 4, 1, 1), "int32"),),
    ),
}

SIZES = {"t": 256, "s": 256, "n": 4, "k": 4, "h": 64}
PLANNED = {  # a function, sizes, options, operands
    "softcap, window": (softcap(5.0), {"k": 2}, {"local_window_size": (64, 32)}, ()),
    "softcap, odd": (softcap(5.0), {"t": 100, "s": 77, "k": 2}, {"is_causal": True}, ()),
    "softcap, from the last": (
        softcap(5.0), {"t": 128, "h": 128}, {"is_causal": True, "bottom_right": True}, (),
    ),
    "softcap, lengths": (softcap(5.0), {}, {"lengths": True, "is_causal": True}, ()),
    "softcap, bias": (softcap(5.0), {}, {"bias": (1, 4, 256, 256)}, ()),
    "prefix": (prefix(16), {}, {}, ()),
    "alibi": (alibi, {"s": 512}, {"is_causal": True, "bottom_right": True}, ()),
    "of examples": (lambda s, b, h, q, kv: s * (1.0 + 0.5 * b + 0.1 * h), {}, {}, ()),
    "slopes": (
        lambda s, b, h, q, kv, a: s - jnp.exp(a) * (q - kv) / 16, {}, {"is_causal": True}, (HEADS,),
    ),
    "table": (biased, {}, {}, (((2, 1, 256, 256), "float32"),)),
    "row": (biased, {}, {}, (((2, 1, 1, 256), "bfloat16"),)),
    "documents": (
        documents, {}, {"is_causal": True}, (((2, 1, 256, 1), "int32"), ((2, 1, 1, 256), "int32")),
    ),
    "mask": (
        lambda s, b, h, q, kv, m: jnp.where(m | (kv == 0), s, -jnp.inf),
        {}, {}, (((2, 1, 256, 256), "bool"),),
    ),
    "remainders": (where(lambda q, kv: (q >= kv) & ((q - kv) % 3 < 2)), {}, {}, ()),
    "gelu": (of_score(jax.nn.gelu), {}, {}, ()),
    "cases": (OF_EACH_ELEMENT["cases"], {}, {}, ()),
    "bounds": (OF_EACH_ELEMENT["bounds"], {}, {}, ()),
    "logarithm": (lambda s, b, h, q, kv: s - jnp.log(1.0 + abs(q - kv)), {}, {}, ()),
}  # fmt: skip


def drawn(normal, aval):
    if aval.dtype == "bool":
        return normal(aval.shape) < 0.8
    if aval.dtype == "int32":
        return jnp.broadcast_to(jnp.arange(max(aval.shape)) // 100, (max(aval.shape),)).reshape(
            [-1 if n == max(aval.shape) else 1 for n in aval.shape]
        ) * jnp.ones(aval.shape, "int32")
    return normal(aval.shape, aval.dtype)


def prepared(name, implementation=None, dtype="bfloat16"):
    """A function of arrays alone, and their avals."""
    function, sizes, options, extra = PLANNED[name]
    t, s, n, k, h = {**SIZES, **sizes}.values()
    options = dict(options, score_mod=function, implementation=implementation)
    avals = [S((2, t, n, h), dtype), *[S((2, s, k, h), dtype)] * 2]
    bias = options.pop("bias", None)
    if options.pop("lengths", False):
        options["query_seq_lengths"] = jnp.array([t - 56, t], "int32")
        options["key_value_seq_lengths"] = jnp.array([s, s - 30], "int32")
    avals += [S(bias, dtype)] if bias else []
    avals += [S(shape, kind if kind != "bfloat16" else dtype) for shape, kind in extra]

    def call(q, k, v, *others):
        given = {"bias": others[0]} if bias else {"score_mod_operands": others}
        return jc.ops.dot_product_attention(q, k, v, **given, **options)

    return call, avals


def gradients(function, places):
    return jax.grad(lambda *x: (function(*x).astype("float32") ** 2).sum(), places)


def floats(operands):
    return tuple(i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, np.floating))
