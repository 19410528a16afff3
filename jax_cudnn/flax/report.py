"""What became of a model's layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One layer of a model, or one function that a module holds.

    Attributes:
        path: where it is, ``blocks.0.attention``; every path for what is in several places.
        name: its class, or the function's name.
        swapped: whether the new model has a layer of this package there.
        why: why not; of a swapped layer, when Flax computes a part of it.
    """

    path: str
    name: str
    swapped: bool
    why: str = ""


@dataclass(frozen=True)
class Report:
    """What :func:`jax_cudnn.flax.accelerate` swapped, and what not and why.

    Attributes:
        entries: layers of Flax, functions for which there is another here, and functions that hold
            a module, in the model's order. Modules of the user's are none: what they hold is.

    Example:
        >>> import jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> _, report = jnn.accelerate(nnx.Embed(3, 4, rngs=nnx.Rngs(0)))
        >>> [(entry.name, entry.why) for entry in report.kept]
        [('Embed', 'there is no such layer here')]
    """

    entries: tuple[Entry, ...]

    @property
    def swapped(self) -> tuple[Entry, ...]:
        """Those with a layer of this package."""
        return tuple(entry for entry in self.entries if entry.swapped)

    @property
    def kept(self) -> tuple[Entry, ...]:
        """Those that are as they were."""
        return tuple(entry for entry in self.entries if not entry.swapped)

    def to_json(self) -> list[dict[str, Any]]:
        """The entries as plain data."""
        return [asdict(entry) for entry in self.entries]

    def __str__(self) -> str:
        """A table, and the numbers of layers below it."""
        head = ("path", "class", "swapped", "why")
        rows = [(e.path, e.name, "yes" if e.swapped else "no", e.why) for e in self.entries]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join((*lines, f"{len(self.swapped)} swapped, {len(self.kept)} kept"))
