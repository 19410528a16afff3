"""plan and support: which graphs a function holds, for which GPU, and what cuDNN makes of them."""

import dataclasses
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import lowered

import jax_cudnn as jc
from jax_cudnn._core import compat
from jax_cudnn._core.cuda import CudaDevice
from jax_cudnn._core.planning import planner, progress
from jax_cudnn._core.planning.deviceless import profiles
from jax_cudnn._core.planning.execution_plan import ExecutionPlan
from jax_cudnn._core.planning.unsupported import unsupported
from jax_cudnn._core.plans import collect, support
from jax_cudnn._core.reasons import Kind, Reason

H200, A100 = profiles.get("H200"), profiles.get("A100")
X = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)


@jc.graph
def relu(g, x, slope=None):
    return g.relu(x, negative_slope=slope)


@jc.graph
def double(g, x):
    return g.add(x, x)


@pytest.fixture
def plans(made_up_plans, monkeypatch):
    """Planning replaced by a stand-in: the names and GPUs that were asked for, once each as if
    plans were kept. ``double`` has no engine on an A100."""
    asked = []

    def plan(spec, site, name):
        if (name, site) not in asked:
            asked.append((name, site))
        if name == "double" and site == A100:
            found = {"engine 1": Reason("not supported (CUDNN_STATUS)", Kind.OTHER)}
            raise unsupported(spec, {**found, "engine 2": Reason("a shape is wrong", Kind.SHAPE)})
        kind = getattr(site, "device_name", "NVIDIA H200")
        return ExecutionPlan("{}", "eng0", 91900, kind, 3 << 20, 0, (), (), b"", 7)

    monkeypatch.setattr(planner, "plan", plan)
    monkeypatch.setattr(support, "_versions", lambda gpus: ("9.19.0", "1.28.0"))
    return asked


def over_a_mesh(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("d",))
    return jax.shard_map(double, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))(x)


HIDING_PLACES = {
    "called": lambda x: double(relu(x)),
    "jit": jax.jit(lambda x: double(relu(x))),
    "scan": lambda x: jax.lax.scan(lambda c, _: (double(c), None), relu(x), None, length=3)[0],
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, double, relu, x),
    "grad": jax.grad(lambda x: double(relu(x)).sum().astype(float)),
    "shard_map": lambda x: over_a_mesh(relu(x)),
}


@pytest.mark.parametrize("where", HIDING_PLACES)
def test_graphs_are_found_wherever_a_program_holds_them(where):
    found = collect.graphs(HIDING_PLACES[where], (X,), {})
    if where == "grad":  # what double computes is not used
        assert found.keys() == {"relu", "relu (backward)", "double (backward)"}
    else:
        assert found.keys() == {"double", "relu"}
        shape = (4, 16) if where == "shard_map" else (8, 16)  # the shape of one device
        assert found["double"].input_tensors[0].shape == shape


def test_pytrees_statics_and_other_python_values_reach_the_function():
    seen = {}

    def fn(parameters, mode, size, *, slope, bias):
        seen.update(mode=mode, size=size, slope=slope)
        return relu(parameters["x"][:size] + bias, slope)

    arguments = ({"x": X}, "mode", 4)
    given = {"slope": 0.5, "bias": np.float32(2)}
    (spec,) = collect.graphs(fn, arguments, given).values()
    assert seen == {"mode": "mode", "size": 4, "slope": 0.5}
    assert (spec.input_tensors[0].shape, spec.calls[0].node.negative_slope) == ((4, 16), 0.5)
    static = jax.jit(fn, static_argnums=(1, 2), static_argnames=("slope",))
    assert list(collect.graphs(static, arguments, given)) == ["relu"]
    three = collect.graphs(lambda x: relu(relu(x)) + relu(x, 0.5) + relu(x[:4]).sum(), (X,), {})
    assert list(three) == ["relu", "relu 2", "relu 3"]  # equal ones are one


def test_function_without_one_plannable_graph_is_told(plans):
    with pytest.raises(jc.GraphError, match=r"contains no cuDNN graph(.|\n)*jax_cudnn\.ops"):
        jc.plan(lambda x: x.sum(), X)
    with pytest.raises(jc.GraphError, match=r"ShapeDtypeStruct[^$]*\(8, 64\)"):
        jc.plan(lambda x: relu(x), (8, 64))
    with pytest.warns(UserWarning, match="plans nothing"):
        jc.warmup(relu, X)
    symbolic = jax.ShapeDtypeStruct((jax.export.symbolic_shape("batch")[0], 4), jnp.float32)
    with pytest.raises(jc.GraphError, match="relu: symbolic dimensions"):
        jc.plan(jax.jit(relu), symbolic)
    with pytest.raises(jc.GraphError, match=r"contains 2 graphs(.|\n)*jax_cudnn\.plans"):
        jc.plan(HIDING_PLACES["called"], X)
    assert plans == []


def test_wrong_gpus_are_told(plans):
    for gpus in (jax.devices("cpu"), [], "H300", 1):
        with pytest.raises(jc.TargetError, match="A100, B200, H100, H200"):
            jc.plan(relu, X, gpus=gpus)
    with pytest.raises(jc.TargetError, match="did you mean 'H200'"):
        jc.target("nvidia h-200")
    with pytest.raises(jc.TargetError, match="what to do: on a machine with the GPU"):
        jc.target("H20")  # a GPU of its own
    with pytest.raises(jc.TargetError, match="two different GPUs"):
        jc.support(relu, X, gpus=["H200", dataclasses.replace(A100, name="H200")])
    assert plans == []


def test_gpus_are_one_or_several_names_profiles_or_devices(plans, monkeypatch):
    for gpus in ("A100", A100):
        assert jc.plan(relu, X, gpus=gpus).keys() == {"A100"}
    devices = jax.devices("cpu")
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(compat, "is_cuda", lambda device: True)
    assert jc.support(relu, X, gpus=[*devices, "H200"]).gpus == ("cpu", "H200")
    assert plans == [("relu", gpu) for gpu in (A100, CudaDevice(0), H200)]


def test_plans_are_tables_by_gpu(plans):
    found = jc.plans(HIDING_PLACES["called"], X, gpus=["H200", "A100"])
    assert found["nvidia h200"]["double"].gpu == "H200"
    assert [line.split() for line in str(found["H200"]).splitlines()] == [
        ["graph", "operands", "runs", "on", "MB", "roofline", "us"],
        ["relu", "bf16[8,16]", "cuDNN", "0.00", "0.0"],
        ["double", "bf16[8,16]", "cuDNN", "0.00", "0.0"],
        ["total", "2", "cuDNN,", "0", "XLA", "0.00", "0.0"],
    ]
    assert str(found.explain()).count("double on") == 2
    for where, names in ((found, "'H200', 'A100'"), (found["H200"], "'relu', 'double'")):
        with pytest.raises(KeyError, match=names):
            where["matmul"]
    assert ["double", "bf16[8,16]", "XLA"] in [line.split()[:3] for line in str(found).splitlines()]


@pytest.mark.parametrize("implementation", ["split", "xla"])
def test_roofline_is_that_of_the_products_factors_whatever_runs_them(implementation, plans):
    @jc.graph(implementation=implementation)
    def product(g, a, b, mask):
        return g.binary_select(g.matmul(a, b), a, mask)

    square = jax.ShapeDtypeStruct((1, 4096, 4096), "bfloat16")
    mask = jax.ShapeDtypeStruct(square.shape, "bool")
    found = jc.plans(product, square, square, mask, gpus=["H200"])["H200"]
    explained = str(found["product"].explain())
    assert "reads 83.9 MB, writes 33.6 MB" in explained
    assert "at least 128.4 us" in explained  # 2 * 4096**3 / (132 SMs * 4096 * 1.98 GHz)
    assert str(found).splitlines()[-1].split()[-1] == "128.4"


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("run", [jc.warmup, jc.plans, lowered])
def test_progress_counts_the_graphs_of_a_program(run, terminal, plans, monkeypatch, caplog, capsys):
    monkeypatch.setattr(progress, "_SILENT", 0.005)
    monkeypatch.setattr(progress, "_REDRAW", 0.005)
    monkeypatch.setattr(progress, "_on_terminal", lambda: terminal)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(1))

    def slow(spec, site, name):
        with progress.planning(name), progress.planning("inside of a measurement"):
            time.sleep(0.3)
        return ExecutionPlan("{}", "eng0", 91900, "NVIDIA H200", 0, 0, (), (), b"", 7)

    monkeypatch.setattr(planner, "plan", slow)
    with jc.target("H200"):
        run(lambda x: double(relu(x)), X)
    total, bar = ("", "## graph 2") if run is lowered else (" of 2", "[##########          ]")
    shown = capsys.readouterr().err if terminal else caplog.text
    assert all(f"graph {number}{total}" in shown for number in (1, 2))
    assert (bar in shown, shown.endswith("\x1b[K")) == (terminal, terminal)
    assert "inside" not in shown


def test_progress_counts_graphs_that_are_planned_at_once(monkeypatch, caplog):
    monkeypatch.setattr(progress, "_SILENT", 0.005)
    with progress.at_once(3, 2) as done:
        time.sleep(0.1)
        done(None)
        time.sleep(0.1)
    shown = "planning for cuDNN: graph %d of 3 (2 at once)"
    assert all(shown % number in caplog.text for number in (1, 2))


def test_support_is_a_table_of_graphs_and_gpus_text_and_data(plans):
    found = jc.support(HIDING_PLACES["called"], X, gpus=["H200", "A100"])
    assert (found.graphs, found.gpus, len(found)) == (("relu", "double"), ("H200", "A100"), 4)
    assert [bool(part) for part in (found, found["H200"], found["A100"])] == [False, True, False]
    row = found["A100", "double"]
    assert (row.supported, row.engine, row.workspace_bytes) == (False, None, None)
    assert row.reason == "a shape is wrong"  # an engine without an explanation says less
    assert [line.split() for line in str(found).splitlines()][2:5] == [
        ["relu", "A100*", "eng0", "3.0", "MiB", "7"],
        ["double", "H200", "eng0", "3.0", "MiB", "7"],
        ["double", "A100*", "none", "[1]"],
    ]
    assert "[1]: a shape is wrong" in str(found)
    assert "| double | A100* | none [1] |" in found.to_markdown()
    assert json.loads(json.dumps(found.to_json()))["rows"][0]["workspace_bytes"] == 3 << 20


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"totalGlobalMem": "much"}, "does not describe a GPU"),
        ({"totalGlobalMem": -1}, "does not describe a GPU"),
        ({"multiProcessorCount": "many"}, "cuDNN does not take the profile 'other'"),
        ({"deviceVer": 300}, "cuDNN does not take the profile 'other'"),
    ],
)
def test_a_profile_that_cudnn_does_not_take_is_told(change, words):
    properties = {**json.loads(H200.properties_json), "deviceName": "other", **change}
    with pytest.raises(jc.TargetError, match=words):
        jc.plan(relu, X, gpus=[jc.Profile.from_json(json.dumps(properties))])
