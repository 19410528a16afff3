"""The bench of Flax's models: all sides train alike, and figures are what they are called."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_cudnn as jc
import jax_cudnn.flax as jnn
from jax_cudnn.__main__ import main
from jax_cudnn.bench.attention.case import LIMIT
from jax_cudnn.bench.flax import cases as flax_cases
from jax_cudnn.bench.flax import gradients, measure, profile
from jax_cudnn.bench.flax import tables as flax_tables
from jax_cudnn.bench.flax.case import step
from jax_cudnn.bench.flax.tables import CUDNN, OURS, PLAIN
from jax_cudnn.bench.run import RESULTS

pytestmark = pytest.mark.wide

FULL = {case.name: case for case in flax_cases.flax_cases()}
TINY = {case.name: case for case in flax_cases.tiny_cases()}
ENVIRONMENT = {
    "device": "NVIDIA H200", "date": "2026-01-01", "cudnn": "1", "jax": "2",
    "nvidia-cudnn-frontend": "3", "flax": "4", "sm_version": 90,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """What ``bench --flax --tiny --profile`` writes, with its exit status."""
    folder = tmp_path_factory.mktemp("flax")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        status = main(["bench", "--flax", "--tiny", "--profile", "--out", str(folder)])
    (path,) = folder.glob("flax_*-tiny.json")
    return status, path


def abstract(case):
    return nnx.eval_shape(lambda: case.make(PLAIN))


def side(ms, losses=(3.0, 2.5, 2.0)):
    figures = dict.fromkeys(("median", "min", "max", "q1", "q3"), ms)
    return {
        "ms": figures, "per_s": 1000.0, "mfu": 0.4, "memory_gb": 10.0, "custom_calls": 5,
        "losses": list(losses), "rounds": 7, "host_ms": 1.0,
        "gradients": {"median": 0.01, "off": 0.0, "least": 0.99, "at": "head.kernel"},
    }  # fmt: skip


def rendered(sides, **more):
    entry = {
        "what": "a model", "status": "timed", "unit": "images", "items": 256, "known_ms": {},
        "goal_ms": None, "parameters": 25_000_000, "flops": 6_000_000_000_000, "not_run": {},
        "swapped": {"ours": {"Conv": 53}, "kept": {"Embed: there is none": 1}}, "sides": sides,
    }  # fmt: skip
    return flax_tables.render_flax(
        {"environment": ENVIRONMENT, "limit": LIMIT, "flax": {"model/1": entry | more}}
    )


# -- all of it, with small shapes ------------------------------------------------------------------


def test_all_sides_train_and_all_figures_are_there(tiny):
    status, path = tiny
    result = json.loads(path.read_text())
    assert status == 0, result["flax"]
    assert {"flax", "optax", "jax", "date"} <= result["environment"].keys()
    assert [*result["flax"]] == [*TINY]
    for name, entry in result["flax"].items():
        assert entry["status"] == "timed", entry
        assert entry["sides"].keys() == {OURS, PLAIN}
        assert entry["not_run"].keys() == ({CUDNN} if TINY[name].attends else set())
        assert entry["swapped"]["ours"]["Linear"] >= 1
        assert ("MultiHeadAttention" in entry["swapped"]["ours"]) == TINY[name].attends
        for name, found in entry["sides"].items():
            seconds = found["ms"]["median"] / 1e3
            assert found["per_s"] == pytest.approx(entry["items"] / seconds, rel=1e-3)
            peak = LIMIT["tflops"]["bfloat16"] * 1e12
            assert found["mfu"] == pytest.approx(entry["flops"] / seconds / peak, rel=1e-3)
            assert found["losses"][-1] < found["losses"][0]
            if name != OURS:
                assert found["gradients"]["median"] < 0.1
                assert not gradients.wrong(found["gradients"])
            # Parameters and one or two states of the optimizer, in float32, at least.
            assert found["memory_gb"] * 1e9 > 2 * 4 * entry["parameters"]
            assert found["custom_calls"] == 0  # references run
            shares = [kernel["ms"] for kernel in found["profile"]["kernels"]]
            assert shares == sorted(shares, reverse=True)
            assert sum(shares) <= found["profile"]["busy_ms"] * 1.01
            assert any(kernel["of"] for kernel in found["profile"]["kernels"])


def test_all_is_rendered(tiny, capsys):
    _, path = tiny
    assert main(["bench", "--render", str(path)]) == 0
    text = capsys.readouterr().out
    for name, entry in json.loads(path.read_text())["flax"].items():
        for found in entry["sides"]:
            assert f"| {name} | {found} |" in text
        layers = ", ".join(f"{n} {kind}" for kind, n in entry["swapped"]["ours"].items())
        assert f"{name}: {layers} swapped, 0 custom calls" in text


# -- the models ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions", "multiply_adds"),
    [
        ("resnet50/batch-256", 25.557, 4.089e9),  # torchvision's figures of ResNet-50
        ("vit-b-16/batch-256", 86.566, 17.47e9),
        ("gpt2-124m/32x1024", 124.48, 1024 * 133.0e6),
        ("gpt2-124m/4x8192", 129.98, 8192 * 199.07e6),
    ],
)
def test_models_are_of_the_published_size(name, millions, multiply_adds):
    case = FULL[name]
    model = abstract(case)
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert parameters / 1e6 == pytest.approx(millions, rel=1e-4)
    examples = jax.eval_shape(case.batch, jax.random.key(0))[0].shape[0]
    assert case.multiply_adds(model) / examples == pytest.approx(multiply_adds, rel=1e-3)


@pytest.mark.parametrize("name", TINY)
def test_multiply_adds_are_those_of_the_traced_model(name):
    """All products and convolutions of the forward; those of attention are full where it runs."""
    case = TINY[name]
    model = abstract(case)
    inputs, _ = jax.eval_shape(case.batch, jax.random.key(0))
    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, inputs)
    counted = sum(products(eqn) for eqn in equations(jaxpr.jaxpr))
    if "gpt2" in name:  # of which the half is hidden
        batch, tokens = inputs.shape
        counted -= len(model.blocks) * batch * tokens**2 * model.tokens.features
    assert case.multiply_adds(model) == counted


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            [*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from equations(getattr(inner, "jaxpr", inner))


def products(eqn):
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return eqn.outvars[0].aval.size * int(jnp.prod(jnp.array([shape[i] for i in contracted])))
    if eqn.primitive.name == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        weight = eqn.invars[1].aval
        return eqn.outvars[0].aval.size * (weight.size // weight.shape[features])
    return 0


def test_a_goal_and_the_figures_known_before_are_of_sides_that_run():
    for case in FULL.values():
        assert case.known.keys() <= {*case.sides}
        assert case.goal < min(case.known.values())


# -- verdicts, profiles and tables -----------------------------------------------------------------


def test_other_losses_than_flaxs_are_wrong(monkeypatch):
    found = {OURS: side(1.0, (3.0, 2.9, 2.0)), PLAIN: side(1.0)}
    verdict = measure._verdict(found, {})
    assert verdict["status"] == "WRONG"
    assert "[3.0, 2.9, 2.0]" in verdict["reason"]
    found[OURS]["losses"] = [3.001, 2.501, 2.1]
    assert measure._verdict(found, {}) == {"status": "timed"}
    found[OURS]["losses"] = [float("nan"), 2.5, 2.0]
    assert measure._verdict(found, {})["status"] == "WRONG"


def test_what_is_compared_with_nothing_has_failed():
    verdict = measure._verdict({OURS: side(1.0)}, {PLAIN: "out of memory"})
    assert verdict["status"] == "failed"
    assert "no other side ran" in verdict["reason"]


@pytest.mark.parametrize(
    "found",
    [{"off": 0.2}, {"least": 0.0}, {"least": float("nan")}, {"off": float("nan")}],
)
def test_gradients_that_are_off_are_wrong(found):
    assert not gradients.wrong(side(1.0)["gradients"])
    assert gradients.wrong(side(1.0)["gradients"] | found)


def without_gradient(layer, x):
    """What the layer computes, of parameters that do not learn."""
    kept = nnx.clone(layer)
    nnx.update(kept, jax.tree.map(jax.lax.stop_gradient, nnx.state(kept)))
    return nnx.Conv.__call__(kept, x)


BROKEN = {  # what the losses of the first steps do not show
    "vit/tiny": (jnn.Conv, without_gradient),  # one layer of many
    "gpt2/tiny": (jnn.MultiHeadAttention, lambda layer, x, *_, **__: jnp.zeros_like(x)),
    "resnet/tiny": (jnn.Conv, lambda layer, x: -3 * nnx.Conv.__call__(layer, x)[::-1]),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", BROKEN)
def test_a_model_with_broken_layers_is_wrong(name, monkeypatch):
    layer, call = BROKEN[name]
    monkeypatch.setattr(layer, "__call__", call)
    found = measure.measure_flax([TINY[name]], seconds=0.0, calls=1, rounds=1)[name]
    assert found["status"] == "WRONG", found
    assert "are not those of" in found["reason"]


def test_without_ours_a_case_has_failed_with_the_reason(monkeypatch):
    def refuse(model):
        raise ValueError("no such layer")

    monkeypatch.setattr(measure, "accelerated", refuse)
    case = TINY["gpt2/tiny"]
    monkeypatch.setattr(type(case), "sides", (OURS,))
    entry = measure.measure_flax([case], seconds=0.0, calls=1, say=str)[case.name]
    assert entry["status"] == "failed"
    assert "no such layer" in entry["reason"]
    assert entry["sides"] == {}


def test_kernels_are_summed_by_step_and_kind():
    text = """
  %loop_add_fusion.3 = bf16[8]{0} fusion(%a), metadata={op_name="jit(step)/jvp(Net)/add" line=3}
  ROOT %gemm_fusion_dot.1 = bf16[8,8]{1,0} fusion(%b), kind=kCustom
"""
    known = profile.operations(text)
    assert known == {"loop_add_fusion_3": "jvp(Net)/add", "gemm_fusion_dot_1": ""}
    events = [("loop_add_fusion_3", 1e6), ("loop_add_fusion_3", 3e6)]
    events += [("gemm_fusion_dot_1", 1e6), ("sm90_xmma_fprop_implicit_gemm_bf16", 10e6)]
    events += [("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 6e6), ("MemcpyD2D", 2e6)]
    events += [("nvjet_tst_128x256", 4e6)]
    found = profile.summed(events, 2, known)
    assert found["busy_ms"] == 13.5
    assert found["kinds_ms"] == {
        "convolutions": 5.0, "attention": 3.0, "XLA's fusions": 2.0, "products": 2.0,
        "copies": 1.0, "XLA's products": 0.5,
    }  # fmt: skip
    assert found["kernels"][0]["ms"] == 5.0
    added = next(k for k in found["kernels"] if k["kernel"] == "loop_add_fusion_3")
    assert added == {"kernel": "loop_add_fusion_3", "calls": 1.0, "ms": 2.0, "of": "jvp(Net)/add"}


def test_a_profiler_that_fails_costs_no_figures(monkeypatch):
    def refuse(call, program):
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(measure, "profile", refuse)
    found = measure._profiled(measure.Training(None, None, ()))
    assert found == {"reason": "RuntimeError: no CUPTI"}
    text = rendered({OURS: side(40.0) | {"profile": found}}, goal_ms=32.0)
    assert "model/1: 25% above its goal\n" in text + "\n"


def test_custom_calls_are_counted():
    text = 'a = custom-call(), custom_call_target="jax_cudnn", b\nc = custom_call_target="other"\n'
    assert len(measure.custom_calls(text)) == 1


def test_a_missed_goal_says_what_remains():
    profiled = {"busy_ms": 39.0, "kinds_ms": {"convolutions": 30.0, "XLA's fusions": 9.0}}
    sides = {OURS: side(40.0) | {"profile": profiled}, PLAIN: side(50.0)}
    text = rendered(sides, goal_ms=32.0, known_ms={PLAIN: 37.9})
    assert "model/1: 25% above its goal; of 39 ms of kernels: convolutions 30" in text
    assert "| model/1 | Flax | 50 (50 to 50) | 1000 images | 40.0% | 10 | 1.25 |  | 37.9 |" in text
    assert "model/1: 53 Conv swapped, 5 custom calls; not swapped: 1 Embed: there is none" in text
    assert "above its goal" not in rendered(sides, goal_ms=41.0)


def test_what_did_not_run_is_told():
    text = rendered({OURS: side(1.0)}, not_run={CUDNN: "out of memory"})
    assert f"model/1, {CUDNN} did not run: out of memory" in text


# -- on a GPU, and without one ---------------------------------------------------------------------


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["resnet/tiny", "gpt2/tiny"])
def test_a_step_plans_on_cudnn(name):
    case = TINY[name]
    model = measure.accelerated(case.make(PLAIN))[0]
    graphdef, state = nnx.split((model, nnx.Optimizer(model, case.optimizer, wrt=nnx.Param)))
    batch = case.batch(jax.random.key(0))

    def pure(state, batch):
        trained = nnx.merge(graphdef, state)
        return step(*trained, *batch), nnx.state(trained)

    with jc.target("H200"):
        plans = jc.plans(pure, state, batch)
    engines = [segment.engine for plan in plans.values() for segment in plan.segments]
    print(engines)
    assert len({*engines} - {"XLA"}) > 1


@pytest.mark.gpu
def test_tiny_models_train_on_the_gpu():
    found = measure.measure_flax(TINY.values(), seconds=0.0, calls=1, profiled=True)
    for case in TINY.values():
        entry = found[case.name]
        assert entry["status"] == "timed", entry
        assert entry["sides"].keys() == {*case.sides}, entry["not_run"]
        assert all(each["profile"]["busy_ms"] > 0 for each in entry["sides"].values())


def test_shown_models_are_the_committed_ones():
    committed = RESULTS / "flax_h200.json"
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    shown = re.search(r"<!-- flax -->\n(.*?)\n<!-- /flax -->", readme, re.S)
    assert shown is not None
    data = json.loads(committed.read_text())
    assert data["flax"].keys() == FULL.keys()
    assert {entry["status"] for entry in data["flax"].values()} == {"timed"}
    assert shown[1] == flax_tables.render_flax(data)
