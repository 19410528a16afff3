"""`python -m jax_cudnn demo`: its picture and its last line."""

from jax_cudnn.commands import demo


def test_times_are_drawn_and_the_last_line_says_what_to_do(monkeypatch):
    lines = demo.chart({"jax_cudnn": 1.0, "plain JAX": 4.0}).splitlines()
    assert [len(line) - len(line.rstrip("█#")) for line in lines] == [10, 40]
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(demo, "cuda_plugins", lambda: ("12",))
    assert ["JAX_PLATFORMS=cpu" in demo._advice(gpu) for gpu in (False, True)] == [True, False]
