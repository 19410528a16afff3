"""Random calls of the functions of attention, and what they mean, in jnp and Flax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
from flax import nnx

import jax_cudnn as jc

from .calls import Draw, Entry, entry


def attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: Any = None,
    is_causal: bool = False, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: Any = None, bottom_right: bool = False, keep: Any = None, sink: Any = None,
    alibi: bool = False, block_mask: Any = None, score_mod: Any = None, heads_first: bool = False,
    return_residual: bool = False, **operands: Any,
) -> Any:  # fmt: skip
    """All weights at once. ``keep`` gives 0 or 1 / (1 - rate) for each; operands of the score_mod
    are named ``operand0``, ``operand1``, ..."""
    if query.ndim == 3:
        named = {
            n: x for n, x in locals().items() if n not in ("query", "key", "value", "operands")
        }
        found = attention(query[None], key[None], value[None], **named, **operands)
        return jax.tree.map(lambda x: x[0], found)
    turn = (lambda x: x) if heads_first else (lambda x: jnp.swapaxes(x, 1, 2))
    q, k, v = map(turn, (query, key, value))
    (_, n, t, h), s = q.shape, k.shape[2]
    k, v = (jnp.repeat(x, n // x.shape[1], 1) for x in (k, v))
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) * (h**-0.5 if scale is None else scale)
    i, j = np.arange(t)[:, None], np.arange(s)
    if score_mod is not None:
        places = np.ix_(*(np.arange(size, dtype="int32") for size in scores.shape))
        scores = score_mod(
            scores, *places, *(operands[f"operand{x}"] for x in range(len(operands)))
        )
    scores = scores + (0.0 if bias is None else bias)
    queries, keys = (
        size if x is None else jnp.clip(x, 0, size).reshape(-1, 1, 1, 1)
        for x, size in ((query_seq_lengths, t), (key_value_seq_lengths, s))
    )
    at = i + (keys - queries if bottom_right else 0)
    left, right = local_window_size if local_window_size is not None else (None, None)
    right = 0 if is_causal else right
    there = (i < queries) & (j < keys) & jnp.ones(scores.shape, bool)
    seen = there if left is None else there & (j >= at - left)
    seen = seen if right is None else seen & (j <= at + right)
    if block_mask is not None:
        seen = seen & jnp.repeat(jnp.repeat(block_mask, 128, 2), 128, 3)[:, :, :t, :s]
    if alibi:
        scores = scores + np.array(oracle_attention.slopes(n)).reshape(n, 1, 1) * (j - at)
    left_over = seen if mask is None else seen & mask
    own = -jnp.inf if sink is None else jnp.where(i < queries, sink.reshape(n, 1, 1), -jnp.inf)
    tops = jnp.where(left_over, scores, -jnp.inf).max(-1, keepdims=True, initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(tops, own))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.where(left_over, jnp.exp(jnp.where(left_over, scores - top, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(own - top)
    parts = jnp.where(total == 0, 1.0, total)
    if mask is not None and sink is None:  # rows of which the mask hides all: the mean
        hidden = seen.any(-1, keepdims=True) & ~left_over.any(-1, keepdims=True)
        weights = jnp.where(hidden, there, weights)
        parts = jnp.where(hidden, jnp.maximum(there.sum(-1, keepdims=True), 1), parts)
    # Divided after the product: its gradient then subtracts two products, as every flash attention
    # does, which are rounded apart.
    out = turn((weights if keep is None else weights * keep) @ v / parts)
    if not return_residual:
        return out
    residual = jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1.0, total)))
    return out, residual[..., 0] if heads_first else jnp.swapaxes(residual[..., 0], 1, 2)


def _heads(draw: Draw) -> tuple[int, ...]:
    """B, T, S, N, K, H, E."""
    n, k = draw.of((1, 1), (2, 2), (4, 2), (4, 1), (6, 3))
    t, h = draw.size(8, 16, 24, 33), draw.of(8, 16, 32, 32)
    s = t if draw.chance(0.5) else draw.size(8, 16, 24, 33)
    return draw.size(1, 2, 3), t, s, n, k, h, h if draw.chance(0.8) else draw.of(8, 16)


def _band(draw: Draw) -> Entry:
    options = draw.some(0.4, is_causal=True)
    options |= draw.some(0.25, local_window_size=(draw.of(0, 1, 5, 20), draw.of(0, 3, 20)))
    return options | draw.some(0.3, bottom_right=True)


def _bias(draw: Draw, scores: Any) -> Any:
    """Of the scores' shape, or with some dimensions 1."""
    kept = draw.of((0, 1, 2, 3), (2, 3), (1, 2, 3), (0, 3), (1, 3), (1,))
    return [size if axis in kept else 1 for axis, size in enumerate(scores)]


def _lengths(draw: Draw, b: int, **sizes: int) -> Entry:
    given = {f"{name}_seq_lengths": draw.integers(0, n, b) for name, n in sizes.items()}
    return given if draw.chance(0.3) else draw.some(0.15, **given)


def _far(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score - 0.05 * abs(q - kv)


def _capped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 5.0 * jnp.tanh(score / 5.0)


def _halved(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return jnp.where((q >= kv) | (h == 1), score, 0.5 * score)


def _scaled(score: Any, b: Any, h: Any, q: Any, kv: Any, factor: Any) -> Any:
    return score * factor


def _gated(score: Any, b: Any, h: Any, q: Any, kv: Any, shift: Any, gate: Any) -> Any:
    return score + shift * jax.nn.sigmoid(gate)


SCORE_MODS = {_far: 0, _capped: 0, _halved: 0, _scaled: 1, _gated: 2}
"""Each with the number of its operands."""


def _ours(**given: Any) -> Any:
    count = sum(name.startswith("operand") for name in given)
    operands = [given.pop(f"operand{i}") for i in range(count)]
    return jc.ops.dot_product_attention(**given, score_mod_operands=operands)


def _attention(*features: str) -> Any:
    """Draws of attention with these features, and often other ones."""

    def draws(draw: Draw) -> Entry:
        b, t, s, n, k, h, e = _heads(draw)
        dropped, tiled = "dropout" in features, "block_mask" in features
        if dropped:  # as many columns of values as keys, to show the weights
            b, t, s, e, h = max(b, 1), max(t, 1), max(min(s, 32), 1), 32, 32
        if tiled:
            b, t, s, h, e = 1, draw.of(130, 200), draw.of(130, 260), 8, 8
        shapes = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, e)}
        options = _band(draw) | draw.some(0.2, scale=draw.of(0.3, 0.1), return_residual=True)
        if "heads_first" in features:
            shapes = {name: (x[0], x[2], x[1], x[3]) for name, x in shapes.items()}
            options["heads_first"] = True
        elif b == 1 and not (dropped or tiled) and draw.chance(0.3):
            shapes = {name: x[1:] for name, x in shapes.items()}
        operands = {name: draw.floats(*x) for name, x in shapes.items()}
        if draw.chance(0.4) or "bias" in features:
            operands["bias"] = draw.floats(*_bias(draw, (b, n, t, s)))
        lengths = _lengths(draw, b, query=t, key_value=s)
        if dropped:  # the same for all examples, which see the same weights then
            options |= lengths
        else:
            operands |= lengths
        if "mask" in features:
            operands["mask"] = draw.booleans(*_bias(draw, (b, n, t, s)))
            options.pop("return_residual", None)
        if "sink" in features:
            operands["sink"] = draw.floats(n, dtype="float32")
        if "alibi" in features:
            options |= {"alibi": True, "is_causal": True}
        if "score_mod" in features:
            options["score_mod"], count = draw.of(*SCORE_MODS.items())
            for i in range(count):
                shape = _bias(draw, (b, n, t, s))
                operands[f"operand{i}"] = draw.floats(*shape, dtype="float32")
        more: Entry = {}
        if tiled:
            tiles = draw.booleans(1, draw.of(1, n), -(-t // 128), -(-s // 128))
            options["block_mask"], more = tiles, {"count": 1}
        if not dropped:
            return entry(_ours, attention, operands, options, **more)
        rate, key = draw.of(0.1, 0.5), np.array([0, draw.rng.randrange(1000)], "uint32")
        options |= {"dropout_rate": rate, "dropout_rng": key}

        # Weights that are alike, times an identity, show which ones are kept.
        eye = np.broadcast_to(np.eye(s, e)[:, None], (b, s, k, e)).astype(draw.dtype)
        shown = operands | {"query": np.zeros_like(operands["query"]), "value": eye}
        (weights, *_) = jax.tree.leaves(draw.run(lambda xs: _ours(**xs, **options), shown))
        seen = np.asarray(weights, np.float32)[..., :s] > 0
        keep = np.swapaxes(seen, 1, 2) / (1 - rate)
        made = entry(_ours, attention, operands, options)
        exact = made["exact"].keywords
        exact = {n: x for n, x in exact.items() if not n.startswith("dropout")} | {"keep": keep}
        return made | {"exact": lambda **xs: attention(**xs, **exact)}

    return draws


def _packed(
    query: Any, key: Any, value: Any, bias: Any = None, *, query_offsets: Any,
    max_query_length: int, key_value_offsets: Any = None, max_key_value_length: Any = None,
    keep: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """One sequence after the other; ``keep`` is that of all, padded."""
    of_keys = query_offsets if key_value_offsets is None else key_value_offsets
    out = jnp.zeros((*query.shape[:2], value.shape[2]), query.dtype)
    residual = jnp.full(query.shape[:2], -jnp.inf, query.dtype)
    for i in range(len(query_offsets) - 1):
        rows, columns = (slice(int(x[i]), int(x[i + 1])) for x in (query_offsets, of_keys))
        q, k, v = query[rows], key[columns], value[columns]
        if not len(q) or not len(k):
            continue
        own = None if bias is None else bias[min(i, len(bias) - 1), :, : len(q), : len(k)][None]
        kept = None if keep is None else keep[i : i + 1, :, : len(q), : len(k)]
        found = attention(
            q[None], k[None], v[None], own, keep=kept, **options, return_residual=True
        )
        out, residual = out.at[rows].set(found[0][0]), residual.at[rows].set(found[1][0])
    return out, residual


def packed(draw: Draw) -> Entry:
    count, (_, _, _, n, k, h, e) = draw.of(1, 2, 3), _heads(draw)
    same = draw.chance(0.5)
    lengths = (
        [draw.integers(0, 12, count)] * 2 if same else [draw.integers(0, 12, count) for _ in "qk"]
    )
    offsets = [np.cumsum([0, *x]).astype("int32") for x in lengths]
    t, s = (int(x[-1]) + draw.of(0, 0, 5) * (not same) for x in offsets)
    t, s = max(t, 1), max(t if same else s, 1)
    longest = [max(int(x.max()), 1) + draw.of(0, 3) for x in lengths]
    longest = [longest[0]] * 2 if same else longest
    options = _band(draw) | draw.some(0.2, scale=0.2) | {"query_offsets": offsets[0]}
    options |= {"max_query_length": longest[0], "return_residual": True}
    if not same:
        options |= {"key_value_offsets": offsets[1], "max_key_value_length": longest[1]}
    shapes = {"query": (t, n, h), "key": (s, k, h), "value": (s, k, e)}
    operands = {name: draw.floats(*x) for name, x in shapes.items()}
    of = draw.of((count, n), (1, n))
    operands |= draw.some(0.3, bias=draw.floats(*of, *longest))
    operands |= draw.some(0.2, sink=draw.floats(n, dtype="float32"))
    exact = lambda return_residual, **given: _packed(**given)  # noqa: E731
    return entry(jc.ops.packed_dot_product_attention, exact, operands, options)


def _paged(
    query: Any, key_pages: Any, value_pages: Any, page_table: Any, bias: Any = None, *,
    value_page_table: Any = None, heads_first: bool = False, bottom_right: bool = True,
    query_offsets: Any = None, max_query_length: Any = None, **options: Any,
) -> Any:  # fmt: skip
    def gathered(pages: Any, table: Any) -> Any:
        pages = jnp.swapaxes(pages, 1, 2) if heads_first else pages
        found = pages[table]  # (B, n, U, K, H)
        return found.reshape(len(table), -1, *found.shape[3:])

    value_page_table = page_table if value_page_table is None else value_page_table
    k, v = gathered(key_pages, page_table), gathered(value_pages, value_page_table)
    options |= {"bottom_right": bottom_right}
    lengths = options.pop("key_value_seq_lengths")
    queries = options.pop("query_seq_lengths", query.shape[-3])
    if options.get("sink") is not None:  # a batch element without keys does not see it
        queries = jnp.where(lengths > 0, queries, 0)
    if query_offsets is None:
        if isinstance(queries, int):
            queries = None
        options |= {"query_seq_lengths": queries, "key_value_seq_lengths": lengths}
        return attention(query, k, v, bias, **options)
    found = []
    for i, rows in enumerate(map(slice, query_offsets, query_offsets[1:])):
        q = query[rows][None]
        own = None if bias is None else bias[min(i, len(bias) - 1), None, :, : q.shape[1]]
        given = options | {"key_value_seq_lengths": lengths[i : i + 1]}
        found.append(attention(q, k[i : i + 1], v[i : i + 1], own, **given))
    rest = len(query) - query_offsets[-1]
    out, residual = (jnp.concatenate([y[0] for y in x]) for x in zip(*found, strict=True))
    out = jnp.pad(out, ((0, rest), (0, 0), (0, 0)))
    return out, jnp.pad(residual, ((0, rest), (0, 0)), constant_values=-jnp.inf)


def paged(draw: Draw) -> Entry:
    b, t, _, n, k, h, e = _heads(draw)
    b, t = max(b, 1), draw.of(1, 1, max(t, 1))
    p, u, each = draw.of(4, 7), draw.of(4, 8), draw.of(2, 3)
    options = draw.some(0.3, heads_first=True, return_residual=True, scale=0.2) | _band(draw)
    options["bottom_right"] = draw.chance(0.7)
    pages = (p, k, u) if "heads_first" in options else (p, u, k)
    operands = {"query": draw.floats(b, t, n, h), "key_pages": draw.floats(*pages, h)}
    operands |= {
        "value_pages": draw.floats(*pages, e),
        "page_table": draw.integers(0, p - 1, b, each),
    }
    operands["key_value_seq_lengths"] = draw.integers(0, each * u, b)
    operands |= draw.some(0.2, query_seq_lengths=draw.integers(0, t, b))
    operands |= draw.some(0.2, bias=draw.floats(draw.of(1, b), n, t, each * u))
    operands |= draw.some(0.2, sink=draw.floats(n, dtype="float32"))
    operands |= draw.some(0.2, value_page_table=draw.integers(0, p - 1, b, each))
    return entry(jc.ops.paged_dot_product_attention, _paged, operands, options)


def _joint(qkv: Any, num_heads: Any = None, **options: Any) -> Any:
    if qkv.ndim == 5:
        qkv = jnp.concatenate([*jnp.moveaxis(qkv, 2, 0)], axis=2)
    n = num_heads or qkv.shape[2] // 3
    k = (qkv.shape[2] - n) // 2
    return attention(qkv[:, :, :n], qkv[:, :, n : n + k], qkv[:, :, n + k :], **options)


def joint(draw: Draw) -> Entry:
    b, t, _, n, k, h, _ = _heads(draw)
    options = _band(draw) | draw.some(0.2, scale=0.2)
    whole = n == k and draw.chance(0.5)
    options |= {} if whole else {"num_heads": n}
    operands = {"qkv": draw.floats(b, t, *((3, n) if whole else (n + 2 * k,)), h)}
    operands |= draw.some(0.3, bias=draw.floats(*_bias(draw, (b, n, t, t))))
    operands |= draw.some(0.2, mask=draw.booleans(*_bias(draw, (b, n, t, t))))
    operands |= _lengths(draw, b, query=t, key_value=t)
    return entry(jc.ops.dot_product_attention_qkv, _joint, operands, options)


def fp8(draw: Draw) -> Entry:
    """Operands of its products are rounded to float8, those of the gradient to float8_e5m2."""
    b, t, s, n, k, h, e = _heads(draw)
    shapes = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, e)}
    operands = {name: draw.floats(*x) for name, x in shapes.items()}
    options = _band(draw) | draw.some(0.2, scale=0.2)
    fp8 = draw.chance(0.5)
    return entry(
        functools.partial(jc.ops.dot_product_attention_fp8, fp8_backward=fp8), attention, operands,
        options, coarse=2.0**-3, inside=False,
        without=("jvp_of_vjp", "vjp_of_vjp", *([] if fp8 else ["jvp"])),
    )  # fmt: skip


def hook(draw: Draw) -> Entry:
    """attention_fn, for Flax's own."""
    b, t, s, n, _, h, _ = _heads(draw)
    lead, length = draw.of((), (b,), (2, b)), max(s, 1)
    shapes = {"query": (t, n, h), "key": (length, n, h), "value": (length, n, h)}
    operands = {name: draw.floats(*lead, *x) for name, x in shapes.items()}
    operands |= draw.some(0.3, bias=draw.floats(*lead, n, t, length))
    operands |= draw.some(0.3, mask=draw.booleans(*lead, 1, t, length))
    exact = lambda **given: nnx.dot_product_attention(**given)  # noqa: E731
    options = draw.some(0.5, broadcast_dropout=False, deterministic=True)
    return entry(jc.ops.attention_fn, exact, operands, options)


FEATURES = {
    "attention": (), "attention biased": ("bias",), "attention masked": ("mask",),
    "attention of sinks": ("sink",), "attention alibi": ("alibi",),
    "attention score_mod": ("score_mod",), "attention score_mod and bias": ("score_mod", "bias"),
    "attention dropout": ("dropout",), "attention dropout and sink": ("dropout", "sink"),
    "attention block_mask": ("block_mask",), "attention heads_first": ("heads_first",),
    "attention of all": ("heads_first", "score_mod", "sink"),
}  # fmt: skip
DRAWS = {
    **{name: _attention(*features) for name, features in FEATURES.items()},
    **{"packed": packed, "paged": paged, "qkv": joint, "fp8": fp8, "attention_fn": hook},
}
_COMPILED = ("packed", "paged", "qkv", "fp8", "attention dropout", "attention dropout and sink")


def _of(name: str) -> Any:
    """Weights are rounded for their product, and results for the backward."""
    return lambda draw: {"inside": True, "compiled": name in _COMPILED, **DRAWS[name](draw)}


TABLE = {name: _of(name) for name in DRAWS}
