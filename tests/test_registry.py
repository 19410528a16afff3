"""The contract of a node, checked when it is registered, and the registry against pygraph."""

import dataclasses
import inspect

import jax.numpy as jnp
import pytest
from helpers import python

import jax_cudnn as jc
from jax_cudnn._core import builder
from jax_cudnn._core.node import REGISTRY, Example, Node


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
