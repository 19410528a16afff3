"""``python -m jax_cudnn cache``: what it prints, its exit status, and archives good and bad."""

import json
import os
import random
import re
import subprocess
import sys
import time
import zipfile

import pytest

from jax_cudnn import JaxCudnnError
from jax_cudnn.__main__ import main
from jax_cudnn._core.store import archive as cache_archive
from jax_cudnn._core.store import entry as cache_entry
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


# -- list, verify, clear ---------------------------------------------------------------------------


def test_list_names_plans_with_size_and_last_use(store, command):
    status, out, err = command("list")
    assert (status, err) == (0, "")
    head, *lines, total = out.splitlines()
    assert head.split() == ["digest", "size", "last", "use", "label"]
    for line, i, age in zip(lines, (1, 0, 2), ("now", "3 h", "2 d"), strict=True):
        size = store.path(digest(f"key {i}")).stat().st_size
        assert line.split("  ")[0] == digest(f"key {i}")[:12]
        assert re.search(rf"\b{size} B +{age}  conv {i} on an H200$", line), line
    assert re.fullmatch(rf"3 entries, .* B of 1.07 GB, in {store.folder}", total)


def test_list_as_json(store, command):
    shown = json.loads(command("list", "--json")[1])
    assert shown["folder"] == str(store.folder)
    assert shown["bytes"] == sum(path.stat().st_size for path in store.folder.iterdir())
    assert [entry["label"][:6] for entry in shown["entries"]] == ["conv 1", "conv 0", "conv 2"]
    assert shown["entries"][0]["digest"] == digest("key 1")
    assert shown["entries"][0]["problem"] == ""


@pytest.mark.parametrize("made", [False, True], ids=["missing", "empty"])
def test_a_folder_without_plans_is_no_error(other, command, made):
    if made:
        other.folder.mkdir()
    assert command("list", folder=other.folder) == (
        0,
        f"No plans in {other.folder} yet; programs add theirs.\n",
        "",
    )
    for action in ("verify", "clear"):
        status, out, err = command(action, folder=other.folder)
        assert (status, err) == (0, "")
        assert out.startswith("0 ")
    assert other.folder.exists() == made


def test_list_lets_no_label_command_the_terminal(store, command):
    put(store, "evil", encode(Content("evil", {}, "\x1b[2Jevil\r\n\u202e")))
    out = command("list")[1]
    assert "?[2Jevil???" in out
    assert not set("\x1b\r\u202e") & set(out)


def test_verify_names_what_cannot_be_used_and_deletes_it_if_asked(store, command):
    status, out, _ = command("verify")
    assert status == 0
    assert out == f"3 entries checked, 0 cannot be used, in {store.folder}\n"
    put(store, "key 0", b"")
    put(store, "key 2", encode(Content("key 1", {}, "")))
    put(store, "old", encode(Content("old", {}, "")).replace(b"plan 1 ", b"plan 0 ", 1))
    (store.folder / "notes").write_text("mine")
    status, out, _ = command("verify")
    assert status == 1
    for key, word in (("key 0", "damaged"), ("key 2", "foreign"), ("old", "older: format 0")):
        assert f"{store.path(digest(key))}: {word}" in out
    assert "4 entries checked, 3 cannot be used" in out
    assert "(damaged: no header)" in command("list")[1]
    shown = json.loads(command("verify", "--json")[1])
    assert (shown["checked"], len(shown["unusable"])) == (4, 3)
    status, out, _ = command("verify", "--delete")
    assert status == 1
    assert "3 deleted" in out
    assert sorted(path.suffix for path in store.folder.iterdir()) == ["", ".plan"]
    assert store.get("key 1") == {"n": 1, "text": "x" * 1000}
    assert command("verify")[0] == 0


def test_clear_deletes_plans_and_nothing_else(store, command):
    kept = ["notes", f"{'a' * 64}.txt", "plan.plan", f"{'A' * 64}.plan"]
    for name in kept:
        (store.folder / name).write_text("mine")
    (store.folder / f"{'a' * 64}.{'0' * 16}.tmp").write_text("left by a killed process")
    assert command("clear")[:2] == (0, f"4 files deleted, {_bytes(store)}, in {store.folder}\n")
    assert sorted(path.name for path in store.folder.iterdir()) == sorted(kept)
    assert command("list")[1].startswith("No plans")


def _bytes(store):
    """Of what the fixture has written, and of the file of 24 bytes."""
    contents = [
        Content(f"key {i}", {"n": i, "text": "x" * 1000 * i}, f"conv {i} on an H200")
        for i in range(3)
    ]
    return f"{sum(len(encode(content)) for content in contents) + 24} B"


# -- export, import --------------------------------------------------------------------------------


def test_plans_travel_in_an_archive(store, other, command, tmp_path):
    put(store, "damaged", b"")
    archive = tmp_path / "plans.zip"
    status, out, err = command("export", archive)
    assert (status, err) == (0, "")
    assert re.fullmatch(rf"3 entries written to {archive}, .* kB\n", out)
    for taken, present in ((3, 0), (0, 3)):
        status, out, err = command("import", archive, folder=other.folder)
        assert (status, err) == (0, "")
        assert out == (
            f"{taken} entries taken, {present} there already, 0 refused, in {other.folder}\n"
        )
    for i in range(3):
        assert other.get(f"key {i}") == {"n": i, "text": "x" * 1000 * i}
    assert [e.label for e in other.entries()] == [e.label for e in store.entries() if e.label]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "plans", "plans.zip"]


def test_an_import_keeps_what_is_there_and_replaces_what_is_damaged(store, other, tmp_path):
    other.put("key 0", {"n": "kept"})
    put(other, "key 1", b"")
    cache_archive.export(store, tmp_path / "plans.zip")
    done = cache_archive.import_(other, tmp_path / "plans.zip")
    assert done == cache_archive.Imported(2, 1, {})
    assert other.get("key 0") == {"n": "kept"}
    assert other.get("key 1") == store.get("key 1")


def test_an_export_that_fails_leaves_the_old_archive(store, command, tmp_path, monkeypatch):
    archive = tmp_path / "plans.zip"
    archive.write_bytes(b"old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    status, out, err = command("export", archive)
    assert (status, out) == (1, "")
    assert "cache export" in err
    assert "No space left on device" in err
    assert archive.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plans", "plans.zip"]


GOOD = encode(Content("key", {"n": 1}, "label"))
NAME = f"{digest('key')}.plan"
MEMBERS = {
    "a path upwards": (f"../{NAME}", GOOD, "not the name"),
    "an absolute path": (f"/elsewhere/{NAME}", GOOD, "not the name"),
    "another file": (".bashrc", b"evil", "not the name"),
    "a line break": (f"{NAME}\n", GOOD, "not the name"),
    "a wrong digest": (f"{digest('other')}.plan", GOOD, "another key"),
    "a wrong checksum": (NAME, GOOD[:-1] + b"!", "damaged"),
    "older": (NAME, GOOD.replace(b"plan 1 ", b"plan 0 ", 1), "older"),
    "empty": (NAME, b"", "damaged"),
    "huge": (NAME, b"\0" * 10_001, "too many"),
}


@pytest.mark.parametrize(("name", "data", "words"), MEMBERS.values(), ids=MEMBERS)
def test_a_bad_member_is_refused_and_the_others_are_taken(
    other, command, tmp_path, monkeypatch, name, data, words
):
    monkeypatch.setattr(cache_archive, "LARGEST", 10_000)
    fine = encode(Content("fine", {"n": 2}, ""))
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), data)
        archive.writestr(zipfile.ZipInfo(f"{digest('fine')}.plan"), fine)
    before = {path for path in tmp_path.parent.rglob("*") if other.folder not in path.parents}
    status, out, err = command("import", tmp_path / "bad.zip", folder=other.folder)
    assert (status, err) == (1, "")
    assert words in out
    assert "1 entry taken, 0 there already, 1 refused" in out
    assert other.get("fine") == {"n": 2}
    assert [path.name for path in other.folder.iterdir()] == [f"{digest('fine')}.plan"]
    after = {path for path in tmp_path.parent.rglob("*") if other.folder not in path.parents}
    assert after == before | {other.folder}


def test_nothing_is_decompressed_for_an_archive(other, tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(NAME, b"\0" * 10**7)
    done = cache_archive.import_(other, tmp_path / "bomb.zip")
    assert done.refused == {NAME: "foreign: compressed by something else"}
    assert not other.folder.exists()


def test_places_before_the_archives_beginning_are_refused(tmp_path, other, store):
    path = tmp_path / "plans.zip"
    cache_archive.export(store, path)
    data = bytearray(path.read_bytes())
    data[-6:-2] = (int.from_bytes(data[-6:-2], "little") + 20).to_bytes(4, "little")
    path.write_bytes(data)
    try:
        assert len(cache_archive.import_(other, path).refused) == 3
    except JaxCudnnError as error:  # newer versions of Python see it when they open it
        assert "no archive of plans" in str(error)  # noqa: PT017


def test_archives_damaged_anywhere_are_told_in_words_and_give_no_other_plan(
    tmp_path, other, store, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # it takes most of the time
    cache_archive.export(store, tmp_path / "good.zip")
    good, bad = (tmp_path / "good.zip").read_bytes(), tmp_path / "bad.zip"
    values = {f"key {i}": store.get(f"key {i}") for i in range(3)}
    refused = 0
    for _ in range(400):
        data = bytearray(good)
        if random.random() < 0.3:
            del data[random.randrange(len(data)) :]
        else:
            data[random.randrange(len(data))] = random.randrange(256)
        bad.write_bytes(data)
        try:
            refused += len(cache_archive.import_(other, bad).refused)
        except JaxCudnnError as error:
            assert "no archive of plans" in str(error)  # noqa: PT017
        for key in values:
            assert other.get(key) in (None, values[key])
        other.clear()
    assert refused


def test_an_archive_of_more_than_the_limit_leaves_what_fits(store, tmp_path):
    cache_archive.export(store, tmp_path / "plans.zip")
    size = store.path(digest("key 1")).stat().st_size
    small = PlanCache(tmp_path / "small", 2 * size)
    cache_archive.import_(small, tmp_path / "plans.zip")
    assert len(small.entries()) == 1
    tiny = PlanCache(tmp_path / "tiny", size // 2)
    done = cache_archive.import_(tiny, tmp_path / "plans.zip")
    assert len(done.refused) == 3
    assert all("too large" in why for why in done.refused.values())


# -- errors, and the way from a shell --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["import", "missing.zip"], "missing.zip: No such file or directory"),
        (["import", "file"], "file is no archive of plans"),
        (["import", "."], "Is a directory"),
        (["export", "missing/plans.zip"], "missing: No such file or directory"),
        (["export", "."], "Is a directory"),
        (["list", "--folder", "file"], "file: Not a directory"),
        (["verify", "--folder", "file"], "Not a directory"),
        (["clear", "--folder", "file"], "Not a directory"),
        (["import", "good.zip", "--folder", "file"], "Not a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_words(store, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    cache_archive.export(store, tmp_path / "good.zip")
    assert main(["cache", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch, capsys):
    monkeypatch.setattr("jax_cudnn._core.settings._default_folder", lambda: None)
    monkeypatch.setattr("jax_cudnn._core.settings._given", {})
    assert main(["cache", "list"]) == 1
    assert "--folder" in capsys.readouterr().err


def test_from_a_shell_it_shows_the_users_own_folder(tmp_path):
    home = tmp_path / "jax_cudnn" / "plans"
    PlanCache(home, LIMIT).put("a", {"n": 1}, "the user's plan")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jax_cudnn", "cache", "list"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "the user's plan" in done.stdout
    assert str(home) in done.stdout


def test_the_largest_entry_is_larger_than_any_plan_known():
    assert cache_entry.LARGEST >= 100 * 120_000


def test_an_archive_does_not_take_the_place_of_a_device(tmp_path, capsys):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "elsewhere")
    for path in (pipe, link):
        before = path.lstat()
        assert main(["cache", "export", "--folder", str(tmp_path), str(path)]) == 1
        assert "no regular file" in capsys.readouterr().err
        assert path.lstat() == before
