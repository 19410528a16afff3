"""What documents show of the results is what the results give."""

import pytest

from benchmarks import documents
from benchmarks.__main__ import main


@pytest.mark.parametrize("command", ["render", "numerics"])
def test_documents_show_what_is_generated(command, capsys):
    assert main([command, "--check"]) == 0, capsys.readouterr().out


def test_a_result_is_printed(capsys):
    assert main(["render", str(documents.committed("h200"))]) == 0
    printed = capsys.readouterr().out
    assert "chain of 200 tiny convolutions" in printed
    assert "| resnet50/" in printed
