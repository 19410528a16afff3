"""The package as a whole: what importing it costs and needs, and its layers."""

import ast
import compileall
import importlib.util
import statistics
from pathlib import Path

import pytest
from helpers import python

import jax_cudnn as jc
from jax_cudnn._core import later

PACKAGE = Path(jc.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


# -- import ----------------------------------------------------------------------------------------


def test_import_adds_at_most_a_sixth_to_importing_jax():
    """65 ms where that takes 0.4 s; as a share, since both take longer on a busy machine. Without
    what compiling the sources costs once."""
    compileall.compile_dir(PACKAGE, quiet=2)
    code = """
        import time
        start = time.process_time()
        import jax
        middle = time.process_time()
        import jax_cudnn
        print((time.process_time() - middle) / (middle - start))
    """
    shares = [float(python(code).stdout) for _ in range(5)]
    assert statistics.median(shares) < 1 / 6, shares


def test_import_loads_no_backend_no_cudnn_and_nothing_optional():
    python("""
        import sys, jax
        before = set(sys.modules)
        import jax_cudnn
        from jax._src import xla_bridge
        assert not xla_bridge._backends
        loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert not loaded & {"cudnn", "flax", "torch", "triton", "nvidia", "matplotlib"}, loaded
    """)


def test_graphs_run_with_cudnn_and_flax_missing_and_planning_says_what_to_install():
    done = python("""
        import sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("cudnn", "flax", "nvidia"):
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Missing())
        import jax, jax.numpy as jnp, jax_cudnn as jc
        f = jc.graph(lambda g, x: g.relu(x))
        assert jax.jit(f)(jnp.ones(3)).shape == (3,)
        from jax_cudnn._core.planning import frontend
        import importlib.util
        importlib.util.find_spec = lambda name: None
        try:
            frontend.load()
        except jc.LibraryError as error:
            print(error)
    """)
    assert "pip install 'jax-cudnn[cuda12]'" in done.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("cudnn") is None, reason="nvidia-cudnn-frontend is not installed"
)
def test_too_old_cudnn_and_frontend_are_named():
    done = python("""
        from jax_cudnn._core.planning import frontend
        from jax_cudnn import LibraryError
        for check, *found in (
            (frontend.check_cudnn, 90100),
            (frontend.check_frontend, "1.5.0", "somewhere"),
        ):
            try:
                check(*found)
            except LibraryError as error:
                print(error)
    """)
    for word in ("9.1.0", "9.19.0", "1.5.0", ">= 1.28", "pip install -U"):
        assert word in done.stdout


# -- layers ----------------------------------------------------------------------------------------

# What each room may import of the package besides itself. The core names no op.
ALLOWED = {
    "_core": {"deviceless"},
    "ops": {"_core"},
    "deviceless": {"_core"},
    "bench": {"flax", "ops", "deviceless", "_core"},
    "doctor": {"deviceless", "_core"},
    "explain": {"ops", "_core"},
    "interop": {"ops", "_core"},
    "flax": {"ops", "_core"},
    "commands": {"bench", "doctor", "ops", "deviceless", "_core"},
}


def imports(path):
    """Absolute names of what a module imports, also inside functions, but not for types alone."""
    parts = ("jax_cudnn", *path.relative_to(PACKAGE).with_suffix("").parts)
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else ()
            module = ".".join((*base, *(node.module or "").split("."))).strip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_flow_one_way(path):
    room = path.relative_to(PACKAGE).parts[0]
    if room.endswith(".py"):
        assert path.name in ("__init__.py", "__main__.py"), f"{path.name} belongs into a room"
        return
    rooms = {name.split(".")[1] for name in imports(path) if name.startswith("jax_cudnn.")}
    assert rooms - {room} <= ALLOWED[room]


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


@pytest.mark.parametrize("module", [m for m in CORE if m.partition(".")[0] in ALLOWED_IN_CORE])
def test_imports_flow_one_way_in_the_core(module):
    room = module.partition(".")[0]
    rooms = {name.partition(".")[0] for name in core_imports(module) if "." in name}
    assert rooms - {room} <= ALLOWED_IN_CORE[room]


@pytest.mark.parametrize("room", ["graph", "store", "job"])
def test_the_rooms_below_planning_reach_it_through_nothing(room):
    """Also not through what stands in the core itself; but tracing ends in JAX's primitive."""
    reached = {m for m in CORE if m.partition(".")[0] == room and m != "graph.trace"}
    while more := set().union(*map(core_imports, reached)) - reached - {"graph.trace"}:
        reached |= more
    assert {m.partition(".")[0] for m in reached if "." in m} == {room}
    assert not reached & {"primitive", "lowering", "ffi"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_compat_uses_jax_internals(path):
    internal = [name for name in imports(path) if name.startswith(("jax._src", "jaxlib"))]
    assert not internal or path == PACKAGE / "_core" / "compat.py", internal


def test_core_is_seen_to_use_internals_where_it_may():
    assert any(name.startswith("jax._src") for name in imports(PACKAGE / "_core" / "compat.py"))


def test_public_names_are_exports_without_logic():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    *body, last = tree.body
    assert isinstance(last, ast.If)
    assert ast.unparse(last.test) == "TYPE_CHECKING"
    assert all(isinstance(node, ast.ImportFrom | ast.Expr) for node in (*body, *last.body))
    names = [
        alias
        for node in (*body, *last.body)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert all(alias.asname == alias.name for alias in names)
    named = {alias.name for node in last.body for alias in node.names}
    assert named == {*later.HOMES, *later.ROOMS}


def test_names_that_are_loaded_when_asked_for():
    python("""
        import sys
        import jax_cudnn as jc
        from jax_cudnn._core import later
        assert not {f"jax_cudnn.{home}" for home in later.HOMES.values()} & {*sys.modules}
        assert {*later.HOMES} <= {*dir(jc)}
        assert all(getattr(jc, name).__name__ == name for name in later.HOMES)
        try:
            jc.nothing
        except AttributeError as error:
            assert "jax_cudnn" in str(error)
        else:
            raise AssertionError
    """)
