"""Checks that a supported Flax is installed; imported before the layers."""

import re

from .._core.errors import LibraryImportError

OLDEST = (0, 12, 8)


def check(version: str) -> None:
    """Raises LibraryImportError for a Flax older than ``OLDEST``."""
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        raise LibraryImportError(
            "Flax is too old for jax_cudnn.flax",
            expected=f">= {'.'.join(map(str, OLDEST))}",
            got=version,
            fix="pip install -U flax",
        )


try:
    from flax import __version__
except ImportError as error:
    raise LibraryImportError(
        "jax_cudnn.flax needs Flax",
        expected=f"flax >= {'.'.join(map(str, OLDEST))}",
        got=f"{type(error).__name__}: {error}",
        fix=f'pip install "flax>={".".join(map(str, OLDEST))}"; only jax_cudnn.flax needs it',
    ) from error
check(__version__)
