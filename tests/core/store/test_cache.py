"""The plan cache on disk: many processes, killed processes, damaged files, full disks, limits."""

import errno
import hashlib
import json
import logging
import os
import random
import subprocess
import sys
import textwrap
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core import settings
from jax_cudnn._core.planning.stored import check_entry
from jax_cudnn._core.store import cache
from jax_cudnn._core.store import entry as cache_entry
from jax_cudnn._core.store.cache import PlanCache
from jax_cudnn._core.store.entry import Content, Unusable, decode, digest, encode

VALUE = {"text": '{"engine": 3}', "bindings": [[1, 0, 0, 64]], "scale": 0.1}
LIMIT = 10**9


@pytest.fixture
def store(tmp_path):
    return PlanCache(tmp_path / "deep" / "plans", LIMIT)


@pytest.fixture
def warnings(caplog):
    """The texts of the warnings so far."""
    caplog.set_level(logging.DEBUG, "jax_cudnn")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def script(code, *arguments):
    """A Python process with the cache; without JAX, whose import would take most of its time."""
    head = f"""
        import json, os, random, sys, types
        package = sys.modules["jax_cudnn"] = types.ModuleType("jax_cudnn")
        package.__path__ = {list(jc.__path__)!r}
        from jax_cudnn._core.store.cache import PlanCache
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process, *, status=0, stderr=""):
    """What a process printed; it must end with this status, and warn of nothing else."""
    try:
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, error
    assert error == stderr or (stderr and error.count("\n") == 1 and stderr in error), error
    return out


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_value_comes_back_and_the_first_writer_wins(store, warnings):
    assert store.get("a") is None
    assert store.put("a", VALUE, "label") is VALUE
    again = PlanCache(store.folder, LIMIT)
    assert again.get("a") == VALUE == again.put("a", {"text": "other"})
    assert again.get("b") is None
    assert names(store.folder) == [f"{hashlib.sha256(b'a').hexdigest()}.plan"]
    assert again.entries()[0].label == "label"
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert not warnings()


def test_configure_changes_what_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "_given", {})
    monkeypatch.chdir(tmp_path)
    chosen = settings.settings()
    assert (chosen.plan_cache_bytes, chosen.job_timeout) == (2**30, 300.0)
    settings.configure(plan_cache="here", plan_cache_bytes=np.int64(10**6))
    settings.configure(job_timeout=5)
    tuning = os.environ["JAX_CUDNN_TUNING"]  # off, in tests
    assert settings.settings() == settings.Settings(tmp_path / "here", 10**6, 5.0, tuning)
    assert cache.configured().put("a", VALUE) == PlanCache("here").get("a")
    assert PlanCache("here").limit == 10**6
    before = settings.settings()
    with pytest.raises(jc.GraphError):
        settings.configure(plan_cache_bytes=1, job_timeout=0)
    assert settings.settings() == before
    settings.configure(plan_cache=None)
    assert cache.configured().put("a", {"n": 2}) == {"n": 2}
    assert cache.configured().get("a") is None
    assert names(tmp_path) == ["here"]


_AGREE = """
store, writer = PlanCache(sys.argv[1], 10**9), sys.argv[2]
keys = [f"key {i}" for i in range(50)]
random.Random(writer).shuffle(keys)
print("ready", flush=True)
input()
print(json.dumps({key: store.put(key, {"writer": writer, "data": key * 500}) for key in keys}))
"""


@pytest.mark.parametrize("links", [True, False])
def test_processes_that_write_at_once_agree(store, links):
    setup = "" if links else "os.link = lambda *paths: os.rmdir(paths[0])  # an OSError"
    store.folder.mkdir(parents=True)
    for i in range(50 * links):
        store.path(digest(f"key {i}")).write_bytes(b"")
    processes = [script(setup + _AGREE, store.folder, writer) for writer in range(6)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 6
    for process in processes:
        print(file=process.stdin, flush=True)
    ended = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 6, ended
    answers = [json.loads(out) for out, _ in ended]
    said = [error for _, error in ended if error]  # a late process may find all files mended
    assert bool(said) == links
    assert all(error.count("\n") == 1 and "damaged" in error for error in said), said
    assert answers == [answers[0]] * 6
    for key, value in answers[0].items():
        assert value["data"] == key * 500
        assert store.get(key) == value
    assert len(names(store.folder)) == 50  # nothing temporary is left


def test_a_folder_that_is_cleared_while_it_is_used_is_no_trouble(store, warnings, monkeypatch):
    store.put("a", VALUE)
    read, write = cache.read, cache._write
    with monkeypatch.context() as patch:
        patch.setattr(cache, "read", lambda path: (store.clear(), read(path))[1])
        assert store.entries() == []
        patch.setattr(cache, "_write", lambda *file: (write(*file), store.clear()))
        assert store.put("b", VALUE) is VALUE
    store.folder.rmdir()
    assert store.get("a") is None
    assert store.put("b", VALUE) == PlanCache(store.folder, LIMIT).get("b")
    assert not warnings()


_KILLED = """
def dies(*arguments, **options):
    os.kill(os.getpid(), 9)

where = sys.argv[2]
if where == "write":  # half of it is there
    where = "fsync"
    dies = lambda file, dies=dies: (os.truncate(file, 60), dies())
setattr(os, where, dies)
PlanCache(sys.argv[1], 3_000).put("key", json.loads(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("where", "damaged"), [("write", False), ("link", False), ("replace", True), ("scandir", False)]
)
def test_a_process_that_is_killed_leaves_a_sound_folder(store, where, damaged):
    values = [{"data": random.Random(n).randbytes(400).hex()} for n in range(6)]
    for n in range(4):
        store.put(f"other key {n}", values[n])  # with one more there are too many
    if damaged:
        store.path(digest("key")).write_bytes(b"no entry")
    process = script(_KILLED, store.folder, where, json.dumps(values[4]))
    finished(process, status=-9, stderr="is ignored" if damaged else "")
    assert [entry.digest for entry in store.verify(check_entry)[1]] == [digest("key")] * damaged
    found = store.get("key")
    assert found == (values[4] if where == "scandir" else None)
    assert store.put("key", values[5]) == store.get("key") == (found or values[5])


KEY = "key"
GOOD = encode(Content(KEY, VALUE, "label"))
GOOD_JSON = zlib.decompress(GOOD.partition(b"\n")[2])


def packed(text):
    body = zlib.compress(text)
    return b"jax_cudnn plan 1 %s\n" % hashlib.sha256(body).hexdigest().encode() + body


DAMAGE = {
    "empty": (b"", "damaged"),
    "other magic": (b"another program\n" + GOOD, "foreign"),
    "newer": (GOOD.replace(b"plan 1 ", b"plan 22 ", 1), "newer"),
    "of another key": (encode(Content("other", VALUE, "label")), "foreign"),
    "nested deeply": (packed(b"[" * 40_000), "damaged"),
    "too large when decompressed": (packed(b" " * 100_001 + GOOD_JSON), "too large"),
    "of too many values": (packed(b'{"key":[' + b"{}," * 33_000 + b"{}]}"), "too large"),
    "half of a character": (packed(GOOD_JSON.replace(b"label", rb"\ud800")), "damaged"),
    "half of a character as its key": (packed(rb'{"key":"\ud800"}'), "damaged"),
    "what JSON has no number for": (packed(GOOD_JSON.replace(b"0.1", b"NaN")), "damaged"),
    "a folder": (Path.mkdir, "foreign"),
    "a pipe": (os.mkfifo, "foreign"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "foreign"),
}


@pytest.mark.parametrize(("damage", "word"), DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_cannot_be_used_warns_once_and_is_replaced(
    store, warnings, monkeypatch, damage, word
):
    monkeypatch.setattr(cache_entry, "LARGEST", 100_000)
    store.put("sound", {"n": 1})
    path = store.path(digest(KEY))
    damage(path) if callable(damage) else path.write_bytes(damage)
    assert store.get(KEY) is None
    (warning,) = warnings()
    assert f"({word}" in warning
    assert path.name in warning
    assert f"cache verify --folder {store.folder}" in warning
    assert PlanCache(store.folder, LIMIT).get(KEY) is None
    assert [entry.problem.partition(":")[0] for entry in store.verify(check_entry)[1]] == [word]
    assert store.put(KEY, VALUE, "label") is VALUE
    assert PlanCache(store.folder, LIMIT).get(KEY) == VALUE
    assert store.get("sound") == {"n": 1}
    assert store.verify(check_entry) == (2, [])
    assert len(warnings()) == 1


def test_a_filled_folder_in_place_of_an_entry_stops_this_entry_only(store, warnings):
    (store.path(digest(KEY)) / "mine").mkdir(parents=True)
    assert store.put(KEY, VALUE) is VALUE
    assert store.put("b", VALUE) is VALUE
    assert PlanCache(store.folder, LIMIT).get("b") == VALUE
    assert "is a folder that is not empty" in warnings()[-1]
    assert store.clear()[2] == {store.path(digest(KEY)).name: "Directory not empty"}


def test_no_flipped_bit_and_no_cut_goes_unseen():
    assert decode(GOOD, digest(KEY)) == Content(KEY, VALUE, "label")
    for i in range(len(GOOD)):
        for changed in (bytes([GOOD[i] ^ 1 << bit]) + GOOD[i + 1 :] for bit in range(8)):
            with pytest.raises(Unusable):
                decode(GOOD[:i] + changed, digest(KEY))
        with pytest.raises(Unusable):
            decode(GOOD[:i], digest(KEY))


@pytest.mark.parametrize("filler", [b"{},", b"[", b" ", b'"",', b"1,", b""])
def test_a_small_file_takes_little_memory(filler):
    """64 kB of it took 1.5 GB. The last one has as many values, and as much text, as may be."""
    most = b'{"key":"' + b"x" * (cache_entry.LARGEST - 2 * cache_entry.MOST)
    most += b'","value":[' + b"{}," * (cache_entry.MOST // 2 - 4) + b"{}]}"
    bomb = packed(b'{"key":[' + filler * (2**26 // len(filler)) if filler else most)
    tracemalloc.start()
    try:
        with pytest.raises(Unusable, match="too large" if filler else "damaged"):
            decode(bomb, digest(KEY))
        assert tracemalloc.get_traced_memory()[1] < 12 * 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, None], ids=["full", "no", "file"])
def test_a_folder_that_cannot_be_written_means_memory_only(tmp_path, warnings, monkeypatch, number):
    """Values come back, there is one warning that names the folder and says what to do."""
    store = PlanCache(tmp_path / "folder", LIMIT)

    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    if number is None:
        store.folder.write_text("mine")
    else:
        store.put("before", {"n": 1})
        os.utime(store.path(digest("before")), (1, 1))
        own = cache._write  # it fails half way, and noting uses as well
        monkeypatch.setattr(cache, "_write", lambda path, data: fail(own(path, data[:9])))
        monkeypatch.setattr(os, "utime", fail)
        assert store.get("before") == {"n": 1}
    for key in "ab":
        assert store.put(key, VALUE, "label") is VALUE
    monkeypatch.undo()
    assert store.put("a", VALUE) is VALUE  # this process has given up
    assert store.get("a") is None
    (warning,) = warnings()
    for word in (str(store.folder), "memory only", "jax_cudnn.configure(plan_cache=...)"):
        assert word in warning
    if number is None:
        assert store.folder.read_text() == "mine"
    else:
        assert len(names(store.folder)) == 1


def test_the_entries_used_last_are_kept_within_the_limit(store, warnings):
    for i in range(20):  # each used a minute after the one before, long ago
        store.put(str(i), {"data": random.Random(i).randbytes(500).hex()}, str(i))
        os.utime(store.path(digest(str(i))), (10**9 + 60 * i,) * 2)
    sizes = [entry.size for entry in store.entries()]
    store.get("3")
    limit = sum(sizes) // 2
    PlanCache(store.folder, limit).put("new", VALUE, "new")
    kept = [entry.label for entry in store.entries()]
    assert set(kept[:2]) == {"new", "3"}
    assert kept[2:] == [str(i) for i in range(19, 21 - len(kept), -1)]
    total = sum(entry.size for entry in store.entries())
    assert 0.9 * limit - max(sizes) < total <= 0.9 * limit
    assert not warnings()


def test_a_limit_holds_while_one_process_writes_much_or_what_is_too_large(tmp_path, warnings):
    store = PlanCache(tmp_path, 100_000)
    for i in range(100):
        store.put(str(i), {"data": random.Random(i).randbytes(2000).hex()})
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100_000 * 65 / 64
    assert (store.get("0"), store.get("99") is not None) == (None, True)
    large = {"data": random.Random(0).randbytes(100_000).hex()}
    assert store.put("large", large) is large
    assert (store.get("large"), store.get("99") is not None) == (None, True)
    (text,) = warnings()
    assert "too large" in text


def test_what_killed_writers_left_goes_after_an_hour_and_other_files_stay(store):
    store.put("a", VALUE)
    left = [store.folder / f"{'a' * 64}.{c * 16}.tmp" for c in "01"]
    mine = store.folder / "notes.tmp"
    for path in (*left, mine):
        path.write_bytes(b"x")
    for path in (left[0], mine):
        os.utime(path, (1, 1))
    PlanCache(store.folder, LIMIT).put("b", VALUE)
    assert [path.exists() for path in (*left, mine)] == [False, True, True]
    assert store.clear()[0] == 3
    assert names(store.folder) == ["notes.tmp"]
