"""The table of what runs where, and how documents are compared and rewritten."""

import pytest

from benchmarks import documents, support_table
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.planning.support_value import MEASURED, PUBLIC, Support, SupportRow


def row(graph, gpu, reason=""):
    basis = PUBLIC if gpu == "A100" else MEASURED
    return SupportRow(graph, gpu, basis, not reason, None if reason else "eng0", reason=reason)


def test_table_counts_examples_and_groups_reasons():
    dtype = "a data type is not supported (x | y)"
    found = Support(
        (
            *(row("relu_bwd_0_float32", gpu) for gpu in ("A100", "H200")),
            row("relu_0_float32", "A100", dtype),
            row("relu_0_float32", "H200"),
            row("relu_1_float16", "A100", dtype),
            row("relu_1_float16", "H200", "a shape is not supported (z)"),
            row("matmul_0_float16", "A100", dtype),
            row("matmul_0_float16", "H200", dtype),
        ),
        "9.28.0",
        "1.32.0",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REGISTRY, "relu_bwd", REGISTRY["relu"])
        shown = support_table.table(found, others=["conv_fprop"]).splitlines()
    assert "cuDNN 9.28.0, nvidia-cudnn-frontend 1.32.0" in shown[0]
    assert shown[4].startswith("| `conv_fprop` | not alone | not alone | ")
    assert shown[5:] == [
        "| `matmul` | none | none | A100, H200: a data type is not supported |",
        "| `relu` | none | 1 of 2 | A100: a data type is not supported; "
        "H200: a shape is not supported |",
        "| `relu_bwd` | all 1 | all 1 |  |",
    ]


def test_a_document_is_compared_and_rewritten(tmp_path):
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- support -->\n<!-- /support -->\nafter\n")
    for shown in ("one\ntwo", "one\nthree"):
        assert documents.placed(document, "support", shown, check=True)
        documents.placed(document, "support", shown, check=False)
        assert not documents.placed(document, "support", shown, check=True)
        marks = f"<!-- support -->\n{shown}\n<!-- /support -->"
        assert document.read_text() == f"before\n{marks}\nafter\n"
