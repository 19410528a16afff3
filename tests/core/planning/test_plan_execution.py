"""A plan that runs by itself, as far as that shows without a GPU: programs, checks, words."""

import dataclasses
import os
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_cases, conv_bias_relu
from helpers import product, relu

import jax_cudnn as jc
from jax_cudnn._core import auto, cuda_graphs, execution
from jax_cudnn._core.planning.execution_plan import CONSTANT, OPERAND, SLOT, UNBOUND

X = jax.ShapeDtypeStruct((64, 128), "float32")
IMAGE = jax.ShapeDtypeStruct((2, 64, 8, 8), "float32")


@jc.graph
def add(g, x, y):
    return g.add(x, y)


def plan(function, *avals, **options):
    with jc.target("H200"):
        return jc.plan(function.with_options(implementation="cudnn", **options), *avals)


def lowered(function, made):
    avals = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in made.spec.input_tensors]
    return function.trace(*avals).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    return [line for line in text.splitlines() if "stablehlo.custom_call @jax_cudnn" in line]


@pytest.mark.deviceless
def test_a_plan_is_the_same_program_as_its_function():
    made = plan(conv_bias_relu.function, *conv_bias_relu.avals)
    function = conv_bias_relu.function.with_options(implementation="cudnn")
    (want,) = calls(helpers.lowered(function, *conv_bias_relu.avals))
    (got,) = calls(lowered(execution.program(made), made))
    assert got.split("(", 1)[1].split(")", 1)[1] == want.split("(", 1)[1].split(")", 1)[1]
    assert execution.program(made) is execution.program(jc.Plan.deserialize(made.serialize()))


@pytest.mark.deviceless
def test_arrays_and_devices_that_do_not_fit_are_refused_in_words(monkeypatch):
    made = plan(add, X, X)
    x = jnp.ones(X.shape, X.dtype)
    with pytest.raises(jc.GraphError, match="expected 2 arrays, got 1"):
        made.execute(x)
    for wrong in (x[:32], x.astype("bfloat16"), 3.0):
        with pytest.raises(jc.GraphError, match="'y' does not fit the plan"):
            made.execute(x, wrong)
    with pytest.raises(jc.GraphTypeError, match="pinned"):
        jax.jit(made.execute)(x, x)
    with pytest.raises(jc.TargetError, match="executes on an NVIDIA GPU"):
        made.execute(x, x)
    monkeypatch.setattr(execution.compat, "is_cuda", lambda device: True)
    with pytest.raises(jc.TargetError, match="for another GPU"):
        made.execute(x, x)


@pytest.mark.deviceless
def test_a_result_takes_an_operands_memory():
    made = plan(add, X, X)
    pairs = execution._pairs(made, {"add.0::OUT_0": "y"})
    assert pairs == execution._pairs(made, {0: 1}) == ((1, 0),)
    text = lowered(execution.program(made, pairs), made)
    (call,) = calls(text)
    assert re.search(
        r"output_operand_alias<output_tuple_indices = \[0\],\s*operand_index = 1", call
    )
    (main,) = (line for line in text.splitlines() if "@main(" in line)
    assert main.count("tf.aliasing_output") == 1
    assert "tf.aliasing_output" in main.split("%arg1")[1]


@pytest.mark.deviceless
def test_what_cannot_run_in_place_is_refused_with_cudnns_rule():
    square = [jax.ShapeDtypeStruct((1, 64, 64), "float32")] * 2
    graphs = {
        "one node": (plan(jc.graph(lambda g, x: g.relu(g.exp(x))), X), {0: 0}),
        "already overwritten": (plan(product, *square), {0: 0}),
        "same shape and dtype": (plan(add, X, jax.ShapeDtypeStruct((1, 128), "float32")), {0: 1}),
        "XLA would copy": (plan(relu, IMAGE), {0: 0}),
        "each operand can hold": (plan(add, X, X), {0: "x", "add.0::OUT_0": "y"}),
    }
    for why, (made, pair) in graphs.items():
        with pytest.raises(jc.GraphError, match=why):
            made.execute(in_place=pair)


NOTE = cuda_graphs.NOTE
NATIVE = {"select_behavior_notes": NOTE}


ALTERED = [  # a row of the backward of attention, by kind, and what takes its place
    (OPERAND, lambda uid, *_: (uid, CONSTANT, 0, 0), "row [0-9]+: [0-9]+ 1 0 "),
    (SLOT, lambda uid, *_: (uid, CONSTANT, 0, 0), "has .* bytes, but row 11, of kind 3"),
    (OPERAND, lambda uid, kind, at, size: (uid, kind, at, size - 1), "leads to 131071"),
    (OPERAND, lambda uid, *row: (UNBOUND, *row), "tensor 1 of the plan is in no row"),
    (OPERAND, lambda uid, *row: (4, *row), "row 0: 4 0 0 "),
    (CONSTANT, lambda uid, *_: (uid, OPERAND, 0, 131072), "by value, .*row 9, of kind 0"),
    (SLOT, lambda uid, kind, at, size: (uid, kind, 528624, size), "row 11: "),
]


@pytest.mark.deviceless
@pytest.mark.parametrize(("kind", "alter", "words"), ALTERED)
def test_the_executor_compares_bindings_with_the_text_of_cudnn(kind, alter, words):
    case = next(case for case in all_cases() if case.name == "sdpa_backward_0_bfloat16")
    own = plan(case.function, *case.avals).only
    assert cuda_graphs._call_site(own, case.name)
    rows = [*own.bindings]
    place = next(i for i, row in enumerate(rows) if row[1] == kind)
    rows[place] = alter(*rows[place])
    with pytest.raises(jc.LibraryError, match=words):
        cuda_graphs._call_site(dataclasses.replace(own, bindings=tuple(rows)), case.name)


@pytest.mark.deviceless
def test_addresses_of_what_does_not_fit_or_lies_elsewhere_are_not_recorded(monkeypatch):
    made = plan(add, X, X, **NATIVE)
    own = dataclasses.replace(made.only, workspace_bytes=64)
    made = dataclasses.replace(made, segments=(dataclasses.replace(made.segments[0], plan=own),))
    recorded = []

    class Library:
        def JaxCudnnRecord(self, *given):
            recorded.append(given)

    class Gpu:
        local_hardware_id = 0

        def get_stream_for_external_ready_events(self):
            return 1

        def __eq__(self, other):
            return other is here

        def __hash__(self):
            return hash(here)

    x, here = jnp.ones(X.shape, X.dtype), jax.devices("cpu")[0]
    room = jnp.zeros(64, "uint8")
    far, far_room = (jax.device_put(y, jax.devices("cpu")[1]) for y in (x, room))
    monkeypatch.setattr(execution, "gpu_for", lambda *given: Gpu())
    monkeypatch.setattr(cuda_graphs, "_library", Library)
    monkeypatch.setattr(cuda_graphs, "_call_site", lambda *given: 1)
    for operands, results, workspace, words in (
        ([x, far], [x], room, "'y' is not on the GPU of the plan"),
        ([x, x], [far], room, "'add.0::OUT_0' is not on the GPU"),
        ([x, x], [x], far_room, "'workspace' is not on the GPU"),
        ([x], [x], room, "expected 2 operands, got 1"),
        ([x, x], [], room, "expected 1 results, got 0"),
        ([x, x[:3]], [x], room, "'y' does not fit"),
        ([x, np.ones(X.shape, X.dtype)], [x], room, "'y' does not fit"),
        ([x, x], [x.astype("bfloat16")], room, "'add.0::OUT_0' does not fit"),
        ([x, x], [x], room[:63], "the workspace is too small"),
        ([x, x], [x], None, "the workspace is too small"),
    ):
        with pytest.raises(jc.GraphError, match=words):
            made.populate_cuda_graph(1, operands, results, workspace)
    with pytest.raises(jc.GraphTypeError, match="not a CUDA graph"):
        made.populate_cuda_graph(None, [x, x], [x], room)
    greater = plan(jc.graph(lambda g, x, y: g.cmp_gt(x, y)), X, X, **NATIVE)
    with pytest.raises(jc.UnsupportedGraphError, match="more than its kernels"):
        greater.populate_cuda_graph(1, [], [])  # XLA converts its result
    rows = plan(conv_bias_relu.function, *conv_bias_relu.avals)
    unable = rows.select(next(r for r in rows.candidates if NOTE not in r.behavior_notes))
    with pytest.raises(jc.UnsupportedGraphError, match="no native CUDA graph"):
        unable.populate_cuda_graph(1, [], [])
    assert not recorded
    made.populate_cuda_graph(1, [x, 4096], [x], room)
    assert len(recorded) == 1


@pytest.mark.deviceless
def test_several_workers_plan_a_program_as_one_does(no_plans, monkeypatch):
    def program(x, w, b):
        return jc.ops.matmul(jc.ops.layer_norm(x, b, b), w, bias=b, activation="relu")

    avals = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((64, 768), (768, 768), (768,))]
    texts = []
    for cores in (1, 2):
        auto.clear()
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, count=cores: range(count))
        with jc.target("H200"):
            lowered = jax.jit(program).trace(*avals).lower(lowering_platforms=("cuda",))
        texts.append(lowered.as_text())
    assert texts[0] == texts[1]
    assert len(calls(texts[0])) == 2
