"""README's picture: the times of the alternatives, divided by those of jax_cudnn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .case import BACKWARD, FORWARD, OURS, TRAINING
from .plot import drawing
from .tables import medians

XLA, JAX_NN, TORCH = "plain JAX (XLA)", "jax.nn, cuDNN attention", "PyTorch"
_COLORS = {XLA: "#9aa0a6", JAX_NN: "#4285c8", TORCH: "#e8833a"}
_NOT_COMPARED = ("cuDNN", "copy")  # jax_cudnn with one option; what a copy of the bytes takes
_STEP = "forward and backward"
_EXAMPLES = "gradient of each example"
_BOTH = (TRAINING, BACKWARD)


class Row(NamedTuple):
    label: str
    result: str
    suite: str
    case: str
    programs: Sequence[str] = ()  # whose times are added


_ATTENTION, _CASES = ("attention_h200", "attention"), ("h200", "cases")
_STEPS, _FLAX = ("steps_h200", "steps"), ("flax_h200", "flax")
ROWS = (
    Row("attention: decode, paged cache", *_ATTENTION, "paged/64x8192x64-8x128", (FORWARD,)),
    Row("attention: packed sequences", *_ATTENTION, "packed/8x4096x32-8x128", _BOTH),
    Row("attention: softcap (score_mod)", *_ATTENTION, "softcap/1x4096x32-8x128", _BOTH),
    Row("attention: causal", *_ATTENTION, "causal/1x8192x64-8x128", _BOTH),
    Row("attention: float8 (others bfloat16)", *_ATTENTION, "float8/1x8192x64-8x128", _BOTH),
    Row("3-D convolution, forward", *_CASES, "unet3d/3x3x3-64-at-64/fprop"),
    Row("1x1 + bias + GELU, forward", *_CASES, "convnext/pointwise-96-384-at-56/bias-gelu"),
    Row("float8 matmul, forward", *_CASES, "mlp/4096x4096x4096/fp8"),
    Row("RMS norm, 8192x4096", "norms_h200", "norms", "rms_norm/8192x4096", _BOTH),
    Row("per-example gradients of a CNN", *_STEPS, "per-example/batch-64", (_EXAMPLES,)),
    Row("MLP, 4096-16384", *_STEPS, "mlp/8192x4096x16384", (_STEP,)),
    Row("ResNet-50, training step", *_FLAX, "resnet50/batch-256"),
    Row("ViT-B/16, training step", *_FLAX, "vit-b-16/batch-256"),
    Row("GPT-2 124M, training step", *_FLAX, "gpt2-124m/32x1024"),
)


def ratios(row: Row, result: Mapping[str, Any]) -> dict[str, float]:
    """By alternative: its fastest side's time, divided by ours."""
    entry = result[row.suite][row.case]
    if "sides" in entry:
        sides = {name: side["ms"]["median"] for name, side in entry["sides"].items()}
        ours = sides.pop("accelerate")
    else:
        found = [entry["programs"][name] for name in row.programs] or [entry]
        times = [medians(program) for program in found]
        everywhere = set.intersection(*(set(time) for time in times))
        sides = {side: sum(time[side] for time in times) for side in everywhere}
        ours = sides[OURS]
        if "over_ours" in found[0]:  # of a step: its reference is not what one writes without us
            return {XLA: found[0]["over_ours"]["XLA"]["median"]}
    fastest: dict[str, float] = {}
    for side, time in sides.items():
        if side not in _NOT_COMPARED and not side.startswith(OURS):
            kind = _kind(side)
            fastest[kind] = min(time / ours, fastest.get(kind, float("inf")))
    return {kind: fastest[kind] for kind in _COLORS if kind in fastest}


def _kind(side: str) -> str:
    if side.startswith("torch"):
        return TORCH
    return JAX_NN if side.endswith(("jax.nn cudnn", "cuDNN attention")) else XLA


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Writes an SVG: for each row a bar for each alternative.

    Raises LibraryError without matplotlib.
    """
    y, places, e = 0.0, [], results["h200"]["environment"]
    with drawing(path, (8, 6.4)) as axes:
        for row in ROWS:
            found = ratios(row, results[row.result])
            places.append(y + (len(found) - 1) / 2)
            for kind, ratio in found.items():
                # From the line at 1: right of it jax_cudnn is faster, left of it slower.
                axes.barh(y, ratio - 1, left=1, height=0.85, color=_COLORS[kind])
                end, side = (ratio * 1.03, "left") if ratio >= 1 else (ratio / 1.03, "right")
                axes.text(end, y, f"{ratio:.2f}", va="center", ha=side, fontsize=7)
                y += 1
            y += 0.7
        for kind, color in _COLORS.items():
            axes.barh(0, 0, left=1, color=color, label=kind)
        axes.legend(loc="lower right", frameon=False)
        axes.axvline(1, color="black", lw=0.8)
        axes.set_xscale("log")
        ticks = [0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlim(0.62, 20)
        axes.set_yticks(places, [row.label for row in ROWS])
        axes.set_ylim(y, -1)
        axes.set_xlabel(
            "time of the alternative / time of jax_cudnn (right of 1: jax_cudnn is faster)"
        )
        axes.set_title(f"{e['device']}, bfloat16, cuDNN {e['cudnn']}, jax {e['jax']}", fontsize=8)


def plot_auto(result: Mapping[str, Any], path: Path) -> None:
    """Writes an SVG of a result of ``auto``: a point for each program, a bar for each family.

    Raises LibraryError without matplotlib.
    """
    from .auto.tables import geomean, lines

    e, families = result["environment"], {}
    for line in filter(lambda line: line.counts, lines(result)):
        families.setdefault(line.family, []).append(line.program["ratio"])
    families["all"] = [ratio for each in families.values() for ratio in each]
    with drawing(path, (8, 1.0 + 0.62 * len(families))) as axes:
        for row, values in enumerate(families.values()):
            mean = geomean(values) or 1.0
            axes.barh(row, mean - 1, left=1, height=0.75, color=_COLORS[JAX_NN], alpha=0.35)
            # Spread over the bar's height in a fixed order, so that equal ratios stay apart.
            at = [row - 0.3 + 0.6 * (place * 5 % 8) / 7 for place in range(len(values))]
            axes.plot(sorted(values), at, "o", ms=2.5, color=_COLORS[JAX_NN])
            place = axes.get_yaxis_transform()
            axes.text(1.01, row, f"{mean:.2f}", transform=place, va="center", fontsize=8)
        axes.axvline(1, color="black", lw=0.8)
        axes.set_xscale("log")
        ticks = [0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        largest, least = max(families["all"]), min(families["all"])
        axes.set_xlim(min(0.9, least) / 1.06, max(1.5, largest) * 1.06)
        axes.set_yticks(range(len(families)), [f"{n} ({len(v)})" for n, v in families.items()])
        axes.set_ylim(len(families) - 0.5, -0.5)
        axes.set_xlabel(
            "time of the fastest plain JAX / time of jax_cudnn (right of 1: jax_cudnn is faster); "
            "bars: geometric means"
        )
        axes.set_title(
            f"{e['device']}, {e['date']}, cuDNN {e['cudnn']}, jax {e['jax']}", fontsize=8
        )
