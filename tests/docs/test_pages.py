"""README, docs/, notebooks and site: what they show runs, and what they name exists."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph import trace
from jax_cudnn._core.graph.node import registry
from jax_cudnn._core.plans import plans, support
from jax_cudnn.interop import built, cache, pygraph, wrapper

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICK = {"graphs.md", "many_gpus.md", "plans_and_cache.md", "sharp_bits.md"}
# What a page says that a line of its code prints, up to a colon.
_PRINTED = re.compile(r"^print\(.*\)  # ([\d(\[TF].*?)(?::.*)?$", re.M)
# An absolute path of two parts or more.
_PATH = re.compile(r"(?<![\w.:<])/\w[\w.-]*/\w")
# What plans say that are of no GPU of the process, which goes by its long name, NVIDIA H200.
_PROFILE = re.compile(r"\b(on|for) H200\b")


def blocks(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.S)


def run(code, names):
    for block in code:
        exec(block, names)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in QUICK else pytest.mark.long)
        for page in PAGES
        if blocks(f"docs/{page}") and page != "adding_an_operation.md"
    ],
)
def test_examples_of_a_page_run_in_order(page, capsys):
    names, code = {}, blocks(f"docs/{page}")
    run(code, names)
    assert {"jax", "jnp", "jc"} <= {*names}, "a page begins with its imports"
    printed = iter(capsys.readouterr().out.splitlines())
    assert [text for block in code for text in _PRINTED.findall(block) if text not in printed] == []


@pytest.mark.deviceless
def test_an_operation_is_added_by_one_file_and_one_line(tmp_path):
    """As the page does it, to a copy of the package."""
    package = Path(jc.__file__).parent
    shutil.copytree(package, tmp_path / "jax_cudnn", ignore=shutil.ignore_patterns("__pycache__"))
    added, line, used = blocks("docs/adding_an_operation.md")
    for block, mode in ((added, "x"), (line, "a")):
        path = re.match(r"# (jax_cudnn/\S+)\n", block).group(1)
        with open(tmp_path / path, mode) as file:
            file.write(block)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = [sys.executable, "-c", used]
    out = subprocess.run(run, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    assert out.stdout.decode().split("\n")[:-1] == _PRINTED.findall(used)


@pytest.mark.parametrize("page", PAGES)
def test_names_on_a_page_exist(page):
    text = (ROOT / "docs" / page).read_text()
    for module, name in set(re.findall(r"\b(jc|jnn)((?:\.[A-Za-z_]\w*)+)", text)):
        found = jc if module == "jc" else jc.flax
        for part in name.split(".")[1:]:
            found = getattr(found, part)
    assert {*re.findall(r"`g\.(\w+)", text)} <= {*registry()}
    assert {*re.findall(r"`plan\.(\w+)", text)} <= {*dir(jc.Plan), *jc.Plan.__dataclass_fields__}


@pytest.mark.parametrize(
    "module", [trace, plans, support, built, cache, pygraph, wrapper], ids=lambda m: m.__name__
)
def test_docstring_examples_run(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert result.failed == 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_its_script_with_outputs(path):
    jupytext = pytest.importorskip("jupytext")
    notebook, script = (jupytext.read(path.with_suffix(kind)) for kind in (".ipynb", ".py"))
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in script.cells
    ]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    shown = [out for cell in cells for out in cell.outputs]
    assert shown
    assert not [out for out in shown if out.output_type == "error" or out.get("name") == "stderr"]
    assert any("image/" in kind for out in shown for kind in out.get("data", {})), "no picture"
    held = ([x for kind, x in out.get("data", {}).items() if "image/" not in kind] for out in shown)
    texts = [out.get("text", "") or str(x) for out, x in zip(shown, held, strict=True)]
    assert not [text for text in texts if _PATH.search(text)]
    if "with planned():" in path.with_suffix(".py").read_text():
        assert not [text for text in texts if _PROFILE.search(text)], (
            "run it on a GPU, and write it"
        )


README = (ROOT / "README.md").read_text()


@pytest.mark.deviceless
def test_examples_run_in_order_and_print_what_is_shown(capsys):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(block, names)
    assert names["fast"].layers[0].scale is names["model"].layers[0].scale
    assert names["capped"].shape == names["q"].shape
    assert names["packed"].shape == names["tokens"].shape
    assert names["gradients"]["down"].any()
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.S)
    printed = capsys.readouterr().out.splitlines()
    assert shown.splitlines() == printed[-9:]


def test_readme_leads_to_every_page():
    pages = [path.name for path in (ROOT / "docs").glob("[!i]*.md")]
    assert [page for page in pages if f"(docs/{page})" not in README] == []


def test_files_that_build_and_core_name_exist():
    files = {path.name for path in ROOT.rglob("*") if path.suffix in (".py", ".cc", ".h", ".json")}
    for page in ("BUILD.md", "jax_cudnn/_core/README.md", "docs/decisions.md"):
        named = re.findall(r"\b(\w+\.(?:py|cc|h))\b", (ROOT / page).read_text())
        assert named
        assert {*named} <= files, page


def test_code_that_decisions_name_exists():
    package, members, bases = ROOT / "jax_cudnn", {}, {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base) for base in node.bases]
                members.setdefault(node.name, set()).update(
                    getattr(part, "name", getattr(part, "id", getattr(part, "attr", "")))
                    for part in ast.walk(node)
                )
    text = (ROOT / "docs" / "decisions.md").read_text()
    named = re.findall(r"`([A-Z]\w+)\.(\w+)", text)
    kinds = lambda name: {name}.union(*map(kinds, bases.get(name, ())))  # noqa: E731
    missing = [
        f"{name}.{member}"
        for name, member in named
        if member not in set().union(*(members.get(kind, ()) for kind in kinds(name)))
    ]
    folders = re.findall(r"`((?:_core|ops|interop|acceleration|flax)/[\w/]*[\w*.]*)`", text)
    assert not missing
    assert folders
    assert [path for path in folders if not (package / path).exists()] == []


def test_readme_and_build_are_short():
    assert README.count("\n") <= 150
    assert len(README.encode()) <= 10_000
    assert (ROOT / "BUILD.md").read_text().count("\n") <= 250


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
    assert [method for method in registry() if f"\n## g.{method}\n" not in page] == []


def test_the_navigation_holds_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert [page for page in pages if f" {page}\n" not in navigation] == []
