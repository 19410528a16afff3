"""What the results of attention and of its backward are like, by port."""

from __future__ import annotations

import math

import numpy as np

from .sampled import SIZE, TERMS, Sampled


def results(of: Sampled) -> dict[str, np.ndarray]:
    """Each sample is that of a query of its own."""
    each, arrays = np.exp(_scores(of)), of.arrays
    total = each.sum(-1)
    o = (each * of.chosen("v", each.shape)).sum(-1)
    if "sink_token" in arrays:  # padding sees none
        there = (total > 0) | ("seq_len_q" not in arrays)
        total = total + there * np.exp(arrays["sink_token"])
    with np.errstate(divide="ignore"):
        return {"O": o / np.where(total > 0, total, 1), "Stats": np.log(total)}


def gradients(of: Sampled) -> dict[str, np.ndarray]:
    arrays, shapes, scale = of.arrays, of.shapes, of.node.attn_scale
    scores, (*_, size) = _scores(of), shapes["v"]
    stats = np.where(np.isneginf(arrays["stats"]), np.inf, arrays["stats"])
    weights = np.exp(scores - stats[:, None])
    mean = of.products(size, (SIZE, 1), "dO", "o")
    slope = weights * (of.products(size, scores.shape, "dO", "v") - mean)
    queries = math.prod(shapes["q"][1:3]) // shapes["k"][1]

    def total(terms: np.ndarray, count: int, *others: str) -> np.ndarray:
        shape = (SIZE, min(count, TERMS))
        found = of.noise.choice(terms.ravel(), shape)
        for other in others:
            found = found * of.chosen(other, shape)
        return found.sum(-1)

    found = {
        "dQ": scale * (slope * of.chosen("k", slope.shape)).sum(-1),
        "dK": scale * total(slope, queries, "q"),
        "dV": total(weights, queries, "dO"),
    }
    if "bias" in arrays:
        scores_of_all = math.prod(shapes["q"][:3]) * shapes["k"][2]
        found["dBias"] = total(slope, scores_of_all // math.prod(shapes["bias"]))
    if "sink_token" in arrays:
        of_sink = np.exp(arrays["sink_token"] - stats)
        found["dSink_token"] = -total(of_sink * mean[:, 0], math.prod(shapes["q"][::2]))
    return found


def _scores(of: Sampled) -> np.ndarray:
    """Those of some queries, from the first to the last, -inf where a key is not seen."""
    (*_, queries, size), keys, band = of.shapes["q"], of.shapes["k"][2], of.node.band
    i, j = np.linspace(0, queries - 1, SIZE).round()[:, None], np.arange(keys)
    lengths = [
        of.arrays.get(name, np.full(SIZE, whole))[:, None]
        for name, whole in (("seq_len_q", queries), ("seq_len_kv", keys))
    ]
    scores = of.node.attn_scale * of.products(size, (SIZE, keys), "q", "k")
    if "bias" in of.arrays:
        scores = scores + of.chosen("bias", scores.shape)
    seen = (i < lengths[0]) & (j < lengths[1])
    at = i + (lengths[1] - lengths[0]) * band.bottom_right
    if band.left is not None:
        seen &= j > at - band.left
    if band.right is not None:
        seen &= j <= at + band.right
    return np.where(seen, scores, -np.inf)
