"""Attention as people write it: by its node and of matmuls, beside what stands around it."""

from __future__ import annotations

from jax_cudnn._core.errors import GraphError

from . import attentions
from .drawing import Drawing, Operand, Value
from .operands import CHANNELS, heads, new_operand, weight
from .steps import attend, norm, one, queries, start, without_last


def softmax(drawing: Drawing) -> None:
    _softmax(drawing, start(drawing, "reduction", 2, 3, 4))


def _softmax(drawing: Drawing, x: Value) -> Value:
    largest = one(drawing, "reduction", x, mode="MAX", out_dims=without_last(x))
    raised = one(drawing, "exp", one(drawing, "sub", x, largest))
    total = one(drawing, "reduction", raised, mode="ADD", out_dims=without_last(x))
    return one(drawing, "div", raised, total, dtype=drawing.dtype)


def attention_of_matmuls(drawing: Drawing) -> None:
    """Scaled, masked, normalised and applied; queries, keys and values are matrices by head."""
    rng = drawing.rng
    q = start(drawing, "matmul", 3)
    heads, _, size = q.shape
    length = rng.choice((16, 32, 48))
    scores = one(drawing, "matmul", q, Operand((heads, size, length), q.dtype))
    scores = one(drawing, "mul", scores, size**-0.5)
    mask = new_operand(drawing, scores.shape, ("bool",))
    scores = one(drawing, "binary_select", scores, -30.0, mask)
    one(drawing, "matmul", _softmax(drawing, scores), Operand((heads, length, size), drawing.dtype))


def attention_of_projections(drawing: Drawing) -> None:
    """As in a transformer: queries are projected, and heads are put together again."""
    rng = drawing.rng
    x = start(drawing, "matmul", 3)
    b, s, c = x.shape
    _, h, _, d = heads(rng)
    q = one(drawing, "matmul", x, weight(drawing, x, (1, c, h * d)), dtype=drawing.dtype)
    q = one(drawing, "reshape", q, out_dims=[b, s, h, d])
    q = one(drawing, "transpose", q, permutation=[0, 2, 1, 3])
    o, *_ = attend(drawing, q)
    o = one(drawing, "transpose", o, permutation=[0, 2, 1, 3])
    o = one(drawing, "reshape", o, out_dims=[b, s, h * o.shape[3]])
    of = (1, o.shape[2], rng.choice(CHANNELS))
    one(drawing, "matmul", o, weight(drawing, o, of), dtype=drawing.dtype)


def gated_attention(drawing: Drawing) -> None:
    """Normalized queries; what they give is gated."""
    q, *_ = norm(drawing, queries(drawing), "rmsnorm", dtype=drawing.dtype)
    o, *_ = attend(drawing, q)
    gate = one(drawing, "sigmoid", new_operand(drawing, o.shape))
    one(drawing, "mul", o, gate, dtype=drawing.dtype)


def attention_of_two_parts(drawing: Drawing) -> None:
    """Of keys that lie in two arrays, put together by the statistics, as where a ring of GPUs has
    parts of the keys."""
    q = queries(drawing)
    parts = [attend(drawing, q, generate_stats=True) for _ in range(2)]
    if any(len(results) < 2 for results in parts):
        raise GraphError("a query sees no key of a part")
    (first, total), (second, other) = parts
    share = one(drawing, "sigmoid", one(drawing, "sub", total, other))
    difference = one(drawing, "sub", first, second)
    more = one(drawing, "mul", difference, share)
    one(drawing, "add", second, more, dtype=drawing.dtype)


def backward_of_attention(drawing: Drawing) -> None:
    """Attention, and its gradients for a loss of its result."""
    o, *_ = attend(drawing, queries(drawing), generate_stats=True)
    step = drawing.steps[-1]
    loss = one(drawing, "sub", o, new_operand(drawing, o.shape), dtype=drawing.dtype)
    ports, attributes = attentions.of_step(drawing, step)
    drawing.add("sdpa_backward", ports | {"dO": loss}, attributes)


def causal_mask(drawing: Drawing) -> None:
    x = start(drawing, "gen_index", 3, 4, 5)
    row = one(drawing, "gen_index", x, axis=len(x.shape) - 2)
    column = one(drawing, "gen_index", x, axis=len(x.shape) - 1)
    one(drawing, "binary_select", x, -30.0, one(drawing, "cmp_ge", row, column))
