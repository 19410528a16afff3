"""``python -m jax_cudnn cache``: its output, its exit status, and good and bad archives."""

import contextlib
import errno
import json
import os
import re
import time
import zipfile
from pathlib import Path

import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn import JaxCudnnError
from jax_cudnn.__main__ import main
from jax_cudnn._core.planning.stored import check_entry
from jax_cudnn._core.store import archive as cache_archive
from jax_cudnn._core.store.cache import PlanCache
from jax_cudnn._core.store.entry import Content, digest, encode

LIMIT = 10**9


@pytest.fixture
def store(tmp_path):
    """Three plans, the first used three hours ago, the second now, the third two days ago."""
    store = PlanCache(tmp_path / "plans", LIMIT)
    for i, hours in enumerate((3, 0, 48)):
        store.put(f"key {i}", {"n": i, "text": "x" * 1000 * i}, f"conv {i} on an H200")
        os.utime(store.path(digest(f"key {i}")), (time.time() - 3600 * hours,) * 2)
    return store


@pytest.fixture
def other(tmp_path):
    return PlanCache(tmp_path / "other", LIMIT)


@pytest.fixture
def command(store, capsys):
    """Runs the command on the folder; exit status, output, errors."""

    def run(*arguments, folder=store.folder):
        status = main(["cache", *map(str, arguments), "--folder", str(folder)])
        return status, *capsys.readouterr()

    return run


def put(store, key, data):
    store.path(digest(key)).write_bytes(data)


def test_list_names_plans_with_size_and_last_use(store, command, monkeypatch):
    status, out, err = command("list")
    assert (status, err) == (0, "")
    assert out.startswith("digest            size  last use  operations: operands -> results; ")
    product = jc.graph(lambda g, x, w: g.relu(g.matmul(x, w)))
    spec = product.trace(jnp.ones((1, 2, 3)), jnp.ones((1, 3, 4)))[1].spec
    assert spec.label == "matmul relu: float32[1,2,3], float32[1,3,4] -> float32[1,2,4]"
    for line, i, age in zip(out.splitlines()[1:4], (1, 0, 2), ("now", "3 h", "2 d"), strict=True):
        size = store.path(digest(f"key {i}")).stat().st_size
        assert line.startswith(digest(f"key {i}")[:12])
        assert re.search(rf"\b{size} B +{age}  conv {i} on an H200$", line), line
    monkeypatch.setattr("jax_cudnn.commands.cache._SHOWN", 2)
    assert command("list")[1].splitlines()[3].startswith("1 more; --all")
    assert command("list", "--all")[1] == out


def test_list_lets_no_label_command_the_terminal(store, command):
    put(store, "evil", encode(Content("evil", {}, "\x1b[2Jevil\r\n\u202e")))
    out = command("list")[1]
    assert "?[2Jevil???" in out
    assert not set("\x1b\r\u202e") & set(out)


def test_verify_names_unusable_entries_and_deletes_them_on_request(store, command):
    assert command("verify")[0] == 0
    put(store, "key 0", encode(Content("key 0", {}, "\ud800")))  # half of a character
    put(store, "key 2", encode(Content("key 1", {}, "")))
    put(store, "old", encode(Content("old", {}, "")).replace(b"plan 1 ", b"plan 0 ", 1))
    (store.folder / "notes").write_text("mine")
    status, out, _ = command("verify")
    assert status == 1
    for key, word in (("key 0", "damaged"), ("key 2", "foreign"), ("old", "older")):
        assert f"{store.path(digest(key))}: {word}" in out
    assert "(damaged" in command("list")[1]
    shown = json.loads(command("verify", "--json")[1])
    assert (shown["checked"], len(shown["unusable"])) == (4, 3)
    status, out, _ = command("verify", "--delete")
    assert (status, "3 deleted" in out) == (1, True)
    assert sorted(path.suffix for path in store.folder.iterdir()) == ["", ".plan"]
    assert store.get("key 1") == {"n": 1, "text": "x" * 1000}
    assert command("verify")[0] == 0


def test_clear_deletes_plans_and_nothing_else(store, command):
    kept = ["notes", f"{'a' * 64}.txt", "plan.plan", f"{'A' * 64}.plan"]
    for name in kept:
        (store.folder / name).write_text("mine")
    (store.folder / f"{'a' * 64}.{'0' * 16}.tmp").write_text("left by a killed process")
    assert json.loads(command("clear", "--json")[1])["deleted"] == 4
    assert sorted(path.name for path in store.folder.iterdir()) == sorted(kept)


def test_plans_travel_in_an_archive(store, other, command, tmp_path):
    put(store, "damaged", encode(Content("damaged", {"n": "\ud800"}, "")))
    store.path(digest("a folder")).mkdir()
    archive = tmp_path / "plans.zip"
    archive.write_text("a file of the user")
    status, _, err = command("export", archive)
    assert (status, "is not overwritten" in err) == (1, True)
    archive.unlink()
    status, out, _ = command("export", archive, "--json")
    assert (status, json.loads(out)["exported"]) == (1, 3)
    left_out = {store.path(digest(key)).name for key in ("damaged", "a folder")}
    assert json.loads(out)["left out"].keys() == left_out
    before = archive.read_bytes()
    for folder, words in ((other.folder, "no such folder"), (tmp_path, "0 unusable")):
        status, _, err = command("export", archive, folder=folder)
        assert (status, words in err, archive.read_bytes()) == (1, True, before), err
    for taken, present in ((3, 0), (0, 3)):
        status, out, err = command("import", archive, folder=other.folder)
        assert (status, err) == (0, "")
        assert re.match(rf"{taken} entries imported, {present} already present, 0 rejected", out)
    put(other, "key 0", b"")
    other.path(digest("key 1")).unlink()
    other.put("key 1", {"n": "kept"})
    assert cache_archive.import_(other, archive, check_entry) == cache_archive.Imported(1, 2, {})
    assert other.get("key 1") == {"n": "kept"}
    for i in (0, 2):
        assert other.get(f"key {i}") == {"n": i, "text": "x" * 1000 * i}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "plans", "plans.zip"]


GOOD = encode(Content("key", {"n": 1}, "label"))
NAME = f"{digest('key')}.plan"
MEMBERS = {
    "a path upwards": (f"../{NAME}", GOOD, "not the name"),
    "a wrong digest": (f"{digest('other')}.plan", GOOD, "another key"),
    "a wrong checksum": (NAME, GOOD[:-1] + b"!", "damaged"),
    "huge": (NAME, b"\0" * 10_001, "too many"),
}


@pytest.mark.parametrize(("name", "data", "words"), MEMBERS.values(), ids=MEMBERS)
def test_a_bad_member_is_refused_and_the_others_are_taken(
    other, command, tmp_path, monkeypatch, name, data, words
):
    monkeypatch.setattr(cache_archive, "LARGEST", 10_000)
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), data)
        fine = encode(Content("fine", {"n": 2}, ""))
        archive.writestr(zipfile.ZipInfo(f"{digest('fine')}.plan"), fine)
    status, out, err = command("import", tmp_path / "bad.zip", folder=other.folder)
    assert (status, err) == (1, "")
    assert words in out
    assert "1 entry imported, 0 already present, 1 rejected" in out
    assert other.get("fine") == {"n": 2}
    assert [*other.folder.iterdir()] == [other.path(digest("fine"))]
    assert not [*tmp_path.glob("*.plan")]


def test_nothing_is_decompressed_for_an_archive(other, tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(NAME, b"\0" * 10**7)
    done = cache_archive.import_(other, tmp_path / "bomb.zip", check_entry)
    assert done.refused == {NAME: "foreign: compressed by something else"}
    assert not other.folder.exists()


def test_archives_damaged_anywhere_raise_our_errors(tmp_path, other, store, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # it takes most of the time
    cache_archive.export(store, tmp_path / "good.zip")
    good, bad = (tmp_path / "good.zip").read_bytes(), tmp_path / "bad.zip"
    places = (int.from_bytes(good[-6:-2], "little") + 20).to_bytes(4, "little")
    damaged = [good[:-6] + places + good[-2:]]  # offsets before the start of the archive
    damaged += [good[:i] + bytes([good[i] ^ 4]) + good[i + 1 :] for i in range(len(good))]
    lost = set()
    for data in damaged:
        bad.write_bytes(data)
        with contextlib.suppress(JaxCudnnError):
            done = cache_archive.import_(other, bad, check_entry)
            assert done.taken + done.present + len(done.refused) + done.lost >= 3, done
            lost.add(done.lost)
        for i in range(3):
            assert other.get(f"key {i}") in (None, store.get(f"key {i}"))
        other.clear()
    assert lost >= {0, 1, 2}


DISK = {
    "export new.zip": "new.zip: No space left on device\n  what to do: free space there",
    "import good.zip": "other: No space left on device\n  got: 1 of 3 entries were imported before",
    "import pipe": "pipe: not a regular file\n  what to do: pass",
    "import none.zip": "none.zip: No such file or directory\n  what to do: check",
    "clear": "plan: Read-only file system\n0 files deleted",
    "verify --delete": "damaged: no header; not deleted: Read-only file system\n0 deleted",
}


@pytest.mark.parametrize("action", DISK)
def test_errors_of_the_disk_are_told(store, other, command, tmp_path, monkeypatch, action):
    monkeypatch.chdir(tmp_path)
    cache_archive.export(store, "good.zip")
    os.mkfifo("pipe")
    put(store, "key 0", b"")
    unlink = os.unlink

    def full(*arguments):
        if "export" in action or len([*tmp_path.glob("other/*")]) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def kept(path):
        if Path(path).suffix == ".plan":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path)

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(os, "unlink", kept)
    folder = other.folder if "import" in action else store.folder
    status, out, err = command(*action.split(), folder=folder)
    assert (status, DISK[action] in out + err) == (1, True), out + err


def test_the_home_of_nobody_is_no_folder(command, capsys):
    with pytest.raises(SystemExit):
        command("list", folder="~nobody.here/plans")
    assert "argument --folder: ~nobody.here/plans: Could not determine" in capsys.readouterr().err
