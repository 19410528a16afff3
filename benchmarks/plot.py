"""The ratios of a result as a picture: bars on a logarithmic scale, the same bytes each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jax_cudnn._core.errors import GraphError, LibraryError
from jax_cudnn._core.package import install
from jax_cudnn.commands.bench import TIMED

_WIN, _LOSS = "#76b900", "#b0b0b0"


def plot(result: dict[str, Any], path: Path) -> None:
    """Writes an SVG: one bar per timed case, whiskers from round to round.

    Raises LibraryError without matplotlib, GraphError when the result has no timed case.
    """
    cases = {n: e for n, e in result.get("cases", {}).items() if e["status"] == TIMED}
    if not cases:
        raise GraphError(
            "there is nothing to plot",
            expected="a result of `python -m benchmarks run cases` with timed cases",
            got=", ".join(result) or "an empty result",
        )
    with drawing(path, (9, 1.2 + 0.24 * len(cases))) as axes:
        _draw(axes, cases, result["environment"])


@contextmanager
def drawing(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """The axes of a picture that is written at the end.

    Raises LibraryError without matplotlib.
    """
    figure_class, svg, context = _matplotlib()
    # Text stays text, and ids do not depend on the run: equal results give equal bytes.
    with context({"svg.hashsalt": "jax_cudnn", "svg.fonttype": "none", "font.size": 8}):
        figure = figure_class(figsize=size, layout="constrained")
        svg(figure)
        yield figure.add_subplot()
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _draw(axes: Any, cases: dict[str, Any], environment: dict[str, Any]) -> None:
    rows = range(len(cases))
    for row, entry in zip(rows, cases.values(), strict=True):
        ratio = entry["ratio"]
        # From the line at 1 to the ratio: on a logarithmic axis a bar has no zero to start at.
        axes.barh(row, ratio - 1, left=1, height=0.7, color=_WIN if ratio >= 1 else _LOSS)
        axes.plot([entry["ratio_min"], entry["ratio_max"]], [row, row], color="black", lw=0.8)
        at_the_right = axes.get_yaxis_transform()
        axes.text(1.01, row, f"{ratio:.2f}", transform=at_the_right, va="center", fontsize=7)
    axes.axvline(1, color="black", lw=0.8)
    axes.set_xscale("log")
    ticks = [0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8]
    low = min(0.5, *(entry["ratio_min"] for entry in cases.values()))
    high = max(2.0, *(entry["ratio_max"] for entry in cases.values()))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low / 1.1, high * 1.1)
    axes.set_yticks(list(rows), list(cases))
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xlabel("time of XLA's best formulation / time of jax_cudnn (right of 1: faster)")
    e = environment
    axes.set_title(f"{e['device']}, {e['date']}, cuDNN {e['cudnn']}, jax {e['jax']}", fontsize=8)


def _matplotlib() -> tuple[Any, Any, Any]:
    """Figure, the SVG canvas and rc_context, without pyplot: no window system is touched."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LibraryError(
            "the picture needs matplotlib", got=str(error), fix=install("bench")
        ) from error
    return Figure, FigureCanvasSVG, rc_context
