"""``tests/in_a_job.py``: tests in the processes of a job."""

import in_a_job
import pytest

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


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # of CI, for the processes outside
    file, results = tmp_path / "test_here.py", tmp_path / "results.xml"

    def run(text, jobs, *options):
        file.write_text(text)
        options = str(file), "--rootdir", str(tmp_path), *options
        code, found = in_a_job.main(2, jobs, results, *options), in_a_job.outcomes(results)
        return code, {name: outcome for (_, name), outcome in found.items()}

    return run


def test_two_processes_are_one_job(run, capsys):
    code, found = run(TESTS, 1)
    assert code == 1
    assert [*found.values()] == ["passed", "failure", "skipped"]
    assert "assert 1 == 0" in capsys.readouterr().out


def test_jobs_share_what_is_selected(run):
    """One of three jobs has no test."""
    code, found = run(TESTS, 3, "-k", "share or skipped")
    assert code == 0
    assert [*found.values()] == ["passed", "skipped"]


@pytest.mark.parametrize("end", ["os.abort()", "jax.process_index() or os._exit(0)"])
def test_a_job_that_dies_failed(end, run):
    """All of its processes, or one that looks as if it had succeeded."""
    code, found = run(f"import os, jax\n\ndef test():\n    {end}\n", 1)
    assert code == 1
    assert found["process 0-0"] == "failure"


@pytest.mark.long
def test_a_process_that_goes_on_alone_is_ended(run):
    """One fails before a sum in which the other waits, or compares it with that of another test."""
    text = TESTS.replace("    mine", "    assert jax.process_index() == 0\n    mine", 1)
    text = text.replace("import jax,", "import in_a_job, jax,", 1) + "\nin_a_job.SECONDS = 3\n"
    code, found = run(text, 1)
    assert code == 1
    assert "passed" not in found.values()
