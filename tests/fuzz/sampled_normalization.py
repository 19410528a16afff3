"""What the results of normalizations and of their backwards are like, by port."""

from __future__ import annotations

import math

import numpy as np

from .sampled import SIZE, TERMS, Sampled


def results(of: Sampled) -> dict[str, np.ndarray]:
    """Each sample is that of a row of its own."""
    arrays, centred, count = of.arrays, of.node.extent.centred, _row(of)
    rows = of.noise.choice(arrays["input"].astype(np.float64), (SIZE, min(count, TERMS)))
    mean = rows.mean(-1) if centred else np.zeros(SIZE)
    variance = np.square(rows - mean[:, None]).mean(-1)
    with np.errstate(divide="ignore"):
        inv_var = (variance + arrays["epsilon"]) ** -0.5
    y = (rows[:, 0] - mean) * inv_var * arrays["scale"] + arrays.get("bias", 0)
    found = {"Y": y, "mean": mean, "inv_var": inv_var}
    if "momentum" in arrays:
        unbiased = variance * count / max(count - 1, 1)
        for name, new in (("mean", mean), ("var", unbiased)):
            old = arrays[f"in_running_{name}"]
            found[f"next_running_{name}"] = old + arrays["momentum"] * (new - old)
    return found


def gradients(of: Sampled) -> dict[str, np.ndarray]:
    count, noise = min(_row(of), TERMS), of.noise
    shared = math.prod(of.shapes["input"]) // math.prod(of.shapes["scale"])
    wide = {port: x.astype(np.float64) for port, x in of.arrays.items()}
    grad = noise.choice(wide["grad"], (SIZE, max(count, min(shared, TERMS))))
    inv_var = wide["inv_variance"][:, None]
    x = noise.choice(wide["input"], grad.shape)
    xhat = (x - wide.get("mean", np.zeros(SIZE))[:, None]) * inv_var
    slope = (grad * noise.choice(wide["scale"], grad.shape))[:, :count]
    row = xhat[:, :count]
    dx = slope - (slope * row).mean(-1, keepdims=True) * row
    dx = dx - slope.mean(-1, keepdims=True) * of.node.extent.centred

    def total(terms: np.ndarray) -> np.ndarray:
        terms = terms[:, : min(shared, TERMS)]
        unknown = np.std(terms) / math.sqrt(SIZE) * noise.standard_normal(SIZE)
        return (terms.mean(-1) + unknown) * shared  # the sample's mean is not that of the tensor

    dscale = total(grad * noise.permuted(xhat))
    return {"DX": (inv_var * dx)[:, 0], "DScale": dscale, "DBias": total(grad)}


def _row(of: Sampled) -> int:
    """The elements over which a normalization takes its mean."""
    shape = of.shapes["input"]
    return math.prod(shape[axis] for axis in of.node.extent.reduced(shape, of.shapes["scale"]))
