"""The list of mutations is of this package, and the docs show what was found of them."""

import json
from pathlib import Path

import mutations
import run


def test_each_mutation_stands_once_in_its_file():
    package = run.ROOT / "jax_cudnn"
    counts = {
        n: (package / f).read_text().count(old) for n, (f, old, _) in mutations.MUTATIONS.items()
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_docs_show_the_outcomes_of_all():
    recorded = json.loads(Path(run.__file__).with_name("after.json").read_text())
    assert {*recorded} == {*mutations.MUTATIONS}, "run what is missing: run.py --only NAME"
    page = run.PAGE.read_text()
    assert run.rendered(page) == page, "renew it: python tests/mutations/run.py --render"
