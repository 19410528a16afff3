"""Cases of each attention function, planned without a GPU and run on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from attention_checks import CAUSAL, KEY, LAST, S, ours

import jax_cudnn as jc

fp8_forward, paged = jc.ops.dot_product_attention_fp8, jc.ops.paged_dot_product_attention
fp8 = functools.partial(fp8_forward, fp8_backward=True)
softcap, prefix, documents = (
    getattr(jc.ops.score_mods, name) for name in ("softcap", "prefix", "documents")
)


def ints(*values):
    return jnp.array(values, "int32")


def dense(
    *, attend=ours, b=2, t=256, s=256, n=4, k=4, v=None, h=64, e=None, bias=None, sink=False,
    operands=(), lengths=(), **given,
):  # fmt: skip
    """A function of arrays, their avals, and how many of them are differentiated."""
    shapes = [(b, t, n, h), (b, s, k, h), (b, s, v or k, e or h), *([bias] if bias else [])]
    avals = [*(S(shape, "bfloat16") for shape in shapes), *[S((n,), "float32")] * sink]
    count = len(avals) if "score_mod" not in given else 3
    avals += [S(shape, dtype) for shape, dtype in operands]
    names = ("query_seq_lengths", "key_value_seq_lengths")
    given |= {name: ints(*ends) for name, ends in zip(names, lengths, strict=False)}

    def function(q, k, v, *others, **more):
        others = [*others]
        named = {"bias": others.pop(0)} if bias else {}
        named |= {"sink": others.pop(0)} if sink else {}
        named |= {"score_mod_operands": others} if operands else {}
        return attend(q, k, v, **named, **given, **more)

    return function, avals, count


def one_array(*, b=2, t=256, n=4, k=4, h=64, bias=None, **given):
    shapes = [(b, t, n + 2 * k, h), *([bias] if bias else [])]

    def function(qkv, bias=None, **more):
        return jc.ops.dot_product_attention_qkv(qkv, n, bias, **given, **more)

    return function, [S(shape, "bfloat16") for shape in shapes], len(shapes)


# Five examples, one without queries, another without keys; the last tokens belong to none.
QUERIES, KEYS = (0, 96, 96, 150, 240, 290), (0, 160, 200, 200, 290, 380)


def packed(
    *, t=300, s=400, n=8, k=2, h=64, e=None, bias=None, sink=False, ends=(QUERIES, KEYS),
    longest=None, **given,
):  # fmt: skip
    shapes = [(t, n, h), (s, k, h), (s, k, e or h), *([bias] if bias else [])]
    longest = longest or [int(np.diff(x).max()) for x in ends]
    avals = [*(S(shape, "bfloat16") for shape in shapes), *[S((n,), "float32")] * sink]

    def function(*operands, **more):
        if sink:
            *operands, more["sink"] = operands
        return jc.ops.packed_dot_product_attention(
            *operands, query_offsets=ints(*ends[0]), key_value_offsets=ints(*ends[1]),
            max_query_length=longest[0], max_key_value_length=longest[1], **given, **more,
        )  # fmt: skip

    return function, avals, len(avals)


def in_pages(
    *, t=1, n=8, k=2, h=64, page=64, per=5, ends=(320, 1, 100, 0), values=None, ragged=False,
    bias=None, sink=False, **given,
):  # fmt: skip
    """One of four batch elements has no keys, and one has a single key; ``values`` is the size of
    pages of values."""
    b = len(ends)
    count = b * per + 3
    pages = (count, k, page, h) if given.get("heads_first") else (count, page, k, h)
    table = np.random.default_rng(0).permutation(count)[: b * per].reshape(b, per)

    others = (*pages[:1], values, *pages[2:]) if values else pages
    if values:
        of_values = np.random.default_rng(1).permutation(count)[: b * per * page // values]
        given["value_page_table"] = jnp.asarray(of_values.reshape(b, -1), "int32")
    if ragged:
        given |= {"query_offsets": ints(0, 96, 96, 150, 240), "max_query_length": 96}
    queries = (300, n, h) if ragged else (b, t, n, h)
    shapes = [queries, pages, others, *([bias] if bias else [])]
    avals = [*(S(shape, "bfloat16") for shape in shapes), *[S((n,), "float32")] * sink]

    def function(q, k, v, *further, **more):
        further, named = [*further], {"key_value_seq_lengths": ints(*ends)}
        named |= {"sink": further.pop()} if sink else {}
        named |= {"bias": further.pop()} if bias else {}
        return paged(q, k, v, jnp.asarray(table, "int32"), **named, **given, **more)

    return function, avals, len(avals)


def of_score(f):
    return lambda score, *_: f(score)


def of_equal_operands(function, bias=None):
    """With a small scale: otherwise a query would put nearly all weight on the equal key, and
    gradients would be only rounding errors."""

    def run(*operands, **more):
        attend = lambda g, *x: g.sdpa(*function(*x), *x[2:], attn_scale=0.03)[0]  # noqa: E731
        return jc.graph(attend).with_options(**more)(*operands)

    x = S((2, 4, 128, 64), "bfloat16")
    return run, [x, x, *([S(bias, "bfloat16")] if bias else [])], 2


SHORT = [256, 128], [253, 133]
WINDOW = {**CAUSAL, "local_window_size": (64, 0)}
DROPOUT = {"dropout_rate": 0.1, "dropout_rng": KEY}
HEADS, ROWS = ((1, 4, 1, 1), "float32"), ((2, 1, 256, 1), "int32")
TABLE = {
    "grouped heads": dense(n=8, k=2, **CAUSAL),
    "heads of keys, of values": dense(n=8, k=2, v=4, **CAUSAL),
    "odd lengths": dense(t=100, s=77, h=32),
    "from the last": dense(t=128, h=128, **LAST),
    "window, lengths": dense(lengths=SHORT, **WINDOW),
    "row of bias": dense(k=2, bias=(2, 1, 1, 256)),
    "column of bias": dense(bias=(1, 4, 256, 1)),
    "sink": dense(k=2, sink=True, **CAUSAL),
    "sink, lengths": dense(b=3, sink=True, lengths=([256, 9, 256], [0, 133, 256])),
    "alibi of six heads": dense(n=6, k=2, alibi=True, **CAUSAL),
    "dropout, bias": dense(bias=(1, 4, 256, 256), **DROPOUT),
    "dropout and all": dense(k=2, sink=True, alibi=True, lengths=SHORT, **CAUSAL, **DROPOUT),
    "qkv": one_array(t=200, n=8, k=2, h=128, **CAUSAL),
    "packed, window": packed(**WINDOW),
    "packed, from the last": packed(s=700, e=64, h=128, **LAST),
    "packed, bias": packed(n=4, k=4, bias=(1, 4, 96, 160)),
    "packed, row of bias": packed(n=4, k=4, bias=(5, 4, 1, 160)),
    "packed, sink": packed(sink=True, **WINDOW),
    "packed, dropout and all": packed(n=4, k=4, bias=(1, 4, 96, 160), **CAUSAL, **DROPOUT),
    "pages, decode": in_pages(**CAUSAL),
    "pages, prefill": in_pages(t=96, heads_first=True, **WINDOW),
    "small pages": in_pages(t=4, page=16, per=20, k=1, **CAUSAL),
    "pages, sink": in_pages(t=96, sink=True, **CAUSAL),
    "pages, one query and a sink": in_pages(sink=True, **CAUSAL),
    "pages, bias": in_pages(t=96, bias=(1, 8, 96, 320)),
    "pages, packed queries": in_pages(ragged=True, sink=True, bias=(4, 8, 96, 320)),
    "pages of two sizes": in_pages(per=10, page=32, values=64, **CAUSAL),
    "fp8": dense(attend=fp8, n=8, k=2, h=128, **CAUSAL),
    "fp8 forward": dense(attend=fp8_forward, n=8, k=2, h=128, **CAUSAL),
    "fp8 forward, lengths": dense(attend=fp8_forward, t=100, s=384, lengths=([99, 9], [251, 381])),
    "fp8, lengths": dense(attend=fp8, t=128, s=384, h=128, lengths=([125, 9], [251, 381])),
    "fp8, from the last": dense(attend=fp8, t=128, h=128, **LAST),
    "fp8, values of another size": dense(attend=fp8, h=192, e=128, **CAUSAL),
    "softcap, window": dense(k=2, score_mod=softcap(5.0), local_window_size=(64, 32)),
    "softcap, lengths": dense(score_mod=softcap(5.0), lengths=SHORT, **CAUSAL),
    "softcap, bias": dense(t=100, s=77, score_mod=softcap(5.0), bias=(1, 4, 100, 77)),
    "prefix": dense(score_mod=prefix(16)),
    "slopes": dense(operands=(HEADS,), **CAUSAL, score_mod=lambda s, b, h, i, j, a: (
        s - jnp.exp(a) * (i - j) / 16 * (1 + b + 0.1 * h))),
    "table": dense(score_mod=lambda *x: x[0] + x[-1], operands=(((2, 1, 256, 256), "float32"),)),
    "row": dense(score_mod=lambda *x: x[0] + x[-1], operands=(((2, 1, 1, 256), "bfloat16"),)),
    "documents": dense(score_mod=documents, operands=(ROWS, ((2, 1, 1, 256), "int32")), **CAUSAL),
    "mask": dense(score_mod=lambda s, b, h, i, j, m: jnp.where(m | (j == 0), s, -jnp.inf),
        operands=(((2, 1, 256, 256), "bool"),)),
    "remainders": dense(score_mod=lambda s, b, h, i, j: (
        jnp.where((i >= j) & ((i - j) % 3 < 2), s, -jnp.inf))),
    "gelu and logarithm": dense(score_mod=lambda s, b, h, i, j: (
        jax.nn.gelu(s) - jnp.log(1.0 + abs(i - j)))),
    "cases": dense(score_mod=of_score(lambda s: jnp.where(s > 0.2, s, -s / 2))),
    "equal keys and values": of_equal_operands(lambda q, k, *_: (q, k, k)),
    "all equal, bias": of_equal_operands(lambda q, k, *_: (k, k, k), (1, 4, 128, 128)),
    # queries whose keys are all hidden by the band
    "window of all lengths": dense(s=128, k=2, local_window_size=(16, 0),
        lengths=([256, 256], [128, 128])),
    "more queries than keys": dense(k=2, lengths=([256, 200], [99, 200]), **LAST),
}  # fmt: skip
ON_BLACKWELL = ("fp8, from the last", "fp8, values of another size")
UNSEEN = dense(s=128, k=2, local_window_size=(16, 0))

# Of -inf, which cuDNN gives its backward where tiles are not full, these make infinity or NaN.
OF_INFINITY = {
    "silu": (of_score(jax.nn.silu), ()),
    "by distance": (lambda s, b, h, q, kv: s * jnp.cos(0.02 * (q - kv)), ()),
    "times an operand": (lambda s, b, h, q, kv, a: s * a, (HEADS,)),
}  # fmt: skip


def gradients(function, places):
    return jax.grad(lambda *x: (function(*x).astype("float32") ** 2).sum(), tuple(places))
