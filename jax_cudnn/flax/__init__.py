"""Flax NNX's layers on cuDNN: ``jax_cudnn.flax.Linear`` in the place of ``flax.nnx.Linear``."""

from .._core.errors import LibraryError

try:
    import flax.nnx  # noqa: F401
except ImportError as error:
    raise LibraryError(
        "jax_cudnn.flax needs Flax",
        expected="flax >= 0.12.8",
        got=f"{type(error).__name__}: {error}",
        fix='pip install "jax-cudnn[flax]"; all of jax_cudnn but its layers runs without Flax',
    ) from error

from .accelerate import Report as Report
from .accelerate import accelerate as accelerate
from .attention import MultiHeadAttention as MultiHeadAttention
from .linear import Linear as Linear
from .paged_cache import PagedCache as PagedCache
