"""cuDNN: installed packages, all copies, which copy each process uses, and why."""

from __future__ import annotations

import os

from .._core.errors import LibraryError
from .._core.planning import frontend
from .copies import LIBRARY_PATH, WHEEL, Copy
from .facts import Facts
from .finding import ABSENT, OK, PROBLEM, WARNING, Finding, blamed, failure, stage

_LEAVE = "nothing for now; uninstall unused copies if versions ever get mixed"


def cudnn_package(facts: Facts, name: str) -> Finding:
    """The nvidia-cudnn wheel: exactly one, for the plugin's CUDA."""
    wheels = [f"nvidia-cudnn-cu{major}" for major in ("12", "13")]
    found = {wheel: facts.packages[wheel] for wheel in wheels if wheel in facts.packages}
    value = ", ".join(f"{wheel} {version}" for wheel, version in found.items())
    if not found:
        return Finding(name, ABSENT, "not installed", "a system-wide cuDNN 9 works, too")
    majors = facts.plugins or ("12", "13")
    wrong = [wheel for wheel in found if wheel[-2:] not in majors]
    if len(found) > 1:
        fix = f"pip uninstall {' '.join(found)}; then {_install(facts)}"
        return Finding(name, PROBLEM, value, "both install into the same folder, nvidia/cudnn", fix)
    if wrong:
        why = f"JAX's CUDA plugin is for CUDA {majors[0]}"
        return Finding(name, PROBLEM, value, why, f"pip uninstall {wrong[0]}; {_install(facts)}")
    return Finding(name, OK, value)


def cudnn_library(facts: Facts, name: str) -> Finding:
    """Every libcudnn.so.9: versions and users, and whether all users have the same version."""
    here, worker = stage(facts.jax, "cudnn_here"), stage(facts.planning, "worker")
    needed = facts.gpu_present or "absent" not in here
    if not facts.copies:
        status = PROBLEM if needed else ABSENT
        why = "no libcudnn.so.9 in LD_LIBRARY_PATH, site-packages, the dynamic linker's cache, "
        why += "the usual folders" + ("; plans cannot be built without it" if needed else "")
        return Finding(name, status, "none found", why, _install(facts))
    value = "\n".join(_row(copy, facts) for copy in facts.copies)
    preferred = [copy for copy in facts.copies if copy.by_name]
    versions = {copy.version for copy in preferred}
    if len(versions) > 1:
        texts = ", ".join(f"{_text(c)} ({', '.join(c.found_by)})" for c in preferred)
        why = (
            f"two versions of cuDNN: {texts}. JAX loads the package's; the planning worker and the "
        )
        why += "frontend prefer LD_LIBRARY_PATH's. Plans of one do not run on the other"
        return Finding(name, PROBLEM, value, why, _keep_one(facts, preferred))
    users = {"JAX's process": here, "the planning worker": worker}
    used = {who: report["cudnn"] for who, report in users.items() if "cudnn" in report}
    ran = stage(facts.jax, "executor").get("cudnn")
    used |= {"the executor": ran} if ran else {}
    if len(set(used.values())) > 1:
        why = ", ".join(f"{who} uses {frontend.version_text(v)}" for who, v in used.items())
        return Finding(name, PROBLEM, value, why, _keep_one(facts, list(facts.copies)))
    for version in used.values():
        try:
            frontend.check_cudnn(version)
        except LibraryError as error:
            why = f"{error.summary}: expected {error.expected}"
            return Finding(name, PROBLEM, value, why, error.fix or "")
    own = not blamed(stage(facts.jax, "frontend_here"))  # else the frontend's finding reports it
    for report in (here, worker):
        if own and blamed(report):
            return failure(name, report, fix=_install(facts))
    others = {copy.version for copy in facts.copies} - {*used.values()}
    if used and others:
        why = "there are unused copies of other versions: a change of LD_LIBRARY_PATH could mix "
        why += "versions"
        return Finding(name, WARNING, value, why, _LEAVE)
    return Finding(name, OK, value, _reason(facts))


def _row(copy: Copy, facts: Facts) -> str:
    users = [who for who, paths in _paths(facts).items() if copy.path in paths]
    used = f"; used by {', '.join(users)}" if users else ""
    return f"{_text(copy)} from {', '.join(copy.found_by)}{used}\n  {copy.path}"


def _text(copy: Copy) -> str:
    return "BROKEN " + copy.broken if copy.version is None else frontend.version_text(copy.version)


def _paths(facts: Facts) -> dict[str, set[str]]:
    """The files that each process or component has loaded."""
    devices, here = stage(facts.jax, "devices"), stage(facts.jax, "cudnn_here")
    ran = stage(facts.jax, "executor").get("cudnn_path")
    paths = {
        "JAX": devices.get("cudnn", []),
        "the frontend": here.get("paths", []),
        "the executor": [ran] if ran else [],
        "the planning worker": stage(facts.planning, "worker").get("paths", []),
    }
    return {who: {os.path.realpath(path) for path in found} for who, found in paths.items()}


def _reason(facts: Facts) -> str:
    """Why this copy is the one in use."""
    paths = _paths(facts)
    used = [copy for copy in facts.copies if any(copy.path in found for found in paths.values())]
    if not used:
        return "none is loaded: the frontend that would use it is missing"
    if paths["JAX"] and WHEEL in used[0].found_by:
        return "JAX's CUDA plugin loads the package's copy first, and everything else then uses it"
    if LIBRARY_PATH in used[0].found_by:
        return "LD_LIBRARY_PATH comes first"
    if WHEEL in used[0].found_by:
        return "LD_LIBRARY_PATH has none, so the package's copy is used"
    return "LD_LIBRARY_PATH and site-packages have none, so the dynamic linker's copy is used"


def _keep_one(facts: Facts, copies: list[Copy]) -> str:
    folders = {os.path.dirname(c.path) for c in copies if LIBRARY_PATH in c.found_by}
    if not folders:
        return "keep one of them and remove the other"
    wheel = next((w for w in facts.packages if w.startswith("nvidia-cudnn-cu")), "")
    fix = f"keep one of them: remove {', '.join(sorted(folders))} from LD_LIBRARY_PATH"
    return fix + (f", or pip uninstall {wheel}" if wheel else "")


def _install(facts: Facts) -> str:
    newest = facts.driver_report.get("version", 0)
    major = facts.plugins[0] if facts.plugins else "13" if newest >= 13000 else "12"
    oldest = frontend.version_text(frontend.OLDEST_CUDNN)
    return f"pip install -U 'nvidia-cudnn-cu{major}>={oldest}'"
