"""How documents with marks are compared and rewritten."""

from benchmarks import documents


def test_a_document_is_compared_and_rewritten(tmp_path):
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- support -->\n<!-- /support -->\nafter\n")
    for shown in ("one\ntwo", "one\nthree"):
        assert documents.placed(document, "support", shown, check=True)
        documents.placed(document, "support", shown, check=False)
        assert not documents.placed(document, "support", shown, check=True)
        marks = f"<!-- support -->\n{shown}\n<!-- /support -->"
        assert document.read_text() == f"before\n{marks}\nafter\n"
