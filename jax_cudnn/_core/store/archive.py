"""Plans for another machine: a zip archive of entries of the plan cache."""

from __future__ import annotations

import errno
import os
import re
import secrets
import zipfile
from pathlib import Path
from typing import NamedTuple

from ..errors import JaxCudnnError
from .cache import PlanCache
from .entry import LARGEST, NAME, STEPS, Check, Content, Unusable, decode, read


class Imported(NamedTuple):
    """The outcome for an archive's members: ``refused`` maps names to reasons, and ``lost`` counts
    those that the archive had when it was written."""

    taken: int
    present: int
    refused: dict[str, str]
    lost: int = 0


def export(cache: PlanCache, path: str | os.PathLike[str]) -> tuple[int, dict[str, str]]:
    """Writes all usable entries to an archive, atomically; returns their number, and why others
    are left out, by name. Raises JaxCudnnError if there are none, and OSError."""
    path, count, skipped = Path(path).absolute(), 0, {}
    _check_regular(path, path.is_symlink())
    if path.is_file() and path.stat().st_size and not zipfile.is_zipfile(path):
        raise JaxCudnnError(
            f"{path} is not overwritten",
            expected="a new file, or an archive",
            got="a file that is not an archive",
            fix="pass another FILE, or delete it",
        )
    entries = cache.entries()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with zipfile.ZipFile(temporary, "x") as archive:
            for entry in reversed(entries):  # the importer's order of last uses
                name = cache.path(entry.digest).name
                try:
                    data = read(cache.path(entry.digest))
                    decode(data, entry.digest)
                except FileNotFoundError:
                    continue  # deleted just now
                except (Unusable, OSError) as error:
                    skipped[name] = str(getattr(error, "strerror", None) or error)
                    continue
                archive.writestr(zipfile.ZipInfo(name), data)
                count += 1
            archive.comment = b"%d entries" % count
        if not count:
            raise JaxCudnnError(
                f"there is nothing to export: {path} is not written",
                expected=f"plans in {cache.folder}",
                got=f"{len(skipped)} unusable" if cache.folder.exists() else "no such folder",
                fix="pass the --folder of a program that has planned; default: the user's",
            )
        os.replace(temporary, path)
    except OSError as error:  # that of a full disk names no file
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return count, skipped


def _check_regular(path: Path, link: bool = False) -> None:
    """OSError for a link, and for a device or a pipe, which may have no end."""
    if link or (path.exists() and not path.is_file() and not path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def import_(cache: PlanCache, path: str | os.PathLike[str], check: Check) -> Imported:
    """Imports the entries of an archive that pass the same checks as files of the cache, and whose
    values fit their keys, as ``check`` finds.

    Names in the archive are compared, never used as paths; nothing is decompressed by the rules
    of the archive. A plan is code for the GPU: import only what you trust, see ``entry.py``.

    Raises:
        JaxCudnnError: not an archive of plans.
        OSError: it cannot be read, or the folder cannot be written.
    """
    taken, present, refused = 0, 0, {}
    _check_regular(Path(path))
    try:
        archive = zipfile.ZipFile(path)
    except _BROKEN as error:
        raise JaxCudnnError(
            f"{path} is not an archive of plans",
            expected="a file written by: python -m jax_cudnn cache export FILE",
            got=str(error),
        ) from error
    with archive:
        members = archive.infolist()
        for member in members:
            try:
                content = _content(archive, member)
                check(content)
                if content.key == STEPS:
                    cache.update(*content)
                    taken += 1
                elif _takes(cache, content, check):
                    taken += 1
                else:
                    present += 1
            except Unusable as error:
                refused[member.filename] = str(error)
            except OSError as error:
                error.add_note(f"{taken} of {len(members)} entries were imported before")
                raise
        written = _COUNT.fullmatch(archive.comment)  # zipfile ends at a damaged row of its list
    lost = max(0, int(written[1]) - len(members)) if written else 0
    return Imported(taken, present, refused, lost)


def _takes(cache: PlanCache, content: Content, check: Check) -> bool:
    """Writes an entry that the cache does not have, or that a whole step has chosen; an unusable
    value in its place is removed."""
    there = cache.get(content.key)
    try:
        if there is not None:
            check(content._replace(value=there))
    except Unusable as error:
        cache.discard(content.key, str(error))
        there = None
    over = there is not None and bool(content.value.get("step")) and not there.get("step")
    return (there is None or over) and cache.add(content, over) is None


_COUNT = re.compile(rb"(\d{1,9}) entries")
_BROKEN = (zipfile.BadZipFile, EOFError, RuntimeError, ValueError)


def _content(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Content:
    name = NAME.fullmatch(member.filename)
    if name is None:
        raise Unusable("foreign: not the name of an entry")
    if member.compress_type != zipfile.ZIP_STORED:
        raise Unusable("foreign: compressed by something else")
    if member.file_size > LARGEST:
        raise Unusable(f"foreign: {member.file_size} bytes are too many")
    try:
        return decode(archive.read(member), name[1])
    except (*_BROKEN, OSError) as error:  # OSError: a place outside of the file
        raise Unusable(f"damaged: {error}") from error
