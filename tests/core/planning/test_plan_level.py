"""The plan level: candidates, one of them in the place of a plan's own, and plans as data."""

import copy
import importlib
import json
import pickle
import pkgutil
import random
import sys

import jax
import pytest
from cases import all_cases, conv_bias_relu
from helpers import product

import jax_cudnn as jc
from jax_cudnn._core import candidates
from jax_cudnn._core.graph import record
from jax_cudnn._core.graph.by_reference import ByReference, Derivative
from jax_cudnn._core.graph.node import Node, registry
from jax_cudnn._core.graph.spec import intern
from jax_cudnn._core.plans.collect import graphs
from jax_cudnn._core.plans.record import sealed

FLOATS = [jax.ShapeDtypeStruct((1, 64, 64), "float32")] * 2


@jc.graph
def two_products(g, a, b):
    return g.matmul(g.relu(g.matmul(a, b)), b)


def plan(function=conv_bias_relu.function, avals=conv_bias_relu.avals, **options):
    with jc.target("H200"):
        return jc.plan(function.with_options(**options), *avals)


@pytest.mark.deviceless
def test_candidates_say_what_heuristics_propose_without_building():
    made = plan()
    rows = made.candidates
    assert [row.index for row in rows] == [*range(len(rows))]
    own = [row for row in rows if {"A", "FALLBACK"} & {*row.modes}]
    assert rows[: len(own)] == tuple(own), "those of the plan's own heuristics come first"
    assert len(own) == made.candidate_count
    for mode in ("A", "B", "FALLBACK"):
        places = [row.modes[mode] for row in rows if mode in row.modes]
        assert sorted(places) == [*range(len(places))] != []
    assert rows[rows.chosen].name == made.engine
    assert {row.supported for row in rows} == {True, None}, "only the plan's own is built"
    assert pickle.loads(pickle.dumps(rows[0])) == rows[0]
    assert len({*rows, *made.candidates}) == len(rows)
    lines = str(rows).splitlines()[:-1]
    assert [line.split()[1] for line in lines if line.split()[0].endswith("*")] == [made.engine]


@pytest.mark.deviceless
def test_options_leave_candidates_out():
    wgrad = jc.graph(lambda g, dy, x: g.conv_wgrad(dy, x, out_dims=(64, 64, 1, 1)))
    images = [jax.ShapeDtypeStruct((8, 64, 28, 28), "bfloat16")] * 2
    rows = plan(wgrad, images, deterministic=True).candidates
    noisy = ["NONDETERMINISTIC" in row.numeric_notes for row in rows]
    assert noisy == [row.reason == "excluded by the options" for row in rows]
    assert any(noisy)
    large = [row for row in plan(max_workspace=0).candidates if row.workspace_bytes]
    assert large
    assert all("bytes of workspace" in row.reason and row.supported is False for row in large)


@pytest.mark.deviceless
def test_select_gives_the_plan_of_a_candidate():
    made = plan(heuristics="FALLBACK")
    rows = made.candidates
    assert made.select(rows.chosen) is made
    of_another_mode = next(row for row in rows if "FALLBACK" not in row.modes)
    for row in (rows[-1], of_another_mode):
        chosen = made.select(row.index)
        assert chosen == made.select(row)
        assert (chosen.engine, chosen.gpu) == (row.name, made.gpu)
        assert chosen.pinned == {"engine": row.engine, "knobs": row.knobs}
        assert plan(heuristics="FALLBACK", **chosen.pinned).engine == row.name
        assert [r.name for r in chosen.candidates] == [r.name for r in rows]
        assert chosen.candidates.chosen == row.index
    names = {row.name for row in rows}
    foreign = next(r for r in plan(product, FLOATS).candidates if r.name not in names)
    for wrong in (1000, foreign):
        with pytest.raises(jc.GraphError, match="no such candidate"):
            made.select(wrong)


@pytest.mark.deviceless
def test_the_fastest_of_the_first_candidates_is_taken(monkeypatch):
    """With a stand-in for the GPU, on which the first one fails."""
    made, ran = plan(), []

    def time(planned, arrays, device):
        ran.append(planned.engine)
        if len(ran) == 1:
            raise jax.errors.JaxRuntimeError("it does not run\nhere")
        return {3: 1e-6}.get(len(ran), 2e-6)

    monkeypatch.setattr(candidates, "time", time)
    monkeypatch.setattr(candidates.execution, "on_device", lambda planned, arrays, device: arrays)
    rows = made.time_candidates(limit=4)
    timed = [row.name for row in rows if row.seconds is not None]
    assert len(rows) == len(made.candidates) > 5
    assert timed == ran[1:]
    assert len(timed) == 4, "another takes the place of one that fails"
    (failed,) = (row for row in rows if row.name == ran[0])
    assert (failed.supported, failed.reason) == (False, "it does not run")
    ran.clear()
    assert made.autotune(limit=4).engine == timed[1] != made.engine
    ran.clear()
    monkeypatch.setattr(candidates, "tried", lambda planned, row: row)  # builds none
    assert made.autotune(limit=None) == made, "nothing ran"
    assert ran == [made.engine]


@pytest.mark.deviceless
def test_a_cut_graph_has_parts_with_candidates():
    made = plan(two_products, FLOATS)
    for call in (lambda: made.candidates, lambda: made.select(0)):
        with pytest.raises(jc.GraphError, match=r"plan\.parts"):
            call()
    assert [part.engine for part in made.parts] == [own.engine for own in made.execution_plans]
    for part in made.parts:
        assert part.candidates[part.candidates.chosen].name == part.engine
        assert part.select(len(part.candidates) - 1).spec.outputs == part.spec.outputs
    left = plan(product, FLOATS, precision="highest")
    with pytest.raises(jc.GraphError, match="not one cuDNN plan") as caught:
        _ = left.pinned
    assert caught.value.why == left.segments[0].reason != ""


def test_graphs_are_written_down_and_read():
    """Those of all cases, and derived ones with families and functions of scores."""
    x, scale = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((2, 64, 4, 64), (64,)))
    softcap = lambda score, b, h, q, kv: 20 * jax.numpy.tanh(score / 20)  # noqa: E731
    attend = lambda q, k, v: jc.ops.dot_product_attention(q, k, v, score_mod=softcap)  # noqa: E731
    specs = [case.function.trace(*case.avals)[1].spec for case in all_cases()]
    for function, avals in ((jc.ops.layer_norm, (x, scale, scale)), (attend, (x, x, x))):
        loss = lambda *arrays, f=function: f(*arrays).astype("float32").sum()  # noqa: E731
        found = graphs(jax.grad(loss), avals, {})
        assert len(found) == 2
        specs += found.values()
    for spec in specs:
        again = record.decoded(json.loads(json.dumps(record.encoded(spec))))
        assert again == spec
        assert intern(again) is intern(spec)


@pytest.mark.deviceless
def test_a_plan_is_read_as_it_was_written():
    for made in (plan(), plan(two_products, FLOATS), plan().select(1)):
        read = jc.Plan.deserialize(made.serialize())
        assert read == made
        assert read.site is None
        with pytest.raises(jc.GraphError, match=r"expected: [^$]* got: [^$]*plan the function"):
            _ = read.parts[0].candidates
        assert str(read.explain()) == str(made.explain())
        assert read.serialize() == made.serialize()


def test_odd_graphs_are_read_as_they_were_written():
    """Numbers that JSON lacks, an intermediate of another dtype than its neighbor, and nodes that
    are computed from the reference of others."""
    x = jax.ShapeDtypeStruct((8, 8, 8), "bfloat16")
    swish = jc.graph(lambda g, x: g.swish(x), implementation="xla")
    odd = jc.graph(lambda g, x: g.concatenate([g.max(x, -jax.numpy.inf), x * -0.0, x], axis=0))
    slope = jax.grad(lambda x: swish(x).astype("float32").sum())
    bend = jax.grad(lambda x: slope(x).astype("float32").sum())
    with jc.target("H200"):
        plans = [plan(odd, [x], implementation="xla"), *jc.plans(bend, x).values()]
    assert any("transpose_" in str(made.spec) for made in plans)
    for made in plans:
        json.dumps(made.to_json(), allow_nan=False)
        assert jc.Plan.deserialize(made.serialize()) == made


def edited(content, path, value):
    """Serialized content with one value changed."""
    data = json.loads(content)
    *most, last = path
    place = data
    for key in most:
        place = place[key]
    place[last] = value
    return resealed(data)


def resealed(data):
    data.pop("checksum", None)
    return sealed(json.dumps(data).encode())


GRAPH = ("graph", 1)  # its fields; each tuple is ["tuple", [...]]
TENSOR = (*GRAPH, "tensors", 1, 0, 1)
OWN = ("segments", 0, "plan")
DAMAGE = [
    ((*TENSOR, "shape"), ["tuple", ["64", 128]], "Tensor.shape"),
    ((*TENSOR, "name"), "other", "no tensor"),
    ((*TENSOR, "dtype"), "float16", "BFLOAT16"),
    ((*TENSOR, "shape"), ["tuple", [8, 64, 28, 29]], "conv_fprop.0"),
    ((*TENSOR, "literal"), "half", "cannot be read"),
    (("gpu",), "\ud800", "surrogates"),
    (("name",), 5, "Plan.name"),
    (("more",), 5, "those of this plan"),
    (("more",), [0] * 2**20, "too large"),
    ((*OWN, "workspace_bytes"), True, "workspace_bytes"),
    ((*OWN, "bindings"), [["1", 0, 0, 0]], "bindings"),
    ((*OWN, "scalars"), 3, "cannot be read"),
    (("graph",), ["os:system", {}], "cannot be read"),
    (("format",), 99, "another format"),
]


@pytest.mark.deviceless
def test_bytes_that_are_no_plan_are_refused():
    good = plan().serialize()
    for i in range(0, len(good), 7):
        with pytest.raises(jc.GraphError, match=r"damaged|not a serialized|format|checksum"):
            jc.Plan.deserialize(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
    for wrong in (b"", b"\xff", b'{"kind": 1}', good[:-1], b"[" * 100_000):
        with pytest.raises(jc.GraphError, match="not a serialized plan"):
            jc.Plan.deserialize(wrong)
    for path, value, words in DAMAGE:
        with pytest.raises(jc.GraphError) as caught:
            jc.Plan.deserialize(edited(good, path, value))
        assert words in str(caught.value), (path, value)


def places(data):
    """Each value inside: its holder, and its key there."""
    for key, value in [*(data.items() if isinstance(data, dict) else enumerate(data))]:
        yield data, key
        if isinstance(value, (dict, list)):
            yield from places(value)


ODD = (None, True, -1, 10**30, 0.5, "", "x", "\ud800", [], {}, ["relu", {}], ["float", "nan"])


@pytest.mark.deviceless
def test_bytes_with_random_changes_are_refused_or_are_a_plan():
    """One that can be written, shown and explained."""
    x = jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16")
    softcap = lambda score, b, h, q, kv: 20 * jax.numpy.tanh(score / 20)  # noqa: E731
    attend = lambda q: jc.ops.dot_product_attention(q, q, q, score_mod=softcap).sum()  # noqa: E731
    with jc.target("H200"):
        plans = [plan(two_products, FLOATS), *jc.plans(jax.grad(attend), x).values()]
    written, taken = [each.serialize() for each in plans], 0
    for seed in range(300):
        rng = random.Random(seed)
        data = json.loads(rng.choice(written))
        found = [*places(data)]
        (holder, key), (other, its) = rng.choices(found, k=2)
        holder[key] = rng.choice([*ODD, *[copy.deepcopy(other[its])] * len(ODD)])
        if rng.random() < 0.2:
            del holder[key]
        try:
            read = jc.Plan.deserialize(resealed(data))
        except jc.GraphError:
            continue
        taken += 1
        written_again = {**json.loads(read.serialize()), "jax_cudnn": data["jax_cudnn"]}
        assert {**written_again, "checksum": ""} == {**data, "checksum": ""}
        assert repr(read)
        assert str(read.explain())
    assert 0 < taken < 100


def test_reading_a_graph_runs_nothing_but_its_classes():
    for title in ("os:system", "_core.package:version", "bench.torch_graphs:X"):
        with pytest.raises(ValueError, match=title):
            record.decoded([title, {}])
    assert "jax_cudnn.bench.torch_graphs" not in sys.modules


def test_every_node_can_be_read():
    for module in pkgutil.walk_packages(jc.ops.__path__, "jax_cudnn.ops."):
        importlib.import_module(module.name)
    nodes, new = set(), {Node}
    while new := {cls for node in new for cls in node.__subclasses__()} - nodes:
        nodes |= new
    nodes -= {ByReference, Derivative}
    ours = {cls for cls in nodes if cls.__module__.startswith("jax_cudnn.")}
    for cls in ours:
        method = getattr(cls, "method", None)  # none: a base of others
        named = record.VALUES.get(cls.__module__.removeprefix("jax_cudnn."), "").split()
        known = registry().get(method) is cls if isinstance(method, str) else method is None
        assert known or cls.__name__ in named, cls
