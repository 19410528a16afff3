"""README: its code runs, it shows what a run prints, and it stays short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.deviceless
def test_examples_run_in_order_and_print_what_is_shown(capsys):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(block, names)
    assert names["fast"].layers[0].scale is names["model"].layers[0].scale
    assert names["hidden"].shape == (4, 16, 256)
    assert names["packed"].shape == names["tokens"].shape
    assert names["gradients"]["down"].any()
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.S)
    printed = capsys.readouterr().out.splitlines()
    assert shown.splitlines() == printed[-9:]


def test_readme_leads_to_every_page():
    pages = [path.name for path in (ROOT / "docs").glob("[!i]*.md")]
    assert [page for page in pages if f"(docs/{page})" not in README] == []


def test_readme_and_build_are_short():
    assert README.count("\n") <= 150
    assert len(README.encode()) <= 10_000
    assert (ROOT / "BUILD.md").read_text().count("\n") <= 250
