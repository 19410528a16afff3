"""Plans for another machine: a zip archive of entries of the plan cache."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import zipfile
from pathlib import Path
from typing import NamedTuple

from ..errors import JaxCudnnError
from .cache import PlanCache
from .entry import LARGEST, NAME, Content, Unusable, checks, decode, read


class Imported(NamedTuple):
    """The outcome for an archive's members; ``refused`` maps names to reasons."""

    taken: int
    present: int
    refused: dict[str, str]


def export(cache: PlanCache, path: str | os.PathLike[str]) -> int:
    """Writes all usable entries to an archive, atomically; returns their number."""
    path = Path(path).absolute()
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    count = 0
    try:
        with zipfile.ZipFile(temporary, "x") as archive:
            for entry in reversed(cache.entries()):  # the importer's order of last uses
                with contextlib.suppress(Unusable, FileNotFoundError):  # deleted just now
                    data = read(cache.path(entry.digest))
                    decode(data, entry.digest)
                    archive.writestr(zipfile.ZipInfo(f"{entry.digest}.plan"), data)
                    count += 1
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def import_(cache: PlanCache, path: str | os.PathLike[str]) -> Imported:
    """Imports the entries of an archive that pass the same checks as files of the cache, and whose
    values fit their keys, see ``entry.checks``.

    Names in the archive are compared, never used as paths; nothing is decompressed by the rules
    of the archive. A plan is code for the GPU: import only what you trust, see ``entry.py``.

    Raises:
        JaxCudnnError: not an archive of plans.
        OSError: it cannot be read, or the folder cannot be written.
    """
    taken, present, refused = 0, 0, {}
    try:
        archive = zipfile.ZipFile(path)
    except _BROKEN as error:
        raise JaxCudnnError(
            f"{path} is not an archive of plans",
            expected="a file written by: python -m jax_cudnn cache export FILE",
            got=str(error),
        ) from error
    with archive:
        for member in archive.infolist():
            try:
                content = _content(archive, member)
                _check(content)
                if not _is_present(cache, content.key) and cache.add(content) is None:
                    taken += 1
                else:
                    present += 1
            except Unusable as error:
                refused[member.filename] = str(error)
    return Imported(taken, present, refused)


def _check(content: Content) -> None:
    for check in checks:
        check(content)


def _is_present(cache: PlanCache, key: str) -> bool:
    """Whether the cache has the key; an unusable value is removed."""
    value = cache.get(key)
    try:
        if value is not None:
            _check(Content(key, value, ""))
    except Unusable as error:
        cache.discard(key, str(error))
        return False
    return value is not None


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
