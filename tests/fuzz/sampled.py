"""A node with samples at its ports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_cudnn._core.graph.dims import Shape

SIZE = 64
"""Elements of a sample."""
TERMS = 4096
"""At most so many of a sum are drawn for its sample."""


@dataclass(frozen=True)
class Sampled:
    """A node, the samples at its input ports, the shapes of the tensors at all ports, and where
    random choices come from."""

    node: Any
    arrays: Mapping[str, np.ndarray]
    shapes: Mapping[str, Shape]
    noise: np.random.Generator

    def chosen(self, port: str, shape: Shape) -> np.ndarray:
        """Elements of a port's sample."""
        return self.noise.choice(self.arrays[port], shape)

    def products(self, count: int, shape: Shape, *ports: str) -> np.ndarray:
        """Sums of so many products, of elements of the sample at each port."""
        samples = [self.arrays[port] for port in ports]
        scale = math.sqrt(count * math.prod(map(mean_square, samples)))
        mean = count * math.prod(float(np.mean(sample)) for sample in samples)
        spread = math.sqrt(max(scale * scale - mean * mean / count, 0.0))
        return mean + spread * self.noise.standard_normal(shape)


def mean_square(sample: np.ndarray) -> float:
    return float(np.mean(np.square(sample))) + 1e-12
