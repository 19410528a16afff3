"""Graphs that run as several segments of one program: cut, evaluated, lowered."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.planning.split import Refusal, for_cudnn, run, search

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


def refusing(limit, asked=None):
    """cuDNN's answers, made up: it takes one convolution with up to ``limit`` other calls."""

    def refusal(spec):
        if asked is not None:
            asked.append(spec)
        anchors = sum(call.node.anchor for call in spec.calls)
        if anchors != 1 or any(call.node.leftover for call in spec.calls):
            return Refusal("not one convolution")
        return None if len(spec.calls) <= 1 + limit else Refusal("too many")

    return refusal


@pytest.mark.parametrize("seed", range(40))
def test_segments_in_order_compute_what_the_whole_graph_computes(seed):
    spec = random_graph(seed)
    segments = search(spec, refusing(seed % 4))
    assert sorted(i for s in segments for i in s.calls) == [*range(len(spec.calls))]
    known = set(spec.inputs)
    for segment in segments:
        assert segment.spec.calls == tuple(spec.calls[i] for i in segment.calls)
        assert bool(segment.reason) == (len(segments) > 1 or segment.leftover)
        assert segment.leftover or refusing(seed % 4)(segment.spec) is None
        assert segment.spec.options == spec.options
        assert set(segment.spec.inputs) <= known
        assert segment.spec.outputs
        for tensor in segment.spec.tensors:
            assert tensor == spec.tensor(tensor.name)
        known |= set(segment.spec.outputs)
    convolutions = [c.name for c in spec.calls if c.node.anchor]
    assert convolutions == sorted(
        c.name for s in segments if not s.leftover for c in s.spec.calls if c.node.anchor
    )
    keys = jax.random.split(jax.random.key(seed), len(spec.inputs))
    operands = [
        jax.random.normal(k, t.shape, t.dtype)
        for k, t in zip(keys, spec.input_tensors, strict=True)
    ]
    got = run(segments, spec, operands, lambda part, *inputs: evaluate(part.spec, *inputs))
    for a, b in zip(got, evaluate(spec, *operands), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_the_random_graphs_are_worth_it():
    sizes = [len(search(random_graph(seed), refusing(seed % 4))) for seed in range(40)]
    assert max(sizes) >= 5
    assert sizes.count(1) >= 2


def test_a_supported_graph_is_asked_for_once_and_is_its_own_segment():
    spec, asked = random_graph(1), []
    (segment,) = search(spec, lambda part: asked.append(part))
    assert segment.spec is spec
    assert asked == [spec]
    assert not segment.leftover


def traced(fn, *shapes):
    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    return jc.graph(fn).trace(*avals)[1].spec


def names(segments):
    """XLA's segments in brackets."""
    return [
        f"[{text}]" if s.leftover else text
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
    assert len(search(spec, refusing(4))) == 1
    for limit in (2, 3):  # one call more would put the cut at a tensor of twice the bytes
        segments = search(spec, refusing(limit))
        assert names(segments) == ["conv_fprop.0 sigmoid.0 relu.0", "[relu.1 tanh.0]"]
    # Two cuts of the same bytes: the larger segment.
    segments = search(spec, refusing(1))
    assert names(segments) == ["conv_fprop.0 sigmoid.0", "[relu.0 relu.1 tanh.0]"]


def test_a_small_result_is_computed_on_the_side_where_its_operands_are():
    def total(g, x, w):
        y = g.conv_fprop(x, w, padding=[1, 1])
        return g.sqrt(g.reduction(g.abs(y), mode="ADD", out_dims=[1, 64, 1, 1]))

    segments = search(traced(total, BIG, SQUARE), refusing(2))
    assert names(segments) == ["conv_fprop.0 abs.0 reduction.0", "[sqrt.0]"]


def test_a_value_and_what_is_computed_of_it_stay_together_or_part_together():
    def swish(g, x, w):
        y = g.conv_fprop(x, w, padding=[1, 1])
        return g.mul(y, g.sigmoid(y))

    assert names(search(traced(swish, BIG, SQUARE), refusing(2))) == [
        "conv_fprop.0 sigmoid.0 mul.0"
    ]
    # sigmoid alone beside the convolution would write two tensors that XLA reads again.
    assert names(search(traced(swish, BIG, SQUARE), refusing(1))) == [
        "conv_fprop.0",
        "[sigmoid.0 mul.0]",
    ]


def test_no_segment_waits_for_itself():
    """A call between two parts of a segment that XLA runs would have to run in its middle."""

    def around(g, x, w):
        y = g.conv_fprop(x, w, padding=[1, 1]).set_data_type("bfloat16")
        p = g.resample(y, "MAXPOOL", **POOL)
        return g.add(y, p)

    segments = search(traced(around, BIG, SQUARE), refusing(9))
    assert names(segments) == ["conv_fprop.0", "[resample.0 add.0]"]


def test_two_convolutions_share_the_calls_between_them_once():
    def two(g, x, w, v):
        y = g.relu(g.conv_fprop(x, w, padding=[1, 1])).set_data_type("bfloat16")
        return g.sigmoid(g.conv_fprop(y, v, padding=[1, 1]))

    segments = search(traced(two, BIG, SQUARE, SQUARE), refusing(9))
    assert names(segments) == ["conv_fprop.0 relu.0", "conv_fprop.1 sigmoid.0"]


def test_a_refused_convolution_is_left_to_xla_with_its_reason():
    def two(g, x, w, v):
        y = g.conv_fprop(x, w, stride=[1, 1]).set_data_type("bfloat16")
        return g.conv_fprop(y, v, stride=[2, 2])

    def refusal(spec):
        strides = [call.node.stride for call in spec.calls]
        return None if strides == [(2, 2)] else Refusal(f"strides {strides}")

    first, second = search(traced(two, BIG, SQUARE, SQUARE), refusal)
    assert first.leftover
    assert "strides [(1, 1)]" in first.reason
    assert "conv_fprop.0" in first.reason
    assert not second.leftover


def test_a_graph_without_convolution_is_xlas_where_cudnn_refuses_it():
    def normalized(g, x):
        y = g.sub(x, g.reduction(x, mode="AVG", out_dims=[64, 1, 1, 1]))
        return g.relu(y), g.resample(y, "MAXPOOL", **POOL)

    (segment,) = search(traced(normalized, BIG), lambda spec: Refusal("no engine"))
    assert segment.leftover


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
    (segment,) = search(traced(two, BIG, SQUARE, SQUARE), lambda spec: Refusal("all", final=True))
    assert (segment.leftover, segment.reason) == (True, "all")


def test_the_search_is_bounded():
    def wide(g, x, w):
        y = g.conv_fprop(x, w, padding=[1, 1])
        for i in range(24):
            y = g.add(g.relu(y), g.mul(g.sigmoid(y), 0.5 + i))
        return y

    asked = []
    segments = search(traced(wide, IMAGE, WEIGHT), refusing(0, asked))
    assert names(segments)[0] == "conv_fprop.0"
    assert len(asked) <= 66
    assert len(set(asked)) == len(asked)


def test_equal_graphs_are_cut_alike():
    for seed in range(10):
        first, second = (search(random_graph(seed), refusing(2)) for _ in range(2))
        assert first == second


@jc.graph
def stem(g, x, w, v):
    """Two convolutions with a pooling between them; the first one's bias-free result is kept."""
    y = g.relu(g.conv_fprop(x, w, padding=[1, 1])).set_data_type("bfloat16")
    p = g.resample(y, "MAXPOOL", window=[3, 3], stride=[2, 2], pre_padding=[1, 1])
    return {"y": y, "z": g.sigmoid(g.conv_fprop(p, v, padding=[1, 1]))}


STEM = [
    jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4, 16, 20, 20), (32, 16, 3, 3), (32, 32, 3, 3))
]


def test_groups_are_connected_and_named_as_in_the_whole():
    spec = stem.trace(*STEM)[1].spec
    first, pool, second = search(spec, refusing(1))
    assert [c.name for c in first.spec.calls] == ["conv_fprop.0", "relu.0"]
    assert [c.name for c in second.spec.calls] == ["conv_fprop.1", "sigmoid.0"]
    assert pool.leftover
    assert "run by XLA" in pool.reason
    assert pool.spec.inputs == first.spec.outputs == ("relu.0::OUT_0",)
    assert second.spec.inputs == ("v", "resample.0::Y")
    assert for_cudnn(spec) == (first.spec, second.spec)


@pytest.mark.parametrize("mode", ["MAXPOOL", "AVGPOOL_INCLUDE_PADDING"])
def test_pooling_is_that_of_lax_and_has_derivatives(mode):
    x = jax.random.normal(jax.random.key(1), (2, 3, 9, 8))
    pooled = jc.graph(lambda g, x: g.resample(x, mode, window=[3, 2], stride=[2, 2]))

    def plain(x):
        if mode == "MAXPOOL":
            return jax.lax.reduce_window(
                x, -jnp.inf, jax.lax.max, (1, 1, 3, 2), (1, 1, 2, 2), "VALID"
            )
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, 3, 2), (1, 1, 2, 2), "VALID") / 6

    np.testing.assert_allclose(pooled(x), plain(x), atol=1e-6)
    got, want = (jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (pooled, plain))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_maximum_keeps_nan_and_infinity():
    x = jnp.array([jnp.nan, 1.0, 2.0, -jnp.inf, -jnp.inf, 3.0]).reshape(1, 1, 6)
    pooled = jc.graph(lambda g, x: g.resample(x, "MAXPOOL", window=[2], stride=[2]))
    np.testing.assert_array_equal(pooled(x).ravel(), [jnp.nan, 2.0, 3.0])


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"resample_mode": "BILINEAR", "window": [2, 2]}, ["MAXPOOL"]),
        ({"resample_mode": "MAXPOOL", "window": [2]}, ["window", "2 numbers"]),
        ({"resample_mode": "MAXPOOL", "window": []}, ["window", "2 numbers"]),
        ({"resample_mode": "MAXPOOL", "window": [9, 2]}, ["window 9", "does not fit"]),
        ({"resample_mode": "MAXPOOL", "window": [2, 2], "post_padding": [0, 2]}, ["no maximum"]),
    ],
)
def test_windows_that_do_not_fit_are_said_in_words(attributes, words):
    with pytest.raises(jc.GraphError) as caught:
        jc.graph(lambda g, x: g.resample(x, **attributes))(jnp.ones((1, 1, 4, 4)))
    for word in words:
        assert word in str(caught.value)


# -- lowered ---------------------------------------------------------------------------------------


@pytest.mark.deviceless
def test_segments_are_custom_calls_of_one_program_with_xla_between_them():
    with jc.target("H200"):
        text = jax.jit(stem).trace(*STEM).lower(lowering_platforms=("cuda",)).as_text()
    kinds = [
        "plan" if "custom_call @jax_cudnn" in line else "pool"
        for line in text.splitlines()
        if "custom_call @jax_cudnn" in line or "stablehlo.reduce_window" in line
    ]
    assert sorted(kinds) == ["plan", "plan", "pool"]


@pytest.mark.deviceless
def test_the_plan_of_a_graph_with_pooling():
    pooled = jc.graph(lambda g, x: g.resample(g.relu(x), "MAXPOOL", window=[2, 2]))
    with jc.target("H200"):
        plan = jc.plan(stem, *STEM)
        assert [s.plan is not None for s in plan.segments] == [True, False, True]
        assert jc.plan(pooled, STEM[0]).engine == "XLA"  # one fusion moves fewer bytes than two
        with pytest.raises(jc.UnsupportedGraphError, match="run by XLA"):
            jc.plan(pooled.with_options(implementation="cudnn"), STEM[0])
        lowered = jax.jit(pooled).trace(STEM[0]).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @jax_cudnn" not in lowered


@pytest.mark.gpu
def test_segments_on_the_gpu():
    keys = jax.random.split(jax.random.key(2), 3)
    operands = [
        (jax.random.normal(k, a.shape) / np.sqrt(np.prod(a.shape[1:]) if i else 1)).astype(a.dtype)
        for i, (k, a) in enumerate(zip(keys, STEM, strict=True))
    ]
    got = jax.jit(stem)(*operands)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = stem(*(jax.device_put(np.asarray(x)) for x in operands))
    for name, value in want.items():
        np.testing.assert_allclose(
            np.asarray(got[name], np.float32), np.asarray(value, np.float32), rtol=2e-2, atol=1e-2
        )


def test_the_search_of_a_large_graph_takes_little_time():
    """Of its own, beside cuDNN's: 150 convolutions with what belongs to each."""

    def deep(g, x, w):
        for _ in range(150):
            y = g.relu(g.add(g.conv_fprop(x, w, padding=[1, 1]), x))
            x = y.set_data_type("bfloat16")
        return x

    spec, asked = traced(deep, (2, 8, 4, 4), (8, 8, 3, 3)), []
    began = time.process_time()
    segments = search(spec, refusing(2, asked))
    assert time.process_time() - began < 10
    assert len(segments) == 150
    assert not any(segment.leftover for segment in segments)
    assert len(asked) <= 151


def test_a_search_that_asks_too_much_goes_on_with_convolutions_alone():
    def deep(g, x, w):
        for i in range(60):
            y = g.conv_fprop(x, w, padding=[1, 1])
            for _ in range(2):
                y = g.add(g.relu(y), g.mul(g.sigmoid(y), 0.5 + i))
            x = y.set_data_type("bfloat16")
        return x

    asked = []
    segments = search(traced(deep, (2, 8, 4, 4), (8, 8, 3, 3)), refusing(0, asked))
    assert len([s for s in segments if not s.leftover]) == 60
    assert 1024 < len(asked) < 1024 + 64 + 60
