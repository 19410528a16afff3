"""The package as a whole: what importing it needs, and its layers."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
from helpers import python

import jax_cudnn as jc

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
        from jax_cudnn._core import later
        assert not {f"jax_cudnn.{home}" for home in later.HOMES.values()} & {*sys.modules}
        assert all(getattr(jc, name).__name__ == name for name in later.HOMES)
        assert not hasattr(jc, "nothing")
        relu = jc.graph(lambda g, x: g.relu(x), implementation="xla")
        jc.plan(relu, jax.ShapeDtypeStruct((8,), "float32"), gpus=["H200"])
        assert not xla_bridge.backends_are_initialized()
    """)


def test_python_without_docstrings_imports_it():
    python("import jax_cudnn as jc; jc.ops.matmul", "-OO")


def test_public_names_alone_are_shown():
    import jax_cudnn.ops.attention

    assert jc.__version__[0].isdigit()
    assert {"ops", "flax", "plan", "graph"} <= {*dir(jc)}
    assert not {"TYPE_CHECKING", "_core"} & {*dir(jc)}
    with pytest.raises(AttributeError, match="did you mean dot_product_attention"):
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


# What each room of the core may import of the other rooms. What stands in the core itself brings
# graphs to JAX, and may import any.
ALLOWED_IN_CORE = {
    "graph": set(),
    "store": set(),
    "job": set(),
    "transforms": {"graph"},
    "planning": {"graph", "store", "job"},
}
CORE = {
    ".".join(path.relative_to(PACKAGE / "_core").with_suffix("").parts): path
    for path in MODULES
    if path.is_relative_to(PACKAGE / "_core")
}


def core_imports(module):
    """Modules of the core that one of them imports, as names like those of ``CORE``."""
    names = [name.removeprefix("jax_cudnn._core.") for name in imports(CORE[module])]
    return {name for full in names for name in (full, full.rpartition(".")[0]) if name in CORE}


def test_imports_flow_one_way_in_the_core():
    wrong = []
    for module in CORE:
        room = module.partition(".")[0]
        rooms = {name.partition(".")[0] for name in core_imports(module) if "." in name}
        allowed = ALLOWED_IN_CORE.get(room, rooms) | {room}
        wrong += [f"{module} imports {other}" for other in rooms - allowed]
    assert not wrong


@pytest.mark.parametrize("room", ["graph", "store", "job"])
def test_the_rooms_below_planning_reach_it_through_nothing(room):
    """Also not through what stands in the core itself; but tracing ends in JAX's primitive."""
    reached = {m for m in CORE if m.partition(".")[0] == room and m != "graph.trace"}
    while more := set().union(*map(core_imports, reached)) - reached - {"graph.trace"}:
        reached |= more
    assert {m.partition(".")[0] for m in reached if "." in m} == {room}
    assert not reached & {"primitive", "lowering", "ffi"}


def test_only_two_modules_use_jax_internals():
    """And is seen to use them."""
    internal = ("jax._src", "jaxlib")
    using = [path for path in MODULES if any(name.startswith(internal) for name in imports(path))]
    assert using == [PACKAGE / "_core" / name for name in ("compat.py", "mesh_compat.py")]
