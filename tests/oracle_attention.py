"""What attention means, in NumPy float64: one query after the other."""

import numpy as np
import oracle_attention_extras


def _place(node, i, queries, keys):
    """Where query i stands among the keys."""
    return i + (keys - queries if node.diagonal_alignment == "BOTTOM_RIGHT" else 0)


def _seen(node, i, j, queries, keys):
    """Whether query i sees key j, of so many."""
    at = _place(node, i, queries, keys)
    left, right = node.diagonal_band_left_bound, node.diagonal_band_right_bound
    inside = (left is None or j > at - left) and (right is None or j <= at + right)
    return inside and i < queries and j < keys


def _scores(node, q, k, bias, seq_len_q, seq_len_kv):
    """(B, H, Sq, Skv), -inf where a key is not seen."""
    (b, h, s, _), (_, n, t, _) = q.shape, k.shape
    bias = np.broadcast_to(0.0 if bias is None else bias, (b, h, s, t))
    alibi = getattr(node, "use_alibi_mask", False)  # fp8's nodes have none
    slopes = oracle_attention_extras.slopes(h) if alibi else [0] * h
    found = np.full((b, h, s, t), -np.inf)
    for at in np.ndindex(b, h, s):
        queries = s if seq_len_q is None else int(seq_len_q[at[0], 0, 0, 0])
        keys = t if seq_len_kv is None else int(seq_len_kv[at[0], 0, 0, 0])
        for j in range(t):
            if _seen(node, at[2], j, queries, keys):
                key = k[at[0], at[1] // (h // n), j]
                distance = slopes[at[1]] * (j - _place(node, at[2], queries, keys))
                found[(*at, j)] = node.attn_scale * (q[at] @ key) + bias[(*at, j)] + distance
    return found


def sdpa(node, q, k, v, bias=None, seq_len_q=None, seq_len_kv=None, sink_token=None):
    scores = _scores(node, q, k, bias, seq_len_q, seq_len_kv)
    out = np.zeros((*q.shape[:3], v.shape[3]))
    stats = np.full((*q.shape[:3], 1), -np.inf)
    for at in np.ndindex(*q.shape[:3]):
        row = scores[at]
        if sink_token is not None and (seq_len_q is None or at[2] < seq_len_q[at[0], 0, 0, 0]):
            row = np.append(row, sink_token[0, at[1], 0, 0])
        if np.isneginf(row).all():
            continue
        each = np.exp(row - row.max())
        values = v[at[0], at[1] // (q.shape[1] // k.shape[1])]
        out[at] = each[: len(values)] @ values / each.sum()
        stats[at] = row.max() + np.log(each.sum())
    return (out, stats)[: len(node.results)]


def backward(
    node, q, k, v, o, dO, stats, bias=None, seq_len_q=None, seq_len_kv=None, sink_token=None
):
    scores = _scores(node, q, k, bias, seq_len_q, seq_len_kv)
    found = {"dQ": np.zeros(q.shape), "dK": np.zeros(k.shape), "dV": np.zeros(v.shape)}
    slopes, of_sink = np.zeros(scores.shape), np.zeros(stats.shape)
    for at in np.ndindex(*q.shape[:3]):
        head = at[0], at[1] // (q.shape[1] // k.shape[1])
        if np.isneginf(stats[at][0]):
            continue
        weights = np.exp(scores[at] - stats[at][0])
        slopes[at] = weights * (v[head] @ dO[at] - dO[at] @ o[at])
        if sink_token is not None:
            weight = np.exp(sink_token[0, at[1], 0, 0] - stats[at][0])
            of_sink[at] = -weight * (dO[at] @ o[at])
        found["dQ"][at] += node.attn_scale * slopes[at] @ k[head]
        found["dK"][head] += node.attn_scale * np.outer(slopes[at], q[at])
        found["dV"][head] += np.outer(weights, dO[at])
    if node.dBias:
        axes = tuple(i for i in range(4) if bias.shape[i] == 1)
        found["dBias"] = slopes.sum(axes, keepdims=True)
    found["dSink_token"] = of_sink.sum((0, 2), keepdims=True)
    return tuple(found[port] for port in node.results)


OPERATIONS = {"sdpa": sdpa, "sdpa_backward": backward}
