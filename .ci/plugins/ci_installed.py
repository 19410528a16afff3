"""A pytest plugin that checks that the installed package was tested, with all golden plans."""

import os
import sys
from pathlib import Path

skipped: list[str] = []


def pytest_runtest_logreport(report):
    if report.skipped and "golden" in report.nodeid:
        skipped.append(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    import jax_cudnn
    from jax_cudnn._core.package import packaged_library

    assert "site-packages" in jax_cudnn.__file__, f"tested the source: {jax_cudnn.__file__}"
    assert packaged_library("libjax_cudnn.so").is_file(), "tested without the executor"
    if hasattr(session.config, "workerinput"):  # one of several workers
        return
    assert not skipped, f"no golden file for these versions: {skipped}"
    tested = Path(os.environ["CI_TESTED"])
    tested.with_suffix(".prefix").write_text(sys.prefix)
    if exitstatus == 0:
        tested.with_suffix(".passed").touch()


def pytest_report_header(config):
    from importlib.metadata import version

    names = ("jax", "jaxlib", "numpy", "nvidia-cudnn-frontend")
    return "versions: " + ", ".join(f"{name} {version(name)}" for name in names)
