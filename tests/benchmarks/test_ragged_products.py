"""The grouped products are measured end to end on a CPU, and shown."""

from benchmarks import ragged


def test_the_products_are_measured_and_rendered():
    (sizes,) = ragged.TINY.values()
    found = ragged.measure(*sizes, seconds=0.0)
    assert [*found] == ["forward", "gradient of lhs", "gradient of rhs"]
    assert all(side["median"] > 0 for sides in found.values() for side in sides.values())
    about = {"device": "cpu", "date": "", "cudnn": "", "jax": "", "nvidia-cudnn-frontend": ""}
    shown = ragged.render({"environment": about, "cases": {"small": found}})
    assert f"| {found['forward'][ragged.OURS]['median']:.0f} |" in shown
