"""``score_mod`` and ``score_mod_bprop`` of a pygraph: functions of a graph and a tensor."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.planning import frontend

if importlib.util.find_spec("cudnn") is None:
    pytest.skip("nvidia-cudnn-frontend is not installed", allow_module_level=True)

B, H, S, D = 2, 4, 128, 64
CAP, BIAS = 3.0, jax.random.normal(jax.random.key(9), (1, H, S, S))
Q, K, V, DO = (jax.random.normal(jax.random.key(i), (B, H, S, D)) for i in range(4))


class Softcap:
    """Keeps a tensor of the forward for the backward, as NVIDIA's modifiers do."""

    def __init__(self, g, kind):
        self.cap = one(g, kind, "cap")

    def forward(self, graph, score):
        self.inner = graph.div(a=score, b=self.cap)
        return graph.mul(a=graph.tanh(self.inner), b=self.cap)

    def backward(self, graph, gradient):
        inner = graph.tanh_backward(loss=graph.mul(gradient, self.cap), input=self.inner)
        return graph.div(a=inner, b=self.cap)

    def meaning(self, s):
        return CAP * jnp.tanh(s / CAP)


class Causal:
    """Comparisons of indices, with a number in host memory, and a bias."""

    def __init__(self, g, kind):
        self.kind, self.low, self.zero = kind, one(g, kind, "low"), one(g, kind, "zero")
        self.bias = g.tensor(name="bias", dim=[1, H, S, S], stride=[H * S * S, S * S, S, 1])

    def seen(self, graph, score):
        row, column = (graph.gen_index(score, axis=a, name=f"index{a}") for a in (2, 3))
        row.set_data_type(self.kind.INT32)
        column.set_data_type(self.kind.INT32)
        seen = graph.cmp_ge(input=row, comparison=column, compute_data_type=self.kind.BOOLEAN)
        return seen.set_data_type(self.kind.BOOLEAN)

    def forward(self, graph, score):
        biased = graph.add(score, self.bias, compute_data_type=self.kind.FLOAT)
        return graph.binary_select(input0=biased, input1=self.low, mask=self.seen(graph, score))

    def backward(self, graph, gradient):
        return graph.mul(gradient, self.seen(graph, gradient))  # a comparison as a number

    def meaning(self, s):
        return jnp.where(jnp.arange(S)[:, None] >= jnp.arange(S), s + BIAS, -jnp.inf)


VALUES = {"cap": CAP, "low": -np.inf, "zero": 0.0, "bias": BIAS}


def one(g, kind, name):
    return g.tensor(name=name, dim=[1] * 4, data_type=kind.FLOAT, is_pass_by_value=True)


def pygraph(name="FLOAT"):
    cudnn = frontend.load()
    kind = cudnn.data_type
    types = {"io_data_type": getattr(kind, name), "intermediate_data_type": kind.FLOAT}
    return cudnn.pygraph(**types, compute_data_type=kind.FLOAT), kind


def tensors(g, *names):
    return [g.tensor(name=n, dim=[B, H, S, D], stride=[H * S * D, S * D, D, 1]) for n in names]


def forward(made, io="FLOAT"):
    g, kind = pygraph(io)
    mod = made(g, kind)
    o, stats = g.sdpa(*tensors(g, *"qkv"), attn_scale=0.25, score_mod=mod.forward,
                      is_inference=False, name="sdpa")  # fmt: skip
    o.set_output(True).set_name("o").set_dim([B, H, S, D]).set_stride([H * S * D, S * D, D, 1])
    stats.set_output(True).set_name("stats").set_data_type(kind.FLOAT)
    return jc.from_pygraph(g), mod


def backward(made, io="FLOAT", **given):
    g, kind = pygraph(io)
    mod = made(g, kind)
    stats = g.tensor(name="stats", dim=[B, H, S, 1], stride=[H * S, S, 1, 1], data_type=kind.FLOAT)
    functions = {"score_mod": mod.forward, "score_mod_bprop": mod.backward, **given}
    results = g.sdpa_backward(*tensors(g, "q", "k", "v", "o", "dO"), stats, attn_scale=0.25,
                              **functions, name="back")  # fmt: skip
    for result in results:
        result.set_output(True)
    return jc.from_pygraph(g), mod


def of(graph, **arrays):
    known = {**VALUES, "q": Q, "k": K, "v": V, **arrays}
    return {n: known[n] for n in [tensor.get_name() for tensor in graph.get_inputs()]}


def plain(mod):
    def attend(q, k, v):
        scores = mod.meaning(0.25 * jnp.einsum("bhsd,bhtd->bhst", q, k))
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        return jnp.exp(scores - total) @ v, total

    return attend


@pytest.mark.parametrize("made", [Softcap, Causal])
def test_values_and_gradients_are_those_of_the_function(made):
    graph, mod = forward(made)
    found = jax.jit(lambda q: graph({**of(graph), "q": q}))(Q)
    o, stats = plain(mod)(Q, K, V)
    np.testing.assert_allclose(found["sdpa::O"], o, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["sdpa::Stats"], stats, rtol=1e-4, atol=1e-5)
    want = jax.vjp(lambda *x: plain(mod)(*x)[0], Q, K, V)[1](DO)

    def loss(q, k, v):
        return (graph({**of(graph), "q": q, "k": k, "v": v})["sdpa::O"] * DO).sum()

    own = jax.jit(jax.grad(loss, (0, 1, 2)))(Q, K, V)
    given = found["sdpa::O"], found["sdpa::Stats"]
    graph, _ = backward(made)
    results = graph(of(graph, o=given[0], stats=given[1], dO=DO))
    for name, exact, derived in zip("QKV", want, own, strict=True):
        np.testing.assert_allclose(derived, exact, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(results[f"back::d{name}"], exact, rtol=1e-3, atol=1e-4)


@pytest.mark.deviceless
@pytest.mark.parametrize("write", [forward, backward])
def test_the_function_is_in_the_plan(write):
    plan = write(Softcap, "BFLOAT16")[0].plan(gpus=["H200"])["H200"]
    assert len(plan.execution_plans) == len(plan.segments) == 1
    assert "tanh" in str(plan.spec)


def test_numbers_of_the_graph_are_constants():
    g, kind = pygraph()
    half = g.tensor_scalar(0.5, kind.FLOAT)

    def mod(graph, score):
        return graph.mul(graph.max(score, graph.tensor_scalar(0.0)), half)

    given = {"attn_scale": 0.25, "generate_stats": False, "score_mod": mod}
    o, _ = g.sdpa(*tensors(g, *"qkv"), **given)
    function = jc.from_pygraph(g, inputs=[*"qkv"], outputs=[o.set_output(True)])
    weights = jax.nn.softmax(jnp.maximum(0.25 * Q @ K.swapaxes(2, 3), 0) * 0.5, axis=-1)
    np.testing.assert_allclose(function(Q, K, V), weights @ V, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"score_mod_bprop": lambda graph, x: graph.mul(x, 2.0)},
            "not the derivative of score_mod",
        ),
        ({"score_mod_bprop": lambda graph, x: 3}, "did not return a tensor"),
        ({"score_mod": None}, "score_mod_bprop without score_mod"),
        ({"score_mod": lambda graph, x: graph.matmul(x, x)}, "matmul is not elementwise"),
        ({"score_mod": lambda graph, x: graph.softmax(x)}, "no operation 'softmax'"),
    ],
)
def test_wrong_functions(given, words):
    with pytest.raises(jc.JaxCudnnError, match=words):
        backward(Softcap, **given)
