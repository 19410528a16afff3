"""The documentation site: its API reference, and that each page is in the navigation."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from jax_cudnn._core.graph.node import REGISTRY

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks.reference()


@pytest.mark.parametrize("name", ["", ".ops", ".ops.score_mods", ".flax", ".interop"])
def test_the_reference_holds_every_public_name(name, reference):
    """As ``dir`` says them, where the reference reads sources; mkdocs --strict resolves them."""
    module = importlib.import_module(f"jax_cudnn{name}")
    page = reference[f"api/{module.__name__.rpartition('.')[2]}.md"]
    heads = re.findall(r"^(?:##|:::) ([\w.]+)$", page, re.M)
    shown = {head.rpartition(".")[2] for head in heads}
    found = {key: getattr(module, key) for key in dir(module) if key[0] != "_"}
    if not hasattr(module, "__path__"):  # imports of its own are in dir, too
        found = {k: v for k, v in found.items() if getattr(v, "__module__", "") == module.__name__}
    public = {
        key for key, value in found.items() if callable(value) and not inspect.ismodule(value)
    }
    assert public == shown


def test_the_reference_holds_every_operation(reference):
    page = reference["api/operations.md"]
    assert [method for method in REGISTRY if f"\n## g.{method}\n" not in page] == []


def test_the_navigation_holds_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert [page for page in pages if f" {page}\n" not in navigation] == []
