"""Booleans at the edge of a plan: numbers there, and the user's booleans outside."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import lowered, spec_of

import jax_cudnn as jc
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.graph.reference import evaluate

SHAPE = (2, 16, 4, 6)
ROW = (1, 16, 1, 1)


def mixed(g, p, q, x, y):
    """Masks that come in, leave, do both and stay inside, beside values of two dtypes."""
    above, equal = g.cmp_gt(x, y), g.cmp_eq(x, 0.25)
    either = g.logical_or(g.logical_and(above, p), g.logical_not(equal))
    chosen = g.binary_select(g.add(x, y), y, either)
    left = g.binary_select(chosen, x, g.logical_and(q, either))
    return above, g.logical_not(above), either, left, g.logical_or(p, q), chosen


MIXED = [(SHAPE, "bool"), (SHAPE, "bool"), (SHAPE, "bfloat16"), (SHAPE, "float32")]


def assert_same_meaning(spec):
    rng = np.random.default_rng(0)
    values = [jnp.asarray(rng.normal(size=t.shape)) for t in spec.input_tensors]
    kinds = [t.dtype for t in spec.input_tensors]
    operands = [(x > 0 if k == "bool" else x).astype(k) for x, k in zip(values, kinds, strict=True)]
    sent = [
        jnp.broadcast_to(x.astype(t.dtype), t.shape)
        for x, t in zip(operands, boundary(spec).planned.input_tensors, strict=True)
    ]
    got, want = evaluate(boundary(spec).planned, *sent), evaluate(spec, *operands)
    for number, value, tensor in zip(got, want, boundary(spec).planned.output_tensors, strict=True):
        assert number.dtype == tensor.dtype != bool
        assert set(np.unique(number)) <= {0, 1} or value.dtype != bool
        np.testing.assert_array_equal(np.asarray(number.astype(value.dtype)), np.asarray(value))


@pytest.mark.parametrize("kept", [range(6), (5,), (2, 1)], ids=["all", "no mask", "two"])
def test_with_numbers_for_booleans_the_graph_means_the_same(kept):
    spec = spec_of(lambda g, *given: [mixed(g, *given)[i] for i in kept], *MIXED)
    before, edge = (
        [t.dtype for t in (*s.input_tensors, *s.output_tensors)]
        for s in (spec, boundary(spec).planned)
    )
    assert edge == ["float32" if d == "bool" else d for d in before]
    assert_same_meaning(spec)


def test_a_smaller_mask_is_broadcast_before_the_plan():
    """Compared inside at its own shape it would be read out of bounds."""
    numbers, small = (SHAPE, "bfloat16"), ((2, 1, 4, 6), "bool")
    logic = spec_of(lambda g, p, q: g.logical_or(p, q), (SHAPE, "bool"), small)
    choice = spec_of(lambda g, x, y, q: g.binary_select(x, y, q), numbers, numbers, small)
    for spec in (logic, choice):
        assert {t.shape for t in boundary(spec).planned.input_tensors} == {SHAPE}
        assert_same_meaning(spec)


def test_masks_that_are_broadcast_to_two_shapes_keep_theirs():
    def graph(g, p, q, r):
        return g.logical_or(p, r), g.logical_and(q, r)

    spec = spec_of(graph, (SHAPE, "bool"), ((2, 16, 1, 1), "bool"), (ROW, "bool"))
    assert boundary(spec).planned.input_tensors[2].shape == ROW
    assert_same_meaning(spec)


def test_other_graphs_are_sent_as_they_are():
    inside = spec_of(
        lambda g, x, y: g.binary_select(x, y, g.cmp_gt(x, y)), *[(SHAPE, "float32")] * 2
    )
    assert "bool" in {tensor.dtype for tensor in inside.tensors}
    assert boundary(inside).planned is inside
    spec, again = spec_of(mixed, *MIXED), spec_of(mixed, *MIXED)
    assert (
        boundary(spec).planned
        is boundary(again).planned
        is boundary(boundary(spec).planned).planned
    )
    assert boundary(spec).planned.canonical() != spec.canonical()


def test_an_operand_is_broadcast_for_its_only_reader():
    avals = [((2, 1, 4, 8), "float16"), ((2, 3, 8, 5), "float16")]
    once = spec_of(lambda g, a, b: g.matmul(a, b), *avals)
    twice = spec_of(lambda g, a, b: (g.matmul(a, b), g.relu(a)), *avals)
    assert boundary(once).planned.input_tensors[0].shape == (2, 3, 4, 8)
    assert boundary(twice).planned.input_tensors[0].shape == (2, 1, 4, 8)


@pytest.mark.deviceless
def test_the_program_has_booleans_and_the_call_has_numbers():
    """A smaller mask reaches it whole; other operands keep their types."""

    @jc.graph(implementation="cudnn")
    def function(g, x, p, q):
        return g.binary_select(x, 0.0, g.logical_or(p, q)), g.cmp_gt(x, 0.0)

    given = [(SHAPE, "bfloat16"), (SHAPE, "bool"), (ROW, "bool")]
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in given]
    text = lowered(function, *avals)
    types = re.search(r"custom_call @jax_cudnn\(.*: \((tensor.*)\) -> (.*)", text).groups()
    types += re.search(r"func.func public @main\((.*?)\) -> \((.*?)\) {", text).groups()
    operands, results, given, returned = (re.findall(r"tensor<([^>]*)>", part) for part in types)
    number, mask, small = "2x16x4x6xbf16", "2x16x4x6xi1", "1x16x1x1xi1"
    assert (given, returned) == ([number, mask, small], [number, mask])
    assert operands == [number, "2x16x4x6xf32", "2x16x4x6xf32"]
    assert results[:2] == [number, "2x16x4x6xf32"]
    assert results[2].endswith("xui8")  # workspace
