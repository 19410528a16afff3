"""Which layers of a model are replaced."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One layer of a model, or one function that a module holds.

    Attributes:
        path: its path in the model, ``blocks.0.attention``; all paths, if it has several.
        name: the name of its class or of the function.
        swapped: whether the accelerated model has a layer of this package there.
        why: why not; for a swapped layer, when Flax computes a part of it.
    """

    path: str
    name: str
    swapped: bool
    why: str = ""


@dataclass(frozen=True)
class Report:
    """The result of :func:`jax_cudnn.flax.report`: the layers that are swapped or kept, and why.

    Attributes:
        entries: in the model's order: layers of Flax and of this package, functions that
            ``jax_cudnn.ops`` could replace, and functions that hold a module. Modules of your own
            have no entry; their layers have.

    Example:
        >>> import jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> report = jnn.report(nnx.Embed(3, 4, rngs=nnx.Rngs(0)))
        >>> [(entry.name, entry.why) for entry in report.kept]
        [('Embed', 'jax_cudnn has no such layer')]
    """

    entries: tuple[Entry, ...]

    @property
    def swapped(self) -> tuple[Entry, ...]:
        """The entries with a layer of this package."""
        return tuple(entry for entry in self.entries if entry.swapped)

    @property
    def kept(self) -> tuple[Entry, ...]:
        """The entries that stay as they are."""
        return tuple(entry for entry in self.entries if not entry.swapped)

    def to_json(self) -> list[dict[str, Any]]:
        """The entries as plain data."""
        return [asdict(entry) for entry in self.entries]

    def __str__(self) -> str:
        """A table, followed by the counts."""
        head = ("path", "class", "swapped", "why")
        rows = [(e.path, e.name, "yes" if e.swapped else "no", e.why) for e in self.entries]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join((*lines, f"{len(self.swapped)} swapped, {len(self.kept)} kept"))
