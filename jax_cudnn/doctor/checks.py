"""The checks, in the order of the report: causes before consequences."""

from __future__ import annotations

import re
from collections.abc import Callable

from .._core.compat import OLDEST_JAX
from .._core.package import install
from .._core.settings import TUNING, VARIABLE
from .check_cudnn import cudnn_library, cudnn_package
from .facts import Facts
from .finding import ABSENT, AFTERWARDS, OK, PROBLEM, Finding, blamed, failure, stage

OLDEST_PYTHON = (3, 11)
INSTALL = install("cuda12", "cuda13")
# The oldest drivers (and the newest CUDA that they support) for plugins of CUDA 12 and 13.
OLDEST_DRIVER = {"12": (12000, "525"), "13": (13000, "580")}

_DRIVER_ADVICE = {
    34: "this libcuda.so.1 is the CUDA toolkit's stub: remove its folder from LD_LIBRARY_PATH",
    100: "start a container with its GPUs (docker run --gpus all); request a GPU from a "
    "scheduler; otherwise run nvidia-smi. On a machine without a GPU, uninstall the driver",
    802: "start NVIDIA's fabric manager and try again",
    803: "the versions of the kernel driver and libcuda.so.1 differ: reboot after a driver update, "
    "or remove the other libcuda.so.1 from LD_LIBRARY_PATH",
    804: "this GPU does not support the forward-compatible libcuda.so.1 of CUDA's compat folder: "
    "remove that folder from LD_LIBRARY_PATH, or update the driver",
}


def examine(facts: Facts) -> list[Finding]:
    """All findings; a check that raises an error is also a finding."""
    findings = [
        Finding("doctor", PROBLEM, f"cannot examine: {what}", why, "please report this")
        for what, why in facts.failed.items()
    ]
    for name, check in CHECKS.items():
        try:
            findings.append(check(facts, name))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            findings.append(Finding(name, PROBLEM, "this check failed", why, "please report this"))
    return findings


def python(facts: Facts, name: str) -> Finding:
    version, interpreter = facts.python
    value = f"{'.'.join(map(str, version))}, {interpreter}"
    if version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return Finding(name, PROBLEM, value, "too old", f"use Python {oldest} or newer")
    return Finding(name, OK, value)


def jax(facts: Facts, name: str) -> Finding:
    version, jaxlib = (facts.packages.get(package) for package in ("jax", "jaxlib"))
    value = f"{version}, jaxlib {jaxlib}"
    if version is None or numbers(version) < OLDEST_JAX:
        why = f"jax_cudnn needs jax >= {'.'.join(map(str, OLDEST_JAX))}"
        return Finding(name, PROBLEM, value, why, "pip install -U jax")
    return Finding(name, OK, value)


def driver(facts: Facts, name: str) -> Finding:
    """libcuda.so.1 and NVIDIA's kernel module."""
    kernel = f"kernel module {facts.kernel_driver}" if facts.kernel_driver else ""
    if facts.driver.ended or not facts.driver_report:
        ended = facts.driver.ended or "printed nothing"
        why = f"the process that queried the driver {ended}. {facts.driver.tail}"
        return Finding(name, PROBLEM, kernel or "does not answer", why, "reinstall NVIDIA's driver")
    missing = facts.driver_report.get("missing")
    if missing is None:
        value = f"supports up to {cuda_text(facts.driver_report['version'])}"
        details = [value, facts.driver_report["path"], kernel]
        return Finding(name, OK, ", ".join(filter(None, details)))
    signs = [*facts.nodes, *([f"the {kernel}"] if kernel else [])]
    if signs or "No such file" not in missing:
        return Finding(
            name,
            PROBLEM,
            kernel or "cannot be loaded",
            f"{missing}" + (f", but there is {', '.join(signs)}" if signs else ""),
            "install NVIDIA's driver; start a container with its GPUs (docker run --gpus all), "
            "which mounts the driver's libraries",
        )
    return Finding(name, ABSENT, "none", "there is no libcuda.so.1 and no sign of an NVIDIA GPU")


def gpus(facts: Facts, name: str) -> Finding:
    """The GPUs that the driver reports, before JAX starts."""
    if facts.gpus:
        rows = enumerate(facts.gpus)
        text = "{}: {name}, compute capability {capability}, {gib} GiB"
        return Finding(name, OK, "\n".join(text.format(n, **gpu) for n, gpu in rows))
    if not facts.driver_report or "missing" in facts.driver_report:
        return Finding(name, ABSENT, "none", "there is no driver")
    visible = facts.variables.get("CUDA_VISIBLE_DEVICES")
    if facts.hidden_gpus:
        count = len(facts.hidden_gpus)
        return Finding(
            name,
            PROBLEM,
            f"none visible, {count} hidden: {facts.hidden_gpus[0]['name']}",
            f"CUDA_VISIBLE_DEVICES is {visible!r}",
            "unset CUDA_VISIBLE_DEVICES, or list the GPUs to use: "
            + ",".join(map(str, range(count))),
        )
    status, text = facts.driver_report["status"], facts.driver_report["text"]
    why = f"the driver returned {status}: {text}" if status else "the driver reports 0 GPUs"
    if visible is not None:
        why += f" (also without CUDA_VISIBLE_DEVICES={visible!r})"
    elif not facts.nodes:
        why += "; /dev/nvidiactl and /dev/nvidia0 are missing"
    fix = _DRIVER_ADVICE.get(status or 100, "run nvidia-smi, and read the system log")
    return Finding(name, PROBLEM, "none visible", why, fix)


def plugin(facts: Facts, name: str) -> Finding:
    """JAX's CUDA plugin: one, complete, of jaxlib's version, and supported by the driver."""
    parts = [f"jax-cuda{m}-{part}" for m in ("12", "13") for part in ("plugin", "pjrt")]
    found = {part: facts.packages[part] for part in parts if part in facts.packages}
    majors = sorted({*facts.plugins, *(re.sub(r"\D", "", part) for part in found)})
    newest = facts.driver_report.get("version", 0)
    if not majors:
        if not facts.gpu_present:
            return Finding(name, ABSENT, "none", "only a machine with a GPU needs it")
        extras = ("cuda12", "cuda13") if newest < OLDEST_DRIVER["13"][0] else ("cuda13", "cuda12")
        why = "without it JAX does not see the GPU"
        return Finding(name, PROBLEM, "none, but there is a GPU", why, install(*extras))
    value = ", ".join(f"{part} {version}" for part, version in found.items())
    value = value or f"for CUDA {', '.join(majors)}"
    if len(majors) > 1:
        keep = "12" if 0 < newest < OLDEST_DRIVER["13"][0] else "13"
        remove = "12" if keep == "13" else "13"
        fix = f"pip uninstall jax-cuda{remove}-plugin jax-cuda{remove}-pjrt nvidia-cudnn-cu{remove}"
        return Finding(name, PROBLEM, value, "JAX can use only one CUDA plugin", fix)
    major = majors[0]
    again = f"pip install -U 'jax[cuda{major}]'"
    if found and (len(found) == 1 or major not in facts.plugins):
        why = "the plugin is incomplete: it consists of jax-cuda*-plugin and jax-cuda*-pjrt"
        fix = f"pip install --force-reinstall 'jax[cuda{major}]'"
        return Finding(name, PROBLEM, value, why, fix)
    jaxlib = facts.packages.get("jaxlib", "")
    if any(numbers(version) != numbers(jaxlib) for version in found.values()):
        return Finding(name, PROBLEM, value, f"JAX rejects it with jaxlib {jaxlib}", again)
    oldest, release = OLDEST_DRIVER.get(major, (0, ""))
    if newest and newest < oldest:
        other = " (or use CUDA 12: pip uninstall jax-cuda13-plugin jax-cuda13-pjrt; "
        other = other + f"{install('cuda12')})" if major == "13" and newest >= 12000 else ""
        why = f"this driver supports up to {cuda_text(newest)}"
        return Finding(name, PROBLEM, value, why, f"update the driver to >= {release}{other}")
    return Finding(name, OK, value)


def jax_devices(facts: Facts, name: str) -> Finding:
    """The devices that JAX uses in a fresh process."""
    report = stage(facts.jax, "devices")
    platforms, flags = (facts.variables.get(v) for v in ("JAX_PLATFORMS", "XLA_FLAGS"))
    if blamed(report):
        hints = [f"unset JAX_PLATFORMS (it is {platforms!r})"] if platforms else []
        hints += [f"check XLA_FLAGS (it is {flags!r})"] if flags else []
        return failure(name, report, fix=", or ".join(hints) or "pip install -U jax jaxlib")
    if report["gpus"]:
        return Finding(name, OK, f"{len(report['gpus'])} x {report['gpus'][0]}")
    value = f"no GPU; JAX runs on {report['platform']}"
    if not facts.gpu_present:
        if facts.plugins and not platforms:
            why = "without a GPU, JAX's CUDA plugin prints an error at each start"
            return Finding(name, OK, value, why, "export JAX_PLATFORMS=cpu")
        return Finding(name, OK, value)
    if platforms and not {"cuda", "gpu"} & set(re.split(r"\W+", platforms)):
        why, fix = f"JAX_PLATFORMS is {platforms!r}", "unset JAX_PLATFORMS"
    else:
        why = "\n".join(report["heard"]) or "JAX gives no reason"
        fix = """read JAX's message: python -c 'import jax; jax.devices("cuda")'"""
        if not facts.gpus or not facts.plugins:
            fix = AFTERWARDS
    return Finding(name, PROBLEM, value, why, fix)


def frontend(facts: Facts, name: str) -> Finding:
    """nvidia-cudnn-frontend, which builds plans."""
    report = stage(facts.jax, "frontend_here")
    if "absent" in report:
        status = PROBLEM if facts.gpu_present else ABSENT
        return Finding(name, status, "not installed", "it builds cuDNN plans", INSTALL)
    if blamed(report):
        fix = "pip install --force-reinstall nvidia-cudnn-frontend; check which `cudnn` Python "
        return failure(name, report, fix=fix + "imports (PYTHONPATH)")
    return Finding(name, OK, f"{report['version']}, {report['path']}")


def executor(facts: Facts, name: str) -> Finding:
    """Our compiled library, accepted by this jaxlib."""
    if not facts.system.startswith("linux"):
        why = "this system has no CUDA: graphs run on their reference"
        return Finding(name, ABSENT, "not built", why)
    report = stage(facts.jax, "executor")
    for tried in (report, stage(facts.planning, "registration")):
        if blamed(tried):
            fix = "pip install -U jax jaxlib, or build jax_cudnn for this jaxlib: pip install ."
            return failure(name, tried, fix=fix)
    return Finding(name, OK, f"{report['path']}, accepted by jaxlib")


def planning(facts: Facts, name: str) -> Finding:
    """Plans a small graph for an absent GPU."""
    report = stage(facts.planning, "planned")
    if "absent" in report or not facts.system.startswith("linux"):
        why = str(report.get("absent", "it needs Linux"))
        return Finding(name, ABSENT, "not available", why, INSTALL)
    if blamed(report):
        return failure(name, report, fix=AFTERWARDS)
    value = f"works: engine {report['engine']} for an H200, {report['seconds']} s"
    return Finding(name, OK, value)


def run(facts: Facts, name: str) -> Finding:
    """Runs a small fused graph and compares it with NumPy."""
    report = stage(facts.jax, "run")
    if blamed(report):
        return failure(name, report, fix=AFTERWARDS)
    if report["platform"] == "cpu":
        return Finding(name, OK, "correct on the CPU (reference)")
    return Finding(name, OK, f"correct on {report['device']}, in one cuDNN plan")


def settings(facts: Facts, name: str) -> Finding:
    """Environment variables that matter; ours are checked."""
    rows = [f"{variable}={value}" for variable, value in facts.variables.items()]
    if facts.variables.get(VARIABLE, TUNING[0]) not in ("", *TUNING):
        why = f"{VARIABLE} is none of {', '.join(TUNING)}: no graph is planned"
        return Finding(name, PROBLEM, "\n".join(rows), why, f"correct it, or unset {VARIABLE}")
    return Finding(name, OK, "\n".join(rows) or "no JAX, XLA or CUDA variable is set")


CHECKS: dict[str, Callable[[Facts, str], Finding]] = {
    "environment": settings,
    "Python": python,
    "jax": jax,
    "driver": driver,
    "GPUs": gpus,
    "CUDA plugin": plugin,
    "JAX's devices": jax_devices,
    "cuDNN package": cudnn_package,
    "cuDNN frontend": frontend,
    "cuDNN": cudnn_library,
    "executor": executor,
    "planning": planning,
    "a graph": run,
}


def numbers(version: str) -> tuple[int, ...]:
    """'0.12.0.1.dev3' -> (0, 12, 0, 1), as JAX compares the versions of plugins."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def cuda_text(version: int) -> str:
    """12040 -> 'CUDA 12.4'."""
    return f"CUDA {version // 1000}.{version % 1000 // 10}"
