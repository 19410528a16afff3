"""The package as a whole: what importing it costs and needs, its layers, and its registry."""

import ast
import dataclasses
import importlib.util
import inspect
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core import builder
from jax_cudnn._core.node import REGISTRY, Example, Node

PACKAGE = Path(jc.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def python(code, *options):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *options, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


# -- import ----------------------------------------------------------------------------------------


def test_import_adds_at_most_50_ms_to_importing_jax():
    code = """
        import time, jax
        start = time.process_time()
        import jax_cudnn
        print(time.process_time() - start)
    """
    times = [float(python(code).stdout) for _ in range(5)]
    assert statistics.median(times) < 0.050, times


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
        from jax_cudnn._core import frontend
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
        from jax_cudnn._core import frontend
        from jax_cudnn import LibraryError
        for version, front in ((90100, "1.28.0"), (91900, "1.5.0")):
            try:
                frontend._require(version, front)
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
    "bench": {"ops", "_core"},
    "explain": {"ops", "_core"},
    "interop": {"ops", "_core"},
    "flax": {"ops", "_core"},
}


def imports(path):
    """Absolute names of what a module imports, also inside functions."""
    parts = ("jax_cudnn", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_compat_uses_jax_internals(path):
    internal = [name for name in imports(path) if name.startswith(("jax._src", "jaxlib"))]
    assert not internal or path == PACKAGE / "_core" / "compat.py", internal


def test_core_is_seen_to_use_internals_where_it_may():
    assert any(name.startswith("jax._src") for name in imports(PACKAGE / "_core" / "compat.py"))


def test_public_names_are_exports_without_logic():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assert all(isinstance(node, ast.ImportFrom | ast.Expr) for node in tree.body)
    names = [
        alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert all(alias.asname == alias.name for alias in names)


# -- the registry ----------------------------------------------------------------------------------


def node(**changes):
    """A class that keeps the contract, but for the changes (None takes a member away)."""
    members = {
        "__doc__": "Text.",
        "method": "test_only",
        "dims": "a: n c -> Y: n c",
        "examples": (Example({"a": (2, 3)}),),
        "reference": lambda self, a: (a,),
        **changes,
    }
    cls = type("TestOnly", (Node,), {k: v for k, v in members.items() if v is not None})
    return dataclasses.dataclass(frozen=True)(cls)


@pytest.fixture
def registry():
    before, signatures = dict(REGISTRY), dict(builder._SIGNATURES)
    yield
    for table, old in ((REGISTRY, before), (builder._SIGNATURES, signatures)):
        table.clear()
        table.update(old)
    if hasattr(builder.GraphBuilder, "test_only"):
        del builder.GraphBuilder.test_only


CONTRACT = {
    "no method": ({"method": None}, "method must name"),
    "twice": ({"method": "relu"}, "'relu' is registered twice"),
    "no reference": ({"reference": None}, "reference is missing"),
    "no examples": ({"examples": ()}, "at least one example"),
    "wrong dims": ({"dims": "a: n c"}, "dims must read"),
    "two groups": ({"dims": "a: *x *y -> Y: *x"}, "more than one group"),
    "batch letter": ({"batch": "q"}, "batch letters 'q' are not in dims"),
    "example's ports": ({"examples": (Example({"b": (2, 3)}),)}, "example's ports"),
}


@pytest.mark.parametrize("what", CONTRACT)
def test_node_that_breaks_the_contract_fails_at_creation(what, registry):
    changes, words = CONTRACT[what]
    with pytest.raises((TypeError, ValueError), match=words):
        builder.register(node(**changes))
    assert "test_only" not in REGISTRY


@pytest.mark.xfail(
    reason="dataclass writes a docstring of its own, which passes the check", strict=True
)
def test_node_without_a_docstring_fails_at_creation(registry):
    with pytest.raises(TypeError, match="docstring is missing"):
        builder.register(node(__doc__=None))


def test_node_that_keeps_the_contract_becomes_a_method(registry):
    builder.register(node())
    got = jc.graph(lambda g, x: g.test_only(a=x, name="n"))(jnp.ones((2, 3)))
    assert got.shape == (2, 3)
    with pytest.raises(TypeError, match="registered twice"):
        builder.register(node())


@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_method_has_a_signature_and_documentation_with_its_source(method):
    function = getattr(builder.GraphBuilder, method)
    names = list(inspect.signature(function).parameters)
    assert names[1 : 1 + len(REGISTRY[method].ports.inputs)] == list(
        REGISTRY[method].ports.input_names
    )
    assert {"name", "compute_data_type"} <= {*names}
    assert "Source: " in function.__doc__


@pytest.mark.deviceless
def test_pygraph_has_every_method_with_our_ports_and_attributes():
    ports = {method: cls.ports.input_names for method, cls in REGISTRY.items()}
    keywords = {
        method: [f.name for f in dataclasses.fields(cls) if f.name != "out_dims"]
        for method, cls in REGISTRY.items()
    }
    done = python(f"""
        import cudnn
        native = getattr(cudnn._pybind_module, "backend_graph", cudnn.pygraph)
        for method, ports in {ports!r}.items():
            assert callable(getattr(cudnn.pygraph, method)), method
            signature = getattr(native, method).__doc__
            for name in (*ports, *{keywords!r}[method], "name", "compute_data_type"):
                assert name + ": " in signature, (method, name, signature)
        print("same")
    """)
    assert done.stdout.strip() == "same"


@pytest.mark.deviceless
def test_pygraph_takes_what_is_emitted_for_every_example():
    done = python("""
        import cudnn
        from jax_cudnn._core import build
        from jax_cudnn.bench.cases import node_cases
        for case in node_cases():
            spec = case.function.trace(*case.avals)[1].spec
            graph = cudnn.pygraph(compute_data_type=cudnn.data_type.FLOAT)
            build._emit(spec, graph, cudnn)
            graph.validate()
            print(spec.calls[0].node.method)
    """)
    emitted = done.stdout.split()
    assert {m: emitted.count(m) for m in REGISTRY} == {
        m: len(c.examples) for m, c in REGISTRY.items()
    }
