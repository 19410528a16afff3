"""`python -m jax_cudnn bench`: honest clocks, checked results, a user's own function."""

import doctest
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn.__main__ import main
from jax_cudnn._core import agreement
from jax_cudnn._core.planning.cost import Cost
from jax_cudnn.commands import bench, timing
from jax_cudnn.commands.bench import Formulation, compare
from jax_cudnn.commands.functions import parse_aval

QUICK = {"calls": 1, "rounds": 1, "seconds": 0.0}


@jc.graph
def product(g, x, w):
    return g.relu(g.matmul(x, w))


def test_avals_are_parsed():
    for text, shape, dtype in (
        ("bf16[8,64]", (8, 64), "bfloat16"),
        (" f8e4m3fn[128, 3] ", (128, 3), "float8_e4m3fn"),
        ("pred[2,]", (2,), "bool"),
        ("s8[]", (), "int8"),
        ("float32[3]", (3,), "float32"),
    ):
        aval = parse_aval(text)
        assert (aval.shape, aval.dtype.name) == (shape, dtype)
    for text in ("bf16", "f32[2,,3]", "f32[-1]", "", "bf17[2]", "str[4]", "bf16(8)"):
        with pytest.raises((jc.GraphError, jc.GraphTypeError), match=r"bf16\[|bf17|str"):
            parse_aval(text)


_MODULE = """
import jax, jax_cudnn as jc

@jc.graph
def product(g, x, w):
    return g.relu(g.matmul(x, w))

def model(x, w):
    return product(x, w) + 1

def plain(x, w):
    return jax.nn.relu(x @ w)

def gelu(x, w):
    return jax.nn.gelu(x @ w)
"""


def test_a_users_function_is_measured(tmp_path, monkeypatch, capsys):
    """Against its reference or another function, which must agree; on a GPU it is timed."""
    name = f"mine_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    avals = ["bf16[1,16,16]", "bf16[1,16,16]"]
    assert main(["bench", f"{name}:model", *avals]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "bench needs an NVIDIA GPU" in line
    assert main(["bench", f"{name}:product", *avals, "--against", f"{name}:plain"]) == 0
    printed = capsys.readouterr()
    assert "The results agree" in printed.out
    assert "compiling" in printed.err
    environment = timing.environment()
    monkeypatch.setattr(timing, "environment", lambda: {**environment, "sm_version": 90})
    assert main(["bench", f"{name}:model", *avals, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("| its graphs in XLA |", "TFLOP/s"))
    (path,) = tmp_path.glob("*.json")
    entry = json.loads(path.read_text())["cases"][f"{name}:model"]
    assert (entry["status"], entry["operands"]) == ("timed", ["bfloat16[1,16,16]"] * 2)
    assert 0 < entry["us"]["jax_cudnn"]["min"] <= entry["us"]["jax_cudnn"]["median"]
    assert main(["bench", f"{name}:product", *avals, "--against", f"{name}:plain"]) == 0
    assert main(["bench", f"{name}:model", *avals, "--against", f"{name}:plain"]) == 1
    assert "WRONG" in capsys.readouterr().out
    wide = ["bf16[1,8,784]", "bf16[1,784,8]"]
    assert main(["bench", f"{name}:product", *wide, "--against", f"{name}:gelu"]) == 1
    assert "| WRONG: difference 0." in capsys.readouterr().out
    assert main(["bench", f"{name}:model", "bf16[1,16,16]", "k=1"]) == 1
    assert "missing a required argument: 'w'" in capsys.readouterr().err
    assert main(["bench", f"{name}:product", "bf16[1,16,16]", "bf16[1,8,16]"]) == 1
    assert "GraphError: g.matmul" in capsys.readouterr().err


class Clock:
    """A clock that only functions advance."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def function(self, name, seconds):
        def run():
            self.now += seconds
            self.calls.append(name)

        return run


def test_functions_take_turns_and_times_are_those_of_one_call():
    clock = Clock()
    functions = {"a": clock.function("a", 2.0), "b": clock.function("b", 3.0)}
    times = timing.interleaved(functions, (), rounds=8, calls=5, clock=clock)
    assert times == {"a": [2.0] * 8, "b": [3.0] * 8}
    assert clock.calls[6:] == (["a"] * 5 + ["b"] * 5) * 8  # behind the warm-up


def test_disagreeing_functions_are_not_timed(key):
    x = jax.random.normal(key, (64, 64))
    found = compare({"f": lambda x: x, "same": lambda x: x * 1.0001, "off": lambda x: x * 1.1}, x)
    assert (found.wrong, dict(found.seconds)) == (("off",), {})
    assert "WRONG" in str(found)
    with pytest.raises(jc.GraphError, match="off disagrees"):
        found.ratio()


def test_agreement_sees_a_wrong_tile_and_what_is_not_finite(key):
    want = jax.random.normal(key, (2048, 2048), jnp.bfloat16)
    difference = agreement.difference(want.at[64:72, 64:72].set(0), want)
    tolerance = agreement.tolerance((want,), want)
    assert difference.relative < tolerance  # the norm alone would miss it
    assert not difference.within(tolerance)
    want = jnp.ones(8)
    for value in (jnp.nan, jnp.inf):
        got = want.at[3].set(value)
        assert not agreement.difference(got, want).within(1e30)
        assert not agreement.difference(want, got).within(0.1)
        assert agreement.difference(got, got).within(0.0)


def test_prepare_and_finish_are_not_timed_and_what_fails_is_left_out(key):
    x, seen = jax.random.normal(key, (8, 16)), []

    def transposed(x):
        seen.append(x.shape)
        return x + 1

    def broken(x):
        raise ValueError("not today")

    way = Formulation(transposed, lambda x: (x.T,), lambda y: y.T)
    found = compare({"f": lambda x: x + 1, "broken": broken, "transposed": way}, x, **QUICK)
    assert (found.wrong, seen, found.best_other) == ((), [(16, 8)], "transposed")
    assert found.failed == {"broken": "ValueError: not today"}
    assert found.ratio() == found.median("transposed") / found.median("f")
    with pytest.raises(ValueError, match="not today"):  # the first must run
        compare({"broken": broken, "f": jnp.sin}, x)


def test_docstring_example_runs():
    found = doctest.testmod(timing)
    assert (found.attempted > 0, found.failed) == (True, 0)


def test_graphs_and_their_cost_are_found_inside_of_programs(key):
    x, w = jax.random.normal(key, (2, 1, 8, 8))
    once = bench.graphs_cost(product, x, w)
    assert once == Cost(2 * 8**3 + 8**2, 3 * 4 * 8**2)

    def repeated(x, w):
        body = lambda c, _: (jax.jit(product)(c, w), None)  # noqa: E731
        return jax.checkpoint(product)(jax.lax.scan(body, x, None, length=5)[0], w)

    pinned = jc.graph(product.fn, implementation="cudnn")

    def model(x, w):
        h = jax.jit(lambda x: product(x, w) + jnp.sum(x))(x)
        return {"y": jax.checkpoint(lambda h: product(h * 2, w))(h), "w": w}

    assert bench.graphs_cost(repeated, x, w) == once * 6
    for function, count in ((model, 2), (repeated, 2), (pinned, 1)):  # also in a loop
        found = bench.graphs(bench.in_xla(function), x, w)
        assert [spec.options.implementation for spec, *_ in found] == ["xla"] * count
    plain = bench.in_xla(model)
    got, want = plain(x, w), model(x, w)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-5, atol=1e-5)
