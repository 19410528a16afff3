"""The contract of a node, checked when it is registered."""

import dataclasses
import inspect
import pickle

import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph import builder
from jax_cudnn._core.graph.example import Example
from jax_cudnn._core.graph.node import REGISTRY, Node


def node(**changes):
    """A class that keeps the contract, but for the changes."""
    members = {
        "__doc__": "Text.",
        "method": "test_only",
        "dims": "a: n c -> Y: n c",
        "examples": (Example({"a": (2, 3)}),),
        "reference": lambda self, a: (a,),
        **changes,
    }
    return dataclasses.dataclass(frozen=True)(type("TestOnly", (Node,), members))


@pytest.fixture
def registry():
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
    if hasattr(builder.GraphBuilder, "test_only"):
        del builder.GraphBuilder.test_only


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "relu"}, "'relu' is registered twice"),
        ({"examples": ()}, "at least one example"),
        ({"dims": "a: n c"}, "dims must read"),
        ({"examples": (Example({"b": (2, 3)}),)}, "example's ports"),
    ],
    ids=["twice", "examples", "dims", "ports"],
)
def test_node_that_breaks_the_contract_fails_at_creation(changes, words, registry):
    with pytest.raises((TypeError, ValueError), match=words):
        builder.register(node(**changes))
    assert "test_only" not in REGISTRY


def test_node_that_keeps_the_contract_becomes_a_method(registry):
    builder.register(node())
    got = jc.graph(lambda g, x: g.test_only(a=x, name="n"))(jnp.ones((2, 3)))
    assert got.shape == (2, 3)


def test_methods_have_signatures_and_documentation_with_its_source():
    for method, cls in REGISTRY.items():
        function = getattr(builder.GraphBuilder, method)
        names = list(inspect.signature(function).parameters)
        assert names[1 : 1 + len(cls.ports.inputs)] == list(cls.ports.input_names)
        assert {"name", "compute_data_type"} <= {*names}
        assert "Source: " in " ".join(function.__doc__.split())
        made = cls.create(**cls.examples[0].attributes)  # travels to the planning worker
        assert pickle.loads(pickle.dumps(made)) == made
