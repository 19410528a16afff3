"""The cross-entropy of a linear layer, found in functions and replaced by one in blocks."""

import re

import absent_gpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from acceleration.test_program import arrays, check, replaced
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn.acceleration.api import KINDS, search
from jax_cudnn.ops import cross_entropy

B, T, D, V = 2, 160, 8, 24


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """As if 320 tokens of 24 classes were several blocks of 128."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 128 * V)


def operands(dtype="float32"):
    hidden, weight, bias = arrays((B, T, D), (D, V), (V,), dtype=dtype)
    labels = jax.random.randint(jax.random.key(0), (B, T), 0, V)
    return hidden, weight, bias, labels


def of_optax(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def picked(x, labels, **how):
    return jnp.take_along_axis(x, labels[..., None], -1, **how)[..., 0]


def one_hot(logits, labels):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, V))


def by_hand(logits, labels):
    shifted = logits - jnp.max(logits, -1, keepdims=True)
    return jnp.log(jnp.exp(shifted).sum(-1)) - picked(shifted, labels, mode="clip")


def flat(logits, labels):
    logits, labels = logits.reshape(-1, V), labels.reshape(-1)
    lse = jax.nn.logsumexp(logits, -1)
    return (lse - logits[jnp.arange(len(labels)), labels]).reshape(B, -1)


LOSSES = {
    "optax": of_optax,
    "optax, one-hot labels": one_hot,
    "log-softmax": lambda x, y: -picked(jax.nn.log_softmax(x), y),
    "log-softmax, one-hot, where": lambda x, y: (
        -jnp.where(y[..., None] == jnp.arange(V), jax.nn.log_softmax(x), 0).sum(-1)
    ),
    "logsumexp": lambda x, y: jax.nn.logsumexp(x, -1) - picked(x, y),
    "logsumexp, negated": lambda x, y: -picked(x, y) + jax.nn.logsumexp(x, -1),
    "without a shift": lambda x, y: jnp.log(jnp.exp(x).sum(-1)) - picked(x, y),
    "by hand": by_hand,
    "flat": flat,
    "vmap": jax.vmap(jax.vmap(lambda x, y: -jax.nn.log_softmax(x)[y])),
}
LOGITS = {
    "x @ w": lambda x, w, b: x @ w,
    "x @ w.T": lambda x, w, b: x @ w.T.T,
    "einsum": lambda x, w, b: jnp.einsum("vd,btd->btv", w.T, x),
    "weight on the left": lambda x, w, b: jax.vmap(lambda x: (w.T @ x.T).T)(x),
    "heads": lambda x, w, b: jnp.einsum("bthd,hdv->btv", x.reshape(B, T, 2, 4), w.reshape(2, 4, V)),
    "bias": lambda x, w, b: x @ w + b,
    "softcap": lambda x, w, b: 3.0 * jnp.tanh((x @ w - b) / 3.0),
    "vmap": lambda x, w, b: jax.vmap(lambda x: jax.vmap(lambda x: x @ w)(x))(x),
}


def found(fn, *args, **options):
    program, missed = search(jax.make_jaxpr(fn)(*args), KINDS, **options)
    regions = [region for inner in program.programs for region in inner.found]
    return [r for r in regions if r.kind == "loss"], [why for _, why in missed]


SPELLINGS = [("x @ w", loss) for loss in LOSSES] + [(logits, "optax") for logits in LOGITS]


@pytest.mark.parametrize(("logits", "loss"), dict.fromkeys(SPELLINGS))
def test_spellings(loss, logits):
    x, w, b, y = operands()
    check(lambda x, w, b: LOSSES[loss](LOGITS[logits](x, w, b), y), x, w, b, kinds=["loss"])


REDUCED = {
    "mean": (lambda z, y: of_optax(z, y).mean(), True),
    "minus the mean": (lambda z, y: -picked(jax.nn.log_softmax(z), y).mean(), True),
    "where": (lambda z, y: jnp.where(y > 3, of_optax(z, y), 0).sum() / (y > 3).sum(), True),
    "where, turned": (lambda z, y: jnp.where(y > 3, 0, of_optax(z, y)).mean(), True),
    "times a mask": (lambda z, y: (of_optax(z, y) * (y > 3)).mean(), False),
    "one-hot, where": (lambda z, y: jnp.where(y > 3, one_hot(z, y), 0).mean(), True),
    "next tokens": (lambda z, y: of_optax(z[:, :-1], y[:, 1:]).mean(), True),
    "next, flat": (lambda z, y: flat(z[:, :-1], y[:, 1:]).mean(), True),
    "weighted": (lambda z, y: (of_optax(z, y) * jnp.linspace(0, 1, T)).mean(), False),
    "of each row": (lambda z, y: of_optax(z, y).mean(axis=1), False),
    "and each": (lambda z, y: (lambda x: (x.mean(), x))(of_optax(z, y)), False),
}


@pytest.mark.parametrize("name", REDUCED)
def test_sums_and_masks(name):
    """A sum of all losses is in the region, whose gradients take three products instead of four."""
    loss, is_sum = REDUCED[name]
    x, w, _, y = operands()
    fn = lambda x, w, y: loss(x @ w, y)  # noqa: E731
    check(fn, x, w, y, kinds=["loss"])
    (region,), _ = found(fn, x, w, y)
    assert (region.output.shape == ()) == is_sum


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds", "one-hot"])
@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8"])
def test_labels_outside_of_the_vocabulary_are_those_of_the_program(mode, dtype):
    x, w, _, _ = operands()
    y = jnp.asarray(np.resize([0, -1, 5, -V, V - 1, V, -V - 1, 100], (B, T)), dtype)

    def fn(x, w):
        logits = x @ w
        if mode == "one-hot":
            return one_hot(logits, y)
        return jax.nn.logsumexp(logits, -1) - picked(logits, y, mode=mode)

    assert len(found(fn, x, w)[0]) == 1
    want, got = fn(x, w), replaced(fn)(x, w)
    assert np.isnan(want).any() == (mode == "fill")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    if mode == "promise_in_bounds":  # without a derivative that JAX defines
        return
    total = lambda f: jax.grad(lambda *x: jnp.nansum(f(*x)), (0, 1))  # noqa: E731
    for a, b in zip(total(fn)(x, w), total(replaced(fn))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def two_shifts(z, y, *_):
    top = z.max(-1, keepdims=True)
    return jnp.log(jnp.exp(z - top).sum(-1)) - picked(z - 2 * top, y)


def stopped_once(z, y, *_):
    top = z.max(-1)
    exponentials = jnp.exp(z - jax.lax.stop_gradient(top)[..., None])
    return jnp.log(exponentials.sum(-1)) + top - picked(z, y)


def smoothed(z, y, *_):
    targets = optax.smooth_labels(jax.nn.one_hot(y, V), 0.1)
    return optax.softmax_cross_entropy(z, targets)


def some_classes(z, y, *_):
    where = (jnp.arange(V) < 20) & (y >= 0)[..., None]
    return optax.softmax_cross_entropy_with_integer_labels(z, y, where=where)


def whole_step(z, y, x, w):
    return jax.value_and_grad(lambda x, w: of_optax(x @ w, y).mean())(x, w)


USED, OTHER, CHANGED = "logits are used", "otherwise", "changed by "
NEARLY = {
    "logits are returned": (lambda z, y, x, w: (of_optax(z, y), z), USED),
    "accuracy": (lambda z, y, x, w: (of_optax(z, y), z.argmax(-1) == y), USED),
    "two labels": (lambda z, y, x, w: of_optax(z, y) + of_optax(z, y + 1), USED),
    "label smoothing": (smoothed, "label_smoothing="),
    "z-loss": (lambda z, y, x, w: of_optax(z, y) + jax.nn.logsumexp(z, -1) ** 2, "used"),
    "temperature": (lambda z, y, x, w: of_optax(z * x[0, 0, 0], y), CHANGED + "mul"),
    "scaled": (lambda z, y, x, w: of_optax(z / 2, y), "scale the hidden states"),
    "another cap": (lambda z, y, x, w: of_optax(2 * jnp.tanh(z / 3), y), CHANGED + "tanh"),
    "abs": (lambda z, y, x, w: of_optax(jnp.abs(z), y), CHANGED + "abs"),
    "bias minus": (lambda z, y, x, w: of_optax(w[0] - z, y), CHANGED + "sub"),
    "bias of tokens": (lambda z, y, x, w: of_optax(z + x[..., :1], y), CHANGED + "add"),
    "one-hot, of logits": (
        lambda z, y, x, w: jax.nn.logsumexp(z, -1) - (jax.nn.one_hot(y, V) * z).sum(-1), OTHER,
    ),
    "soft labels": (
        lambda z, y, x, w: optax.softmax_cross_entropy(z, jax.nn.softmax(x @ -w)), OTHER,
    ),
    "classes from 1": (
        lambda z, y, x, w: ((y[..., None] == jnp.arange(1, V + 1)) * jax.nn.log_softmax(z)).sum(-1),
        OTHER,
    ),
    "another fill": (
        lambda z, y, x, w: jax.nn.logsumexp(z, -1) - picked(z, y, fill_value=0.0), OTHER,
    ),
    "two shifts": (two_shifts, OTHER),
    "a shift with a gradient": (stopped_once, "kept from the gradient"),
    "over the tokens": (lambda z, y, x, w: jax.nn.log_softmax(z, 1)[:, :, 0], OTHER),
    "other axis": (lambda z, y, x, w: picked(jax.nn.log_softmax(z, 1), y), OTHER),
    "fewer classes": (lambda z, y, x, w: of_optax(z[..., :20], y % 20), "over all classes"),
    "where": (some_classes, None),
    "weights of a batch": (
        lambda z, y, x, w: jax.vmap(lambda x, w, y: of_optax(x @ w, y))(x, jnp.stack([w, -w]), y),
        "hidden states and a weight",
    ),
    "differentiated inside": (whole_step, "around the function that is differentiated"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_a_loss_stays_with_a_reason(name):
    loss, words = NEARLY[name]
    x, w, _, y = operands()
    fn = lambda x, w, y: loss(x @ w, y, x, w)  # noqa: E731
    regions, missed = found(fn, x, w, y)
    assert not regions
    assert words is None or any(words in why for why in missed), missed
    jax.tree.map(np.testing.assert_array_equal, replaced(fn, ["loss"])(x, w, y), fn(x, w, y))


def test_logits_of_one_block_stay(monkeypatch):
    x, w, _, y = operands()
    fn = lambda x, w: of_optax(x @ w, y)  # noqa: E731
    assert len(found(fn, x, w)[0]) == 1
    monkeypatch.setattr(cross_entropy, "BLOCK", B * T * V)
    assert found(fn, x, w) == ([], [])


@pytest.mark.deviceless
def test_who_runs_it_and_what_the_report_says():
    x, w, _, y = operands("bfloat16")
    fn = lambda x, w: of_optax((x @ w).astype("float32"), y).mean()  # noqa: E731
    report = jc.accelerate(fn).report(x, w, gpu="H200")
    (region,) = report.to_json()["regions"]
    what = "bfloat16 [320, 8] x [8, 24], 15,360 bytes of logits"
    assert (region["kind"], region["what"], region["runs_on"]) == ("loss", what, "XLA in blocks")
    assert "1 found: 1 on XLA in blocks" in str(report)
    assert jc.accelerate(fn).report(x, w).to_json()["regions"][0]["runs_on"] == ""
    for options in ({"without": "loss"}, {"only": "attention"}):
        assert not jc.accelerate(fn, **options).report(x, w).to_json()["regions"]
    plain, fast = (jax.value_and_grad(f, (0, 1)) for f in (fn, jc.accelerate(fn)))
    traced = lambda f: str(jax.make_jaxpr(f)(x, w))  # noqa: E731
    assert traced(fast) == traced(plain)  # on a CPU
    with jc.target("H200"):
        assert "scan" in traced(fast)
        (_, got), want = fast(x, w), plain(x.astype("float32"), w.astype("float32"))[1]
        error = lambda g: np.linalg.norm(np.asarray(g, "float32") - want[0])  # noqa: E731
        assert error(got[0]) <= 1.5 * error(plain(x, w)[1][0])
        with jc.implementation("xla"):
            (region,) = jc.accelerate(fn).report(x, w).to_json()["regions"]
            assert (region["runs_on"], "implementation" in region["why"]) == ("XLA", True)
            assert "scan" not in traced(fast)
    strict = jc.accelerate(fn, numerics="strict").report(x, w).to_json()
    assert not strict["regions"]


@pytest.mark.deviceless
@pytest.mark.parametrize("framework", ["nnx", "linen", "equinox"])
def test_models(framework):
    """Attention, and the loss of the last layer: both are found, and gradients are equal."""
    y = operands()[3]
    if framework == "equinox":
        eqx = pytest.importorskip("equinox")
        keys = jax.random.split(jax.random.key(0), 3)
        embed, head = eqx.nn.Embedding(V, D, key=keys[0]), eqx.nn.Linear(D, V, key=keys[1])
        attention = eqx.nn.MultiheadAttention(2, D, key=keys[2])

        def apply(model, y):
            embed, attention, head = model

            def one(y):
                x = jax.vmap(embed)(y)
                return jax.vmap(head)(x + attention(x, x, x))

            return jax.vmap(one)(y)

        params, rest = eqx.partition((embed, attention, head), eqx.is_array)
        model = lambda params, y: apply(eqx.combine(params, rest), y)  # noqa: E731
    elif framework == "nnx":
        nnx = pytest.importorskip("flax.nnx")

        class Model(nnx.Module):
            def __init__(self, rngs):
                self.embed = nnx.Embed(V, D, rngs=rngs)
                self.attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)

            def __call__(self, y):
                x = self.embed(y)
                return self.embed.attend(x + self.attention(x))

        graph, params = nnx.split(Model(nnx.Rngs(0)))
        model = lambda params, y: nnx.merge(graph, params)(y)  # noqa: E731
    else:
        linen = pytest.importorskip("flax.linen")

        class Model(linen.Module):
            @linen.compact
            def __call__(self, y):
                x = linen.Embed(V, D)(y)
                return linen.Dense(V)(x + linen.MultiHeadDotProductAttention(2)(x))

        params, model = Model().init(jax.random.key(0), y), Model().apply

    def loss(params, y):
        return of_optax(model(params, y)[:, :-1], y[:, 1:]).mean()

    kinds = [r["kind"] for r in jc.accelerate(loss).report(params, y).to_json()["regions"]]
    assert {"attention", "loss"} <= {*kinds}
    want = jax.value_and_grad(loss)(params, y)
    with jc.target("H200"):
        got = jax.value_and_grad(jc.accelerate(loss, only="loss"))(params, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), got, want)


@pytest.mark.deviceless
def test_in_loops_devices_and_checkpoints():
    x, w, _, y = operands()
    fn = lambda x, w: of_optax(x @ w, y).mean()  # noqa: E731
    check(jax.checkpoint(fn), x, w, kinds=["loss"])
    looped = lambda x, w: jax.lax.scan(lambda c, _: (fn(x + c, w), c), 0.0, None, 2)  # noqa: E731
    check(looped, x, w, kinds=["loss"])
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_devices(x, w):
        mean = lambda x, w, y: jax.lax.pmean(of_optax(x @ w, y).mean(), "x")  # noqa: E731
        specs = P("x"), P(), P("x")
        return jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=P())(x, w, y)

    x = jnp.tile(x, (1, 2, 1))
    y = jnp.tile(y, (1, 2))
    check(on_devices, x, w, kinds=["loss"])


@pytest.mark.deviceless
def test_second_derivatives_and_batches():
    x, w, _, y = operands()
    for fn in (
        lambda x, w: of_optax(x @ w, y).mean(),
        lambda x, w: of_optax(x @ w, y)[0, 3:].sum(),
    ):
        hvp = lambda f: jax.jit(lambda *x: jax.jvp(jax.grad(f, (0, 1)), x, x)[1])  # noqa: E731
        both = lambda f: jax.jit(jax.vmap(jax.grad(f, (0, 1)), (0, None)))  # noqa: E731
        want = hvp(fn)(x, w), both(fn)(jnp.stack([x, -x]), w)
        with jc.target("H200"):
            fast = jc.accelerate(fn)
            got = hvp(fast)(x, w), both(fast)(jnp.stack([x, -x]), w)
            assert "scan" in str(jax.make_jaxpr(hvp(fast))(x, w))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-4), got, want)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_tokens_and_vocabulary(kind):
    x, w, b, y = operands()
    fn = lambda x, w, b, y: of_optax(x @ w + b, y)  # noqa: E731
    types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=types)
    specs = P("data"), P(None, "model"), P("model"), P("data")
    if kind == "Explicit":  # along which JAX picks no logits where the classes are sharded
        specs = P("data"), P(), P(), P("data")
    pairs = zip((x, w, b, y), specs, strict=True)
    args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in pairs]
    for total in (fn, lambda *args: fn(*args).mean()):
        want = jax.grad(lambda *args, f=total: f(*args).sum(), (0, 1, 2))(x, w, b, y)
        fast = jc.accelerate(total, only="loss")
        step = jax.jit(jax.grad(lambda *args, f=fast: f(*args).sum(), (0, 1, 2)))
        with jax.set_mesh(mesh), jc.target("H200"):
            got = step(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), got, want)
        assert "loss" in {r["kind"] for r in fast.report(x, w, b, y).to_json()["regions"]}


@pytest.mark.deviceless
@pytest.mark.parametrize(("devices", "weighted"), [(1, False), (2, False), (2, True)])
def test_logits_are_not_in_the_memory_of_a_gpu(devices, weighted, monkeypatch):
    """A step of 8192 tokens and 32768 classes: 512 MiB of logits in bfloat16, in each direction.
    Between devices goes the gradient of the weight alone."""
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    monkeypatch.setattr(cross_entropy, "BLOCK", 2**24)
    mesh = jax.sharding.Mesh(np.array(absent_gpus.h200s(devices)), ("x",))
    shapes = ((4, 2048, 64), "bfloat16", P("x")), ((64, 32768), "bfloat16", P())
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (*shapes, ((4, 2048), "int32", P("x")))
    ]

    def loss(x, w, y):
        losses = of_optax((x @ w).astype("float32"), y)
        return (losses * y).mean() if weighted else losses.mean()

    def memory(f):
        step = jax.value_and_grad(f, (0, 1))
        program = absent_gpus.compiled(step, *args, mesh=mesh)
        return program.memory_analysis().temp_size_in_bytes, program.as_text()

    plain, ours = memory(loss), memory(jc.accelerate(loss))
    logits = 4 * 2048 * 32768 * 2 // devices
    assert plain[0] >= logits
    assert ours[0] < logits / 3
    assert "8192,32768]" not in ours[1]
    assert "2048,32768]" not in ours[1]
    assert not re.search("all-gather|all-to-all|collective-permute", ours[1])
