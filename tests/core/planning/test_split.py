"""Graphs that run as several segments of one program: cut, evaluated, lowered."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import spec_of

import jax_cudnn as jc
from jax_cudnn._core.execution import in_order
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.planning.split import Refusal, search

POOL = {"window": [3, 3], "pre_padding": [1, 1], "post_padding": [1, 1]}
IMAGE, WEIGHT = (2, 8, 6, 6), (8, 8, 3, 3)


def random_graph(seed):
    """Random operations on images of one shape; each result is used, returned, or both."""
    rng = random.Random(seed)

    @jc.graph
    def graph(g, x, y, w):
        values = [x, y]
        for _ in range(rng.randrange(1, 12)):
            a, b = rng.choice(values), rng.choice(values)
            kind = rng.randrange(6)
            if kind < 2:
                mode = rng.choice(["MAXPOOL", "AVGPOOL_INCLUDE_PADDING", "AVGPOOL_EXCLUDE_PADDING"])
                values.append(g.resample(a, mode, **POOL))
            elif kind == 2:
                values.append(g.add(a, b))
            elif kind == 3:
                values.append(g.relu(a) if rng.random() < 0.5 else g.mul(a, 0.5))
            elif kind == 4:
                values.append(g.conv_fprop(a, w, padding=[1, 1]).set_data_type("bfloat16"))
            else:
                values.append(g.sigmoid(a))
        made = values[2:]
        return rng.sample(made, rng.randrange(1, len(made) + 1))

    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (IMAGE, IMAGE, WEIGHT)]
    return graph.trace(*avals)[1].spec


PLAN: Any = "a plan"


def refusing(limit, asked=None):
    """cuDNN's answers, made up: it takes one convolution with up to ``limit`` other calls."""

    def refusal(spec):
        if asked is not None:
            asked.append(spec)
        anchors = sum(bool(call.node.anchor) for call in spec.calls)
        if anchors != 1 or any(call.node.xla_only for call in spec.calls):
            return Refusal("not one convolution")
        return PLAN if len(spec.calls) <= 1 + limit else Refusal("too many")

    return refusal


@pytest.mark.parametrize("seed", [6, 9, 10, 17, 19, 29, 42, 56])
def test_segments_in_order_compute_what_the_whole_graph_computes(seed):
    spec, asked = random_graph(seed), []
    (whole,) = search(spec, lambda part: asked.append(part) or PLAN)
    assert (whole.spec, asked, whole.plan) == (spec, [spec], PLAN)
    segments = search(spec, refusing(seed % 4))
    assert segments == search(random_graph(seed), refusing(seed % 4))
    assert sorted(i for s in segments for i in s.calls) == [*range(len(spec.calls))]
    known = set(spec.inputs)
    for segment in segments:
        assert segment.spec.calls == tuple(spec.calls[i] for i in segment.calls)
        assert bool(segment.reason) == (len(segments) > 1 or segment.plan is None)
        assert segment.plan in (None, refusing(seed % 4)(segment.spec))
        assert segment.spec.options == spec.options
        assert set(segment.spec.inputs) <= known
        assert segment.spec.outputs
        for tensor in segment.spec.tensors:
            assert tensor == spec.tensor(tensor.name)
        known |= set(segment.spec.outputs)
    of_cudnn = [c.name for s in segments if s.plan for c in s.spec.calls if c.node.anchor]
    assert sorted(of_cudnn) == [c.name for c in spec.calls if c.node.anchor]
    draw = np.random.default_rng(seed).standard_normal
    operands = [jnp.asarray(draw(t.shape), t.dtype) for t in spec.input_tensors]
    got = in_order(segments, spec, operands, lambda part, *inputs: evaluate(part.spec, *inputs))
    for a, b in zip(got, evaluate(spec, *operands), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def traced(fn, *shapes):
    return spec_of(fn, *((s, "bfloat16") for s in shapes))


def names(segments):
    """XLA's segments in brackets."""
    return [
        f"[{text}]" if s.plan is None else text
        for s in segments
        for text in [" ".join(call.name for call in s.spec.calls)]
    ]


BIG = (64, 64, 128, 128)  # a tensor of it takes far longer than a kernel's start
SQUARE = (64, 64, 3, 3)


def test_the_cut_that_moves_fewest_bytes_is_taken():
    def chain(g, x, w):  # float32 but for what the first relu gives
        y = g.relu(g.sigmoid(g.conv_fprop(x, w, padding=[1, 1]))).set_data_type("bfloat16")
        return g.tanh(g.relu(y)).set_data_type("float32")

    spec = traced(chain, BIG, SQUARE)
    for limit in (2, 3):  # one call more would put the cut at a tensor of twice the bytes
        segments = search(spec, refusing(limit))
        assert names(segments) == ["conv_fprop.0 sigmoid.0 relu.0", "[relu.1 tanh.0]"]


def test_a_final_answer_ends_the_search_around_a_convolution():
    """What is measured to be slower is not tried in parts, of which nothing is known."""

    def two(g, x, w, v):
        y = g.relu(g.conv_fprop(x, w, stride=[1, 1])).set_data_type("bfloat16")
        return g.sigmoid(g.conv_fprop(y, v, stride=[2, 2]))

    def refusal(spec):
        strides = [call.node.stride for call in spec.calls if call.node.anchor]
        if strides == [(2, 2)] and len(spec.calls) > 1:
            return Refusal("slower", final=True)
        return refusing(9)(spec)

    first, second = search(traced(two, BIG, SQUARE, SQUARE), refusal)
    assert names([first, second]) == ["conv_fprop.0 relu.0", "[conv_fprop.1 sigmoid.0]"]
    assert second.reason == "conv_fprop.1, sigmoid.0: slower"


def test_the_maximum_keeps_nan_and_infinity():
    x = jnp.array([jnp.nan, 1.0, 2.0, -jnp.inf, -jnp.inf, 3.0]).reshape(1, 1, 6)
    pooled = jc.graph(lambda g, x: g.resample(x, "MAXPOOL", window=[2], stride=[2]))
    np.testing.assert_array_equal(pooled(x).ravel(), [jnp.nan, 2.0, 3.0])


def deep(count, width):
    """Convolutions, each followed by so many additions."""

    def function(g, x, w):
        for i in range(count):
            y = g.conv_fprop(x, w, padding=[1, 1])
            for _ in range(width):
                y = g.add(g.relu(y), g.mul(g.sigmoid(y), 0.5 + i))
            x = y.set_data_type("bfloat16")
        return x

    return traced(function, (2, 8, 4, 4), (8, 8, 3, 3))


@pytest.mark.parametrize(
    ("count", "width", "limit", "most"),
    [(100, 1, 4, 101), (60, 2, 0, 1024 + 64 + 60)],  # from there on with convolutions alone
)
def test_the_search_is_bounded_and_finds_all_convolutions(count, width, limit, most):
    asked = []
    segments = search(deep(count, width), refusing(limit, asked))
    assert len([s for s in segments if s.plan]) == count
    assert len(asked) <= most
    assert len(set(asked)) == len(asked)
