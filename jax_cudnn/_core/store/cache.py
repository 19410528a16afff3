"""Plans on disk: one file per key, in a folder that many processes share.

A file has the format of ``entry.py``, and the SHA-256 of its key as name. It is written under a
temporary name and then linked to its final one, so it is complete or absent even if its writer
dies. The first writer wins: all processes use the same bytes.

Disk errors never raise. A full disk, a folder that is not writable, or a file that is damaged,
foreign or of another format causes one warning per process; the caller continues with the value
that it has in memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..settings import settings
from .entry import NAME, Check, Content, Unusable, decode, digest, encode, read

log = logging.getLogger("jax_cudnn")

_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_HOUR = 3600.0  # seconds: how exactly last uses are known, and how long a writer may take
_FULL = 0.9  # of the limit remains when entries are deleted

_warned: set[tuple[Path, str]] = set()


def configured() -> PlanCache:
    """The plan cache of this process's settings; without one it holds nothing."""
    chosen = settings()
    return _opened(chosen.plan_cache, chosen.plan_cache_bytes)


@functools.lru_cache
def _opened(folder: Path | None, limit: int) -> PlanCache:
    cache = PlanCache(folder or os.devnull, limit)  # where nothing is, and nothing can be added
    cache._writable = folder is not None
    return cache


class Entry(NamedTuple):
    """An entry, for the shell command.

    Attributes:
        digest: SHA-256 of its key, in hexadecimal.
        label: a description for people, written by the writer of the file.
        size: of the file, in bytes.
        used: the time of its last use, in seconds of ``time.time()``, accurate to an hour.
        problem: why it cannot be used, or "".
    """

    digest: str
    label: str
    size: int
    used: float
    problem: str


class PlanCache:
    """A folder of plans.

    Args:
        folder: created by the first write.
        limit: bytes of all entries. Above it the least recently used entries are deleted. A
            process checks after writing each 1/64 of the limit. None: as configured.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int | None = None):
        self.folder = Path(folder)
        self.limit = settings().plan_cache_bytes if limit is None else limit
        self._writable = True
        self._unseen = self.limit  # bytes written since sizes were looked at; look at the first put

    def get(self, key: str) -> dict[str, Any] | None:
        """The value of a key, or None. Counts as a use."""
        path = self.path(digest(key))
        try:
            value = decode(read(path), path.stem).value
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (Unusable, OSError) as error:
            self._warn(
                "entry",
                f"{path.name} is ignored ({error}). A new entry replaces it if the folder can be "
                f"written. To find more: python -m jax_cudnn cache verify --folder {self.folder}",
            )
            return None
        with contextlib.suppress(OSError):  # another user's file, or deleted just now
            if time.time() - path.stat().st_mtime > _HOUR:
                os.utime(path)
        return value

    def discard(self, key: str, problem: str) -> None:
        """Removes an entry with an unusable value, so that another can replace it."""
        path = self.path(digest(key))
        then = _remove(path)
        then = f"It cannot be deleted: {then}." if then else "A new plan replaces it."
        self._warn("entry", f"{path.name} is ignored ({problem}). {then}")

    def put(self, key: str, value: dict[str, Any], label: str = "") -> dict[str, Any]:
        """Stores a value (JSON) unless there is one; returns the value that all processes use.

        If nothing can be written, that is ``value``, and this process stops writing.
        """
        found = self._add(Content(key, value, label))
        return value if found is None else found

    def replace(self, key: str, value: dict[str, Any], label: str = "") -> None:
        """Stores a value, in place of another one if there is one, in one step."""
        self._add(Content(key, value, label), over=True)

    def update(self, key: str, value: dict[str, Any], label: str = "") -> None:
        """Adds the items of dictionaries to those of a stored value, one process at a time."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # replace() says what is wrong
                self.folder.mkdir(0o700, parents=True, exist_ok=True)
                stack.enter_context(self._lock())
            stored = self.get(key) or {}
            self.replace(key, {k: {**stored.get(k, {}), **v} for k, v in value.items()}, label)

    def _add(self, content: Content, over: bool = False) -> dict[str, Any] | None:
        """As :meth:`add`; what cannot be written is said."""
        try:
            return self.add(content, over) if self._writable else None
        except Unusable as error:
            self._warn("size", f"{content.label} is not stored: {error}")
        except OSError as error:
            self._writable = False
            self._warn(
                "folder",
                f"{error.strerror or error}. New plans of this process stay in memory only; "
                "fix the folder or set another: jax_cudnn.configure(plan_cache=...)",
            )
        return None

    def add(self, content: Content, over: bool = False) -> dict[str, Any] | None:
        """Writes an entry, or returns the value of an existing one, unless it is written ``over``.

        Raises OSError, and Unusable for an entry that is too large.
        """
        data, path = encode(content), self.path(digest(content.key))
        if len(data) > _FULL * self.limit:
            raise Unusable(f"too large: {len(data)} bytes, and the limit of all is {self.limit}")
        with contextlib.suppress(FileExistsError):  # a file: reported when it is used as a folder
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.tmp")
        try:
            _write(temporary, data)
            try:
                (os.replace if over else os.link)(temporary, path)
            except OSError:  # there is something, or the file system has no links
                if over:
                    raise
                with self._lock():
                    found = self.get(content.key)
                    if found is not None:
                        return found
                    with contextlib.suppress(OSError):
                        path.rmdir()  # of an empty folder; nothing else
                    with contextlib.suppress(FileNotFoundError):  # cleared just now
                        os.replace(temporary, path)
        except IsADirectoryError as error:
            raise Unusable(f"{path} is a folder that is not empty") from error
        finally:
            temporary.unlink(missing_ok=True)
        self._evict(len(data))
        return None

    def path(self, digest: str) -> Path:
        """The file of the entry whose key has this digest."""
        return self.folder / f"{digest}.plan"

    def entries(self, check: Check | None = None) -> list[Entry]:
        """All entries, read and checked, most recently used first."""
        found = []
        for name, status in self._files():
            if NAME.fullmatch(name):
                stem, label, problem = Path(name).stem, "", ""
                try:
                    content = decode(read(self.folder / name), stem)
                    label = content.label
                    if check is not None:
                        check(content)
                except FileNotFoundError:
                    continue  # deleted just now
                except (Unusable, OSError) as error:
                    problem = str(error)
                found.append(Entry(stem, label, status.st_size, status.st_mtime, problem))
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def verify(self, check: Check, delete: bool = False) -> tuple[int, list[Entry]]:
        """The number of entries, and the unusable ones; deletes the latter with ``delete``."""
        entries = self.entries(check)
        unusable = [entry for entry in entries if entry.problem]
        for i, entry in enumerate(unusable if delete else ()):
            if why := _remove(self.path(entry.digest)):
                unusable[i] = entry._replace(problem=f"{entry.problem}; not deleted: {why}")
        return len(entries), unusable

    def clear(self) -> tuple[int, int, dict[str, str]]:
        """Deletes the files of the cache and no others; returns their number and bytes, and why
        others remain, by name."""
        sizes, left = [], {}
        for name, status in self._files():
            if why := _remove(self.folder / name):
                left[name] = why
            else:
                sizes.append(status.st_size)
        return len(sizes), sum(sizes), left

    def _evict(self, written: int) -> None:
        """Deletes the least recently used entries above the limit, and files that killed writers
        left. Other processes may do the same at the same time."""
        self._unseen += written
        if self._unseen <= self.limit // 64:
            return
        self._unseen = 0
        entries = []
        for name, status in self._files():
            if NAME.fullmatch(name):
                entries.append((status.st_mtime_ns, name, status.st_size))
            elif time.time() - status.st_mtime > _HOUR:
                _remove(self.folder / name)
        total = sum(size for _, _, size in entries)
        allowed = self.limit if total <= self.limit else _FULL * self.limit
        for _, name, size in sorted(entries):
            if total <= allowed:
                break
            _remove(self.folder / name)
            total -= size

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """The files of the cache, including unfinished ones; none if there is no folder."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as files:
            for file in files:
                if NAME.fullmatch(file.name) or _TEMPORARY.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):
                        yield file.name, file.stat(follow_symlinks=False)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One process at a time if the file system has locks; otherwise the last writer wins."""
        import fcntl  # not on Windows

        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _warn(self, kind: str, message: str) -> None:
        """Warns once per process for each folder and kind of problem."""
        level = logging.DEBUG if (self.folder, kind) in _warned else logging.WARNING
        _warned.add((self.folder, kind))
        log.log(level, "jax_cudnn plan cache %s: %s", self.folder, message)


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> str:
    """Deletes a file, or an empty folder in its place; returns why it cannot, or ""."""
    try:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""
