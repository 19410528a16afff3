"""A part of the table of collectives, compiled for H200s that are absent."""

import importlib.util

import pytest

from benchmarks.collectives import ONE_LINE, OURS, PLAIN, collectives, compiled

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
        reason="XLA's compiler for CUDA is not installed",
    ),
]


@pytest.mark.long
def test_a_data_parallel_transformer_has_the_collectives_of_plain_jax():
    from benchmarks.sharded import AUTOMATIC, transformer

    plain, *others = (
        collectives(compiled(transformer(), column, "data parallel", AUTOMATIC).as_text())
        for column in (PLAIN, OURS, ONE_LINE)
    )
    assert [*plain] == ["all-reduce"]
    for other in others:
        assert other.keys() == plain.keys()
        assert other["all-reduce"][0] == plain["all-reduce"][0]
        assert other["all-reduce"][1] <= 1.01 * plain["all-reduce"][1]
