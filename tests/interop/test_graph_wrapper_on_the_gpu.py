"""Graphs of the wrapper and of cuDNN's frontend: one plan each, and on the GPU its numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_cudnn as jc
from jax_cudnn._core.planning import frontend

EPSILON = np.full((1, 1, 1, 1), 1e-3, np.float32)


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


def of_the_frontend():
    """A convolution with an epilogue by cudnn.pygraph."""
    cudnn = frontend.load()
    types = dict.fromkeys(("intermediate_data_type", "compute_data_type"), cudnn.data_type.FLOAT)
    g = cudnn.pygraph(io_data_type=cudnn.data_type.HALF, **types)
    dims = {"x": (8, 64, 28, 28), "w": (64, 64, 3, 3), "b": (1, 64, 1, 1)}
    strides = {name: [c * h * w, 1, c * w, c] for name, (_, c, h, w) in dims.items()}
    x, w, b = (g.tensor(name=name, dim=dims[name], stride=strides[name]) for name in "xwb")
    y = g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    y = g.relu(g.bias(input=y, bias=b)).set_output(True)
    return jc.from_pygraph(g, inputs=[x, w, b], outputs=[y])


GRAPHS = [layernorm, attention, of_the_frontend]


@pytest.mark.deviceless
@pytest.mark.parametrize("build", GRAPHS)
def test_each_is_one_plan(build):
    graph = build().with_options(implementation="cudnn")
    assert len(graph.plan(gpus=["H200"])["H200"].segments) == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("by_cudnn")
@pytest.mark.parametrize("build", GRAPHS)
def test_numbers_of_calls_and_of_plans(build, key):
    graph, arrays, numbers = build(), [], []
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
