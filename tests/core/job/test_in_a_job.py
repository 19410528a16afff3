"""``tests/in_a_job.py``: tests in the processes of a job."""

from pathlib import Path

import in_a_job

from benchmarks.tested import counted

TESTS = """
import jax, jax.numpy as jnp, pytest
from jax.sharding import NamedSharding, PartitionSpec as P

def test_devices_of_both_share_an_array():
    mine = NamedSharding(jax.make_mesh((2,), ("x",)), P("x"))
    x = jax.make_array_from_callback((4,), mine, jnp.arange(4.0).__getitem__)
    assert len(x.addressable_shards) == 1
    assert jax.jit(jnp.sum)(x) == 6

def test_that_fails_in_one():
    assert jax.process_index() == 0

@pytest.mark.skip
def test_that_is_skipped():
    pass
"""


def test_two_processes_are_one_job(tmp_path, capsys):
    file, results = tmp_path / "test_here.py", tmp_path / "results.xml"
    file.write_text(TESTS)
    assert in_a_job.main(2, 1, results, str(file), "--rootdir", str(tmp_path)) == 1
    assert counted(results) == {"test_here": {"passed": 1, "failed": 1, "skipped": 1}}
    assert "assert 1 == 0" in capsys.readouterr().out


def test_a_test_that_did_not_end_failed():
    one = {("module", "a"): "passed", ("module", "b"): "passed"}
    assert [*in_a_job.worst([one, {("module", "a"): "passed"}]).values()] == ["passed", "failure"]
    assert {*in_a_job.worst([one, in_a_job.outcomes(Path("missing.xml"))]).values()} == {"failure"}
