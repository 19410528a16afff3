"""What the notebooks share: random arrays, a check of results, times and pictures."""

import contextlib
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import jax_cudnn as jc

on_gpu = jax.default_backend() == "gpu"
COLORS = {"cuDNN": "#76b900", "XLA": "#c9cdd2"}
_random = np.random.default_rng(0)


def planned():
    """A context in which plans are made for this machine's GPU or, without one, for an H200."""
    return contextlib.nullcontext() if on_gpu else jc.target("H200")


def normal(shape, dtype=jnp.float32):
    """Normally distributed values, the same in each run."""
    return jnp.asarray(_random.standard_normal(shape), dtype)


def aval(shape, dtype="bfloat16"):
    """The shape and dtype of an array, which planning needs in place of its values."""
    return jax.ShapeDtypeStruct(shape, dtype)


def check(got, want, tolerance=1e-2):
    """Prints the relative error in the 2-norm, which must be below the tolerance."""
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < tolerance, error
    print(f"{error:.1e}")


def seconds(functions, *arrays, runs=20, rounds=5):
    """The time of one call of each compiled function: the best of several alternating rounds."""
    compiled = {name: jax.jit(function) for name, function in functions.items()}
    for function in compiled.values():
        jax.block_until_ready(function(*arrays))
    best = dict.fromkeys(compiled, np.inf)
    for _ in range(rounds):
        for name, function in compiled.items():
            began = time.perf_counter()
            for _ in range(runs):
                result = function(*arrays)
            jax.block_until_ready(result)
            best[name] = min(best[name], (time.perf_counter() - began) / runs)
    return best


def bars(times, title):
    """Horizontal bars of ``{name: seconds}``, each with its value."""
    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.4 * len(times)))
    values = [1e6 * value for value in times.values()]
    colors = [COLORS["XLA" if name in ("XLA", "Flax") else "cuDNN"] for name in times]
    drawn = axes.barh([*times], values, color=colors)
    axes.bar_label(
        drawn, [f"{value:,.0f}" if value > 99 else f"{value:.1f}" for value in values], padding=3
    )
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="microseconds, less is better", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    plt.show()


def draw(plans):
    """A row for each plan, a box for each segment, in the order in which they run.

    ``plans`` is a plan or ``{name: plan}``. Each box lists its operations, the bytes it reads and
    writes, and the shortest time that the GPU's peak rates allow.
    """
    plans = {plans.name: plans} if isinstance(plans, jc.Plan) else dict(plans)
    rows = [(name, plan.explain().to_json()["segments"]) for name, plan in plans.items()]
    lines = [max(len(_listed(s)) for s in segments) for _, segments in rows]
    columns = max(2, *(len(segments) for _, segments in rows))
    figure, axes = plt.subplots(figsize=(2.5 * columns + 0.5, sum(lines) * 0.19 + len(rows) * 0.45))
    top = 0.0
    for (name, segments), count in zip(rows, lines, strict=True):
        axes.text(0, top - 0.7, name, weight="bold", va="center")
        top -= 1.4
        for column, segment in enumerate(segments):
            color, text = COLORS[segment["runs_on"]], "\n".join(_listed(segment))
            box = Rectangle((column, top - count - 0.4), 0.9, count + 0.4, color=color)
            axes.add_patch(box)
            axes.text(column + 0.45, top - count / 2 - 0.2, text, ha="center", va="center", size=8)
            if column:
                middle = top - count / 2 - 0.2
                axes.annotate("", (column, middle), (column - 0.1, middle), arrowprops=_ARROW)
        top -= count + 0.8
    axes.set(xlim=(-0.05, columns), ylim=(top, 0))
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    plt.show()


_ARROW = {"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0}


def _listed(segment):
    """The lines of a segment's box."""
    operations = [name.rsplit("::", 1)[-1] for name in segment["operations"]]
    if len(operations) > 6:
        operations = [*operations[:5], f"and {len(operations) - 5} more"]
    megabytes = (segment["reads_bytes"] + segment["writes_bytes"]) / 1e6
    seconds = segment["roofline_seconds"]  # None where the GPU's rates are not known
    least = "" if seconds is None else f", at least {1e6 * seconds:.2g} us"
    return [segment["runs_on"], *operations, f"{megabytes:.3g} MB{least}"]
