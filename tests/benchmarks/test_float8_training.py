"""The benchmark of float8 runs, and shows what it found; XLA has its model's products in float8."""

import absent_gpus
import jax
import pytest
from flax import nnx

from benchmarks import float8


@pytest.mark.long
def test_a_small_run():
    cases = {name: case(0.0) for name, case in float8.TINY.items()}
    assert all(side["us"]["median"] > 0 for sides in cases.values() for side in sides.values())
    curves = {"small": float8.curves((16, 1, 2), batch=4, length=32, count=20)}
    for side in curves["small"].values():
        first, last = side["losses"]
        assert last < first < 6
    about = {"device": "cpu", "date": "", "cudnn": "", "jax": "", "nvidia-cudnn-frontend": ""}
    shown = float8.render({"environment": about, "cases": cases, "curves": curves})
    us = cases["linear"][float8.WIDE]["us"]["median"]
    assert f"| linear | {float8.WIDE} | {us:.0f} | 1.00 |" in shown
    assert f"| small | {float8.CURRENT} | " in shown


@pytest.mark.deviceless
@pytest.mark.parametrize("side", [float8.CURRENT, float8.DELAYED])
def test_every_product_of_a_block_is_in_float8(side, monkeypatch):
    """Also where gelu could be fused with a product that is kept, of which cuBLASLt has none."""
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    block = nnx.eval_shape(lambda: float8.Block(256, 2, float8.KINDS[side], nnx.Rngs(0)))
    graph, state = nnx.split(block)
    x = jax.ShapeDtypeStruct((2, 512, 256), "bfloat16")

    def step(state, x, dy):
        y, vjp = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
        return y, vjp(dy)

    text = absent_gpus.compiled(step, state, x, x).as_text() or ""
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 12
    assert '__cublas$lt$matmul"' not in text
