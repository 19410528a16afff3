"""Benchmarks of the loss, of grouped products and of int8 weights run on a CPU, and are shown."""

from benchmarks import cross_entropy, quantized, ragged

ABOUT = {"device": "cpu", "date": "", "cudnn": "", "jax": "", "nvidia-cudnn-frontend": ""}


def test_the_loss_of_a_language_model():
    found = cross_entropy.measure(256, 16, 512, seconds=0.0)
    assert [*found] == [*cross_entropy.SIDES]
    assert all(side["ms"]["median"] > 0 and side["error"] < 0.01 for side in found.values())
    shown = cross_entropy.render({"environment": ABOUT, "cases": {"small": found}})
    ratio = found[cross_entropy.OURS]["mb"] / found[cross_entropy.PLAIN]["mb"]
    assert f"| {ratio:.3f} |" in shown


def test_grouped_products():
    found = ragged.measure(2, 256, 64, 128, seconds=0.0)
    assert [*found] == ["forward", "gradient of lhs", "gradient of rhs"]
    assert all(side["median"] > 0 for sides in found.values() for side in sides.values())
    shown = ragged.render({"environment": ABOUT, "cases": {"small": found}})
    assert f"| {found['forward'][ragged.OURS]['median']:.0f} |" in shown


def test_int8_weights():
    found = quantized.measure(4, 256, 64, seconds=0.0)
    assert all(times["median"] > 0 for times in found.values())
    shown = quantized.render({"environment": ABOUT, "cases": {"small": found}})
    assert f"| {quantized.OURS} | {found[quantized.OURS]['median']:.1f} |" in shown
