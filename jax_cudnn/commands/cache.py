"""``python -m jax_cudnn cache``: list, verify, clear, export and import the plan cache."""

from __future__ import annotations

import argparse
import errno
import json
import time
from pathlib import Path
from typing import Any

from .._core.errors import JaxCudnnError
from .._core.planning.stored import check_entry
from .._core.settings import settings
from .._core.store import archive
from .._core.store.cache import PlanCache

_EXAMPLE = """\
examples:
  python -m jax_cudnn cache list
  python -m jax_cudnn cache verify --delete
  python -m jax_cudnn cache export plans.zip      # on a machine that has the plans
  python -m jax_cudnn cache import plans.zip      # on others with the same GPU and versions

A plan is code for the GPU: import only archives that you trust like a program.
"""
_SHOWN = 20
_PLACE = "or pass another FILE or --folder"
_FIXES = {
    errno.ENOSPC: f"free space there, {_PLACE}; import leaves present entries as they are",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), f"make it writable, {_PLACE}"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "check this path"),
    **dict.fromkeys((errno.EISDIR, errno.EINVAL), "pass a regular file"),
}
_Outcome = tuple[bool, dict[str, Any], list[str]]  # whether all is well, facts for JSON, lines


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m jax_cudnn``."""
    parser = commands.add_parser(
        "cache",
        help="list, verify, clear, export or import plans on disk",
        description="The plans that processes share on disk.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(dest="action", required=True)
    parsers = {}
    for name, (does, _) in _ACTIONS.items():
        parsers[name] = added = actions.add_parser(name, help=does, description=does)
        added.add_argument(
            "--folder", type=_folder, metavar="DIR", help="the cache folder (default: the user's)"
        )
        added.add_argument("--json", action="store_true", help="print JSON")
    everything = f"print all, not {_SHOWN} only, as --json does"
    parsers["list"].add_argument("--all", action="store_true", help=everything)
    parsers["verify"].add_argument("--delete", action="store_true", help="delete them")
    for name in ("export", "import"):
        parsers[name].add_argument("file", type=Path, metavar="FILE", help="the archive, a zip")


def _folder(text: str) -> Path:
    try:
        if text:
            return Path(text).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    raise argparse.ArgumentTypeError("the folder name is empty")


def run(options: argparse.Namespace) -> int:
    """Runs the parsed command and returns the exit status."""
    folder = options.folder or settings().plan_cache
    if folder is None:
        raise JaxCudnnError(
            "there is no cache folder: this user has no home", fix="pass --folder DIR"
        )
    try:
        well, facts, lines = _ACTIONS[options.action][1](PlanCache(folder), options)
    except OSError as error:
        path = Path(error.filename2 or error.filename or folder)
        where = path.parent if path.suffix == ".tmp" else path
        raise JaxCudnnError(
            f"cache {options.action}: {where}: {error.strerror or error}",
            got="; ".join(getattr(error, "__notes__", ())),
            fix=_FIXES.get(error.errno or 0),
        ) from error
    facts = {"folder": str(folder), **facts}
    print(json.dumps(facts, indent=1) if options.json else "\n".join(lines))
    return int(not well)


def _list(cache: PlanCache, options: argparse.Namespace) -> _Outcome:
    entries = cache.entries()
    size = sum(entry.size for entry in entries)
    listed = [entry._asdict() for entry in entries]
    facts = {"bytes": size, "limit": cache.limit, "entries": listed}
    if not entries:
        what = "holds no plans" if cache.folder.is_dir() else "does not exist"
        return True, facts, [f"{cache.folder} {what}. Programs add their plans when they run."]
    lines = [f"{'digest':12}  {'size':>8}  {'last use':>8}  operations: operands -> results; plan"]
    shown = len(entries) if options.all else _SHOWN
    for entry in entries[:shown]:
        age = _age(time.time() - entry.used)
        text = f"({entry.problem})" if entry.problem else _printable(entry.label) or "-"
        lines.append(f"{entry.digest[:12]}  {_size(entry.size):>8}  {age:>8}  {text}")
    if len(entries) > shown:
        lines.append(f"{len(entries) - shown} more; --all lists them")
    total = f"{_count(len(entries))}, {_size(size)} of {_size(cache.limit)}, in {cache.folder}"
    return True, facts, [*lines, total]


def _verify(cache: PlanCache, options: argparse.Namespace) -> _Outcome:
    count, unusable = cache.verify(check_entry, options.delete)
    facts = {"checked": count, "unusable": {e.digest: e.problem for e in unusable}}
    lines = [f"{cache.path(entry.digest)}: {entry.problem}" for entry in unusable]
    if unusable and options.delete:
        left = sum(cache.path(entry.digest).exists() for entry in unusable)
        facts["deleted"] = len(unusable) - left
        lines.append(f"{facts['deleted']} deleted")
    elif unusable:
        lines.append("They are ignored. --delete deletes them.")
    total = f"{_count(count)} checked, {len(unusable)} unusable, in {cache.folder}"
    return not unusable, facts, [*lines, total]


def _clear(cache: PlanCache, options: argparse.Namespace) -> _Outcome:
    count, size, left = cache.clear()
    lines = [f"not deleted: {cache.folder / name}: {why}" for name, why in left.items()]
    text = f"{count} {'file' if count == 1 else 'files'} deleted, {_size(size)}, in {cache.folder}"
    return not left, {"deleted": count, "bytes": size, "left": left}, [*lines, text]


def _export(cache: PlanCache, options: argparse.Namespace) -> _Outcome:
    count, skipped = archive.export(cache, options.file)
    lines = [f"left out: {cache.folder / name}: {why}" for name, why in skipped.items()]
    size = options.file.stat().st_size
    text = f"{_count(count)} written to {options.file}, {_size(size)}"
    facts = {"exported": count, "bytes": size, "left out": skipped}
    return not skipped, facts, [*lines, text]


def _import(cache: PlanCache, options: argparse.Namespace) -> _Outcome:
    done = archive.import_(cache, options.file, check_entry)
    lines = [f"rejected: {_printable(name)}: {why}" for name, why in done.refused.items()]
    lines.append(
        f"{_count(done.taken)} imported, {done.present} already present, "
        f"{len(done.refused)} rejected, in {cache.folder}"
    )
    if done.lost:
        lines.append(f"The archive is damaged: it had {_count(done.lost)} more. Copy it again.")
    return not (done.refused or done.lost), done._asdict(), lines


_ACTIONS = {
    "list": ("print digest, size, last use and graph of the most recently used entries", _list),
    "verify": ("print unusable entries; exit with 1 if there are any", _verify),
    "clear": ("delete all entries, but no other files", _clear),
    "export": ("write all usable entries into one archive", _export),
    "import": ("check the entries of an archive and add them", _import),
}


def _count(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _printable(text: str) -> str:
    """Replaces control characters: names and labels may come from an archive."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "now"
