"""What mkdocs.yml adds to the pages of this folder: the API reference, and files from outside."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    from griffe import Extension
except ImportError:  # tests, which read the reference as Markdown
    Extension: Any = object

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "BUILD.md": "build.md",
    "CHANGELOG.md": "changelog.md",
    "notebooks": "notebooks.md",
}
"""Pages whose source is outside of this folder."""

_HEADS = {
    "interop": "Interfaces of cuDNN for JAX arrays; all of these are also names of `jax_cudnn`.",
    "": "`import jax_cudnn as jc`. The functions with batteries included are in "
    "[`jax_cudnn.ops`](ops.md), Flax's layers in [`jax_cudnn.flax`](flax.md).",
    "ops": "Functions with the argument conventions of `jax.nn`, `jax.lax` and `jax.numpy`.",
    "ops.score_mods": "Functions for the `score_mod=` of `jax_cudnn.ops.dot_product_attention`.",
    "flax": "Subclasses of Flax NNX's layers: the same parameters, initialisers and arguments.",
}


def public(module: str) -> Iterator[tuple[str, str]]:
    """Names that a module of the package exports, as its source states them, and their homes."""
    path = ROOT.joinpath("jax_cudnn", *module.split("."))
    if not path.is_dir():  # a module whose public names are its functions
        tree = ast.parse(path.with_suffix(".py").read_text())
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        yield from ((name, f"{module}.{name}") for name in functions if name[0] != "_")
        return
    for node in ast.walk(ast.parse((path / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            for alias in node.names:
                if alias.asname == alias.name and alias.name[0] != "_":
                    yield alias.name, f"{node.module}.{alias.name}"


def reference() -> dict[str, str]:
    """The pages of the API reference: each public name, in order of the alphabet."""
    pages = {}
    shown: dict[str, str] = {}  # where a name stands that several modules export
    for module, head in _HEADS.items():
        full = f"jax_cudnn.{module}".rstrip(".")
        page = f"api/{module.rpartition('.')[2] or 'jax_cudnn'}.md"
        lines = [f"# {full}", head]
        names = sorted(public(module), key=lambda n: (n[0].endswith("Error"), n[0].lower()))
        for name, home in names:
            path = _path(module, name, home)
            if name in shown and not module:
                lines.append(f"## {name}\n\nSee [`{shown[name]}`][{shown[name]}].")
            else:
                shown[name] = path
                inherited = "\n    options: {inherited_members: true}" * (module == "interop")
                lines.append(f"::: {path}{inherited}")
        pages[page] = "\n\n".join(lines) + "\n"
    return pages | {"api/operations.md": _operations()}


def _path(module: str, name: str, home: str) -> str:
    """What griffe finds by the name; of a module of the same name it would show that."""
    full = f"jax_cudnn.{module}".rstrip(".")
    folder = ROOT.joinpath(*full.split("."))
    shadowed = (folder / f"{name}.py").exists() or (folder / name).is_dir()
    return f"{full}.{home}" if shadowed else f"{full}.{name}"


@functools.cache
def _links() -> dict[str, str]:
    """The anchors of public names: ``jax_cudnn.ops.conv`` as docstrings have it."""
    found = [(module, *each) for module in _HEADS for each in public(module)]
    paths = {name: _path(module, name, home) for module, name, home in reversed(found)}
    return {f"jax_cudnn.{m}.{n}".replace("..", "."): paths[n] for m, n, _ in found}


def _operations() -> str:
    """Each method of ``g``, by its signature and the docstring of its class or function."""
    importlib.import_module("jax_cudnn")
    registry = importlib.import_module("jax_cudnn._core.graph.node").registry()
    signature = importlib.import_module("jax_cudnn._core.graph.arguments").signature
    lines = [
        "# Operations of a graph",
        "The methods of `g`, the first argument of a function under `@jax_cudnn.graph`: those of "
        "`cudnn.pygraph`, with the same keywords. [What runs where](../operations.md) says which "
        "GPUs have an engine for each; [numerics](../numerics.md) how each rounds.",
    ]
    for method, node in sorted(registry.items()):
        shown = re.sub(r": '([^']*)'", r": \1", str(signature(node)))
        options = "    options: {show_root_heading: false, show_signature: false, members: false}"
        lines += [f"## g.{method}", f"```python\ng.{method}{_wrapped(shown)}\n```"]
        lines.append(f"::: {node.__module__}.{node.__qualname__}\n{options}")
    return "\n\n".join(lines) + "\n"


def _wrapped(signature: str) -> str:
    """A signature that is too long for a line with one parameter a line."""
    if len(signature) < 70:
        return signature
    arguments = re.split(r", (?![^\[(]*[\])])", signature[1:-1])
    return "(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"


# -- mkdocs ----------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    sys.path.append(str(ROOT))  # for _operations, behind what is installed
    for uri, text in reference().items():
        files.append(File.generated(config, uri, content=text))
    for source, uri in PAGES.items():
        path = ROOT / source
        text = _notebooks() if path.is_dir() else _inside(path.read_text())
        files.append(File.generated(config, uri, content=text))
    for page in [*files.documentation_pages()]:
        for target in _outside(page.content_string):
            uri = f"files/{target}"
            if target not in PAGES and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    for target in _outside(markdown):
        markdown = markdown.replace(f"](../{target}", f"]({PAGES.get(target, f'files/{target}')}")
    return re.sub(r"^- API: .*(\n  .*)*", _with_links, markdown, flags=re.M)


def _with_links(names: re.Match[str]) -> str:
    """Names of pages of the reference as links, which would lead nowhere in the repository."""
    pages = {f"jax_cudnn.{m}".rstrip("."): m.rpartition(".")[2] or "jax_cudnn" for m in _HEADS}
    pages["g"] = "operations"
    return re.sub(r"`([\w.]+)`", lambda name: f"[{name[0]}](api/{pages[name[1]]}.md)", names[0])


def _outside(markdown: str) -> list[str]:
    """What a page of docs/ links to elsewhere in the repository; the longest first."""
    found = set(re.findall(r"\]\(\.\./([^)#\s]+)", markdown))
    return sorted((t for t in found if t in PAGES or (ROOT / t).is_file()), key=len, reverse=True)


def _inside(markdown: str) -> str:
    """A page from the root of the repository, as if it stood in docs/."""
    markdown = re.sub(r"\]\((?!\w+:|#)", "](../", markdown)
    return markdown.replace("](../docs/", "](")


def _notebooks() -> str:
    """A list of the notebooks by their titles."""
    found = {path.stem: re.search(r"^# # (.*)", path.read_text(), re.M) for path in _scripts()}
    rows = [f"- [{title[1] if title else n}](../notebooks/{n}.ipynb)" for n, title in found.items()]
    return (
        "# Notebooks\n\nMost are executed on a GPU. To run one, keep `helpers.py` next to it.\n\n"
        + "\n".join(rows)
    )


def _scripts() -> list[Path]:
    """Those for training come first, then the introduction."""
    first = ("train_gpt", "train_resnet", "train_on_a_mesh", "train_moe", "introduction")
    order = {name: place for place, name in enumerate(first)}
    scripts = (path.with_suffix(".py") for path in (ROOT / "notebooks").glob("*.ipynb"))
    return sorted(scripts, key=lambda path: (order.get(path.stem, len(order)), path.stem))


# -- docstrings ------------------------------------------------------------------------------------


class Docstrings(Extension):
    """Our docstrings as griffe reads Google's: reST's roles as links, ``Example:`` as a section."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r":(?:func|class|meth|mod|attr):`~?([^`]+)`", _linked, obj.docstring.value)
        obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.M)


def _linked(role: re.Match[str]) -> str:
    name = role[1]
    return f"[`{name}`][{_links()[name]}]" if name in _links() else f"`{name}`"
