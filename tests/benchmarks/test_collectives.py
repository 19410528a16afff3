"""A part of the table of collectives, compiled for H200s that are absent."""

import importlib.util

import pytest

from benchmarks.collectives import COLUMNS, collectives, compiled

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
        reason="XLA's compiler for CUDA is not installed",
    ),
]


def test_a_data_parallel_transformer_has_the_collectives_of_plain_jax():
    from benchmarks.sharded import AUTOMATIC, transformer

    plain, ours = (
        collectives(compiled(transformer(), column, "data parallel", AUTOMATIC).as_text())
        for column in (COLUMNS[0], COLUMNS[-1])
    )
    assert {kind: n for kind, (n, _) in ours.items()} == {kind: n for kind, (n, _) in plain.items()}
    assert [*ours] == ["all-reduce"]
    assert ours["all-reduce"][1] <= plain["all-reduce"][1]
