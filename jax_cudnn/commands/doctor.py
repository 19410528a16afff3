"""``python -m jax_cudnn doctor``: versions of everything, whether they fit, and what to do.

Each row of ``CHECKS`` examines the facts of ``facts.py``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._core.compat import OLDEST_JAX
from .._core.package import install
from .._core.planning import frontend as library
from .._core.settings import TUNING, VARIABLE
from .facts import LIBRARY_PATH, SONAME, WHEEL, Copy, Facts, collect

OLDEST_PYTHON = (3, 11)
INSTALL = install("cuda12", "cuda13")
AFTERWARDS = "fix the problems above, then try again"  # advice for consequences
OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "absent"

# The oldest drivers (and the newest CUDA that they support) for plugins of CUDA 12 and 13.
_OLDEST_DRIVER = {"12": (12000, "525"), "13": (13000, "580")}
_USERS = {
    "JAX": "devices",
    "the frontend": "cudnn_here",
    "the executor": "executor",
    "the planning worker": "planned",
}
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


class Finding(NamedTuple):
    """One row of the report.

    Attributes:
        status: "ok"; "absent": not installed, and not needed on this machine; "warning": works
            now, but may break; "problem": installed but broken or incompatible, or a GPU that
            cannot be used.
        value: versions and locations, possibly on several lines.
        why: the reason for the status.
        fix: what to do; of a problem without its own, the advice of its check.
    """

    status: str
    value: str
    why: str = ""
    fix: str = ""


def examine(facts: Facts) -> dict[str, Finding]:
    """All findings by name; a check that raises an error is also a finding."""
    findings = {}
    for name, check, advice in CHECKS:
        try:
            finding = check(facts)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            finding = Finding(PROBLEM, "this check failed", why, "please report this")
        fix = finding.fix or (advice if finding.status == PROBLEM else "")
        findings[name] = finding._replace(fix=fix)
    return findings


def blamed(report: Mapping[str, Any]) -> Finding | None:
    """The finding for a stage with an error, or one that was not tried."""
    if "untried" in report:
        return Finding(WARNING, "not tried", report["untried"])
    if "error" not in report:
        return None
    error = report["error"]
    details = ", ".join(f"{part} {error[part]}" for part in ("expected", "got") if error.get(part))
    why = "\n".join(filter(None, (details, error.get("why"))))
    return Finding(PROBLEM, error["summary"], why, error.get("fix") or "")


def settings(facts: Facts) -> Finding:
    rows = "\n".join(f"{variable}={value}" for variable, value in facts.variables.items())
    if facts.variables.get(VARIABLE, "") not in ("", *TUNING):
        return Finding(PROBLEM, rows, f"{VARIABLE} is none of {', '.join(TUNING)}")
    return Finding(OK, rows or "no JAX, XLA or CUDA variable is set")


def python(facts: Facts) -> Finding:
    status = OK if sys.version_info >= OLDEST_PYTHON else PROBLEM
    return Finding(status, f"{sys.version.split()[0]}, {sys.executable}")


def jax(facts: Facts) -> Finding:
    version, jaxlib = (facts.packages.get(name, "not installed") for name in ("jax", "jaxlib"))
    return Finding(
        OK if _numbers(version) >= OLDEST_JAX else PROBLEM, f"{version}, jaxlib {jaxlib}"
    )


def driver(facts: Facts) -> Finding:
    """libcuda.so.1 and NVIDIA's kernel module."""
    report = facts.report("driver")
    if "path" in report:
        details = (f"supports up to {_cuda(report['version'])}", report["path"], *facts.signs[-1:])
        return Finding(OK, ", ".join(details))
    missing = report.get("missing", "")
    if "No such file" in missing and not facts.signs:
        return Finding(ABSENT, "none", "there is no libcuda.so.1 and no sign of an NVIDIA GPU")
    why = missing + (f", but there is {', '.join(facts.signs)}" if facts.signs else "")
    return blamed(report) or Finding(PROBLEM, "cannot be loaded", why)


def gpus(facts: Facts) -> Finding:
    """The GPUs that the driver reports, before JAX starts."""
    report, visible = facts.report("driver"), facts.variables.get("CUDA_VISIBLE_DEVICES")
    if facts.gpus:
        text = "{}: {name}, compute capability {capability}, {gib} GiB"
        return Finding(OK, "\n".join(text.format(n, **gpu) for n, gpu in enumerate(facts.gpus)))
    if "status" not in report:
        return Finding(ABSENT, "none", "there is no driver")
    status = report["status"]
    why = f"the driver returned {status}: {report['text']}" if status else "it reports 0 GPUs"
    fix = _DRIVER_ADVICE.get(status or 100, "")
    if visible is not None:
        why += f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        fix = "unset CUDA_VISIBLE_DEVICES, or list the GPUs to use" if facts.signs else fix
    return Finding(PROBLEM, "none visible", why, fix)


def plugin(facts: Facts) -> Finding:
    """JAX's CUDA plugin: one, complete, of jaxlib's version, and supported by the driver."""
    parts = [f"jax-cuda{m}-{part}" for m in ("12", "13") for part in ("plugin", "pjrt")]
    found = {part: facts.packages[part] for part in parts if part in facts.packages}
    jaxlib, newest = facts.packages.get("jaxlib", ""), _newest_cuda(facts)
    majors = sorted({*facts.plugins, *(part[8:10] for part in found)})
    if not majors:
        if facts.gpu_present:
            return Finding(PROBLEM, "none", "without it JAX does not see the GPU")
        return Finding(ABSENT, "none", "only a machine with a GPU needs it")
    value = ", ".join(f"{part} {version}" for part, version in found.items())
    again = f"pip install -U --force-reinstall 'jax[cuda{majors[0]}]'"
    other = "13" if 0 < newest < _OLDEST_DRIVER["13"][0] else "12"
    uninstall = f"pip uninstall jax-cuda{other}-plugin jax-cuda{other}-pjrt nvidia-cudnn-cu{other}"
    oldest, release = _OLDEST_DRIVER.get(majors[0], (0, ""))
    update = f"update the driver to >= {release}"
    if majors == ["13"] and newest >= 12000:
        update += f" (or use CUDA 12: {uninstall}; {install('cuda12')})"
    problems = (
        (len(majors) > 1, "JAX can use only one CUDA plugin", uninstall),
        (len(found) == 1, "it consists of jax-cuda*-plugin and jax-cuda*-pjrt", again),
        (
            any(_numbers(version) != _numbers(jaxlib) for version in found.values()),
            f"JAX rejects it with jaxlib {jaxlib}",
            again,
        ),
        (0 < newest < oldest, f"this driver supports up to {_cuda(newest)}", update),
    )
    found_wrong = (Finding(PROBLEM, value, why, fix) for wrong, why, fix in problems if wrong)
    return next(found_wrong, Finding(OK, value or f"for CUDA {majors[0]}"))


def devices(facts: Facts) -> Finding:
    """The devices that JAX uses in a fresh process."""
    report = facts.report("devices")
    platforms, flags = (facts.variables.get(v) for v in ("JAX_PLATFORMS", "XLA_FLAGS"))
    if failed := blamed(report):
        given = f"JAX_PLATFORMS (it is {platforms!r}) and XLA_FLAGS (it is {flags!r})"
        return failed._replace(fix=f"check {given}" if platforms or flags else "")
    if report["gpus"]:
        return Finding(OK, f"{len(report['gpus'])} x {report['gpus'][0]}")
    value = f"no GPU; JAX runs on {report['platform']}"
    if not facts.gpu_present:
        if facts.plugins and not platforms:
            why = "without a GPU, JAX's CUDA plugin prints an error at each start"
            return Finding(OK, value, why, "export JAX_PLATFORMS=cpu")
        return Finding(OK, value)
    if platforms and not {"cuda", "gpu"} & {*re.split(r"\W+", platforms)}:
        return Finding(PROBLEM, value, f"JAX_PLATFORMS is {platforms!r}", "unset JAX_PLATFORMS")
    why = "\n".join(report["heard"]) or "JAX gives no reason"
    return Finding(PROBLEM, value, why, "" if facts.gpus and facts.plugins else AFTERWARDS)


def cudnn_package(facts: Facts) -> Finding:
    """The nvidia-cudnn wheel: exactly one."""
    wheels = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
    found = [f"{wheel} {facts.packages[wheel]}" for wheel in wheels if wheel in facts.packages]
    if not found:
        return Finding(ABSENT, "not installed", "a system-wide cuDNN 9 works, too")
    if len(found) == 1:
        return Finding(OK, found[0])
    fix = f"pip uninstall {' '.join(wheels)}; then {_cudnn(facts)}"
    return Finding(
        PROBLEM, ", ".join(found), "both install into nvidia/cudnn, the same folder", fix
    )


def frontend(facts: Facts) -> Finding:
    """nvidia-cudnn-frontend, which builds plans."""
    report = facts.report("frontend_here")
    if "absent" in report:
        status = PROBLEM if facts.gpu_present else ABSENT
        return Finding(status, "not installed", "it builds cuDNN plans", INSTALL)
    return blamed(report) or Finding(OK, f"{report['version']}, {report['path']}")


def cudnn(facts: Facts) -> Finding:
    """Every libcudnn.so.9: versions and users, and whether all users have the same version."""
    here = facts.report("cudnn_here")
    if not facts.copies:
        status = PROBLEM if facts.gpu_present or "absent" not in here else ABSENT
        why = f"no {SONAME} in LD_LIBRARY_PATH, site-packages, the dynamic linker's cache; plans "
        return Finding(status, "none found", why + "cannot be built without it", _cudnn(facts))
    loaded = {
        who: [os.path.realpath(path) for path in facts.report(stage).get("paths", ())]
        for who, stage in _USERS.items()
    }
    rows, used = [], set()
    for copy in facts.copies:
        users = [who for who, paths in loaded.items() if copy.path in paths]
        used |= {copy.version} if users else set()
        rows.append(f"{_text(copy)}{'; used by ' * bool(users)}{', '.join(users)}\n  {copy.path}")
    value = "\n".join(rows)
    # JAX or the frontend may load these by path, before the dynamic linker's search.
    first = [copy for copy in facts.copies if {LIBRARY_PATH, WHEEL} & {*copy.found_by}]
    if len({copy.version for copy in first}) > 1 or len(used) > 1:
        texts = "; ".join(map(_text, facts.copies))
        why = f"two versions of cuDNN: {texts}. JAX loads the package's; the planning worker and "
        why += "the frontend prefer LD_LIBRARY_PATH's. Plans of one do not run on the other"
        folders = {os.path.dirname(c.path) for c in first if LIBRARY_PATH in c.found_by}
        fix = "keep one of them: uninstall the package, or remove "
        fix += f"{', '.join(sorted(folders)) or 'the others'} from LD_LIBRARY_PATH"
        return Finding(PROBLEM, value, why, fix)
    if failed := blamed(here):
        return failed
    if used and {copy.version for copy in facts.copies} - used:
        why = "copies of other versions are unused: a change of LD_LIBRARY_PATH could mix them"
        return Finding(WARNING, value, why, "uninstall unused copies if versions ever get mixed")
    return Finding(OK, value)


def executor(facts: Facts) -> Finding:
    """Our compiled library, accepted by this jaxlib."""
    if not sys.platform.startswith("linux"):
        return Finding(ABSENT, "not built", "without CUDA graphs run on their reference")
    report = facts.report("executor")
    accepted = Finding(OK, f"{report.get('path')}, accepted by jaxlib")
    return blamed(report) or blamed(facts.report("registration")) or accepted


def planning(facts: Facts) -> Finding:
    """Plans a small graph for an absent GPU."""
    report = facts.report("planned")
    if "absent" in report or not sys.platform.startswith("linux"):
        return Finding(ABSENT, "not available", report.get("absent", "it needs Linux"), INSTALL)
    value = "works: engine {engine} for an H200, {seconds} s"
    return blamed(report) or Finding(OK, value.format(**report))


def graph(facts: Facts) -> Finding:
    """Runs a small fused graph and compares it with NumPy."""
    report = facts.report("compute")
    where = f"{report.get('device')}, in one cuDNN plan"
    where = "the CPU (reference)" if report.get("platform") == "cpu" else where
    return blamed(report) or Finding(OK, f"correct on {where}")


# Causes before consequences: name, function, and advice for a problem without its own.
CHECKS: tuple[tuple[str, Callable[[Facts], Finding], str], ...] = (
    ("environment", settings, f"correct it, or unset {VARIABLE}"),
    ("Python", python, f"use Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"),
    ("jax", jax, f"pip install -U 'jax>={'.'.join(map(str, OLDEST_JAX))}'"),
    ("driver", driver, "install NVIDIA's driver; start a container with docker run --gpus all"),
    ("GPUs", gpus, "run nvidia-smi, and read the system log"),
    ("CUDA plugin", plugin, INSTALL),
    (
        "JAX's devices",
        devices,
        """read JAX's message: python -c 'import jax; jax.devices("cuda")'""",
    ),
    ("cuDNN package", cudnn_package, INSTALL),
    ("cuDNN frontend", frontend, "pip install --force-reinstall nvidia-cudnn-frontend"),
    ("cuDNN", cudnn, INSTALL),
    ("executor", executor, "pip install -U jax jaxlib, or build jax_cudnn for this jaxlib"),
    ("planning", planning, AFTERWARDS),
    ("a graph", graph, AFTERWARDS),
)


def _text(copy: Copy) -> str:
    version = copy.version
    text = f"BROKEN {copy.broken}" if version is None else library.version_text(version)
    return f"{text} from {', '.join(copy.found_by)}"


def _cudnn(facts: Facts) -> str:
    major = facts.plugins[0] if facts.plugins else "13" if _newest_cuda(facts) >= 13000 else "12"
    return f"pip install -U 'nvidia-cudnn-cu{major}>={library.version_text(library.OLDEST_CUDNN)}'"


def _newest_cuda(facts: Facts) -> int:
    return facts.report("driver").get("version", 0)  # 12040 is 12.4; 0 without a driver


def _numbers(version: str) -> tuple[int, ...]:
    """'0.12.0.1.dev3' -> (0, 12, 0, 1), as JAX compares the versions of plugins."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def _cuda(version: int) -> str:
    return f"CUDA {version // 1000}.{version % 1000 // 10}"  # 12040 -> CUDA 12.4


# -- the report ------------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m jax_cudnn``."""
    about = "heck the installation: versions, GPUs, drivers"
    parser = commands.add_parser("doctor", help=f"c{about}", description=f"C{about}.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda options: doctor(options.json))


def doctor(as_json: bool = False) -> int:
    """Prints what is installed, whether it works together, and what to do.

    Returns the exit code: 1 if there is a problem (something is installed but broken or
    incompatible, or a GPU cannot be used), else 0. A machine without a GPU, with or without cuDNN,
    is not a problem: graphs run on their reference there.
    """
    facts = collect()
    findings = examine(facts)
    problem = any(finding.status == PROBLEM for finding in findings.values())
    if as_json:
        report = {
            "jax_cudnn": facts.packages.get("jax-cudnn"),
            "ok": not problem,
            "verdict": verdict(facts, findings),
            "findings": [{"name": name, **f._asdict()} for name, f in findings.items()],
            "packages": facts.packages,
            "environment": facts.variables,
            "gpus": facts.gpus,
            "cudnn": [copy._asdict() for copy in facts.copies],
        }
        print(json.dumps(report, indent=2))
    else:
        print(f"jax_cudnn {facts.packages.get('jax-cudnn', '(a source tree)')}\n")
        for name, finding in findings.items():
            mark = "PROBLEM" if finding.status == PROBLEM else finding.status
            lines = finding.value.splitlines() or [""]
            for label, text in (("why: ", finding.why), ("do:  ", finding.fix)):
                lines += [
                    f"{label if n == 0 else '':5}{x}" for n, x in enumerate(text.splitlines())
                ]
            print(f"{mark:9}{name:16}" + f"\n{'':25}".join(lines))
        print(f"\nverdict: {verdict(facts, findings)}")
    return int(problem)


def verdict(facts: Facts, findings: Mapping[str, Finding]) -> str:
    """What works; or what does not work and how to fix it, causes before consequences."""
    problems = {name: f for name, f in findings.items() if f.status == PROBLEM}
    if problems:
        fixes = list(dict.fromkeys(finding.fix for finding in problems.values()))
        if len(fixes) > 1 and AFTERWARDS in fixes:
            fixes.remove(AFTERWARDS)
        head = f"problems: {', '.join(problems)}. What to do, in this order:"
        return "\n".join([head, *(f"  {n}. {fix}" for n, fix in enumerate(fixes, 1))])
    if facts.gpus:
        return "everything works: graphs run as cuDNN plans on this machine's GPU."
    text = "nothing is broken. There is no GPU: graphs run on their reference"
    if "engine" in facts.report("planned"):
        return f"{text}, and plans can be built for an absent GPU (jax_cudnn.target)."
    return f"{text}. cuDNN or its frontend is missing; to plan for an absent GPU: {INSTALL}"
