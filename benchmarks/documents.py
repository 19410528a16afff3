"""What the docs show of the results, and whether they still do."""

from __future__ import annotations

import difflib
import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jax_cudnn._core.errors import GraphError

from . import ROOT, cross_entropy, float8, many_gpus, quantized, ragged
from .attention.tables import render as render_attention
from .auto.tables import render as render_auto
from .before_after import render as render_one_gpu
from .cases.tables import render as render_cases
from .cases.tables import render_host
from .collectives import render as render_collectives
from .flax.tables import render as render_flax
from .flax.tables import render_one_line, render_sentence
from .norms.tables import render as render_norms
from .public_models import render as render_models
from .steps.tables import render as render_steps
from .tested import render as render_tested
from .tracing import render as render_tracing
from .tuning import render as render_tuning

RESULTS = Path(__file__).parent / "results"
PAGE, OPERATIONS = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "operations.md"
PICTURE, OVERVIEW = RESULTS / "h200.svg", RESULTS / "overview.svg"
SHOWN: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
    ("bench", "h200", render_host),
    ("cases", "h200", render_cases),
    ("steps", "steps_h200", render_steps),
    ("flax", "flax_h200", render_flax),
    ("norms", "norms_h200", render_norms),
    ("attention", "attention_h200", render_attention),
]
"""Between which marks of the page the table of which result stands."""

_HELD = {"bench": "host"}
_LANGUAGE_MODELS = {
    module.__name__.rpartition(".")[2]: module.render
    for module in (ragged, cross_entropy, quantized, float8)
}


def committed(name: str) -> Path:
    return RESULTS / f"{name}.json"


def autos() -> list[Path]:
    """The committed results of ``auto``; README's picture and the page show the last one."""
    return sorted(RESULTS.glob("auto_*.json"))


def several() -> list[Path]:
    """The committed results of ``many_gpus``."""
    return sorted(RESULTS.glob("many_gpus_*.json"))


def read(path: Path) -> dict[str, Any]:
    """A result; GraphError where a file is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _no_result(path, repr(error)) from error
    if not isinstance(result, dict) or "environment" not in result:
        raise _no_result(path, "JSON of another kind")
    return result


def printed(path: Path) -> str:
    """The tables of one result."""
    held = read(path)
    try:
        if "summary" in held:
            return render_auto(held)
        if "starts" in held:
            return render_tuning(held)
        for name, rendered in _LANGUAGE_MODELS.items():
            if path.stem.startswith(name):
                return rendered(held)
        shown = [rendered(held) for mark, _, rendered in SHOWN if _HELD.get(mark, mark) in held]
    except (AttributeError, KeyError, TypeError) as error:
        raise _no_result(path, repr(error)) from error
    return "\n\n".join(shown)


def _no_result(path: Path, got: str) -> GraphError:
    return GraphError(
        f"{path} does not hold a result",
        expected="the JSON that `python -m benchmarks run` writes",
        got=got,
    )


def tables() -> Iterator[tuple[Path, str, str]]:
    """The pages with the marks and the tables between them."""
    for mark, name, rendered in SHOWN:
        yield PAGE, mark, rendered(read(committed(name)))
    for name, rendered in _LANGUAGE_MODELS.items():
        yield PAGE, name, rendered(read(committed(f"{name}_h200")))
    yield ROOT / "docs" / "testing.md", "tested", render_tested(RESULTS)
    for file in autos()[-1:]:
        yield PAGE, "auto", render_auto(read(file))
    for file in sorted(RESULTS.glob("tuning_*.json"))[-1:]:
        yield PAGE, "tuning", render_tuning(read(file))
    steps = read(committed("flax_h200"))
    yield ROOT / "README.md", "steps", render_sentence(steps)
    page = ROOT / "docs" / "accelerate.md"
    yield page, "one line", render_one_line(steps)
    yield page, "models", render_models(read(committed("public_models_h200")))
    yield page, "tracing", render_tracing(read(committed("tracing")))
    page = ROOT / "docs" / "many_gpus.md"
    yield page, "collectives", render_collectives(read(committed("collectives_h200")))
    yield page, "one gpu", render_one_gpu(read(committed("one_gpu_h200")))
    for file in several():
        yield page, "many gpus", many_gpus.render(read(file))


def placed(document: Path, mark: str, shown: str, check: bool) -> str:
    """Puts a text between the marks of a document, or with ``check`` says how it differs."""
    text = document.read_text(encoding="utf-8")
    found = re.search(rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", text, re.S)
    if found is None:
        raise GraphError(
            f"{document} has no place for this table",
            expected=f"a line <!-- {mark} -->, and after the table a line <!-- /{mark} -->",
        )
    begin, end = found.span(1)
    return written(document, f"{text[:begin]}{shown}\n{text[end:]}", check)


def written(file: Path, text: str, check: bool) -> str:
    """Writes a file, or with ``check`` says how it differs."""
    old = file.read_text(encoding="utf-8") if file.exists() else ""
    if check:
        return "\n".join(
            difflib.unified_diff(
                old.splitlines(), text.splitlines(), str(file), "generated", lineterm=""
            )
        )
    file.write_text(text, encoding="utf-8")
    return ""


def picture(check: bool) -> str:
    """Draws the pictures, or with ``check`` says whether the text of one would be another: each
    version of matplotlib draws its own lines."""
    from . import overview, plot

    different = []
    results = {name: read(committed(name)) for _, name, _ in SHOWN}

    def draw_overview() -> None:
        if autos():
            overview.plot_auto(read(autos()[-1]), drawn)
        else:
            overview.plot(results, drawn)

    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "drawn.svg"
        pictures = [(PICTURE, lambda: plot.plot(results["h200"], drawn)), (OVERVIEW, draw_overview)]
        for file in several():
            draw = functools.partial(many_gpus.plot, read(file), drawn)
            pictures.append((file.with_suffix(".svg"), draw))
        for file, draw in pictures:
            draw()
            new = drawn.read_text(encoding="utf-8")
            if not check:
                file.write_text(new, encoding="utf-8")
            if not file.exists() or _words(new) != _words(file.read_text(encoding="utf-8")):
                different.append(f"{file} is not what its result gives")
    return "\n".join(different)


def _words(svg: str) -> list[str]:
    return re.findall(r">([^<>]+)</text>", svg)
