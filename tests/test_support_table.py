"""`python -m jax_cudnn support`: the table of the README, and a function of one's own."""

import json
import sys
import types
from pathlib import Path

import jax
import pytest
from cases import case

import jax_cudnn as jc
from jax_cudnn.__main__ import main
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.planning.support_value import MEASURED, PUBLIC, Support, SupportRow
from jax_cudnn.bench import support_command, support_table

README = Path(__file__).parent.parent / "README.md"


def row(graph, gpu, reason=None):
    basis = PUBLIC if gpu == "A100" else MEASURED
    if reason is None:
        return SupportRow(graph, gpu, basis, True, "eng0", 0, 1)
    return SupportRow(graph, gpu, basis, False, reason=reason)


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
    assert "A100 are from public specifications, not read on a device" in shown[0]
    assert shown[2] == "| operation | A100 | H200 | where not, why |"
    assert shown[4].startswith("| `conv_fprop` | not alone | not alone | ")
    assert shown[5:] == [
        "| `matmul` | none | none | A100, H200: a data type is not supported |",
        "| `relu` | none | 1 of 2 | A100: a data type is not supported; "
        "H200: a shape is not supported |",
        "| `relu_bwd` | all 1 | all 1 |  |",
    ]


def test_document_is_compared_and_rewritten(tmp_path):
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- support -->\n<!-- /support -->\nafter\n")
    assert support_table.block(document) == ""
    for shown in ("one\ntwo", "one\nthree"):
        assert support_table.difference(document, shown)
        support_table.write(document, shown)
        assert support_table.difference(document, shown) == ""
        marks = f"<!-- support -->\n{shown}\n<!-- /support -->"
        assert document.read_text() == f"before\n{marks}\nafter\n"
    lines = support_table.difference(document, "one\nfour").splitlines()
    assert {"-three", "+four"} <= {*lines}


@pytest.mark.parametrize("text", [None, "no marks"])
def test_document_without_the_marks_is_told_before_anything_is_planned(text, tmp_path, capsys):
    document = tmp_path / "README.md"
    if text is not None:
        document.write_text(text)
    assert main(["support", "--check", str(document)]) == 1
    assert str(document) in capsys.readouterr().err


def test_readme_lists_every_operation():
    shown = support_table.block(README)
    assert [m for m in sorted(REGISTRY) if f"| `{m}` |" not in shown] == [], (
        "renew it: python -m jax_cudnn support --write README.md"
    )


@pytest.mark.deviceless
def test_table_is_planned_for_all_profiles():
    @case(((8, 16), "float32"))
    def relu_0_float32(g, x):
        return g.relu(x)

    @case(((2, 64, 8, 8), "bfloat16"), ((64, 64, 3, 3), "bfloat16"))
    def relu_1_bfloat16(g, x, w):
        y = g.relu(g.conv_fprop(x, w)).set_data_type("bfloat16")
        return g.conv_fprop(y, w)

    shown = support_table.render([relu_0_float32, relu_1_bfloat16])
    assert "| operation | A100 | H100 | H200 | B200 | where not, why |" in shown
    assert shown.splitlines()[4:] == [
        "| `relu` | 1 of 2 | 1 of 2 | 1 of 2 | 1 of 2 | A100, H100, H200, B200: more than one "
        "convolution or matmul in one graph |"
    ]


def test_check_and_write(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(support_table, "render", lambda: "the table")
    document = tmp_path / "README.md"
    document.write_text("<!-- support -->\nan old one\n<!-- /support -->\n")
    assert main(["support", "--check", str(document)]) == 1
    out = capsys.readouterr().out
    assert "-an old one" in out
    assert "+the table" in out
    assert f"--write {document}" in out
    assert main(["support", "--write", str(document)]) == 0
    assert main(["support", "--check", str(document)]) == 0
    assert main(["support", "--render"]) == 0
    assert capsys.readouterr().out == "the table\n"


@pytest.fixture
def own(monkeypatch):
    """A module of the user's, and what ``support`` is asked."""
    module = types.ModuleType("own_module")
    module.relu = jc.graph(lambda g, x, slope=None: g.relu(x, negative_slope=slope))
    monkeypatch.setitem(sys.modules, "own_module", module)
    asked = []

    def support(fn, *args, gpus=None, **static):
        asked.append((fn, args, gpus, static))
        rows = [row("relu", gpu, None if gpu == "H200" else "not supported") for gpu in gpus]
        return Support(tuple(rows), "9.28.0", "1.28.0")

    monkeypatch.setattr(support_command, "support", support)
    return asked


def test_own_function(own, capsys):
    arguments = ["support", "own_module:relu", "bf16[8,64]", "slope=0.5", "--gpus", "H200"]
    assert main(arguments) == 0
    aval = jax.ShapeDtypeStruct((8, 64), "bfloat16")
    assert own == [(sys.modules["own_module"].relu, (aval,), ["H200"], {"slope": 0.5})]
    assert capsys.readouterr().out.startswith("graph  GPU   engine")
    arguments[-1] = "H200,A100"
    assert main([*arguments, "--json"]) == 1  # one of the GPUs has no plan
    assert [r["gpu"] for r in json.loads(capsys.readouterr().out)["rows"]] == ["H200", "A100"]
    assert main([*arguments, "--markdown"]) == 1
    assert capsys.readouterr().out.startswith("| graph | GPU |")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a function"),
        (["own_module:relu", "--check", "x"], "take no function"),
        (["own_module:relu", "f32[8", "--gpus", "H200"], "dtype"),
        (["own_module:relu", "f32[8]", "slope=half", "--gpus", "H200"], "slope"),
        (["own_module:gelu", "f32[8]", "--gpus", "H200"], "gelu"),
    ],
    ids=str,
)
def test_wrong_arguments_are_told(arguments, words, own, capsys):
    if ("own_module:relu" in arguments and "--gpus" in arguments) or "gelu" in words:
        assert main(["support", *arguments]) == 1
    else:
        with pytest.raises(SystemExit):
            main(["support", *arguments])
    assert words in capsys.readouterr().err
    assert own == []
