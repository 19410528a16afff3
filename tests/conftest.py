"""Fixtures and the rules by which tests that need hardware or cuDNN are skipped, with a reason."""

import importlib.metadata
import os
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit these
    # Several processes share a GPU: none may take most of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Eight host devices for sharding; must be set before JAX starts its backends.
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
    if not os.path.exists("/dev/nvidiactl"):
        # Without a GPU the CUDA plugin only prints its failure to find one.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # Most of the time goes into compiling thousands of small programs: none is compiled twice.
        flags.append("--xla_backend_optimization_level=0")
        if importlib.metadata.version("jax").startswith("0.10."):
            flags.append("--xla_cpu_use_fusion_emitters=false")  # slow to compile
        _compiled = tempfile.TemporaryDirectory(prefix="jax_cudnn-tests-")  # deleted at exit
        os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ.setdefault("JAX_CUDNN_TUNING", "off")  # but where a test is about it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as the times of benchmarks/many_gpus.py

import functools
import importlib.util
import itertools
import json
import sys
import zlib
from pathlib import Path

import jax
import pytest

import jax_cudnn as jc
from jax_cudnn._core import auto
from jax_cudnn._core.planning import losses, planner
from jax_cudnn._core.settings import settings

# The clone's ``benchmarks`` can be imported, behind all that is installed.
sys.path.append(str(Path(__file__).parents[1]))

# Plans of tests, also of their subprocesses, stay out of the user's cache; deleted at exit.
_cache_home = tempfile.TemporaryDirectory(prefix="jax_cudnn-tests-")
os.environ["XDG_CACHE_HOME"] = _cache_home.name


def _has_gpu() -> bool:
    try:
        return any("cuda" in d.client.platform_version.lower() for d in jax.devices("gpu"))
    except RuntimeError:
        return False


def pytest_addoption(parser):
    parser.addoption("--every", action="store_true", help="each axis on a mesh, not a sample")
    parser.addoption(
        "--cases", type=int, default=1, help="of each test's cases, every n-th and the last"
    )


@pytest.hookimpl(trylast=True)  # of those that -k and -m select
def pytest_collection_modifyitems(config, items):
    kept, others, step = [], [], max(1, config.getoption("cases"))
    for _, cases in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        *cases, last = cases
        for i, item in enumerate(cases):
            (others if i % step else kept).append(item)
        kept.append(last)
    config.hook.pytest_deselected(items=others)
    items[:] = kept
    missing = {} if _has_gpu() else {"gpu": "no NVIDIA GPU is visible to JAX"}
    if not importlib.util.find_spec("cudnn"):
        missing["deviceless"] = "nvidia-cudnn-frontend is not installed"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _device(request):
    """Tests with none of these marks run on the CPU, also where there is a GPU."""
    if any(map(request.node.get_closest_marker, ("gpu", "several_gpus"))):
        yield
    else:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            yield


@pytest.fixture
def key(request):
    """The test's own random key, the same in each run."""
    return jax.random.key(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def by_cudnn():
    """Graphs are one cuDNN plan, or refused: XLA runs none of them in silence."""
    with jc.implementation("cudnn"):
        yield


@pytest.fixture
def no_plans():
    """No plan is known, and none is read from the disk or left there."""
    kept = settings().plan_cache
    jc.configure(plan_cache=None)
    auto.clear()
    yield
    auto.clear()
    jc.configure(plan_cache=kept)


@pytest.fixture
def made_up_plans(no_plans, monkeypatch):
    """For tests that put something in place of ``planner._build``: neither cuDNN's versions nor
    its losses matter to them."""

    def identity(site):
        versions = {"cuDNN": "9.19.0", "jax_cudnn": planner.fingerprint(), "site": repr(site)}
        return json.dumps({"GPU": getattr(site, "properties_json", ""), **versions})

    monkeypatch.setattr(planner, "identity", functools.cache(identity))
    monkeypatch.setattr(losses, "table", dict)
