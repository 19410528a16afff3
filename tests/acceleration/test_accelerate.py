"""``jax_cudnn.accelerate``: what it replaces for a GPU, what it says, and what it leaves alone."""

import copy
import dataclasses
import functools
import gc
import pickle
import re
import weakref
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from acceleration.test_program import arrays, replaced
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn._core import settings
from jax_cudnn._core.primitive import in_jaxpr
from jax_cudnn.acceleration import region as regions
from jax_cudnn.acceleration.api import search

SHAPE = (2, 128, 2, 64)


def attend(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def graphs(fn, *args, gpu="H200"):
    with jc.target(gpu):
        return [name for name, _ in in_jaxpr(jax.make_jaxpr(fn)(*args).jaxpr)]


def half(*shapes):
    return arrays(*shapes, dtype="bfloat16")


def test_without_a_gpu_it_is_the_function():
    args = half(*[SHAPE] * 3)
    fast = jc.accelerate(attend)
    assert str(jax.make_jaxpr(fast)(*args)) == str(jax.make_jaxpr(attend)(*args))
    assert fast.__name__ == "attend"
    assert "attend" in repr(fast)


@pytest.mark.deviceless
def test_forward_and_backward_are_one_graph_each():
    args = half(*[SHAPE] * 3)
    fast = jc.accelerate(attend)
    assert graphs(fast, *args) == ["dot_product_attention"]
    loss = lambda *x: (fast(*x).astype("float32") ** 2).sum()  # noqa: E731
    both = ["dot_product_attention", "dot_product_attention (backward)"]
    for step in (jax.grad(loss, (0, 1, 2)), jax.jit(jax.grad(loss)), jax.value_and_grad(loss)):
        assert graphs(step, *args) == both
    assert graphs(jax.grad(jax.checkpoint(loss)), *args) == [both[0], *both]
    with jc.target("H200"):
        wide = jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))(*arrays(*[SHAPE] * 3))
        plain = jax.grad(lambda *x: (attend(*x).astype("float32") ** 2).sum(), (0, 1, 2))(*args)
        ours = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    for exact, a, b in zip(wide, plain, ours, strict=True):
        error = lambda x, exact=exact: np.linalg.norm(np.asarray(x, "float32") - exact)  # noqa: E731
        assert error(b) <= 1.5 * error(a)


@pytest.mark.deviceless
def test_a_backward_that_xla_runs_is_that_of_the_users_equations():
    args = arrays(*[SHAPE] * 3)  # float32: cuDNN has a forward alone
    fast = jc.accelerate(attend)
    assert graphs(fast, *args) == ["dot_product_attention"]
    step = lambda f: jax.grad(lambda *x: (f(*x) ** 2).sum())  # noqa: E731
    assert graphs(step(fast), *args) == []
    with jc.target("H200"):
        dots = [str(jax.make_jaxpr(step(f))(*args)).count("dot_general") for f in (attend, fast)]
    assert dots[0] == dots[1]


@pytest.mark.deviceless
def test_a_product_stays_where_xla_runs_its_backward(monkeypatch):
    refused = regions._refused
    xlas = lambda spec, *a: "XLA is faster" if spec.origin.suffix else refused(spec, *a)  # noqa: E731
    monkeypatch.setattr(regions, "_refused", xlas)
    total = lambda f: jax.grad(lambda *x: f(*x).astype("float32").sum())  # noqa: E731
    layer = jc.accelerate(lambda x, w: jax.nn.gelu(x @ w))
    assert graphs(total(layer), *half((4096, 64), (64, 4096))) == ["matmul", "matmul (backward)"]
    assert graphs(total(jc.accelerate(attend)), *half(*[SHAPE] * 3)) == []


@pytest.mark.deviceless
def test_what_xla_runs_faster_stays_the_users_equations():
    x, s, b = half((64, 128), (128,), (128,))

    def norm(x, s, b):
        y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return y * s + b

    report = jc.accelerate(norm).report(x, s, b, gpu="H200").to_json()
    (region,) = report["regions"]
    if region["runs_on"] == "XLA":
        assert region["why"]
        with jc.target("H200"):
            text = str(jax.make_jaxpr(jc.accelerate(norm))(x, s, b))
        assert text == str(jax.make_jaxpr(norm)(x, s, b))
    with jc.implementation("xla"):
        args = half(*[SHAPE] * 3)
        assert graphs(jc.accelerate(attend), *args) == []


@pytest.mark.deviceless
def test_report_and_explain():
    x = jax.ShapeDtypeStruct(SHAPE, "bfloat16")

    def model(q, k, v):
        out, _ = jax.lax.scan(lambda c, _: (attend(c, k, v), None), q, None, 4)
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", out, k))
        return jnp.einsum("bhts,bshd->bthd", p, v), p

    fast = jc.accelerate(model)
    (undecided,) = fast.report(x, x, x).to_json()["regions"]
    assert (undecided["kind"], undecided["times"], undecided["runs_on"]) == ("attention", 4, "")
    report = fast.report(x, x, x, gpu="H200")
    (region,) = report.to_json()["regions"]
    assert region["runs_on"] == "cuDNN"
    assert region["at"].startswith(f"{__file__}:")
    assert "causal" in region["what"]
    gelu, operands = jc.accelerate(lambda x, w: jax.nn.gelu(x @ w)), half((8192, 768), (768, 3072))
    (found,) = gelu.report(*operands, gpu="H200").to_json()["regions"]
    assert re.fullmatch(r"1\.\d\d predicted", found["gain"])
    (missed,) = report.to_json()["missed"]
    assert "used elsewhere" in missed["why"]
    text = str(report)
    assert text.startswith("model for H200: 1 found: 1 on cuDNN")
    assert "nearly, at" in text
    explained = jc.explain(fast, x, x, x, gpu="H200")
    (graph,) = explained.to_json()["graphs"]
    assert graph["times"] == 4
    assert "test_accelerate.py" in next(iter(graph["called"]))
    made = jc.plans(fast, x, x, x, gpus=["H200", "A100"])
    assert {gpu: [*plans] for gpu, plans in made.items()} == {
        "H200": ["dot_product_attention"], "A100": ["dot_product_attention"],
    }  # fmt: skip


@pytest.mark.deviceless
def test_the_second_call_traces_nothing_and_other_settings_do():
    traces = 0

    def counted(q, k, v, *, scale=1.0):
        nonlocal traces
        traces += 1
        return attend(q * scale, k, v)

    args = half(*[SHAPE] * 3)
    fast = jc.accelerate(counted)
    with jc.target("H200"):
        for _ in range(2):
            jax.block_until_ready(fast(*args))
        assert traces == 1
        for _ in range(2):
            fast(*args, scale=0.5)
        assert traces == 2
    with jc.target("A100"):
        fast(*args)
    assert traces == 3


@pytest.mark.deviceless
def test_what_a_function_closes_over():
    q, k, v = half(*[SHAPE] * 3)
    held = {"k": k}
    fast = jc.accelerate(lambda q: attend(q, held["k"], v))
    with jc.target("H200"):
        first = fast(q)
        held["k"] = 2 * k  # read anew, as without accelerate
        np.testing.assert_array_equal(fast(q), jc.accelerate(attend)(q, 2 * k, v))
        assert not np.array_equal(first, fast(q))

        def loss(k):
            return jc.accelerate(lambda q: attend(q, k, v))(q).astype("float32").sum()

        want = jax.grad(lambda k: attend(q, k, v).astype("float32").sum())(k)
        got, want = (x.astype("float32") for x in (jax.jit(jax.grad(loss))(k), want))
        np.testing.assert_allclose(got, want, rtol=0.1, atol=0.2)


@pytest.mark.deviceless
def test_decorators_methods_and_callable_pytrees():
    q, k, v = half(*[SHAPE] * 3)

    class Layer:
        @jc.accelerate(only=["attention"])
        def __call__(self, q, k, v):
            return attend(q, k, v)

    assert graphs(Layer().__call__, q, k, v) == ["dot_product_attention"]

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Block:
        k: jax.Array
        v: jax.Array

        def __call__(self, q):
            return attend(q, self.k, self.v)

    fast = jc.accelerate(Block(k, v))
    assert len(jax.tree.leaves(fast)) == 2
    run = lambda block, q: block(q)  # noqa: E731
    assert graphs(run, fast, q) == ["dot_product_attention"]
    doubled = jax.tree.map(lambda x: 2 * x, fast)
    with jc.target("H200"):
        np.testing.assert_array_equal(doubled(q), jc.accelerate(attend)(q, 2 * k, 2 * v))
    eqx = pytest.importorskip("equinox")
    layer = eqx.nn.MultiheadAttention(2, 64, key=jax.random.key(0), dtype=jnp.bfloat16)
    x = half((128, 64))[0]
    assert "dot_product_attention" in graphs(eqx.filter_jit(jc.accelerate(layer)), x, x, x)


@pytest.mark.deviceless
def test_a_failure_of_its_own_leaves_the_function_as_it_is(monkeypatch, caplog):
    from jax_cudnn.acceleration import attention, program

    monkeypatch.undo()
    args = half(*[SHAPE] * 3)
    for name in ("find", "dot_product_attention"):
        with monkeypatch.context() as patch:
            patch.setattr(attention, name, lambda *args, **given: 1 / 0)
            assert graphs(jc.accelerate(attend), *args) == []
    built = program.Program._flat
    failing = lambda self, jaxpr, *rest: built(self, jaxpr, *rest) if not jaxpr.eqns else 1 / 0  # noqa: E731
    monkeypatch.setattr(program.Program, "_flat", failing)
    assert graphs(jc.accelerate(attend), *args) == []
    assert caplog.text.count("Please report this") == 3


def test_what_it_does_not_take():
    with pytest.raises(jc.GraphTypeError, match="no function"):
        jc.accelerate(3)
    with pytest.raises(jc.GraphTypeError, match="unknown numerics"):
        jc.accelerate(attend, numerics="exact")
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    for fn in (model, model.__call__):
        with pytest.raises(jc.GraphTypeError, match=r"flax\.accelerate"):
            jc.accelerate(fn)
    for kinds in (["attentions"], "attentions", 3, [["attention"]], ["x", 3]):
        with pytest.raises(jc.GraphTypeError, match="unknown kind"):
            jc.accelerate(attend, only=kinds)


@pytest.mark.deviceless
def test_kinds_are_chosen():
    x, w, b = half((4, 256, 64), (64, 64), (64,))

    def block(x, w, b):
        h = jax.nn.relu(x @ w + b).reshape(4, 256, 1, 64)
        return attend(h, h, h)

    kinds = lambda **given: [  # noqa: E731
        r["kind"] for r in jc.accelerate(block, **given).report(x, w, b).to_json()["regions"]
    ]
    assert kinds() == ["attention", "product"]
    assert kinds(only=["product"]) == ["product"]
    assert kinds(without=["product", "convolution"]) == ["attention"]


def test_strict_numerics_keep_each_rounding():
    x, w, b = half((4, 64), (64, 64), (64,))
    rounded = lambda x, w, b: jax.nn.relu(x @ w + b)  # noqa: E731

    def once(x, w, b):
        y = jnp.dot(x, w, preferred_element_type="float32") + b.astype("float32")
        return jax.nn.relu(y).astype("bfloat16")

    for fn, found in ((rounded, [1, 0]), (once, [1, 1])):
        assert found == [
            len(jc.accelerate(fn, numerics=how).report(x, w, b).to_json()["regions"])
            for how in ("fused", "strict")
        ]


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_collectives_on_a_mesh_are_those_of_the_function(kind):
    def block(p, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
        x = x + jnp.einsum("bthk,hkd->btd", attend(q, k, v), p["out"])
        return x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]

    shapes = {"q": (64, 4, 16), "k": (64, 4, 16), "v": (64, 4, 16), "out": (4, 16, 64)}
    shapes |= {"up": (64, 128), "bias": (128,), "down": (128, 64)}
    columns, rows = P(None, "model"), P("model")
    spread = {**dict.fromkeys(("q", "k", "v", "up"), columns), "out": rows, "bias": rows}
    spread |= {"down": rows}
    if kind == AxisType.Explicit:
        spread = dict.fromkeys(shapes, P())
    *arrays_, x = half(*shapes.values(), (8, 32, 64))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh), jc.target("H200"):
        place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))  # noqa: E731
        p = {name: place(0.1 * a, spread[name]) for name, a in zip(shapes, arrays_, strict=True)}
        found = []
        for fn in (block, jc.accelerate(block)):
            loss = lambda p, x, fn=fn: (fn(p, x).astype("float32") ** 2).mean()  # noqa: E731
            step = jax.jit(jax.grad(loss))
            text = step.lower(p, place(x, P("data"))).compile().as_text()
            names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
            collectives = Counter(re.findall(rf"= \S+ ({names})\(", text))
            found.append((collectives, step(p, place(x, P("data")))))
    assert found[0][0] == found[1][0]
    for want, got in zip(*(jax.tree.leaves(grads) for _, grads in found), strict=True):
        error = np.linalg.norm(got.astype("float32") - want.astype("float32"))
        assert error <= 0.05 * np.linalg.norm(want.astype("float32"))


def test_a_cast_of_the_result_is_not_in_the_region():
    x, w = half((2, 128, 4, 64), (64,))

    def norm(x, w):
        wide = x.astype("float32")
        y = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
        return (y.astype("bfloat16") * w).astype("float32").sum()

    loss = lambda q: attend(q, q, q).astype("float32").sum()  # noqa: E731
    for fn, args, kind in ((loss, (x,), "attention"), (norm, (x, w), "normalization")):
        (region,) = search(jax.make_jaxpr(fn)(*args), [kind], False)[0].found
        assert region.output.dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_lengths_in_a_dtype_that_does_not_hold_one_more(dtype):
    q, k, v = half(*[(2, 200, 2, 64)] * 3)
    most = jnp.iinfo(dtype).max

    def masked(q, k, v, n):
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / 8
        seen = jnp.arange(200) <= n[:, None, None, None].astype("int32")
        narrow = jnp.arange(200, dtype=dtype) <= n[:, None, None, None]
        seen = narrow if dtype == "uint8" else seen
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)

    n = jnp.asarray([most, 5], dtype)
    want, got = masked(q, k, v, n), replaced(masked)(q, k, v, n)
    np.testing.assert_allclose(want.astype("float32"), got.astype("float32"), atol=0.03)


class Attends:
    @jc.accelerate
    def forward(self, q):
        return attend(q, q, q)


def test_methods_report_and_what_was_traced_is_copied():
    (x,) = half((2, 128, 4, 64))
    assert len(Attends().forward.report(x).to_json()["regions"]) == 1
    fast = jc.accelerate(attend)
    fast.report(x, x, x)
    for same in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert len(same.report(x, x, x).to_json()["regions"]) == 1


def test_kinds_of_an_iterator():
    x, w = half((2, 64), (64, 64))
    fast = jc.accelerate(lambda x, w: jax.nn.relu(x @ w), only=iter(["product"]))
    assert [region["kind"] for region in fast.report(x, w).to_json()["regions"]] == ["product"]


@pytest.mark.deviceless
def test_a_report_counts_what_is_alone_and_sees_lines_through_jit():
    x = jax.ShapeDtypeStruct(SHAPE, "bfloat16")

    def model(q, k, v):
        return attend(q, k, v) @ v.mean((0, 1)).T

    report = jc.accelerate(jax.jit(model)).report(x, x, x)
    (region,) = report.to_json()["regions"]
    assert region["at"].startswith(f"{__file__}:")
    assert report.to_json()["alone"] == {"products": 1, "convolutions": 0}
    assert str(report).endswith("alone, as XLA runs them: 1 product")


first_of = jax.jit(lambda x, *others: x)
PASSED_THROUGH = {
    "between equations": lambda x: jnp.tanh(first_of(jnp.tanh(x))),
    "at the end": lambda x: first_of(jnp.tanh(x)),
    "with others": lambda x: sum(jax.jit(lambda x: (x, 2 * x))(jnp.tanh(x))),
    "after a product": lambda x: jnp.tanh(first_of(x @ x.T) + 1.0),
    "key": lambda x: jax.nn.gelu(first_of(x @ x.T, jax.random.key(0))),
    "twice": lambda x: jnp.sin(first_of(first_of(jnp.tanh(x)), jnp.cos(x))),
}


@pytest.mark.parametrize("name", PASSED_THROUGH)
def test_a_call_may_return_its_operand(name):
    fn = PASSED_THROUGH[name]
    (x,) = arrays((16, 16))
    with jc.target("H200"):
        fast = jc.accelerate(fn)
        np.testing.assert_allclose(fast(x), fn(x), rtol=1e-3, atol=1e-4)
        of = lambda f: jax.grad(lambda x: f(x).sum())(x)  # noqa: E731
        np.testing.assert_allclose(of(fast), of(fn), rtol=1e-3, atol=1e-4)


@pytest.mark.deviceless
@pytest.mark.parametrize("shape", [(0, 16, 2, 64), (2, 0, 2, 64), (2, 16, 0, 64)])
def test_attention_of_nothing(shape):
    x = jnp.zeros(shape)
    with jc.target("H200"):
        assert jc.accelerate(attend)(x, x, x).shape == shape


@pytest.mark.deviceless
def test_attention_is_found_next_to_a_mask_of_a_constant_key(caplog):
    def dropped(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k)
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, scores.shape[2:])
        weights = jax.nn.softmax(jnp.where(kept, scores, -1e9))
        return attend(jnp.einsum("bhts,bshd->bthd", weights, v) + 1, k, v)

    x = half(SHAPE)[0]
    found = jc.accelerate(dropped).report(x, x, x, gpu="H200").to_json()["regions"]
    assert [region["kind"] for region in found] == ["attention"] * 2
    assert not caplog.records


@pytest.mark.deviceless
def test_support_traces_for_each_gpu_and_errors_name_the_users_function():
    x = jax.ShapeDtypeStruct(SHAPE, "bfloat16")
    fast = jc.accelerate(attend)
    assert jc.support(fast, x, x, x, gpus=["H200", "A100"]).gpus == ("H200", "A100")
    with pytest.raises(jc.GraphError, match="name the GPU"):
        jc.plans(fast, x, x, x)

    def branches(x):
        return x if x.sum() > 0 else -x

    for call in (jc.accelerate(branches).report, lambda x: jc.plans(branches, x)):
        with pytest.raises(jax.errors.ConcretizationTypeError, match=r"function branches at .*t_"):
            call(x)


@pytest.mark.deviceless
def test_a_wrong_setting_of_the_environment_is_an_error(monkeypatch):
    monkeypatch.setattr(settings, "_given", {})
    monkeypatch.setenv("JAX_CUDNN_TUNING", "fats")
    with jc.target("H200"), pytest.raises(jc.GraphError, match="did you mean 'fast'"):
        jc.accelerate(attend)(*half(*[SHAPE] * 3))


@pytest.mark.deviceless
def test_inside_of_shard_map_regions_are_found_too():
    """There operations of their own make constants to values that differ between devices."""

    def block(p, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, w) for w in p["qkv"])
        x = x + attend(q, k, v).reshape(x.shape)
        return x + jax.nn.gelu(x @ p["up"] + 0.5) @ p["up"].T

    qkv, up, x = half((3, 64, 4, 16), (64, 256), (8, 64, 64))
    p, mesh = (
        {"qkv": qkv * 0.1, "up": up * 0.1},
        jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,)),
    )
    found = []
    for fn in (block, jc.accelerate(block)):
        loss = lambda p, x, fn=fn: (fn(p, x).astype("float32") ** 2).mean()  # noqa: E731
        step = lambda p, x, loss=loss: jax.tree.map(  # noqa: E731
            lambda g: jax.lax.pmean(g, "data"), jax.grad(loss)(p, x)
        )
        run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        with jc.target("H200"):
            names = [name for name, _ in in_jaxpr(jax.make_jaxpr(run)(p, x).jaxpr)]
            found.append((names, jax.jit(run)(p, x)))
    (none, want), (names, got) = found
    assert none == []
    assert (
        names.count("dot_product_attention") == names.count("dot_product_attention (backward)") == 1
    )
    assert "matmul" in names
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        error = np.linalg.norm(a.astype("float32") - b.astype("float32"))
        assert error <= 0.05 * np.linalg.norm(a.astype("float32"))


def same(fn, *args, grads=True, tolerance=2e-5):
    """That a function and the same replaced for a GPU agree, and their gradients; what is found."""
    fast = jc.accelerate(fn)

    def total(f):
        return lambda *x: sum(jnp.sin(y.astype("float32")).sum() for y in jax.tree.leaves(f(*x)))

    places = tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))
    runs = [lambda f: jax.jit(f)(*args)]
    runs += [lambda f: jax.jit(jax.grad(total(f), places))(*args)] * grads
    with jc.target("H200"):
        for run in runs:
            for want, got in zip(*map(jax.tree.leaves, (run(fn), run(fast))), strict=True):
                want, got = (np.asarray(x, np.float32) for x in (want, got))
                assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want) + 1e-6
        regions = fast.report(*args).to_json()["regions"]
    return [r["kind"] for r in regions if r["runs_on"] == "cuDNN"]


@pytest.mark.parametrize("scales", [(0.5, 1, 1), (1, 3, 1), (1, 1, 0.5), (2, 1, -0.25)])
def test_scales_of_queries_keys_and_values(scales):
    def scaled(q, k, v):
        return attend(*(s * x for s, x in zip(scales, (q, k, v), strict=True)))

    args = half(*[SHAPE] * 3)
    assert same(scaled, *args, tolerance=0.03) == ["attention"]


def _pooled(x, w, q):
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q[None], x[None]))
    return jax.nn.gelu(x @ w + jnp.einsum("bts,bsd->btd", scores, x[None])[0])


def _normed(x, w, b):
    y = (jnp.dot(x, w, preferred_element_type="float32") + b).astype("bfloat16").astype("float32")
    return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)


TOGETHER = {
    "a scaled query": lambda x, w, b: jax.nn.softmax(((x @ w + b) / 8) @ x.T) @ x,
    "in a loop": lambda x, w, b: jax.lax.scan(
        lambda c, _: (jax.nn.softmax(((c @ w + b) / 8) @ x.T) @ x, None), x, None, 2
    )[0],
    "a bias": lambda x, w, b: _pooled(x, w, b[None]),
    "a norm of a cast product": _normed,
    "values": lambda x, w, b: jax.nn.softmax(x @ x.T / 8) @ ((x @ w + b) * 0.5),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_regions_that_meet(name):
    x, w, b = half((64, 64), (64, 64), (64,))
    assert same(TOGETHER[name], x, 0.1 * w, b, tolerance=0.05)


def test_what_attention_reads_is_the_result_of_the_product_before():
    closed = jax.make_jaxpr(TOGETHER["a scaled query"])(*half((64, 64), (64, 64), (64,)))
    program, _ = search(closed, ("attention", "product"))
    assert [region.kind for region in program.found] == ["attention", "product"]


def attended(q, k, b):
    seen = jnp.tril(jnp.ones((len(q), len(k)), bool))
    return jax.nn.softmax(jnp.where(seen, q @ k.T / 8, -1e30)) @ k + b


def normalized(x, w, b):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * b


IN_A_SHARD_MAP = {
    "attention": (attended, (256, 64)),
    "product": (lambda x, w, b: jax.nn.gelu(x @ w + b), (256, 64)),
    "normalization": (normalized, (4096, 512)),
}


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("what", IN_A_SHARD_MAP)
def test_around_a_shard_map_with_replicated_operands(what, around):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    fn, shape = IN_A_SHARD_MAP[what]
    of = lambda f: jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=P("d"))  # noqa: E731
    x, w, b = half(shape, (64, shape[1]), (shape[1],))
    args = x, 0.1 * w, b
    if around:
        assert same(of(fn), *args, tolerance=0.05) == [what]
        return
    total = lambda f: lambda *a: (of(f)(*a).astype("float32") ** 2).sum()  # noqa: E731
    with jc.target("H200"):
        want, got = (jax.jit(jax.grad(total(f), (0, 1, 2)))(*args) for f in (fn, jc.accelerate(fn)))
    for a, c in zip(want, got, strict=True):
        a, c = (np.asarray(x, np.float32) for x in (a, c))
        assert np.linalg.norm(a - c) <= 0.05 * np.linalg.norm(a)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("spec", "checked"), [("d", True), ("d", False), (None, True)])
@pytest.mark.parametrize("what", IN_A_SHARD_MAP)
def test_around_a_shard_map_under_its_mesh(what, spec, checked, kind):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    fn, shape = IN_A_SHARD_MAP[what]
    specs = P(spec), P(), P()
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(spec), check_vma=checked)
    x, w, b = half(shape, (64, shape[1]), (shape[1],))
    with jax.set_mesh(mesh):
        args = [jax.device_put(a, own) for a, own in zip((x, 0.1 * w, b), specs, strict=True)]
        assert same(mapped, *args, tolerance=0.05) == [what]


@pytest.mark.parametrize("causal", [False, True])
def test_eager_gradients_on_explicit_axes(causal):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    q = jax.random.normal(jax.random.key(0), (4, 32, 2, 16))

    def loss(q):
        return (jax.nn.dot_product_attention(q, q, q, is_causal=causal) ** 2).sum()

    with jax.set_mesh(mesh), jc.target("H200"):
        q = jax.device_put(q, P("d"))
        want, got = jax.grad(loss)(q), jax.grad(jc.accelerate(loss))(q)
    assert got.sharding == want.sharding
    np.testing.assert_allclose(got, want, 1e-4, 1e-4)


def test_what_is_no_array_is_passed_as_it_is():
    @jc.accelerate
    def told(x, names, sign):
        return {"y": jax.nn.gelu(x @ x.T + len(names)), "name": names[0], "n": 3}, None, sign

    x, names = half((64, 64))[0], np.array(["a", "b"])
    with jc.target("H200"):
        for sign in (0.0, -0.0, 0):
            found, none, back = told(x, names, sign)
            assert (found["name"], found["n"], none) == ("a", 3, None)
            assert isinstance(found["y"], jax.Array)
            assert (repr(back), type(back)) == (repr(sign), type(sign))


def test_a_result_that_may_hold_arrays_of_the_trace_is_left_alone():
    class Holder:
        def __init__(self, y):
            self.y = y

    fast = jc.accelerate(lambda x: Holder(jax.nn.gelu(x @ x.T)))
    x = half((64, 64))[0]
    with jc.target("H200"):
        assert isinstance(fast(x).y + 1, jax.Array)
        assert not fast.report(x).to_json()["regions"]


def test_of_symbolic_shapes_a_function_runs_as_it_is():
    fast = jc.accelerate(lambda x, w, b: jax.nn.gelu(x @ w + b))
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n,64"), "float32")
    w, b = arrays((64, 64), (64,))
    with jc.target("H200"):
        made = jax.export.export(jax.jit(fast), platforms=["cuda"])(x, w, b)
        assert "custom_call @jax_cudnn" not in made.mlir_module()
        assert not fast.report(x, w, b).to_json()["regions"]


@pytest.mark.deviceless
def test_a_function_is_traced_once():
    traced = []

    def model(x, w, found):
        traced.append(found)
        return jax.nn.gelu(x @ w) if found else jnp.sin(x)

    x, w = half((4096, 1024), (1024, 4096))
    for found in (False, True):
        fast = jc.accelerate(model)
        with jc.target("H200"):
            jax.make_jaxpr(lambda x, w, f=fast, found=found: f(x, w, found))(x, w)
    assert traced == [False, True]


@pytest.mark.deviceless
def test_equal_layers_are_decided_and_differentiated_once(monkeypatch):
    asked = []
    refusal = regions.refusal
    monkeypatch.setattr(regions, "refusal", lambda *a: asked.append(1) or refusal(*a))

    def model(layers, x, w, v):
        for _ in range(layers):
            x = x + jax.nn.gelu(x @ w) @ v
        return x.astype("float32").sum()

    args = half((4096, 1024), (1024, 4096), (4096, 1024))
    counts = []
    for layers in (2, 6):
        asked.clear()
        with jc.target("H200"):
            jax.make_jaxpr(jax.grad(jc.accelerate(functools.partial(model, layers)), (1, 2)))(*args)
        counts.append(len(asked))
    assert counts[0] == counts[1] > 2


def test_a_module_of_nnx_among_the_arguments_is_an_error_on_every_device():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    fast = jc.accelerate(lambda m, x: m(x))
    with pytest.raises(jc.GraphTypeError, match="NNX module") as error:
        fast(model, jnp.ones((2, 4)))
    assert "nnx.split" in str(error.value)
    graph, state = nnx.split(model)
    passed = jc.accelerate(lambda state, x: nnx.merge(graph, state)(x))
    assert passed(state, jnp.ones((2, 4))).shape == (2, 4)


@pytest.mark.deviceless
def test_the_report_counts_graphs_that_are_there_already_and_warns_of_float32():
    args = half(*[SHAPE] * 3)
    with jc.target("H200"):
        report = jc.accelerate(jax.grad(lambda *x: jc.accelerate(attend)(*x).sum())).report(*args)
    assert report.to_json()["graphs"] == 2
    assert "written with jax_cudnn already: 2 graphs" in str(report)
    wide = jc.accelerate(attend).report(*arrays(*[SHAPE] * 3), gpu="H200")
    assert "cast queries, keys and values to bfloat16" in str(wide)


@pytest.mark.deviceless
def test_arrays_that_a_function_closes_over_are_freed():
    def run():
        w = jnp.full((1024, 1024), 0.01, "bfloat16")

        def loss(x):
            x, _ = jax.lax.scan(lambda x, _: (jax.nn.gelu(x @ w + 1), None), x, length=2)
            return jax.nn.gelu(x @ w + 1).astype("float32").sum()

        jax.make_jaxpr(jax.grad(jc.accelerate(loss)))(jnp.ones((256, 1024), "bfloat16"))
        return weakref.ref(w)

    with jc.target("H200"):
        kept = run()
    gc.collect()
    assert kept() is None


def test_the_report_says_where_to_put_the_line():
    loss = lambda x, w: (jax.nn.relu(x @ w) ** 2).sum()  # noqa: E731
    args = half((64, 64), (64, 64))
    assert "jax.grad(jc.accelerate(loss))" in str(jc.accelerate(jax.grad(loss)).report(*args))
    assert "jax.grad" not in str(jc.accelerate(loss).report(*args))


@pytest.mark.deviceless
def test_layers_of_one_line_differ_in_their_numbers_and_masks():
    x, w, bias = half((4096, 1024), (1024, 1024), (1024,))

    def layers(x, w, bias, scales):
        for scale in scales:
            x = jax.nn.relu((x @ (w / 32)) * scale + bias)
        return x

    def windows(q, k, v, sizes):
        rows, columns = jnp.arange(128)[:, None], jnp.arange(128)[None]
        for size in sizes:
            s = jnp.einsum("bthd,bshd->bhts", q, k) / 8
            s = jnp.where((columns <= rows) & (rows - columns < size), s, -1e9)
            q = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)
        return q

    cases = (layers, (x, w, bias), (0.5, 2.0, 0.5)), (windows, half(*[SHAPE] * 3), (4, 64, 4))
    for fn, args, numbers in cases:
        fast = jc.accelerate(lambda *x, fn=fn, numbers=numbers: fn(*x, numbers))
        with jc.target("H200"):
            (got, want), regions = (fast(*args), fn(*args, numbers)), fast.report(*args)
        assert regions.to_json()["regions"]
        difference = np.linalg.norm(np.float32(got) - np.float32(want))
        assert difference <= 0.02 * np.linalg.norm(np.float32(want))
