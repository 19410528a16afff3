"""``jc.explain``: the calls of a program, what they run as, and what to change."""

import dataclasses
import itertools
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from helpers import relu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_cudnn as jc
from jax_cudnn.__main__ import main
from jax_cudnn._core.planning.planned_graph import Measured
from jax_cudnn._core.planning.split import whole
from jax_cudnn._core.plans import explain as module
from jax_cudnn._core.plans.picture import Picture

pytestmark = pytest.mark.deviceless
S = jax.ShapeDtypeStruct
X, W = S((8, 64, 28, 28), "bfloat16"), S((64, 64, 1, 1), "bfloat16")
CUT = r"- 1\.6 MB, two: cut, because "


@jc.graph
def two(g, x, w):
    y = g.relu(g.conv_fprop(x, w) * 0.5)
    return g.relu(g.conv_fprop(y, w))


def block(x, w):
    for _ in range(2):
        x = two(x, w)  # twice
    return jax.lax.scan(lambda c, _: (relu(c), None), x, None, length=3)[0]  # three times


def line_of(text):
    lines = open(__file__).read().splitlines()
    (found,) = [
        i for i, line in enumerate(lines, 1) if line.endswith(text) and "line_of" not in line
    ]
    return found


@pytest.fixture(scope="module")
def report():
    return jc.explain(jax.jit(block), X, W, gpu="H200")


def test_each_graph_says_where_it_is_called_how_often_and_what_it_moves(report):
    first, second = report.to_json()["graphs"]
    assert [first["graph"], second["graph"]] == ["two", "relu"]
    for graph, comment, times in ((first, "  # twice", 2), (second, "  # three times", 3)):
        ((place, count),) = graph["called"].items()
        assert place.endswith(f"test_explain.py:{line_of(comment)}")
        assert count == graph["times"] == times
    image, weight = X.size * 2, W.size * 2
    assert first["bytes"] == 2 * (image + weight + image)
    assert second["bytes"] == 2 * image
    assert first["least_seconds"] > first["roofline_seconds"] > 0, "the cut costs a round trip"
    assert second["least_seconds"] == second["roofline_seconds"]
    assert first["edge"][0].startswith("channels-last in memory: x, relu.0")
    ((nbytes, why),) = [(c["bytes"], c["what"]) for c in report.to_json()["changes"]]
    assert nbytes == 2 * image, "what crosses the cut, in both calls"
    assert why.startswith("cut, because ")


def test_the_text_shows_the_table_what_is_fused_and_the_cuts(report):
    text = str(report)
    assert text.startswith("block, H200; graphs: 2, calls: 5\ngraph ")
    total = re.search(r"^total +([\d.]+) +>= ([\d.]+) +([\d.]+) +>= ([\d.]+)$", text, re.M)
    moved, time, least, ratio = map(float, total.groups())
    graphs = report.to_json()["graphs"]
    assert moved == pytest.approx(sum(g["bytes"] * g["times"] for g in graphs) / 1e6, abs=0.01)
    assert ratio == pytest.approx(time / least, rel=0.05)
    one, two = (line for line in text.splitlines() if re.match(r"\+- \d\. ", line))
    assert re.match(r"\+- 1\. cuDNN eng\d+: [34] operations in one plan, 1\.6 MB, at least", one)
    assert re.match(r"\+- 2\. cuDNN eng\d+: 2 operations in one plan, 1\.6 MB, at least", two)
    assert re.search(r"^\+> .*: bf16\[8,64,28,28\], 802,816 bytes, to 2$", text, re.M)
    assert re.search(r"^\|  read back: .*\n\|  w: |^\|  w: .*\n\|  read back: ", text, re.M)
    assert "|    mul.0(conv_fprop.0, 0.5)\n" in text
    assert re.search(CUT, text)


def test_a_picture_has_all_operations_and_marks_the_cuts(report):
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(report.pictures["two"].svg())
    fills = {text.text: box.get("fill") for box, text in itertools.pairwise(root)}
    colors = {name: fills[name] for name in ("conv_fprop.0", "mul.0 0.5", "conv_fprop.1", "relu.1")}
    assert colors["conv_fprop.0"] == colors["mul.0 0.5"] != colors["conv_fprop.1"]
    assert colors["conv_fprop.1"] == colors["relu.1"]
    wide = [line for line in root.iter(f"{svg}polyline") if line.get("stroke-width") == "2"]
    assert len(wide) == 1, "one tensor crosses the cut"
    right, bottom = (float(root.get(side)) for side in ("width", "height"))
    for box in root.findall(f"{svg}rect")[1:]:
        x, y, w, h = (float(box.get(key)) for key in ("x", "y", "width", "height"))
        assert x >= 0 <= y
        assert x + w <= right
        assert y + h <= bottom
    assert report._repr_html_().count("<svg") == 2


def test_boxes_of_a_picture_do_not_overlap_and_arrows_point_down():
    def residual(g, x, w, b):
        y = g.relu(g.add(g.conv_fprop(x, w), b))
        return g.relu(g.add(g.conv_fprop(y, w), x)), g.tanh(y)

    plans = jc.plan(jc.graph(residual), X, W, S((1, 64, 1, 1), "bfloat16"), gpus="H200")
    root = ElementTree.fromstring(Picture(plans["H200"]).svg())
    svg = "{http://www.w3.org/2000/svg}"
    boxes = [
        [float(box.get(key)) for key in ("x", "y", "width", "height")]
        for box in root.findall(f"{svg}rect")[1:]
    ]
    for (x, y, w, h), (x2, y2, w2, h2) in itertools.combinations(boxes, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y
    for line in root.iter(f"{svg}polyline"):
        heights = [float(point.partition(",")[2]) for point in line.get("points").split()]
        assert heights == sorted(heights)


def test_measured_candidates_decide_what_is_shown(monkeypatch):
    """With a stand-in for what measuring finds."""
    odd = jc.graph(lambda g, x, w: g.conv_fprop(x, w), implementation="xla")
    made = jc.plans(odd, X, W, gpus=["H200"])
    ((name, plan),) = made["H200"].items()
    made["H200"][name] = plan = dataclasses.replace(plan, implementation="split")
    least = jc.explain(odd, X, W, gpu="H200").to_json()["graphs"][0]["roofline_seconds"]

    def found(what, seconds, taken=False, note=""):
        return SimpleNamespace(what=what, seconds=seconds, taken=taken, note=note)

    sides = (
        found("cuDNN eng5", 3e-5),
        found("XLA", 4 * least, True),
        found("cuDNN eng6", None, note="wrong"),
    )
    object.__setattr__(plan, "measured", sides)
    monkeypatch.setattr(module, "plans", lambda *args, **kwargs: made)
    report = jc.explain(odd, X, W, gpu="H200")
    (graph,) = report.to_json()["graphs"]
    assert graph["seconds"] == 4 * least
    lines = str(report).splitlines()
    assert re.match(rf"{name} .* XLA +\d\.\d+ +\d\.\d+ +\d\.\d+ +4\.00$", lines[1 + 1])
    assert re.fullmatch(
        r"\+- XLA: 1 operation, 1\.6 MB, .* us measured", lines[lines.index("") + 2]
    )
    told = lines.index("cuDNN eng5: 30.0 us")
    assert lines[told - 1].startswith("XLA: ")
    assert lines[told - 1].endswith(" us, taken")
    assert lines[told + 1] == "cuDNN eng6: not measured, wrong"
    assert not report.to_json()["changes"]


@pytest.mark.parametrize("wrong", [{"gpu": 3}, {"gpu": ["H200"]}, {"gpus": ["H200"]}])
def test_explain_is_of_one_gpu(wrong):
    with pytest.raises(jc.GraphTypeError, match="explain takes one GPU"):
        jc.explain(two, X, W, **wrong)


def test_copies_at_the_edge_and_advice_are_named():
    def attend(q, bias):
        return jc.ops.dot_product_attention(q, q, q, bias=bias), two(
            jnp.ones(X.shape, X.dtype), jnp.ones(W.shape, W.dtype)
        )

    report = jc.explain(
        attend, S((2, 64, 4, 64), "bfloat16"), S((1, 1, 64, 64), "bfloat16"), gpu="H200"
    )
    cut, change = report.to_json()["changes"]
    assert cut["graph"] == "two", "what concerns more bytes comes first"
    assert "is_causal" in change["what"]
    assert change["bytes"] == report.to_json()["graphs"][0]["segments"][0]["reads_bytes"]

    pick = jc.graph(lambda g, x, y, mask: g.binary_select(x, y, mask))
    arrays = S((64, 128), "float32"), S((64, 128), "float32"), S((64, 128), "bool")
    (graph,) = jc.explain(pick.with_options(implementation="cudnn"), *arrays, gpu="H200").to_json()[
        "graphs"
    ]
    (edge,) = graph["edge"]
    assert edge == "mask, bool[64,128], is written as f32[64,128], 32,768 bytes, in XLA"


def test_what_a_mesh_gathers_is_said_with_its_bytes():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.device_put(
        jnp.ones((8, 256), "bfloat16"), NamedSharding(mesh, PartitionSpec(None, "model"))
    )
    report = jc.explain(lambda x: jc.ops.rms_norm(x, jnp.ones(256, "bfloat16")), x, gpu="H200")
    assert "\non the mesh: " in str(report)
    gathered = [
        c for c in report.to_json()["changes"] if "is gathered along dimension" in c["what"]
    ]
    assert [c["bytes"] for c in gathered] == [x.nbytes]
    assert gathered[0]["what"].endswith("; shard another dimension")


def test_the_command_prints_text_json_and_html_and_says_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "own_module", SimpleNamespace(two=two, other=jnp.sin))
    good = ["explain", "own_module:two", "bf16[8,64,28,28]", "bf16[64,64,1,1]", "--gpu", "H200"]
    assert main(good) == 0
    assert re.search(CUT.replace("1\\.6 MB", "802,816 bytes"), capsys.readouterr().out)
    assert main([*good, "--json"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert graph["called"] == {f"{module._short(__file__ + ':1')[:-2]}:{line_of('@jc.graph')}": 1}
    assert main([*good, "--html"]) == 0
    assert capsys.readouterr().out.startswith("<pre>two, H200; graphs: 1, calls: 1</pre>\n")
    for wrong, words in (
        (["explain", "nowhere:two", "f32[8]"], "no module 'nowhere'"),
        (["explain", "own_module:three", "f32[8]"], "has no 'three'"),
        (["explain", "own_module:two", "f32(8)"], "dtype[sizes]"),
        (["explain", "own_module:other", "f32[8]"], "contains no cuDNN graph"),
        ([*good[:-1], "K80"], "one of A100, B200, H100, H200"),
        (good[:-2], "--gpu"),
    ):
        assert main(wrong) == 1
        assert words in capsys.readouterr().err


def test_without_a_measurement_the_nearest_measured_graphs_predict():
    x = S((32768, 768), "bfloat16")
    matmul = lambda x, w: jc.ops.matmul(x, w, activation="gelu")  # noqa: E731
    report = jc.explain(matmul, x, S((768, 3072), "bfloat16"), gpu="H200")
    (graph,) = report.to_json()["graphs"]
    assert not graph["measured"]
    assert graph["predicted"]["xla_over_cudnn"] > 1
    assert all("gelu" in case or "relu" in case for case in graph["predicted"]["cases"])
    text = " ".join(str(report).split())
    assert f"XLA takes {graph['predicted']['xla_over_cudnn']:.2f} of cuDNN's time" in text


@pytest.mark.parametrize(("seconds", "listed"), [(1e-5, False), (None, True)])
def test_a_refusal_is_listed_unless_a_way_of_cudnn_was_slower(seconds, listed):
    (plan,) = jc.plans(two, X, W, gpus=["H200"])["H200"].values()
    (in_xla,) = whole(plan.spec, None, "cuDNN has no engine")
    ways = Measured("XLA", 1e-6, "", True), Measured("cuDNN eng0", seconds, "fails" * listed)
    plan = dataclasses.replace(plan, segments=(in_xla,), measured=ways)
    assert [what for _, what in module._changes(plan, "")] == [
        "runs in XLA, because cuDNN has no engine"
    ] * listed


def test_an_operation_itself_is_explained():
    """No line of the user's code calls it."""
    rows = jax.ShapeDtypeStruct((8, 64), "bfloat16")
    scale = jax.ShapeDtypeStruct((64,), "bfloat16")
    assert "rmsnorm" in str(jc.explain(jc.ops.rms_norm, rows, scale, gpu="H200")).replace("_", "")
