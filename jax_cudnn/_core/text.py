"""Text for people: tables, bytes, seconds, and the shapes of tensors."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from .graph.spec import Tensor


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> Iterator[str]:
    """The lines of a table: the first ``left`` columns to the left (all, without that), the others
    to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        in_left = len(widths) if left is None else left
        cells = (cell.ljust(w) if i < in_left else cell.rjust(w) for i, (cell, w) in pairs)
        yield "  ".join(cells).rstrip()


def wrapped(text: str, indent: str = "") -> str:
    """Lines of at most 100 characters, those after the first indented by two more."""
    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=f"{indent}  ")


def size(count: int) -> str:
    """Bytes, in MB from one million on."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count:,} bytes"


def microseconds(seconds: float) -> str:
    """Seconds in microseconds, with two digits or more."""
    return f"{seconds * 1e6:,.1f}" if seconds >= 1e-6 else f"{seconds * 1e6:.2g}"


def shape(tensor: Tensor) -> str:
    """A tensor's dtype and sizes as JAX prints them: ``bf16[8,64]``."""
    dtype = re.sub(r"(?<=u)int|(?<=i)nt|(?<=f)loat", "", tensor.dtype)
    return f"{dtype}[{','.join(map(str, tensor.shape))}]"
