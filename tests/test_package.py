"""The package as a whole: what importing it needs, and its layers."""

import ast
import fnmatch
import graphlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from helpers import python

import jax_cudnn as jc
from jax_cudnn._core.graph.node import Algebra, Node
from jax_cudnn._core.graph.planned import Anchor, Edge, Planned

PACKAGE = Path(jc.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_import_loads_no_backend_no_cudnn_and_nothing_before_it_is_asked_for():
    python("""
        import sys, jax
        before = set(sys.modules)
        import jax_cudnn as jc
        from jax._src import xla_bridge
        assert not xla_bridge._backends
        loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert not loaded & {"cudnn", "flax", "torch", "triton", "nvidia", "matplotlib"}, loaded
        own = {name for name in {*sys.modules} - before if name.startswith("jax_cudnn.")}
        assert len(own) <= 28, own  # a tenth of JAX's import time would be about 70
        assert [name for name in own if name.startswith("jax_cudnn.ops.")] == []
        from jax_cudnn._core import lazy
        assert not {f"jax_cudnn.{home}" for home in lazy.HOMES.values()} & {*sys.modules}
        assert all(getattr(jc, name).__name__ == name for name in lazy.HOMES)
        assert not hasattr(jc, "nothing")
        relu = jc.graph(lambda g, x: g.relu(x), implementation="xla")
        jc.plan(relu, jax.ShapeDtypeStruct((8,), "float32"), gpus=["H200"])
        assert not xla_bridge.backends_are_initialized()
    """)


def test_python_without_docstrings_imports_it():
    python("import jax_cudnn as jc; jc.ops.matmul", "-OO")


def test_names_of_operations_are_the_same_for_tools_and_at_run_time():
    tree = ast.parse(Path(jc.ops.__file__).read_text())
    (types,) = [n for n in tree.body if isinstance(n, ast.If)]
    said = {(n.module, name.asname) for n in types.body for name in n.names}
    assert said == {(home, name) for name, home in jc.ops._HOME.items()} | {(None, "score_mods")}


def test_public_names_alone_are_shown():
    import jax_cudnn.ops.attention

    assert jc.__version__[0].isdigit()
    assert {"ops", "flax", "plan", "graph"} <= {*dir(jc)}
    assert not {"TYPE_CHECKING", "_core"} & {*dir(jc)}
    with pytest.raises(AttributeError, match="there is dot_product_attention"):
        _ = jax_cudnn.ops.attention
    with pytest.raises(AttributeError, match=r"did you mean jax_cudnn.flax.report\?"):
        _ = jc.report
    assert repr(jc.target("H200")) == "<jax_cudnn context: H200>"
    rooms = [jc.ops, jc.ops.score_mods, *([jc.flax] if importlib.util.find_spec("flax") else [])]
    for room in rooms:
        shown = {name for name in dir(room) if inspect.ismodule(getattr(room, name))}
        assert shown <= {"score_mods"}
        assert not any(name.startswith("_") for name in dir(room))


def test_a_missing_broken_or_too_old_frontend_is_named(monkeypatch, tmp_path):
    pytest.importorskip("cudnn")
    from jax_cudnn._core.planning import frontend

    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(jc.LibraryError) as caught:
            frontend._load()
    assert "pip install 'jax-cudnn[cuda12]'" in str(caught.value)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/none:{tmp_path}/")
    advice = frontend._repair(f"{tmp_path}//libcudnn.so.9")
    assert advice.endswith(f"or remove {tmp_path} from LD_LIBRARY_PATH")
    assert frontend._repair("/other/libcudnn.so.9") == frontend.INSTALL
    for check, found, words in (
        (frontend.check_cudnn, [90100], ["9.1.0", "9.19.0", "pip install -U"]),
        (frontend.check_frontend, ["1.5.0", "somewhere"], ["1.5.0", ">= 1.28"]),
    ):
        with pytest.raises(jc.LibraryError) as caught:
            check(*found)
        assert all(word in str(caught.value) for word in words)


# What each room may import of the package besides itself. The core names no op.
ALLOWED = {
    "_core": set(),
    "ops": {"_core"},
    "acceleration": {"ops", "_core"},
    "interop": {"ops", "_core"},
    "flax": {"acceleration", "ops", "_core"},
    "commands": {"ops", "_core"},
}


def imports(path):
    """Absolute names of what a module imports, also inside functions, but not for types alone."""
    parts = ("jax_cudnn", *path.relative_to(PACKAGE).with_suffix("").parts)
    tree = ast.parse(path.read_text())
    of_types = lambda n: isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"  # noqa: E731
    tree.body = [node for node in tree.body if not of_types(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else ()
            module = ".".join((*base, *(node.module or "").split("."))).strip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_imports_flow_one_way():
    wrong = []
    for path in MODULES:
        room = path.relative_to(PACKAGE).parts[0]
        if room.endswith(".py"):
            assert room in ("__init__.py", "__main__.py"), f"{room} belongs into a room"
            continue
        rooms = {name.split(".")[1] for name in imports(path) if name.startswith("jax_cudnn.")}
        wrong += [f"{path} imports {other}" for other in rooms - {room} - ALLOWED[room]]
    assert not wrong


def test_the_contract_of_a_node_is_small():
    said = {name for part in (Planned, Node) for name in (*vars(part), *part.__annotations__)}
    assert len({name for name in said if not name.startswith("_")}) <= 30
    parts = [v for part in (Planned, Node) for v in vars(inspect.getmodule(part)).values()]
    values = {v for v in parts if isinstance(v, type) and hasattr(v, "_fields")}
    assert {Algebra, Anchor, Edge} <= values
    assert sum(len(value._fields) for value in values) <= 68


FLOORS = {
    "values": "errors reasons compat mesh_compat cuda package settings user_context lazy text "
    "graph graph.dims graph.dtypes graph.options graph.planned graph.source graph.spec "
    "graph.promotion",
    "nodes": "graph.node graph.record",
    "graphs": "graph.layout graph.merging graph.boundary graph.tensor graph.arguments "
    "graph.builder graph.reference graph.xla_form graph.by_reference primitive",
    "transformations": "transforms transforms.* rules",
    "stores": "store store.* job",
    "planning": "context planning planning.*",
    "running": "ffi execution agreement operands trials candidates cuda_graphs tuning auto",
    "sharding": "sharding sharding.* partition",
    "tracing": "registrations graph.trace",
    "plans": "plans plans.* inspection inspection.*",
}
"""The modules of the core, from bottom to top: none imports from a higher floor, also inside of
functions."""
NAMES = {
    ".".join(("jax_cudnn", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in MODULES
}


def module_imports(module):
    """The modules of the package that one of them imports, without the package itself."""
    for name in imports(NAMES[module]):
        found = name if name in NAMES else name.rpartition(".")[0]
        if found in NAMES and found not in (module, "jax_cudnn"):
            yield found


def test_no_file_is_long():
    """Lines, at most: of a file of the package, and of the executor."""
    folder = Path(jc.__file__).parent
    count = {path: len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    assert {path.name: lines for path, lines in count.items() if lines > 400} == {}
    executor = [path for kind in ("*.cc", "*.h") for path in (folder / "csrc").glob(kind)]
    if executor:  # sources are not in the wheel
        assert sum(len(path.read_text().splitlines()) for path in executor) <= 900


def test_nothing_in_the_core_imports_upwards():
    def floor(module):
        own = module.removeprefix("jax_cudnn._core.")
        (found,) = (
            i
            for i, text in enumerate(FLOORS.values())
            if any(fnmatch.fnmatchcase(own, pattern) for pattern in text.split())
        )
        return found

    core = [name for name in NAMES if name.startswith("jax_cudnn._core.")]
    pairs = [(m, other) for m in core for other in module_imports(m) if other in core]
    assert [(m, other) for m, other in pairs if floor(m) < floor(other)] == []


def test_few_modules_import_by_a_computed_name():
    """Which no other test sees: a public name on first use, nodes, what a store or a worker names,
    a user's module, and cuDNN's frontend where it must not be needed."""
    found = [p for p in MODULES if re.search("import_module|__import__|run_module", p.read_text())]
    lazy = "ops/__init__ _core/lazy _core/graph/node _core/graph/record commands/functions "
    lazy += "commands/facts _core/planning/deviceless/worker"
    assert {*found} == {PACKAGE / f"{name}.py" for name in lazy.split()}


def test_no_module_imports_itself_through_others():
    graph = graphlib.TopologicalSorter({name: {*module_imports(name)} for name in NAMES})
    graph.prepare()  # raises CycleError, which names the modules


def test_only_two_modules_use_jax_internals():
    """And is seen to use them."""
    internal = ("jax._src", "jaxlib")
    using = [path for path in MODULES if any(name.startswith(internal) for name in imports(path))]
    assert using == [PACKAGE / "_core" / name for name in ("compat.py", "mesh_compat.py")]
