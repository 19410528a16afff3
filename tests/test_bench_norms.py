"""The bench of normalizations: all sides compute the same, and the GPU's time alone is told."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn.__main__ import main
from jax_cudnn._core.planning import losses as learned
from jax_cudnn.bench import queued, run, sides, torch_graphs
from jax_cudnn.bench.halves import halves
from jax_cudnn.bench.norms import cases as norm_cases
from jax_cudnn.bench.norms import formulations as norm_formulations
from jax_cudnn.bench.norms import measure as norms
from jax_cudnn.bench.norms import tables as norm_tables
from jax_cudnn.bench.norms import torch_sides as norm_torch
from jax_cudnn.bench.norms.cases import BACKWARD, FORWARD, PROGRAMS, TRAINING
from jax_cudnn.bench.norms.measure import COPY
from jax_cudnn.bench.run import RESULTS
from jax_cudnn.bench.sides import OURS, REFERENCE, WHOLE

pytestmark = pytest.mark.wide

FULL = {case.name: case for case in norm_cases.norm_cases()}
TINY = {case.name.partition("/")[0]: case for case in norm_cases.tiny_cases()}
QUICK = {"seconds": 0.0, "calls": 1, "rounds": 1, "say": str}
ENVIRONMENT = {
    "device": "GPU", "date": "2026-01-01", "cudnn": "1", "jax": "2", "nvidia-cudnn-frontend": "3",
    "torch": "4", "triton": "5", "driver": "6", "sm_version": 90,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """What ``bench --norms --tiny`` writes, with its exit status."""
    folder = tmp_path_factory.mktemp("norms")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        status = main(["bench", "--norms", "--tiny", "--out", str(folder)])
    (path,) = folder.glob("norms_*-tiny.json")
    return status, path


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


def avals(case):
    return {name: operand.aval for name, operand in case.operands.items()}


def few(case, **xla):
    """The case with these formulations and one more alone."""
    return dataclasses.replace(
        case, xla={"two passes": case.exact, **xla}, forwards=("two passes", *xla)
    )


def rendered(entries):
    return norm_tables.render_norms(
        {"environment": ENVIRONMENT, "limit": norms.LIMIT, "norms": entries}
    )


# -- all of it, with small shapes ------------------------------------------------------------------


def test_all_sides_agree_and_all_figures_are_there(tiny):
    status, path = tiny
    result = json.loads(path.read_text())
    assert status == 0
    assert {"torch", "triton", "driver", "cudnn", "jax", "date"} <= result["environment"].keys()
    assert result["limit"] == norms.LIMIT
    assert [*result["norms"]] == [case.name for case in TINY.values()]
    installed = torch_graphs.installed()
    for case in TINY.values():
        entry = result["norms"][case.name]
        assert [*entry["programs"]] == [*PROGRAMS]
        for program, found in entry["programs"].items():
            assert found["status"] == "timed", (case.name, program, found)
            xla = case.forwards if program == FORWARD else case.xla
            every = {WHOLE, OURS, REFERENCE, *xla, *(norm_torch.SIDES if installed else ())}
            assert found["errors"].keys() == every
            assert found["us"].keys() == found["host_us"].keys() == every | {COPY}
            assert found["tbytes_s"].keys() == found["of_limit"].keys() == every | {COPY}
            missing = dict.fromkeys(norm_torch.SIDES, torch_graphs.MISSING)
            assert found["not_run"] == ({} if installed else missing)
            assert all(0 < error["relative"] < 0.01 for error in found["errors"].values())
            assert found["best_xla"] in xla
            assert min(xla, key=lambda s: found["us"][s]["median"]) == found["best_xla"]
            assert found["bytes"] == case.bytes(program)
            rate = found["bytes"] / found["us"][OURS]["median"] / 1e6
            assert found["tbytes_s"][OURS] == pytest.approx(rate, rel=1e-3)
            assert found["of_limit"][OURS] == pytest.approx(rate / 4.3, abs=1e-3)
            assert found["rounds"] >= 7
            assert {side: held["graphs"] for side, held in found["plans"].items()} == {
                WHOLE: 1,
                OURS: 1,
            }
        both = entry["training_step"]["us"]
        each = [entry["programs"][program]["us"] for program in (TRAINING, BACKWARD)]
        assert both[OURS] == pytest.approx(sum(us[OURS]["median"] for us in each), abs=2e-3)


def test_all_is_rendered(tiny, capsys):
    _, path = tiny
    assert main(["bench", "--render", str(path)]) == 0
    text = capsys.readouterr().out
    result = json.loads(path.read_text())["norms"]
    tables = [
        [row for row in part.splitlines() if row.startswith("|")] for part in text.split("\n\n")
    ]
    tables = [rows for rows in tables if rows]
    assert len(tables) == len(PROGRAMS) + 1
    for rows in tables:
        assert len({row.count("|") for row in rows}) == 1
        assert [row.split(" | ")[0] for row in rows[2:]] == [f"| {name}" for name in result]
    for program, rows in zip(PROGRAMS, tables, strict=False):
        for entry, row in zip(result.values(), rows[2:], strict=True):
            us = entry["programs"][program]["us"]
            cells = row.split(" | ")
            assert cells[1].startswith(f"{us[OURS]['median']:.4g} (")
            assert cells[2:4] == [f"{us[side]['median']:.4g}" for side in (WHOLE, REFERENCE)]
            assert cells[4].endswith(entry["programs"][program]["best_xla"])
    assert (f"- all: torch: {torch_graphs.MISSING}" in text) != torch_graphs.installed()


def test_what_has_been_learned_since_is_told(tiny, monkeypatch):
    """A graph that cuDNN ran in the measurement, and that the table of losses holds now."""
    _, path = tiny
    result = json.loads(path.read_text())
    ran = {"graphs": 1, "cuDNN": 1, "XLA": 0, "patterns": ["rmsnorm"]}
    result["environment"]["sm_version"] = 91
    result["norms"]["rms_norm/128x32"]["programs"][TRAINING]["plans"][OURS] = ran
    table = {"patterns": {"rmsnorm": {"a": 0.5, "b": 0.6}}}
    for sm_version, shown in (("91", "cuDNN; now XLA |"), ("92", "cuDNN |")):
        monkeypatch.setattr(learned, "table", lambda known=sm_version: {known: table})
        text = norm_tables.render_norms(result)
        assert [line for line in text.splitlines() if line.endswith(shown)]
        assert ("now XLA" in text) == (sm_version == "91")


def test_without_torch_its_sides_say_so(no_torch):
    case = few(TINY["rms_norm"])
    entry = norms.measure_norms([case], **QUICK)[case.name]
    assert entry["status"] == "timed"
    for found in entry["programs"].values():
        assert found["not_run"] == dict.fromkeys(norm_torch.SIDES, torch_graphs.MISSING)


@pytest.mark.parametrize("name", [*TINY])
@pytest.mark.skipif(not torch_graphs.installed(), reason="torch is not installed")
def test_torch_sides_run_again_and_again(name):
    """The backward, too; and what a forward writes in place are not JAX's arrays."""
    case = TINY[name]
    operands, dy = case.arrays(jax.random.key(0))
    before = jax.tree.map(np.asarray, operands)
    for program in PROGRAMS:
        call = norm_torch.program(norm_torch.EAGER, program, case, [(operands, dy)])
        first, second = call().arrays(), call().arrays()
        key = "x" if program == BACKWARD else "y"
        np.testing.assert_array_equal(np.float32(first[key]), np.float32(second[key]))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, operands))


# -- what is wrong or fails ------------------------------------------------------------------------


def with_gradient(function, factor):
    """The function with one gradient of x that is wrong by a factor."""

    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (x, None), lambda _, dx: ((factor * dx).astype(dx.dtype),))
    return lambda x, **others: function(x=scaled(x), **others)


def with_epsilon(case, epsilon):
    """The first formulation with another epsilon."""
    axes = {"rms_norm": ((1,), (0,), False), "batch_norm": ((0, 1, 2), (0, 1, 2), True)}
    norm = norm_formulations.Norm(*axes[case.name.partition("/")[0]], epsilon)
    return norm_formulations.plain(norm)


@pytest.mark.parametrize("name", ["rms_norm", "batch_norm"])
def test_a_formulation_that_is_wrong_is_noticed_and_not_timed(name, no_torch):
    case = few(TINY[name], off=with_epsilon(TINY[name], 0.1))
    entry = norms.measure_norms([case], **QUICK)[case.name]
    assert entry["status"] == "WRONG"
    for found in entry["programs"].values():
        assert found["status"] == "WRONG"
        assert re.fullmatch(r"errors \(norm, worst element\) of off: .*", found["reason"])
        assert "off" not in found["us"]
        assert {OURS, "two passes"} <= found["us"].keys()
    assert "WRONG: errors (norm, worst element) of off" in rendered({case.name: entry})


@pytest.mark.parametrize("side", [WHOLE, OURS])
def test_our_side_with_a_wrong_gradient_fails_the_command(side, no_torch, tmp_path, monkeypatch):
    case = few(TINY["layer_norm"])

    def ours(implementation):
        right = case.ours(implementation)
        wrong = (side == WHOLE) == (implementation == "cudnn")
        return with_gradient(right, 1.0625) if wrong else right

    mutated = dataclasses.replace(case, ours=ours)
    monkeypatch.setattr(norm_cases, "tiny_cases", lambda: [mutated])
    assert main(["bench", "--norms", "--tiny", "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())["norms"][case.name]["programs"]
    states = {program: entry["status"] for program, entry in found.items()}
    assert states == {FORWARD: "timed", TRAINING: "timed", BACKWARD: "WRONG"}
    assert f" of {side}: 0.06" in found[BACKWARD]["reason"]
    assert side not in found[BACKWARD]["us"]


def test_a_missing_gradient_is_wrong(no_torch):
    """That of the bias alone, which is a thousandth of all that the backward writes."""
    right = TINY["layer_norm"].exact

    def no_bias(bias, **others):
        return right(bias=jax.lax.stop_gradient(bias), **others)

    case = few(TINY["layer_norm"], off=no_bias)
    found = norms.measure_norms([case], **QUICK)[case.name]["programs"]
    assert [entry["status"] for entry in found.values()] == ["timed", "timed", "WRONG"]


def test_what_fails_leaves_the_others(no_torch):
    def broken(*operands, **named):
        raise ValueError("not today")

    base = few(TINY["rms_norm"])
    cases = [
        dataclasses.replace(base, name="whole", ours=lambda i: broken if i else base.ours(i)),
        dataclasses.replace(base, name="ours", ours=lambda i: base.ours(i) if i else broken),
        dataclasses.replace(few(base, odd=broken), name="formulation"),
        dataclasses.replace(base, name="exact", exact=broken),
        dataclasses.replace(base, name="good"),
    ]
    told = []
    entries = norms.measure_norms(cases, **QUICK | {"say": told.append})
    assert {name: entry["status"] for name, entry in entries.items()} == {
        "whole": "timed",
        "ours": "failed",
        "formulation": "timed",
        "exact": "failed",
        "good": "timed",
    }
    assert entries["exact"]["reason"] == "ValueError: not today"
    for found in entries["ours"]["programs"].values():
        assert found["reason"] == found["not_run"][OURS] == "ValueError: not today"
        assert WHOLE in found["us"]
    for program in PROGRAMS:
        found = entries["formulation"]["programs"][program]
        assert found["not_run"]["odd"] == "ValueError: not today"
        assert entries["whole"]["programs"][program]["not_run"][WHOLE] == "ValueError: not today"
    assert [line.split(":")[0] for line in told] == [*entries]
    text = rendered(entries)
    (line,) = (
        line for line in text.splitlines() if line.endswith(": failed: ValueError: not today")
    )
    assert line.startswith("- ours forward, ")
    assert ", exact: failed" in line
    assert "odd did not run: ValueError: not today" in text


# -- the cases -------------------------------------------------------------------------------------


def test_cases_have_the_shapes_that_are_asked_for():
    rows = ("8192x4096", "32768x8192", "16384x4096", "4096x16384", "1024x12288", "8192x128")
    images = ("256x56x56x64", "256x14x14x1024")
    rows += ("262144x128", "262144x64", "32768x768", "8192x1000")
    wanted = [f"{kind}/{shape}" for kind in ("rms_norm", "layer_norm") for shape in rows]
    kinds = ("batch_norm", "batch_norm-relu", "batch_norm-residual-relu")
    wanted += [f"{kind}/{shape}" for kind in kinds for shape in images]
    wanted += [f"instance_norm/{shape}" for shape in ("32x64x64x256", "64x32x32x128")]
    assert [*FULL] == wanted
    assert {name.partition("/")[0] for name in FULL} == {*TINY}
    assert {case.operands["x"].dtype for case in FULL.values()} == {"bfloat16"}


def test_bytes_are_those_of_each_array_once():
    rows, columns = 8192, 4096
    x, row, statistic = 2 * rows * columns, 2 * columns, 4 * rows
    case = FULL[f"rms_norm/{rows}x{columns}"]
    assert case.bytes(FORWARD) == 2 * x + row
    assert case.bytes(TRAINING) == 2 * x + row + statistic
    assert case.bytes(BACKWARD) == 3 * x + 2 * row + statistic
    case = FULL[f"layer_norm/{rows}x{columns}"]
    assert case.bytes(TRAINING) == 2 * x + 2 * row + 2 * statistic
    assert case.bytes(BACKWARD) == 3 * x + 3 * row + 2 * statistic
    x, channel = 2 * 256 * 56 * 56 * 64, 4 * 64
    case = FULL["batch_norm/256x56x56x64"]
    assert case.bytes(FORWARD) == 2 * x + 6 * channel  # running statistics are read and written
    assert case.bytes(BACKWARD) == 3 * x + 5 * channel
    case = FULL["batch_norm-residual-relu/256x56x56x64"]
    assert case.bytes(TRAINING) == 3 * x + 8 * channel + x // 16  # a bit an element
    assert case.bytes(BACKWARD) == 4 * x + 5 * channel + x // 16


# -- forward and backward as two programs ----------------------------------------------------------


@pytest.mark.parametrize("name", [*FULL])
def test_ours_keeps_statistics_alone(name):
    """Neither x again nor anything in another order; so do formulations by hand."""
    case = FULL[name]
    for function in (case.ours("cudnn"), case.ours(None), case.xla["by hand"]):
        half = halves(function, avals(case), case.learned)
        kept = jax.eval_shape(half.training, avals(case))[1]
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in kept)
        mask = case.operands["x"].aval.size // 8 if "relu" in name else 0
        ours = function is not case.xla["by hand"]
        assert 0 < size <= case.kept - mask * (not ours) + 4


def test_halves_compute_the_gradient_from_views_of_operands_and_results(key):
    def function(x, scale):
        moved = jnp.transpose(jnp.sin(x) * scale, (1, 0)).reshape(2, 2, 3)
        y = jnp.exp(moved)  # keeps a result, which is returned in another order
        z = jnp.sum(x)
        return {"y": jnp.transpose(y, (2, 0, 1)), "z": z}

    def total(x, scale):
        return jnp.sum(dy * function(x, scale)["y"]), None

    keys = jax.random.split(key, 3)
    operands = {
        "x": jax.random.normal(keys[0], (3, 4)),
        "scale": jax.random.normal(keys[1], ()),
    }
    dy = jax.random.normal(keys[2], (3, 2, 2))
    half = halves(function, operands, ("x",))
    trained = jax.jit(half.training)(operands)
    assert [leaf.shape for leaf in trained[1]] == [(3, 4)]  # cos(x); exp's result is there
    assert trained[0].keys() == {"y", "z"}
    got = jax.jit(half.backward)(half.saved(operands, trained), dy)
    want = jax.grad(lambda x: total(x, operands["scale"])[0])(operands["x"])
    np.testing.assert_allclose(got["x"], want, rtol=1e-6)
    assert got.keys() == {"x"}


def test_what_is_converted_again_is_not_kept(key):
    x = jax.random.normal(key, (8, 4), jnp.bfloat16)
    half = halves(
        lambda x: {"y": (x.astype(jnp.float32)) * x.astype(jnp.float32)}, {"x": x}, ("x",)
    )
    trained = half.training({"x": x})
    assert trained[1] == []
    got = half.backward(half.saved({"x": x}, trained), jnp.ones((8, 4)))["x"]
    np.testing.assert_array_equal(got, 2 * x)


# -- times -----------------------------------------------------------------------------------------


class Machine:
    """A host that issues calls and a device that runs them in order, by a clock of their own."""

    def __init__(self):
        self.now = self.free = 0.0

    def __call__(self):
        return self.now

    def function(self, issue, run):
        def call():
            self.now += issue
            self.free = max(self.now, self.free) + run
            return self

        return call

    def block_until_ready(self):
        self.now = max(self.now, self.free)
        return self


def queue(machine, functions, fill):
    read = machine.function(1e-6, fill) if fill else None
    fillers = dict.fromkeys(functions, read)
    return queued.times(functions, fillers, calls=20, rounds=9, seconds=1e9, clock=machine)


def test_behind_a_filler_the_time_is_the_devices_alone():
    machine = Machine()
    functions = {"slow": machine.function(30e-6, 3e-6), "quick": machine.function(5e-6, 500e-6)}
    found = queue(machine, functions, 1e-3)
    assert found["slow"].seconds == pytest.approx([3e-6] * 9)
    assert found["quick"].seconds == pytest.approx([500e-6] * 9)
    assert found["slow"].hidden
    assert found["quick"].hidden
    # What the host takes for the calls, and for the fillers before them.
    assert found["slow"].issued == pytest.approx(30e-6, rel=0.01)


def test_without_a_filler_or_with_too_short_a_one_the_host_is_told():
    for fill in (None, 10e-6):
        machine = Machine()
        found = queue(machine, {"f": machine.function(30e-6, 3e-6)}, fill)["f"]
        assert not found.hidden
        assert min(found.seconds) > 25e-6


def test_goals_are_those_of_the_figures():
    def program(ours, other, share):
        us = {s: dict.fromkeys(("median", "q1", "q3"), t) for s, t in ((OURS, ours), *other)}
        return {
            "status": "timed", "bytes": 8, "us": us, "best_xla": "one pass", "plans": {},
            "errors": {}, "of_limit": {OURS: share}, "tbytes_s": {},
        }  # fmt: skip

    slow, quick = ("one pass", 10.0), (norm_torch.COMPILED, 5.0)
    entries = {
        "a": {
            "status": "timed",
            "programs": {
                FORWARD: program(5.05, [slow, quick], 0.9),
                TRAINING: program(6.0, [slow, quick], 0.9),
                BACKWARD: program(6.0, [slow, quick], 0.86),
            },
        },
        "b": {"status": "timed", "programs": {BACKWARD: program(6.0, [slow], 0.84)}},
    }
    text = rendered(entries)
    assert "- backward within 15 % of the limit: 1 of 2; not: b, backward (0.84)" in text
    assert (
        "- forward not slower than the best other side: 1 of 2; not: a, "
        f"{TRAINING} (1.20 times torch.compile)" in text
    )


def test_each_case_is_written_when_it_is_done(tmp_path, monkeypatch, no_torch):
    """A run that is ended early leaves what it has measured."""
    case = few(TINY["rms_norm"])

    def ended(implementation):
        raise KeyboardInterrupt

    cases = [case, dataclasses.replace(case, name="later", ours=ended)]
    monkeypatch.setattr(norm_cases, "tiny_cases", lambda: cases)
    with pytest.raises(KeyboardInterrupt):
        run.run_norms(tmp_path, tiny=True)
    (path,) = tmp_path.glob("*.json")
    assert [*json.loads(path.read_text())["norms"]] == [case.name]


# -- the command -----------------------------------------------------------------------------------


def test_options_of_norms_go_together(capsys):
    for options in (["--norms", "--steps"], ["--norms", "f:g"], ["--norms", "--plot", "x.svg"]):
        assert main(["bench", *options]) == 1
        assert "GraphError" in capsys.readouterr().err
    assert main(["bench", "--norms", "--tiny", "--only", "no such"]) == 1
    assert "rms_norm/" in capsys.readouterr().err
    assert main(["bench", "--norms", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*FULL]


def test_normalizations_measured_anew_take_the_place_of_earlier_ones(tmp_path, no_torch):
    path, entry = tmp_path / "norms.json", {"status": "timed", "programs": {}}
    environment = sides.environment()
    path.write_text(
        json.dumps({"environment": environment, "limit": norms.LIMIT, "norms": {"a": entry}})
    )
    part = {"environment": environment, "limit": norms.LIMIT, "norms": {"b": entry}}
    run.merge(part, path)
    assert [*json.loads(path.read_text())["norms"]] == ["a", "b"]
    assert main(["bench", "--render", str(path)]) == 0


def test_the_drivers_version_is_read(tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb\nGCC 12\n")
    assert sides.driver(file) == "570.124.06"
    assert sides.driver(tmp_path / "none") == "none"


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["rms_norm/8192x128", "batch_norm/256x14x14x1024"])
def test_each_program_is_one_plan_whose_engine_is_told(name):
    case = FULL[name]
    function = case.ours("cudnn")
    half = halves(function, avals(case), case.learned)
    trained = jax.eval_shape(half.training, avals(case))
    read = (half.saved(avals(case), trained), trained[0]["y"])
    with jc.target("H200"):
        for program, operands in ((half.training, (avals(case),)), (half.backward, read)):
            held = sides.plans(program, operands)
            assert (held["graphs"], held["cuDNN"], held["XLA"]) == (1, 1, 0)
            assert all(engine.startswith("eng") for engine in held["engines"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*TINY])
def test_a_case_on_the_gpu_has_all_figures(name):
    case = TINY[name]
    entry = norms.measure_norms([case], **QUICK | {"calls": 20})[case.name]
    assert entry["status"] == "timed", entry
    for found in entry["programs"].values():
        assert WHOLE in found["us"]
        assert found["plans"][WHOLE]["cuDNN"] >= 1
        assert found["host_hidden"][OURS]
        assert 0 < found["us"][OURS]["median"] < 1000


def test_shown_normalizations_are_the_committed_ones():
    committed = RESULTS / "norms_h200.json"
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    shown = re.search(r"<!-- norms -->\n(.*?)\n<!-- /norms -->", readme, re.S)
    assert (shown is not None) == committed.exists()
    if shown is None:
        pytest.skip("no normalizations are measured yet")
    data = json.loads(committed.read_text())
    assert data["norms"].keys() == FULL.keys()
    assert {entry["status"] for entry in data["norms"].values()} == {"timed"}
    assert shown[1] == norm_tables.render_norms(data)
