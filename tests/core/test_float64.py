"""float64: computed in float64 by XLA, on a GPU too, with all derivatives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz import functions
from fuzz.calls import Call, Draw

import jax_cudnn as jc
from jax_cudnn._core.planning.limits import FLOAT64


class Wide(Draw):
    """Of float64 alone."""

    def floats(self, *shape, dtype=None, scale=1.0):
        return super().floats(*shape, dtype="float64", scale=scale)

    def some(self, probability, **given):
        return {n: x for n, x in super().some(probability, **given).items() if "element" not in n}


SEEDS = {"conv_general_dilated": 2, "dot_general": 2}
# Not those that round to float8, draw random numbers, or compare with Flax's float32.
NAMES = [n for n in functions.NAMES if not re.search("fp8|dropout|layer$|attention_fn", n)]


def drawn(name):
    """A call with its derivatives."""
    made = functions.TABLE[name](Wide(SEEDS.get(name, 1), None))
    made = {part: x for part, x in made.items() if part not in ("count", "without")}
    return Call(0, **made, names=["vjp", "jvp", "vmap_of_vjp"])


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_computed_in_float64_and_runs_in_xla(name):
    with jax.enable_x64(True):
        call = drawn(name)
        got, want = (jax.jit(call.program(i))(*call.data) for i in (0, 1))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == "float64"
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)
        with jc.target("H200"):
            lowered = jax.jit(call.program()).trace(*call.data).lower(lowering_platforms=("cuda",))
            calls = [line for line in lowered.as_text().splitlines() if "custom_call" in line]
            assert "jax_cudnn" not in "".join(calls)
            call.names = ["forward"]
            with jc.implementation("cudnn"), pytest.raises(jc.UnsupportedGraphError) as caught:
                jax.jit(call.program()).trace(*call.data).lower(lowering_platforms=("cuda",))
    assert FLOAT64 in str(caught.value)


def test_a_wrapped_graph_and_a_stated_compute_type_are_float64_too():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        a, b = (jnp.asarray(rng.normal(size=shape)) for shape in ((1, 6, 8), (1, 8, 5)))
        with jc.Graph(inputs=["mm::A", "mm::B"], outputs=["y"]) as wrapped:
            g = wrapped
            g.mul(g.matmul(a, b, name="mm"), 3.0).set_output(True).set_name("y")
        stated = jc.graph(lambda g, a, b: g.matmul(a, b) * 3.0, compute_data_type="float32")
        for got in (*jax.tree.leaves(wrapped(a, b)), stated(a, b)):
            assert got.dtype == "float64"
            np.testing.assert_allclose(got, 3.0 * (a @ b), rtol=1e-13)
