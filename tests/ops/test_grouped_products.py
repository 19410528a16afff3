"""The grouped products of experts: values, derivatives, offsets, plans, meshes, errors."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import has_cudnn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_cudnn as jc
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.graph.node import registry
from jax_cudnn.ops.matmul.grouped import MoeGroupedMatmul

S, K, N, E, TOP_K = 24, 8, 6, 3, 2
TURNED = (1, 512, 256), (4, 128, 256)  # (1, S, K) and (E, N, K)
OFFSETS = {
    "starts": [0, 10, 17],
    "empty groups": [0, 0, 24],
    "begins late": [5, 9, 20],
    "with the end": [0, 10, 17, 20],
    "ends with the rows": [2, 10, 17, 24],
    "no rows": [4, 4, 4, 4],
    "two groups each": [0, 3, 3, 12, 13, 20],
    "two each, with the end": [0, 3, 3, 12, 13, 20, 22],
}
WRONG = {
    "descending": [9, 3, 20],
    "outside": [-5, 12, 10**9],
    "all of it": [2**31 - 1, -(2**31), 0],
}
HAS_CUDNN = importlib.util.find_spec("cudnn") is not None


def offsets_of(values):
    return jnp.array(values, jnp.int32).reshape(-1, 1, 1)


def operands(mode="NONE", experts=E, dtype="float32", seed=0):
    """Token, weight, and the positions of the mode, by port."""
    random = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), dtype)  # noqa: E731
    given = {"token": draw(1, S, K), "weight": draw(experts, K, N)}
    places = random.permutation(S)
    moves = {
        "NONE": {},
        "GATHER": {"token_index": random.integers(0, S, 30)},
        "SCATTER": {"token_index": places // TOP_K, "token_ks": places % TOP_K},
    }[mode]
    return given | {p: jnp.asarray(x, jnp.int32).reshape(1, -1, 1) for p, x in moves.items()}


def node_of(mode):
    return MoeGroupedMatmul(mode, TOP_K if mode == "SCATTER" else 1)


def grouped(mode="NONE"):
    """A function of operands by port."""
    node = node_of(mode)

    def fn(g, given):
        return g.moe_grouped_matmul(**given, mode=node.mode, top_k=node.top_k)

    return jc.graph(fn)


def numbers(given):
    return {port: np.asarray(x).astype("float64") for port, x in given.items()}


@pytest.mark.parametrize("mode", ["NONE", "GATHER", "SCATTER"])
@pytest.mark.parametrize("name", [*OFFSETS, *WRONG])
def test_values_are_those_of_a_loop_over_groups(mode, name):
    given = operands(mode) | {"first_token_offset": offsets_of((OFFSETS | WRONG)[name])}
    found = jax.jit(grouped(mode))(given)
    want = oracle.OPERATIONS["moe_grouped_matmul"](node_of(mode), **numbers(given))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_sums_are_float32_or_int32(dtype):
    given = operands(dtype="float32")
    given = {port: (3 * x).astype(dtype) for port, x in given.items()}
    given["first_token_offset"] = offsets_of(OFFSETS["starts"])
    found = grouped()(given)
    assert found.dtype == {"bfloat16": "bfloat16", "int8": "int32"}.get(dtype, "float32")
    want = oracle.OPERATIONS["moe_grouped_matmul"](node_of("NONE"), **numbers(given))
    rounding = 2.0**-8 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(np.asarray(found, "float64"), want, rtol=rounding, atol=1e-5)


def test_a_single_expert_and_rows_that_no_group_has():
    given = operands(experts=1) | {"first_token_offset": offsets_of([3, 20])}
    found = grouped()(given | {"token": given["token"].at[0, 20:].set(jnp.inf)})[0]
    want = (given["token"][0] @ given["weight"][0]).at[20:].set(0)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["NONE", "GATHER", "SCATTER"])
def test_derivatives_of_first_and_second_order(mode):
    given = operands(mode) | {"first_token_offset": offsets_of(OFFSETS["begins late"])}

    def loss(token, weight):
        return jnp.sum(jnp.sin(grouped(mode)(given | {"token": token, "weight": weight})))

    factors = given["token"], given["weight"]
    check_grads(loss, factors, 2, rtol=3e-2, atol=3e-2)
    cotangent = jnp.cos(grouped(mode)(given))
    of_token, of_weight = jax.grad(loss, (0, 1))(*factors)
    run = oracle.OPERATIONS["moe_grouped_matmul"]
    exact, ct = numbers(given), np.asarray(cotangent, "float64")
    for port, got in (("token", of_token), ("weight", of_weight)):
        for at in [(0, 0, 0), (0, 6, 3), (0, 2, 1)]:  # linear: a column of its matrix
            unit = np.zeros(given[port].shape)
            unit[at] = 1
            want = np.sum(ct * run(node_of(mode), **exact | {port: unit}))
            assert abs(got[at] - want) < 1e-4


def test_gradients_are_the_two_nodes_and_those_of_the_backward_too():
    given = operands() | {"first_token_offset": offsets_of(OFFSETS["two each, with the end"])}
    loss = lambda t, w: grouped()(given | {"token": t, "weight": w}).sum()  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(given["token"], given["weight"]))
    assert "= moe_grouped_matmul(" in text
    assert "= moe_grouped_matmul_bwd(" in text
    assert "transpose_moe" not in text
    assert "jvp_moe" not in text
    offsets = given["first_token_offset"]
    backward = jc.graph(lambda g, y, t: g.moe_grouped_matmul_bwd(y, t, offsets, out_dims=(E, K, N)))
    cotangent = jnp.sin(jnp.arange(S * N, dtype=jnp.float32).reshape(1, S, N))
    run = lambda y, t: jnp.sum(jnp.sin(backward(y, t)))  # noqa: E731
    check_grads(run, (cotangent, given["token"]), 2, rtol=3e-2, atol=3e-2)
    text = str(jax.make_jaxpr(jax.grad(run, (0, 1)))(cotangent, given["token"]))
    assert text.count("= moe_grouped_matmul(") == 2


@pytest.mark.parametrize("name", ["starts", "two groups each", "with the end", "descending"])
def test_the_backward_sums_the_rows_of_each_expert(name):
    offsets = offsets_of((OFFSETS | WRONG)[name])
    token, cotangent = operands()["token"], operands(seed=1)["token"][..., :N]
    node = registry()["moe_grouped_matmul_bwd"].create(out_dims=(E, K, N))
    found = jc.graph(lambda g, y, t, o: g.moe_grouped_matmul_bwd(y, t, o).set_dim([E, K, N]))(
        cotangent, token, offsets
    )
    given = {"doutput": cotangent, "token": token, "first_token_offset": offsets}
    want = oracle.OPERATIONS["moe_grouped_matmul_bwd"](node, **numbers(given))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mapped", [("weight",), ("token",), ("token", "first_token_offset")])
def test_vmap_of_any_operands(mapped):
    given = operands() | {"first_token_offset": offsets_of(OFFSETS["starts"])}
    other = operands(seed=1) | {"first_token_offset": offsets_of(OFFSETS["empty groups"])}
    batch = given | {port: jnp.stack([given[port], other[port]]) for port in mapped}
    axes = {port: 0 if port in mapped else None for port in given}
    found = jax.vmap(grouped(), ({**axes},))(batch)
    second = given | {port: other[port] for port in mapped}
    np.testing.assert_allclose(found[0], grouped()(given), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], grouped()(second), rtol=1e-5, atol=1e-5)
    text = str(jax.make_jaxpr(jax.vmap(grouped(), ({**axes},)))(batch))
    assert ("scan[" in text) == (mapped != ("weight",))  # columns of all weights are one product


@pytest.mark.parametrize("mode", ["NONE", "GATHER", "SCATTER"])
def test_a_plan_gets_positions_inside_of_the_arrays(mode):
    random = np.random.default_rng(3)
    given = operands(mode) | {"first_token_offset": offsets_of(OFFSETS["with the end"])}
    _, trace = grouped(mode).trace(given)
    spec = trace.spec
    names = {name: port for port, name in spec.calls[0].inputs}
    for _ in range(10):
        wild = {
            port: jnp.asarray(random.integers(-(2**31), 2**31, x.shape), jnp.int32)
            if x.dtype == jnp.int32
            else x
            for port, x in given.items()
        }
        sent = boundary(spec).clipped([wild[names[name]] for name in spec.inputs])
        found = {names[name]: np.asarray(x) for name, x in zip(spec.inputs, sent, strict=True)}
        offsets = found["first_token_offset"].ravel()
        rows = 30 if mode == "GATHER" else S
        assert 0 <= offsets.min() <= offsets.max() <= rows
        assert (np.diff(offsets) >= 0).all()
        for port, most in (("token_index", S), ("token_ks", TOP_K)):
            if port in found:
                most = S // TOP_K if (port, mode) == ("token_index", "SCATTER") else most
                assert 0 <= found[port].min() <= found[port].max() < most


def test_columns_are_sharded_and_rows_are_whole():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    given = operands() | {"first_token_offset": offsets_of(OFFSETS["starts"])}
    want = grouped()(given)
    for spec in (P(None, None, "model"), P(None, "model")):
        placed = given | {"weight": jax.device_put(given["weight"], NamedSharding(mesh, spec))}
        run = jax.jit(grouped())
        np.testing.assert_allclose(run(placed), want, rtol=1e-5, atol=1e-5)
        if spec[-1] == "model" and len(spec) == 3:
            assert "all-gather" not in run.lower(placed).compile().as_text()
    rows = given | {"token": jax.device_put(given["token"], NamedSharding(mesh, P(None, "model")))}
    np.testing.assert_allclose(jax.jit(grouped())(rows), want, rtol=1e-5, atol=1e-5)


def aval(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def avals(mode="NONE", dtype="bfloat16", entries=8):
    moves = {"NONE": (), "GATHER": ("token_index",), "SCATTER": ("token_index", "token_ks")}[mode]
    return {
        "token": aval((1, 512, 256), dtype),
        "weight": aval((8, 256, 128), dtype),
        "first_token_offset": aval((entries, 1, 1), "int32"),
        **dict.fromkeys(moves, aval((1, 512, 1), "int32")),
    }


@pytest.mark.deviceless
def test_what_is_planned():
    if not has_cudnn(92800):
        pytest.skip("cuDNN 9.28 plans it")
    with jc.implementation("cudnn"):
        plans = jc.plan(grouped(), avals(), gpus=["A100", "H200", "B200"])
        for plan in plans.values():
            assert len(plan.execution_plans) == 1
        for mode in ("GATHER", "SCATTER"):
            with pytest.raises(jc.UnsupportedGraphError, match="read outside of the arrays"):
                jc.plan(grouped(mode), avals(mode), gpus=["H200"])


@pytest.mark.deviceless
def test_weights_are_read_as_they_lie():
    @jc.graph
    def turned(g, token, weight, offsets):
        return g.moe_grouped_matmul(token, weight.set_stride([256 * 128, 1, 256]), offsets)

    operands = [aval((1, 512, 256)), aval((8, 256, 128)), aval((8, 1, 1), "int32")]
    with jc.implementation("cudnn"):
        (plan,) = jc.plan(turned, *operands, gpus=["H200"]).values()
    assert len(plan.execution_plans) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("offsets", [[0, 100, 200, 300], [9, 9, 50, 512], [4, -5, 600, 2]])
def test_plans_compute_what_float64_does(dtype, offsets):
    """With weights as (E, N, K), which every cuDNN takes that has the node."""
    random = np.random.default_rng(0)
    token, weight = (jnp.asarray(random.standard_normal(s), dtype) for s in TURNED)

    @jc.graph(implementation="cudnn")
    def turned(g, token, weight, offsets):
        return g.moe_grouped_matmul(token, weight.set_stride([256 * 128, 1, 256]), offsets)

    given = token, weight.swapaxes(1, 2), offsets_of(offsets)
    found = jax.jit(turned)(*given)
    ports = "token", "weight", "first_token_offset"
    want = oracle.OPERATIONS["moe_grouped_matmul"](
        node_of("NONE"), **numbers(dict(zip(ports, given, strict=True)))
    )
    np.testing.assert_allclose(np.asarray(found, "float64"), want, rtol=2e-2, atol=0.1)


@pytest.mark.deviceless
def test_what_follows_runs_after_it():
    if not has_cudnn(92800):
        pytest.skip("cuDNN 9.28 plans it")
    relu = jc.graph(lambda g, given: g.relu(g.moe_grouped_matmul(**given)))
    (plan,) = jc.plan(relu, avals(), gpus=["H200"]).values()
    assert len(plan.execution_plans) == 1
    assert "+ XLA for H200" in str(plan)
    with jc.implementation("cudnn"), pytest.raises(jc.UnsupportedGraphError, match="TF32 only"):
        jc.plan(grouped().with_options(precision="highest"), avals(dtype="float32"), gpus=["H200"])


@pytest.mark.skipif(not HAS_CUDNN, reason="nvidia-cudnn-frontend is not installed")
@pytest.mark.parametrize("mode", ["NONE", "GATHER", "SCATTER"])
def test_from_pygraph_takes_it(mode):
    import cudnn

    types = {"io_data_type": cudnn.data_type.FLOAT, "compute_data_type": cudnn.data_type.FLOAT}
    g = cudnn.pygraph(**types)
    given = operands(mode) | {"first_token_offset": offsets_of(OFFSETS["starts"])}
    kinds = {"float32": cudnn.data_type.FLOAT, "int32": cudnn.data_type.INT32}
    tensors = {
        port: g.tensor(name=port, dim=list(x.shape), data_type=kinds[str(x.dtype)])
        for port, x in given.items()
    }
    own = {"mode": getattr(cudnn.moe_grouped_matmul_mode, mode), "top_k": node_of(mode).top_k}
    y = g.moe_grouped_matmul(**tensors, **own).set_output(True)
    found = jc.from_pygraph(g, inputs=[*tensors.values()], outputs=[y])(*given.values())
    np.testing.assert_array_equal(found, grouped(mode)(given))

    backward = cudnn.pygraph(**types)
    ports = {"doutput": (1, S, N), "token": (1, S, K), "first_token_offset": (E, 1, 1)}
    tensors = [
        backward.tensor(name=port, dim=list(shape), data_type=kinds[dtype])
        for (port, shape), dtype in zip(ports.items(), ("float32", "float32", "int32"), strict=True)
    ]
    dw = backward.moe_grouped_matmul_bwd(*tensors).set_output(True)
    arrays = jnp.ones(ports["doutput"]), operands()["token"], given["first_token_offset"]
    found = jc.from_pygraph(backward, inputs=tensors, outputs=[dw])(*arrays)
    np.testing.assert_allclose(found.sum((0, 2)), N * arrays[1][0].sum(0), rtol=1e-4)


@pytest.mark.skipif(not HAS_CUDNN, reason="nvidia-cudnn-frontend is not installed")
@pytest.mark.parametrize("method", ["rope", "rope_backward"])
def test_from_pygraph_names_the_function_for_a_rotary_embedding(method):
    import cudnn

    if not hasattr(cudnn.pygraph, method):
        pytest.skip("this frontend has no rope")
    g = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
    x = g.tensor(name="x", dim=[2, 4, 8, 16])
    getattr(g, method)(x, g.tensor(name="f", dim=[8, 1, 1, 16])).set_output(True)
    with pytest.raises(jc.GraphError, match="does not support this operation") as error:
        jc.from_pygraph(g)
    assert "jax_cudnn.ops.rotary_embedding" in str(error.value)


@pytest.mark.skipif(not HAS_CUDNN, reason="nvidia-cudnn-frontend is not installed")
def test_the_end_of_the_last_group_needs_a_newer_cudnn(monkeypatch):
    import cudnn

    g = cudnn.pygraph()
    shapes = {"token": [1, 8, 4], "weight": [2, 4, 4], "first_token_offset": [3, 1, 1]}
    tensors = {port: g.tensor(name=port, dim=shape) for port, shape in shapes.items()}
    monkeypatch.setattr(cudnn, "backend_version", lambda: 91900)
    with pytest.raises(RuntimeError, match=r"needs cuDNN 9\.28"):
        node_of("NONE").emit(g, tensors, {})
    monkeypatch.setattr(cudnn, "backend_version", lambda: 92800)
    assert len(node_of("NONE").emit(g, tensors, {})) == 1


WRONG_CALLS = {
    "'NONE' takes other operands": lambda x: x | {"token_ks": jnp.zeros((1, S, 1), jnp.int32)},
    "wrong number of entries": lambda x: x | {"first_token_offset": offsets_of([0] * 5)},
    "disagree on dimension 'k'": lambda x: x | {"weight": x["weight"][:, 1:]},
    "does not take float32 for 'first_token_offset'": lambda x: (
        x | {"first_token_offset": jnp.zeros((E, 1, 1))}
    ),
    "'first_token_offset' has the wrong shape": lambda x: (
        x | {"first_token_offset": jnp.zeros((E,), jnp.int32)}
    ),
    "'token' has the wrong shape": lambda x: x | {"token": jnp.ones((2, S, K))},
    "does not take int32 for 'weight'": lambda x: x | {"weight": jnp.ones((E, K, N), jnp.int32)},
}


@pytest.mark.parametrize("message", WRONG_CALLS)
def test_errors_say_what_is_wrong(message):
    given = operands() | {"first_token_offset": offsets_of(OFFSETS["starts"])}
    with pytest.raises((jc.GraphError, jc.GraphTypeError), match=message):
        grouped()(WRONG_CALLS[message](given))


def test_errors_of_attributes():
    given = operands("SCATTER") | {"first_token_offset": offsets_of(OFFSETS["starts"])}
    with pytest.raises(jc.GraphError, match="unknown mode"):
        jc.graph(lambda g, x: g.moe_grouped_matmul(**x, mode="COMBINE"))(given)
    with pytest.raises(jc.GraphError, match="not a multiple of top_k"):
        jc.graph(lambda g, x: g.moe_grouped_matmul(**x, mode="SCATTER", top_k=5))(given)
    backward = jc.graph(lambda g, *xs: g.moe_grouped_matmul_bwd(*xs, out_dims=(E, N, K)))
    with pytest.raises(jc.GraphError, match="out_dims do not fit"):
        backward(jnp.ones((1, S, N)), given["token"], given["first_token_offset"])
