"""``jc.from_pygraph``: graphs built with cuDNN's frontend, as JAX functions."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_cases
from helpers import has_cudnn, normal

import jax_cudnn as jc
from jax_cudnn._core.planning import build, frontend

if importlib.util.find_spec("cudnn") is None:
    pytest.skip("nvidia-cudnn-frontend is not installed", allow_module_level=True)

SPATIAL = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}


@pytest.fixture(scope="module")
def cudnn():
    return frontend.load()


def pygraph(cudnn, **kwargs):
    types = {"intermediate_data_type": "FLOAT", "compute_data_type": "FLOAT", **kwargs}
    return cudnn.pygraph(**{key: getattr(cudnn.data_type, name) for key, name in types.items()})


def conv_bias_relu(cudnn):
    g = pygraph(cudnn, io_data_type="FLOAT")
    x = g.tensor(name="X", dim=[2, 16, 6, 5], stride=[480, 1, 80, 16])
    w = g.tensor(name="W", dim=[8, 16, 3, 3], stride=[144, 1, 48, 16])
    b = g.tensor(name="B", dim=[1, 8, 1, 1], stride=[8, 1, 8, 8])
    y = g.conv_fprop(x, w, **SPATIAL, name="conv")
    y = g.relu(g.bias(input=y, bias=b))
    return g, (x, w, b), y.set_output(True).set_name("Y").set_uid(90)


@jc.graph
def plain(g, x, w, b):
    return g.relu(g.bias(g.conv_fprop(x, w, **SPATIAL), b))


def test_it_is_the_graph_function_with_all_references_and_transformations(cudnn):
    g, inputs, y = conv_bias_relu(cudnn)
    function = jc.from_pygraph(g, inputs=inputs, outputs=[y])
    arrays = normal(jax.random.key(0), (2, 16, 6, 5), (8, 16, 3, 3), (1, 8, 1, 1))
    assert function.spec.canonical() is plain.trace(*arrays)[1].spec.canonical()
    want = plain(*arrays)
    np.testing.assert_array_equal(jax.jit(function)(*arrays), want)
    by_name = function({"X": arrays[0], inputs[1].get_uid(): arrays[1], "bias.0::bias": arrays[2]})
    np.testing.assert_array_equal(by_name["relu.0::OUT_0"], want)
    other = jc.from_pygraph(g, inputs=["B", "conv::image", "W"], outputs=[90])
    np.testing.assert_array_equal(other(arrays[2], *arrays[:2]), want)
    result = jc.from_pygraph(g)({**dict(zip(inputs, arrays, strict=True)), y: want})
    np.testing.assert_array_equal(result[y], want)
    _, others, _ = conv_bias_relu(cudnn)
    with pytest.raises(jc.GraphError, match="has no tensor"):
        jc.from_pygraph(g, others, [y])
    with pytest.raises(jc.GraphError, match="the pygraph defines it"):
        jc.from_pygraph(g, io_data_type="HALF")


SPECS = {case.name: case.function.trace(*case.avals)[1].spec for case in all_cases()}
EMITTED = [name for name, spec in SPECS.items() if not any(c.node.xla_only for c in spec.calls)]


@pytest.mark.parametrize("name", EMITTED)
def test_nothing_of_a_node_is_lost(cudnn, name):
    """What the package emits for planning is the same after conversion and emission."""
    if not all(hasattr(cudnn.pygraph, call.node.method) for call in SPECS[name].calls):
        pytest.skip("cudnn.pygraph has no such operation")
    if "moe_grouped" in name and not has_cudnn(92800):
        pytest.skip("cuDNN 9.28 plans it")
    graph = emitted(cudnn, SPECS[name])
    assert described(emitted(cudnn, jc.from_pygraph(graph).spec)) == described(graph)


def emitted(cudnn, spec):
    graph = pygraph(cudnn, io_data_type="FLOAT")
    build._emit(spec, graph, cudnn)
    return graph


def described(graph):
    def tensors(ports):
        return {port: (list(t.dim), list(t.stride), t.data_type) for port, t in ports.items()}

    return [
        (n.node_type, tensors(n.inputs), tensors(n.outputs), str(n.params), n.compute_data_type)
        for n in graph.nodes
    ]


def test_numbers_passed_by_value(cudnn):
    g = pygraph(cudnn, io_data_type="FLOAT")
    x = g.tensor(name="x", dim=[6, 32])
    scale = g.tensor(name="scale", dim=[1, 32])
    epsilon = g.tensor(
        name="epsilon", dim=[1, 1], is_pass_by_value=True, data_type=cudnn.data_type.FLOAT
    )
    half = g.tensor_scalar(0.5, cudnn.scalar_type.COMPILE_TIME_CONST)
    phase = cudnn.norm_forward_phase.INFERENCE
    y, _ = g.rmsnorm(input=x, scale=scale, epsilon=epsilon, norm_forward_phase=phase)
    g.mul(y, half).set_output(True).set_name("y")
    function = jc.from_pygraph(g, inputs=["x", "scale", "epsilon"], outputs=["y"])
    a, s = jnp.arange(192.0).reshape(6, 32), jnp.full((1, 32), 2.0)
    want = a * jax.lax.rsqrt((a * a).mean(1, keepdims=True) + 0.1)
    for given in (0.1, jnp.float32(0.1)):
        np.testing.assert_allclose(function(a, s, given), want, rtol=1e-5)


def test_attention_with_dropout_scale_and_optional_gradients(cudnn):
    g = pygraph(cudnn, io_data_type="BFLOAT16")
    tensors = {name: g.tensor(name=name, dim=[2, 4, 32, 8]) for name in ("q", "k", "v", "o", "dO")}
    stats = g.tensor(name="stats", dim=[2, 4, 32, 1], data_type=cudnn.data_type.FLOAT)
    words = [g.tensor(name=n, dim=[1, 1, 1, 1], data_type=cudnn.data_type.INT64) for n in "st"]
    bias, d_bias = (g.tensor(name=n, dim=[1, 4, 32, 32]) for n in ("bias", "d_bias"))
    scale = g.tensor_scalar(0.25, cudnn.data_type.FLOAT)
    given = {**tensors, "stats": stats, "bias": bias, "dBias": d_bias, "attn_scale": scale}
    results = g.sdpa_backward(**given, dropout=(0.1, *words), use_causal_mask=True)
    for result in (*results, d_bias):
        result.set_output(True)
    spec = jc.from_pygraph(g, outputs=[*results, d_bias]).spec
    assert [spec.tensor(n).shape for n in spec.outputs] == [(2, 4, 32, 8)] * 3 + [(1, 4, 32, 32)]
    assert {spec.tensor(n).dtype for n in spec.inputs} == {"bfloat16", "float32", "uint32"}
    (call,) = spec.calls
    assert (call.node.dropout_probability, call.node.attn_scale) == (0.1, 0.25)


def test_integers_inside_are_of_the_intermediate_type(cudnn):
    g = pygraph(cudnn)
    a = g.tensor(name="a", dim=[4, 8], data_type=cudnn.data_type.INT32)
    b = g.tensor(name="b", dim=[4, 8], data_type=cudnn.data_type.INT32)
    half = g.div(a, b)
    y = g.add(half, half).set_output(True).set_data_type(cudnn.data_type.FLOAT)
    function = jc.from_pygraph(g, inputs=[a, b], outputs=[y])
    ones = jnp.ones((4, 8), jnp.int32)
    np.testing.assert_array_equal(function(ones, 2 * ones), np.ones((4, 8), np.float32))


def test_a_comparison_is_a_number_to_what_computes_with_it(cudnn):
    g = pygraph(cudnn, io_data_type="FLOAT")
    x, y = (g.tensor(name=name, dim=[4, 8], stride=[8, 1]) for name in "xy")
    above = g.cmp_gt(x, y)
    masked, picked = g.mul(above, x), g.binary_select(above, y, above)
    for result in (masked, picked):
        result.set_output(True)
    function = jc.from_pygraph(g, inputs=[x, y], outputs=[masked, picked])
    array = jnp.arange(32.0).reshape(4, 8)
    got = function(array, 0 * array + 3)
    np.testing.assert_array_equal(got[0], np.where(array > 3, array, 0))
    np.testing.assert_array_equal(got[1], np.where(array > 3, 1, 3))


def test_ragged_offsets_of_what_takes_none_are_refused(cudnn):
    g = pygraph(cudnn, io_data_type="FLOAT")
    x = g.tensor(name="x", dim=[4, 8], ragged_offset=g.tensor(name="r", dim=[5, 1]))
    g.relu(x).set_output(True)
    with pytest.raises(jc.GraphError, match="packed_dot_product_attention"):
        jc.from_pygraph(g)
