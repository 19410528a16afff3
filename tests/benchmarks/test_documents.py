"""What documents show of the results is what the results give."""

import pytest

from benchmarks.__main__ import main


@pytest.mark.parametrize("command", ["render", "numerics"])
def test_documents_show_what_is_generated(command, capsys):
    assert main([command, "--check"]) == 0, capsys.readouterr().out
