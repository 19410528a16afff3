"""Graphs of the wrapper and of cuDNN's frontend: one plan each, and on the GPU its numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_cudnn as jc
from jax_cudnn._core.planning import frontend

SPATIAL = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
EPSILON = np.full((1, 1, 1, 1), 1e-3, np.float32)


def channels_last(shape):
    _, c, h, w = shape
    return [c * h * w, 1, c * w, c]


def conv():
    """The frontend's guide: channels-last strides, a result of the graph's io_data_type."""
    x, w = (8, 64, 56, 56), (32, 64, 3, 3)
    with jc.Graph(
        io_data_type="HALF", compute_data_type="FLOAT", inputs=["X", "W"], outputs=["Y"]
    ) as graph:
        image = graph.tensor(name="X", dim=x, stride=channels_last(x))
        weight = graph.tensor(name="W", dim=w, stride=channels_last(w))
        y = graph.conv_fprop(image=image, weight=weight, **SPATIAL, name="conv2d")
        y.set_output(True).set_name("Y")
    return graph


def matmul():
    """A weight that lies transposed, and a bias."""
    with jc.Graph(io_data_type="BFLOAT16", inputs=["A", "B", "C"], outputs=["D"]) as graph:
        a = graph.tensor(name="A", dim=[4, 128, 256])
        b = graph.tensor(name="B", dim=[4, 256, 128], stride=[256 * 128, 1, 256])
        c = graph.tensor(name="C", dim=[1, 1, 128])
        graph.bias(graph.matmul(a, b), c).set_name("D").set_output(True)
    return graph


def layernorm():
    """Statistics in float32, and an epsilon that is a NumPy array."""
    with jc.Graph(
        io_data_type="HALF",
        inputs=["x", "s", "b", "ln::epsilon"],
        outputs=["ln::Y", "ln::MEAN", "ln::INV_VARIANCE"],
    ) as graph:
        x = graph.tensor(name="x", dim=[4096, 768, 1, 1], stride=[768, 1, 768, 768])
        s, b = (graph.tensor(name=n, dim=[1, 768, 1, 1], stride=[768, 1, 768, 768]) for n in "sb")
        results = graph.layernorm(x, s, b, EPSILON, norm_forward_phase="TRAINING", name="ln")
        for result, dtype in zip(results, ("HALF", "FLOAT", "FLOAT"), strict=True):
            result.set_output(True).set_data_type(dtype)
    return graph


def attention():
    """Arrays that lie as tokens, (B, S, H, D)."""
    dims, strides = [2, 8, 512, 64], [8 * 512 * 64, 64, 8 * 64, 1]
    with jc.Graph(io_data_type="BFLOAT16", inputs=[*"qkv"], outputs=["a::O", "a::Stats"]) as graph:
        q, k, v = (graph.tensor(name=name, dim=dims, stride=strides) for name in "qkv")
        out, stats = graph.sdpa(
            q=q, k=k, v=v, attn_scale=0.125, is_inference=False, use_causal_mask=True, name="a"
        )
        out.set_output(True).set_dim(dims).set_stride(strides)
        stats.set_output(True).set_data_type("FLOAT")
    return graph


def of_the_frontend(built=False):
    """The same convolution by cudnn.pygraph, with an epilogue; ``built`` has it planned there."""
    cudnn = frontend.load()
    types = dict.fromkeys(("intermediate_data_type", "compute_data_type"), cudnn.data_type.FLOAT)
    where = {"handle": cudnn.create_handle()} if built else {}
    g = cudnn.pygraph(io_data_type=cudnn.data_type.HALF, **types, **where)
    x, w, b = (8, 64, 28, 28), (64, 64, 3, 3), (1, 64, 1, 1)
    tensors = [
        g.tensor(name=n, dim=d, stride=channels_last(d))
        for n, d in zip("xwb", (x, w, b), strict=True)
    ]
    y = g.relu(g.bias(input=g.conv_fprop(*tensors[:2], **SPATIAL), bias=tensors[2]))
    y.set_output(True)
    if built:
        g.validate()
        g.build_operation_graph()
        g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return jc.from_pygraph(g, inputs=tensors, outputs=[y])


GRAPHS = [conv, matmul, layernorm, attention, of_the_frontend]


@pytest.mark.deviceless
@pytest.mark.parametrize("build", GRAPHS)
def test_each_is_one_plan(build):
    graph = build().with_options(implementation="cudnn")
    assert len(graph.plan(gpus=["H200"])["H200"].segments) == 1


def check(graph, key):
    """Called, and planned and executed; an epsilon is a number."""
    arrays, numbers = [], []
    for i, tensor in enumerate(graph.spec.input_tensors):
        if tensor.name.endswith("epsilon"):
            numbers.append(EPSILON)
        else:
            x = 0.5 * jax.random.normal(jax.random.fold_in(key, i), tensor.shape)
            arrays.append(x.astype(tensor.dtype))
    want = oracle.evaluate(graph.spec, [*arrays, *map(jnp.asarray, numbers)])
    called = jax.jit(lambda *arrays: graph(*arrays, *numbers))(*arrays)
    executed = graph.plan().execute(*arrays)
    for got in (called, executed):
        for ours, theirs in zip(jax.tree.leaves(got), want, strict=True):
            assert oracle.distance(ours, theirs) < 1e-2


@pytest.mark.gpu
@pytest.mark.usefixtures("by_cudnn")
@pytest.mark.parametrize("build", GRAPHS)
def test_numbers(build, key):
    check(build(), key)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_cudnn")
def test_a_graph_that_the_frontend_has_planned_is_carried_over(key):
    graph = of_the_frontend(built=True)
    assert graph.spec.canonical() is of_the_frontend().spec.canonical()
    check(graph, key)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_cudnn")
def test_channels_last_arrays_are_not_copied():
    graph = conv()

    def of_channels_last(x, w):
        return graph(x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)

    shapes = (8, 56, 56, 64), (32, 3, 3, 64)
    avals = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes]
    compiled = jax.jit(of_channels_last).lower(*avals).compile().as_text()
    kinds = re.findall(r"= [^=]*?\b(copy|transpose|copy-start|fusion|custom-call)\(", compiled)
    assert set(kinds) == {"custom-call"}
