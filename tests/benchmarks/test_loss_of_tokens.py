"""The loss of a language model is measured end to end on a CPU, and shown."""

from benchmarks import cross_entropy


def test_the_loss_is_measured_and_rendered():
    found = cross_entropy.measure(256, 16, 512, seconds=0.0)
    assert [*found] == [*cross_entropy.SIDES]
    assert all(side["ms"]["median"] > 0 and side["error"] < 0.01 for side in found.values())
    about = {"device": "cpu", "date": "", "cudnn": "", "jax": "", "nvidia-cudnn-frontend": ""}
    shown = cross_entropy.render({"environment": about, "cases": {"small": found}})
    ratio = found[cross_entropy.OURS]["mb"] / found[cross_entropy.PLAIN]["mb"]
    assert f"| {ratio:.3f} |" in shown
