"""The table of operations, examples and transformations: each graph beside plain jnp."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_cases
from transformations import (
    ALL,
    SMALL,
    Transformations,
    compare,
    smaller,
    spec_and_operands,
    tolerance,
)

import jax_cudnn as jc
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.transforms import batch, linearize, prune, transpose

CASES = {case.name: case for case in all_cases()}


def failures(errors, allowed):
    return {name: f"{error:.1e}" for name, error in errors.items() if not error <= allowed}


# A minute each: all of them run on the GPU, and derivatives of small ones in test_attention_fp8.py.
IN_FLOAT8 = ("sdpa_fp8_backward", "sdpa_mxfp8")


def of_each_kind():
    """The first case of each sequence of nodes: those of other dtypes and ranks run on the GPU."""
    first = {}
    for name, case in CASES.items():
        spec = case.function.trace(*case.avals)[1].spec
        first.setdefault(tuple(call.node for call in spec.calls), name)
    return [name for name in first.values() if not name.startswith(IN_FLOAT8)]


@pytest.mark.wide
@pytest.mark.parametrize("name", of_each_kind())
def test_each_transformation_of_each_case(name):
    spec, operands = spec_and_operands(CASES[name], SMALL)
    errors, allowed = compare(spec, operands), tolerance(spec)
    print(f"{name}, of {allowed:.1e}:", {k: f"{v:.1e}" for k, v in errors.items()})
    assert not failures(errors, allowed), str(spec)


def specs():
    return {name: case.function.trace(*case.avals)[1].spec for name, case in CASES.items()}


def test_every_operation_is_in_the_table():
    methods = {call.node.method for spec in specs().values() for call in spec.calls}
    assert methods == {*REGISTRY}


def test_every_operation_but_those_of_booleans_is_differentiated_in_the_table():
    moving = set()
    for spec in specs().values():
        operands = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in spec.input_tensors]
        outputs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in spec.output_tensors]
        if Transformations(operands, outputs).applies("vjp"):
            moving |= {call.node.method for call in spec.calls}
    assert all(method.startswith(("cmp_", "logical_")) for method in {*REGISTRY} - moving)


def test_most_graphs_of_the_table_are_small():
    """The sizes are the cases' own where smaller ones do not fit (small strides, windows)."""
    whole = [name for name, spec in specs().items() if smaller(spec, SMALL) is spec]
    assert len(whole) < len(CASES) / 10, whole


# -- the test of the table: a wrong rule must not pass --------------------------------------------


def _twice(rule):
    def slope(self, g, port, t, values):
        return rule(self, g, port, t + t, values)

    return slope


def _negated(rule):
    return lambda self, g, *values: {port: -x for port, x in rule(self, g, *values).items()}


def _anywhere(rule):
    """Folded into the axis along which the node computes."""

    def folds(self, batched, tensors):
        yield dict.fromkeys(tensors, self.axis)

    return folds


def _mean(rule):
    """A sum becomes a mean when it is folded."""

    def folded(self, fold, size, tensors):
        return dataclasses.replace(rule(self, fold, size, tensors), mode="AVG")

    return folded


def _doubled(rule):
    def transposed(self, g, cotangents, inputs, tensors):
        return {port: x + x for port, x in rule(self, g, cotangents, inputs, tensors).items()}

    return transposed


# What is wrong -> operation, rule, the wrong rule by the right one, what then differs at least.
MUTATIONS = {
    "a slope counts twice": ("mul", "slope", _twice, {"vjp", "jvp", "scan"}),
    "a cotangent has the wrong sign": ("neg", "transpose", _negated, {"vjp", "vmap_of_vjp"}),
    "a convolution's tangent is negative": ("conv_fprop", "jvp", _negated, {"jvp", "linearize"}),
    "a product's cotangents are doubled": ("matmul", "transpose", _doubled, {"vjp", "remat"}),
    "indices go on along a folded axis": ("gen_index", "folds", _anywhere, {"vmap"}),
    "a folded sum is a mean": ("reduction", "folded", _mean, {"vmap"}),
}


@pytest.fixture
def fresh_rules():
    """Graphs derived by other rules are not remembered, neither before nor after."""

    def forget():
        for rule in (linearize.linearize, transpose.transpose, batch.batch, prune.pruned):
            rule.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_wrong_rule_is_noticed(what, fresh_rules, monkeypatch):
    method, rule, wrong, differ = MUTATIONS[what]
    case = next(c for name, c in CASES.items() if name.startswith(f"{method}_"))
    spec, operands = spec_and_operands(case, SMALL)
    node = REGISTRY[method]
    monkeypatch.setattr(node, rule, wrong(getattr(node, rule)))
    names = [name for name in ALL if name in differ | {"forward"}]
    errors = compare(spec, operands, names)
    noticed = {*failures(errors, tolerance(spec))}
    assert noticed == differ & {*errors}
    assert noticed


def test_a_tangent_without_results_is_no_hindrance():
    """That of an index, beside one that is read by a cast alone."""

    @jc.graph
    def function(g, x, scale):
        return g.mul(g.mul(x, g.gen_index(x, axis=1)), scale)

    x, scale = jnp.ones((2, 8, 4), "bfloat16"), jnp.ones((1, 1, 1), "float32")
    got = jax.grad(lambda x: function(x, scale).astype("float32").sum())(x)
    np.testing.assert_array_equal(got[0, :, 0], jnp.arange(8, dtype="bfloat16"))


def test_a_cast_of_a_constant_alone_stays():
    x, scale = jnp.full((3, 4, 1), 2, "bfloat16"), jnp.ones((3, 1), "bfloat16")
    np.testing.assert_allclose(jax.vmap(jc.ops.rms_norm)(x, scale), 1, rtol=1e-2)
