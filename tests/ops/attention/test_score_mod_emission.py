"""How score_mod is passed to cuDNN and XLA: each supported operation and its derivative."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_table import of_score, softcap
from test_score_mod import B, K, N, T, alibi, biased, scaled

from jax_cudnn._core.graph.node import registry
from jax_cudnn.ops.attention import reference as attention_reference
from jax_cudnn.ops.attention.score_mod import (
    emission as score_mod_emission,
)
from jax_cudnn.ops.attention.score_mod import (
    written as score_mod_written,
)
from jax_cudnn.ops.attention.score_mod.emission import refused_backward


def where(f):
    """Scores selected by comparisons of integers."""
    return lambda s, b, h, q, kv: jnp.where(f(q, kv), s, -jnp.inf)


CHANGES = {  # functions, and the shape of an operand
    "softcap": softcap(2.0),
    "not equal, remainders": where(lambda q, kv: (kv % 3 == 0) | (((q - kv) % 5 < 3) & (kv != q))),
    "not, xor, truth": where(lambda q, kv: ~((q < kv) ^ (kv % 4).astype(bool)) | (kv == 0)),
    "towards zero": where(lambda q, kv: ((q - kv) / 4).astype("int32") + (kv > 3) > -2),
    "quotients": where(
        lambda q, kv: jnp.sign(jax.lax.rem(q - kv, 4) + jax.lax.div(q - kv, 3)) >= (q - kv) // 5
    ),
    "arithmetic": of_score(lambda s: 1 - s + 2 * s / 3 - (-s) + 1 / (2 + s * s) + s**0),
    "powers": of_score(lambda s: s**3 - s**2 + (1 + s * s) ** -2 + (2 + abs(s)) ** 1.5 + 1.5**s),
    "exponentials": of_score(lambda s: jnp.exp(s) + jnp.exp2(s) + jnp.expm1(s)),
    "logarithms": of_score(lambda s: jnp.log(2 + s * s) + jnp.log1p(s * s)),
    "roots": of_score(lambda s: jnp.sqrt(1 + s * s) + jax.lax.rsqrt(1 + s * s)),
    "waves": of_score(lambda s: jnp.sin(s) + jnp.cos(s) + jnp.tan(0.1 * s)),
    "activations": of_score(lambda s: jax.nn.gelu(s) + jax.nn.silu(s) + jax.nn.softplus(s)),
    "erf, relu": of_score(jax.jit(lambda s: jax.nn.gelu(s, approximate=False) + jax.nn.relu(s))),
    "bounds": of_score(lambda s: jnp.clip(s, -1, 0.7) + jnp.minimum(s, 0.3) + jnp.maximum(0.1, s)),
    "cases": of_score(lambda s: jnp.where(s > 0.2, jnp.where(s < 1, s, 2 * s), -s / 2)),
    "steps": of_score(lambda s: s + jnp.floor(s) + jnp.ceil(s) + jnp.sign(s)),
    "finite": of_score(lambda s: jnp.where(jnp.isfinite(s), 2 * s, 0.0)),
    "folded": of_score(lambda s: s * jnp.sqrt(2.0) + jnp.arange(4.0).reshape(4, 1, 1)),
    "alibi": alibi,
    "biased": (biased, (1, N, T, K)),
    "scaled": (scaled, (1, N, 1, 1)),
}  # fmt: skip


class Computed:
    """A tensor of a pygraph that computes eagerly."""

    def __init__(self, value, kind="", number=False):
        self.value, self.kind, self.number = value, kind, number

    def set_data_type(self, kind):
        self.kind = kind
        return self


class ComputingGraph:
    """A pygraph that computes eagerly, with the restrictions of cuDNN's attention engines."""

    def __init__(self):
        self.added = []

    def __getattr__(self, method):
        def add(*args, name="", compute_data_type="", axis=None, **named):
            self.added.append(method)
            cls = registry()[method]
            given = dict(zip(cls.ports.input_names, args, strict=False)) | named
            assert list(given) == list(cls.ports.input_names)
            assert not next(iter(given.values())).number
            booleans = [port for port, x in given.items() if x.kind == "BOOLEAN"]
            assert booleans in ([], ["mask"])
            node = cls() if axis is None else cls(axis)
            assert compute_data_type == ("FLOAT" if axis is None else "INT32")
            values = {port: jnp.asarray(x.value, "float32") for port, x in given.items()}
            (value,) = node.reference(**values)
            return Computed(value)

        return add

    def tensor_scalar(self, value, kind):
        assert value == float(np.float32(value)) or np.isnan(value)
        return Computed(np.float32(value), number=True)


@pytest.fixture
def no_cudnn(monkeypatch):
    """A replacement with the values that ComputingGraph understands."""
    kinds = types.SimpleNamespace(FLOAT="FLOAT", INT32="INT32", BOOLEAN="BOOLEAN")
    scalars = types.SimpleNamespace(scalar_type=types.SimpleNamespace(RUNTIME_PARAM=""))
    fake = types.SimpleNamespace(data_type=kinds, _pybind_module=scalars)
    monkeypatch.setitem(sys.modules, "cudnn", fake)


def emitted(function, operands=()):
    band = attention_reference.Band()
    mod, read = score_mod_written.written(function, [*operands], (B, N, T, K), band, [])
    given = dict(zip(mod.ports, read, strict=True))
    tensors = {port: Computed(x) for port, x in given.items()}
    return mod, given, score_mod_emission.Emission.with_derivative(mod, tensors)


@pytest.mark.usefixtures("no_cudnn")
@pytest.mark.parametrize("name", CHANGES)
def test_cudnn_and_xla_are_given_the_function_and_its_derivative(name, normal):
    change, *shapes = CHANGES[name] if isinstance(CHANGES[name], tuple) else [CHANGES[name]]
    operands = [normal(shape) for shape in shapes]
    scores, gradient, graph = normal((B, N, T, K)), normal((B, N, T, K)), ComputingGraph()
    mod, given, emission = emitted(change, operands)
    out = emission.forward(graph, Computed(scores)).value
    places = [
        jnp.arange(n).reshape(np.eye(4, dtype=int)[i] * (n - 1) + 1)
        for i, n in enumerate(scores.shape)
    ]
    want, pull = jax.vjp(lambda s: change(s, *places, *operands), scores)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(mod(scores, 0, given), want, rtol=2e-5, atol=2e-5)
    back = emission.backward(graph, Computed(gradient)).value
    np.testing.assert_allclose(back, pull(gradient)[0], rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("no_cudnn")
def test_the_derivative_reads_what_the_forward_made(normal):
    """The argument of tanh in 50 tanh(score / 50), which cuDNN would compute twice."""
    emission, graph = emitted(softcap(50.0))[2], ComputingGraph()
    emission.forward(graph, Computed(normal((B, N, T, K))))
    emission.backward(graph, Computed(normal((B, N, T, K))))
    assert graph.added == ["mul", "tanh", "mul", "mul", "tanh_backward", "mul"]


@pytest.mark.parametrize("name", ["expm1", "log1p"])
def test_digits_near_zero(name):
    x = [*(s * 10.0**-n for n in range(1, 9) for s in (1, -1)), 0, 0.6, 3, 20]
    scores = jnp.broadcast_to(jnp.asarray(x, "float32"), (1, 1, 1, len(x)))
    mod, _ = score_mod_written.written(of_score(getattr(jnp, name)), [], scores.shape)
    assert refused_backward(mod, (1, 1, 128, 128)) is None
    got, slope = jax.jit(lambda s: jax.jvp(lambda s: mod(s, 0, {}), (s,), (s * 0 + 1,)))(scores)
    wide = np.asarray(scores[0, 0, 0], np.float64)
    np.testing.assert_allclose(got[0, 0, 0], getattr(np, name)(wide), rtol=1e-6)
    want = np.exp(wide) if name == "expm1" else 1 / (1 + wide)
    np.testing.assert_allclose(slope[0, 0, 0], want, rtol=1e-5)
