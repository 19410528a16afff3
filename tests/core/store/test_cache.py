"""The plan cache on disk: many processes, killed processes, damaged files, full disks, limits."""

import errno
import hashlib
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core import settings
from jax_cudnn._core.store import cache
from jax_cudnn._core.store import entry as cache_entry
from jax_cudnn._core.store.cache import PlanCache
from jax_cudnn._core.store.entry import Content, Unusable, decode, digest, encode

VALUE = {"text": '{"engine": 3}', "bindings": [[1, 0, 0, 64]], "scale": 0.1}
LIMIT = 10**9
posix = pytest.mark.skipif(os.name != "posix", reason="needs signals, forks and users")


@pytest.fixture
def store(tmp_path):
    return PlanCache(tmp_path / "plans", LIMIT)


@pytest.fixture
def warnings(caplog):
    """The texts of the warnings so far."""
    caplog.set_level(logging.DEBUG, "jax_cudnn")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def script(code, *arguments):
    """A Python process with the cache; without JAX, whose import would take most of its time."""
    head = f"""
        import sys, types
        package = sys.modules["jax_cudnn"] = types.ModuleType("jax_cudnn")
        package.__path__ = {list(jc.__path__)!r}
        from jax_cudnn._core.store import cache, entry as cache_entry
        from jax_cudnn._core.store.cache import PlanCache
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process, *, stderr=""):
    """What a process printed; it must have succeeded, and warned of nothing else."""
    try:
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, error
    assert error == stderr or (stderr and error.count("\n") == 1 and stderr in error), error
    return out


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# -- one process -----------------------------------------------------------------------------------


def test_a_value_comes_back_to_another_object_and_unknown_keys_are_none(store, warnings):
    assert store.get("a") is None
    assert store.put("a", VALUE, "label") is VALUE
    again = PlanCache(store.folder, LIMIT)
    assert again.get("a") == VALUE
    assert again.get("b") is None
    assert names(store.folder) == [f"{hashlib.sha256(b'a').hexdigest()}.plan"]
    assert again.entries()[0].label == "label"
    assert not warnings()


def test_the_first_writer_wins(store):
    store.put("a", VALUE)
    assert PlanCache(store.folder, LIMIT).put("a", {"text": "other"}) == VALUE
    assert store.get("a") == VALUE


def test_two_folders_know_nothing_of_each_other(tmp_path):
    one, two = PlanCache(tmp_path / "1", LIMIT), PlanCache(tmp_path / "2", LIMIT)
    one.put("a", {"n": 1})
    assert two.put("a", {"n": 2}) == {"n": 2}
    assert (one.get("a"), two.get("a")) == ({"n": 1}, {"n": 2})


def test_text_of_any_script_and_long_keys(store):
    key = "μ→∞\n" * 100_000
    assert store.put(key, {"λ": "ü\0"}, "ℓ") == PlanCache(store.folder, LIMIT).get(key)


def test_a_new_folder_is_its_users_only_and_an_old_one_stays_as_it_is(tmp_path):
    new, old = tmp_path / "deep" / "new", tmp_path / "old"
    old.mkdir(mode=0o755)
    for folder in (new, old):
        PlanCache(folder, LIMIT).put("a", VALUE)
    assert new.stat().st_mode & 0o777 == 0o700
    assert old.stat().st_mode & 0o777 == 0o755


# -- settings --------------------------------------------------------------------------------------


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.setattr(settings, "_given", {})


@pytest.mark.usefixtures("unset")
def test_the_default_folder_follows_the_platform_and_is_found_late(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = settings.settings()
    assert (chosen.plan_cache_bytes, chosen.job_timeout) == (2**30, 300.0)
    if sys.platform.startswith("linux"):
        assert chosen.plan_cache == tmp_path / "jax_cudnn" / "plans"
    assert cache.put("a", VALUE) == cache.get("a") == PlanCache(chosen.plan_cache).get("a")


@pytest.mark.usefixtures("unset")
def test_configure_changes_what_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings.configure(plan_cache="here", plan_cache_bytes=np.int64(10**6))
    settings.configure(job_timeout=5)
    assert settings.settings() == settings.Settings(tmp_path / "here", 10**6, 5.0)
    cache.put("a", VALUE)
    settings.configure(plan_cache=tmp_path / "there")
    assert cache.get("a") is None
    assert PlanCache("here").limit == 10**6
    settings.configure(plan_cache=None)
    assert cache.put("a", {"n": 2}) == {"n": 2}
    assert cache.get("a") is None
    assert names(tmp_path) == ["here"]


@pytest.mark.usefixtures("unset")
def test_a_user_without_a_home_has_no_folder(monkeypatch):
    monkeypatch.setattr(settings, "_default_folder", lambda: None)
    assert cache.put("a", VALUE) is VALUE
    assert cache.get("a") is None


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"plan_cache": 3}, jc.GraphTypeError, "int: 3"),
        ({"plan_cache": b"folder"}, jc.GraphTypeError, "bytes"),
        ({"plan_cache": ""}, jc.GraphError, "None for plans in memory only"),
        ({"plan_cache": "a\0b"}, jc.GraphError, "no folder"),
        ({"plan_cache": "~no_such_user_here/x"}, jc.GraphError, "no_such_user_here"),
        ({"plan_cache_bytes": 0}, jc.GraphError, "more than 0"),
        ({"plan_cache_bytes": -1}, jc.GraphError, "plan_cache_bytes=-1"),
        ({"plan_cache_bytes": 1e9}, jc.GraphTypeError, "whole number"),
        ({"plan_cache_bytes": True}, jc.GraphTypeError, "bool"),
        ({"plan_cache_bytes": None}, jc.GraphTypeError, "NoneType"),
        ({"job_timeout": 0}, jc.GraphError, "more than 0"),
        ({"job_timeout": float("nan")}, jc.GraphError, "nan"),
        ({"job_timeout": float("inf")}, jc.GraphError, "inf"),
        ({"job_timeout": "300"}, jc.GraphTypeError, "a number"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unset")
def test_settings_that_cannot_be_are_refused_and_change_nothing(given, error, words):
    before = settings.settings()
    with pytest.raises(error, match=words):
        settings.configure(**{"plan_cache": "x", "plan_cache_bytes": 1, "job_timeout": 1, **given})
    assert settings.settings() == before


# -- many processes --------------------------------------------------------------------------------

_NO_LINKS = """
import os
def link(*paths):
    raise OSError(95, "Operation not supported")
os.link = link
"""

_AGREE = """
import json, os, random, time

def slow_replace(*paths, replace=os.replace):
    time.sleep(0.002)  # whoever else has found no sound entry has time to come in between
    replace(*paths)

os.replace = slow_replace
store, writer = PlanCache(sys.argv[1], 10**9), sys.argv[2]
keys = [f"key {i}" for i in range(50)]
random.shuffle(keys)
print("ready", flush=True)
input()
print(json.dumps({key: store.put(key, {"writer": writer, "data": key * 500}) for key in keys}))
"""


@posix
@pytest.mark.parametrize("setup", ["", _NO_LINKS], ids=["links", "no links"])
@pytest.mark.parametrize("damaged", [False, True], ids=["empty folder", "damaged entries"])
def test_processes_that_write_at_once_agree(store, setup, damaged):
    store.folder.mkdir()
    if damaged:
        for i in range(50):
            store.path(digest(f"key {i}")).write_bytes(b"")
    processes = [script(setup + _AGREE, store.folder, writer) for writer in range(6)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [json.loads(finished(p, stderr="damaged" if damaged else "")) for p in processes]
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) == 50
    for key, value in answers[0].items():
        assert value["data"] == key * 500
        assert store.get(key) == value
    assert len(names(store.folder)) == 50  # nothing temporary is left


_HAMMER = """
import json, random, time
store, writer = PlanCache(sys.argv[1], 30_000), sys.argv[2]
found = 0
end = time.monotonic() + 1.2
while time.monotonic() < end:
    key = f"key {random.randrange(50)}"
    allowed = [{"key": key, "data": f"{key} {w} " * 200 + str(hash((key, w)))} for w in range(6)]
    value = store.get(key)
    assert value is None or value in allowed, (key, value)
    found += value is not None
    assert store.put(key, allowed[int(writer)], "x" * 1000) in allowed
    if random.random() < 0.01:
        store.clear() if random.random() < 0.2 else store.verify(delete=True)
print(found)
"""


@posix
def test_reading_writing_and_deleting_at_once_gives_nothing_but_what_was_written(
    store, monkeypatch
):
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    processes = [script(_HAMMER, store.folder, writer) for writer in range(6)]
    assert all(int(finished(process)) for process in processes)
    small = PlanCache(store.folder, 30_000)
    small.put("one more", VALUE)
    assert sum(entry.size for entry in small.entries()) <= 30_000
    assert small.verify()[1] == []
    assert all(name.endswith(".plan") for name in names(store.folder))


@pytest.mark.parametrize("vanished", ["temporary file", "entry"])
def test_a_folder_that_is_cleared_while_it_is_used_is_no_trouble(
    store, warnings, monkeypatch, vanished
):
    store.put("a", VALUE)
    if vanished == "entry":
        read = cache.read
        monkeypatch.setattr(cache, "read", lambda path: (store.clear(), read(path))[1])
        assert store.entries() == []
    else:
        write = cache._write
        monkeypatch.setattr(cache, "_write", lambda *file: (write(*file), store.clear()))
        assert store.put("b", VALUE) is VALUE
    monkeypatch.undo()
    assert names(store.folder) == []
    assert store.put("b", VALUE) == PlanCache(store.folder, LIMIT).get("b")
    assert not warnings()


# -- kill -9 ---------------------------------------------------------------------------------------

_KILLED_AT_EACH_LINE = """
import os, random, signal

cache.log.disabled = True
os.fsync = lambda file: None  # it is for the loss of power, and takes most of the time
store, damaged = PlanCache(sys.argv[1], 3_000), sys.argv[2] == "damaged"
store.folder.mkdir()
value = lambda n: {"data": random.Random(n).randbytes(400).hex()}

def put_and_die(key, line):
    executed = 0
    def trace(frame, event, argument):
        nonlocal executed
        if not frame.f_code.co_filename.startswith(os.path.dirname(cache.__file__)):
            return None
        executed += 1
        if executed == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    store.put(key, value(line))
    os._exit(0)

status, line, left = None, 0, 0
while status != 0:
    line += 1
    key = f"key {line}"
    for path in store.folder.iterdir():
        left += path.suffix == ".tmp"
        path.unlink()
    for n in range(4):
        store.put(f"other key {n}", value(n))  # with one more there are too many
    if damaged:
        store.path(cache_entry.digest(key)).write_bytes(b"no entry")
    pid = os.fork()
    if not pid:
        put_and_die(key, line)
    status = os.waitpid(pid, 0)[1]
    unusable = [entry.digest for entry in store.verify()[1]]
    assert unusable in ([], [cache_entry.digest(key)] if damaged else [])
    found = store.get(key)
    assert found in (None, value(line))
    other = value(-line)
    assert store.put(key, other) == store.get(key) == (found or other)
print(line, left)
"""


@posix
@pytest.mark.parametrize("kind", ["empty", "damaged"])
def test_a_process_killed_at_any_line_leaves_a_sound_folder(store, kind):
    lines, left = finished(script(_KILLED_AT_EACH_LINE, store.folder, kind)).split()
    assert int(lines) > 50
    assert int(left) > 3  # some died between writing and naming


_KILLED_AT_RANDOM = """
import itertools, os, random, signal, time

store = PlanCache(sys.argv[1], 10**8)
values = [{"data": os.urandom(100_000).hex()} for _ in range(8)]
parent = os.getpid()

def fork():
    pid = os.fork()
    if not pid:
        for n in itertools.count():
            store.put(f"{os.getpid()} {n}", values[n % 8])
            if os.getppid() != parent:
                os._exit(1)
    return pid

for _ in range(40):
    writers = fork(), fork()
    time.sleep(random.uniform(0, 0.03))
    for writer in writers:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
"""


@posix
def test_processes_killed_at_random_moments_leave_a_sound_folder(store):
    finished(script(_KILLED_AT_RANDOM, store.folder))
    count, unusable = store.verify()
    assert count
    assert unusable == []
    assert store.put("a", VALUE) == store.get("a") == VALUE


# -- files that cannot be used ---------------------------------------------------------------------

KEY = "key"
GOOD = encode(Content(KEY, VALUE, "label"))
GOOD_JSON = zlib.decompress(GOOD.partition(b"\n")[2])
HEADER = GOOD.index(b"\n") + 1


def packed(text):
    body = zlib.compress(text if isinstance(text, bytes) else json.dumps(text).encode())
    return b"jax_cudnn plan 1 %s\n" % hashlib.sha256(body).hexdigest().encode() + body


def flipped(place):
    return GOOD[:place] + bytes([GOOD[place] ^ 4]) + GOOD[place + 1 :]


DAMAGE = {
    "empty": (b"", "damaged"),
    "in the magic": (GOOD[:5], "damaged"),
    "in the header": (GOOD[: HEADER - 9], "damaged"),
    "after the header": (GOOD[:HEADER], "damaged"),
    "in the middle": (GOOD[: len(GOOD) // 2], "damaged"),
    "without its last byte": (GOOD[:-1], "damaged"),
    "with a byte more": (GOOD + b"\0", "damaged"),
    "all zeros": (bytes(len(GOOD)), "foreign"),
    "other magic": (b"another program\n" + GOOD, "foreign"),
    "flipped in the magic": (flipped(0), "foreign"),
    "flipped in the checksum": (flipped(HEADER - 3), "damaged"),
    "flipped in the body": (flipped(len(GOOD) - 20), "damaged"),
    "older": (GOOD.replace(b"plan 1 ", b"plan 0 ", 1), "older"),
    "newer": (GOOD.replace(b"plan 1 ", b"plan 22 ", 1), "newer"),
    "of another key": (encode(Content("other", VALUE, "label")), "foreign"),
    "not compressed": (
        b"jax_cudnn plan 1 %s\n{}" % hashlib.sha256(b"{}").hexdigest().encode(),
        "damaged",
    ),
    "no JSON": (packed(b"\xff"), "damaged"),
    "a list": (packed([1]), "damaged"),
    "without a value": (packed({"key": KEY, "label": ""}), "damaged"),
    "a value that is no object": (packed({"key": KEY, "label": "", "value": [1]}), "damaged"),
    "a key that is no text": (packed({"key": 1, "label": "", "value": {}}), "damaged"),
    "nested deeply": (packed(b"[" * 90_000), "damaged"),
    "too large when decompressed": (packed(b" " * 100_001 + GOOD_JSON), "damaged"),
    "a folder": (Path.mkdir, "foreign"),
    "a pipe": (os.mkfifo if os.name == "posix" else Path.mkdir, "foreign"),
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
    assert [entry.problem.partition(":")[0] for entry in store.verify()[1]] == [word]
    assert store.put(KEY, VALUE, "label") is VALUE
    assert PlanCache(store.folder, LIMIT).get(KEY) == VALUE
    assert store.get("sound") == {"n": 1}
    assert store.verify() == (2, [])
    assert len(warnings()) == 1


def test_no_flipped_bit_and_no_cut_goes_unseen():
    assert decode(GOOD, digest(KEY)) == Content(KEY, VALUE, "label")
    for i in range(len(GOOD)):
        for changed in (bytes([GOOD[i] ^ 1 << bit]) + GOOD[i + 1 :] for bit in range(8)):
            with pytest.raises(Unusable):
                decode(GOOD[:i] + changed, digest(KEY))
        with pytest.raises(Unusable):
            decode(GOOD[:i], digest(KEY))


@pytest.mark.parametrize("full", [False, True], ids=["a link", "a folder with files"])
def test_what_cannot_be_replaced_is_left_alone(store, warnings, full):
    store.put("sound", {"n": 1})
    path = store.path(digest(KEY))
    target = store.folder.parent / "mine"
    target.mkdir()
    if full:
        target.rename(path)
        (path / "file").write_text("mine")
    else:
        path.symlink_to(target)
    assert store.put(KEY, VALUE) is VALUE
    assert (path / "file").exists() == full
    assert target.exists() != full
    assert store.get(KEY) == (None if full else VALUE)
    assert len(warnings()) == 1 + full


# -- folders that cannot be used -------------------------------------------------------------------


def assert_memory_only(store, warnings, words):
    """Values come back, there is one warning that names the folder and says what to do."""
    assert store.put("a", VALUE, "label") is VALUE
    assert store.put("b", VALUE) is VALUE
    assert PlanCache(store.folder, LIMIT).put("c", VALUE) is VALUE
    assert store.get("a") is None
    (warning,) = warnings()
    for word in (*words, str(store.folder), "memory only", "jax_cudnn.configure(plan_cache=...)"):
        assert word in warning


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_full_disk_means_memory_only(store, warnings, monkeypatch, call):
    store.put("before", {"n": 1})

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:  # the file is there, and incomplete
        write = cache._write
        monkeypatch.setattr(cache, "_write", lambda path, data: full(write(path, data[:9])))
    assert_memory_only(store, warnings, ["No space left on device"])
    assert store.get("before") == {"n": 1}
    assert len(names(store.folder)) == 1
    monkeypatch.undo()
    assert store.put("later", VALUE) is VALUE  # this process has given up
    assert store.get("later") is None
    assert PlanCache(store.folder, LIMIT).put("later", VALUE) is VALUE
    assert store.get("later") == VALUE


@posix
def test_a_real_limit_of_the_file_size_means_memory_only(store):
    process = script(
        """
        import os, resource
        store = PlanCache(sys.argv[1], 10**9)
        store.put("small", {"n": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        for key in ("a", "b"):
            value = {"data": os.urandom(50_000).hex()}
            assert store.put(key, value) is value
        assert store.get("small") == {"n": 1}
        """,
        store.folder,
    )
    finished(process, stderr="File too large")
    assert len(names(store.folder)) == 1
    assert store.verify() == (1, [])


@posix
def test_a_folder_of_another_user_is_read_and_not_written(store):
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # TMPDIR may be closed to others
        os.chmod(shared, 0o755)
        folder = Path(shared) / "plans"
        folder.mkdir()
        PlanCache(folder, LIMIT).put("theirs", VALUE)
        os.utime(PlanCache(folder, LIMIT).path(digest("theirs")), (1, 1))
        folder.chmod(0o555)
        process = script(
            """
            import os
            if os.getuid() == 0:
                os.setgroups([])
                os.setuid(65534)
            store = PlanCache(sys.argv[1], 10**9)
            assert store.get("theirs")["scale"] == 0.1
            for key in ("a", "b"):
                assert store.put(key, {"n": 1}) == {"n": 1}
            assert store.put("theirs", {"n": 1})["scale"] == 0.1
            """,
            folder,
        )
        finished(process, stderr="Permission denied")
        folder.chmod(0o755)
        assert len(names(folder)) == 1


@pytest.mark.parametrize("deep", [False, True], ids=["the folder", "above the folder"])
def test_a_file_in_place_of_the_folder(tmp_path, warnings, deep):
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file" / "plans" if deep else tmp_path / "file"
    assert_memory_only(PlanCache(folder, LIMIT), warnings, ["Not a directory"])
    assert (tmp_path / "file").read_text() == "mine"


def test_a_link_to_nowhere_in_place_of_the_folder(tmp_path, warnings):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert_memory_only(PlanCache(tmp_path / "link", LIMIT), warnings, ["No such file or directory"])


def test_a_folder_that_vanishes_is_made_again(store, warnings):
    store.put("a", VALUE)
    for path in store.folder.iterdir():
        path.unlink()
    store.folder.rmdir()
    assert store.get("a") is None
    store.put("a", VALUE)
    assert store.get("a") == VALUE
    assert not warnings()


# -- limits ----------------------------------------------------------------------------------------


def filled(store, count, size=1000):
    """Entries of about this size, each used a minute after the one before, long ago."""
    for i in range(count):
        store.put(str(i), {"data": random.Random(i).randbytes(size // 2).hex()}, str(i))
        os.utime(store.path(digest(str(i))), (10**9 + 60 * i,) * 2)


def test_the_entries_used_last_are_kept_within_the_limit(store, warnings):
    filled(store, 20)
    sizes = [entry.size for entry in store.entries()]
    assert [entry.label for entry in store.entries()] == [str(i) for i in reversed(range(20))]
    store.get("3")
    limit = sum(sizes) // 2
    PlanCache(store.folder, limit).put("new", VALUE, "new")
    kept = [entry.label for entry in store.entries()]
    assert set(kept[:2]) == {"new", "3"}
    assert kept[2:] == [str(i) for i in range(19, 21 - len(kept), -1)]
    total = sum(entry.size for entry in store.entries())
    assert 0.9 * limit - max(sizes) < total <= 0.9 * limit
    assert not warnings()


def test_a_limit_holds_while_one_process_writes_much(tmp_path):
    store = PlanCache(tmp_path, 100_000)
    for i in range(100):
        store.put(str(i), {"data": random.randbytes(2000).hex()})
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100_000 * 65 / 64
    assert store.get("99")
    assert store.get("0") is None


def test_what_is_larger_than_the_limit_is_not_kept_and_drives_nothing_out(tmp_path, warnings):
    store = PlanCache(tmp_path, 5000)
    store.put("a", VALUE)
    large = {"data": random.randbytes(5000).hex()}
    assert store.put("large", large) is large
    assert store.get("large") is None
    assert store.get("a") == VALUE
    assert store.put("b", VALUE) == store.get("b")
    (text,) = warnings()
    assert "too large" in text


def test_what_could_not_be_read_back_is_not_written(store, monkeypatch):
    monkeypatch.setattr(cache_entry, "LARGEST", 1000)
    large = {"data": "0" * 2000}  # its file would be small
    assert store.put("large", large) is large
    assert store.entries() == []


def test_a_use_is_noted_at_most_once_an_hour(store):
    store.put("a", VALUE)
    path = store.path(digest("a"))
    for age, noted in ((600, False), (7200, True)):
        then = int(time.time()) - age
        os.utime(path, (then, then))
        store.get("a")
        assert (path.stat().st_mtime > then) == noted


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
