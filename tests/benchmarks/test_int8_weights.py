"""The benchmark of int8 weights runs, and shows what it found."""

from benchmarks import quantized


def test_a_small_run():
    (sizes,) = quantized.TINY.values()
    found = quantized.measure(*sizes, seconds=0.0)
    assert all(times["median"] > 0 for times in found.values())
    about = {"device": "cpu", "date": "", "cudnn": "", "jax": "", "nvidia-cudnn-frontend": ""}
    shown = quantized.render({"environment": about, "cases": {"small": found}})
    assert f"| {quantized.OURS} | {found[quantized.OURS]['median']:.1f} |" in shown
