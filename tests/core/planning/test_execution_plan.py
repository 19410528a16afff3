"""From the frontend's blob to an ExecutionPlan's plain rows, its text and its attributes."""

import itertools
import json
import math
import os
import struct
import zipfile
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core import auto, job
from jax_cudnn._core.cuda_graphs import _new_call_site
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.planning import execution_plan as plans
from jax_cudnn._core.planning import planner
from jax_cudnn._core.planning.deviceless import profiles
from jax_cudnn._core.planning.execution_plan import (
    CONSTANT,
    OPERAND,
    RESULT,
    SLOT,
    UNBOUND,
    VIEW,
    ExecutionPlan,
    decode,
    uids,
)
from jax_cudnn._core.planning.stored import check_entry, key_text, plan_of
from jax_cudnn._core.store.archive import export, import_
from jax_cudnn._core.store.cache import PlanCache
from jax_cudnn._core.store.entry import Content, digest, encode
from jax_cudnn._core.store.entry import decode as read_entry


@jc.graph
def scaled(g, x, b):
    return g.relu(x * 0.5 + b)


SPEC = scaled.trace(jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros((1, 8), jnp.bfloat16))[1].spec
X, B, OUT, HALF = uids(SPEC).values()
TEXT = (
    '{"cudnnVersion":91900,"GPUProfile":'
    '{"deviceName":"NVIDIA H200","pciDeviceId":7,"totalGlobalMem": 15}}'
)
BLOB = {
    "cudnn_backend_data": TEXT,
    "variant_pack_uids": [X, B, OUT, HALF],
    "variant_pack_replacements": {},
    "pass_by_values": {},
    "workspace_modifications": {},
    "fe_workspace_size": 0,
}


def made(**changes):
    return decode(SPEC, {**BLOB, **changes}, "eng1", 512, 3)


def with_modification(what):
    uids, what = [X, B, OUT, 80], {"80": what}
    return made(variant_pack_uids=uids, workspace_modifications=what, fe_workspace_size=244)


def rows(plan):
    return {uid: row for uid, *row in plan.bindings}


def test_operands_results_and_constants_are_bound_by_uid():
    plan = made()
    assert rows(plan) == {
        X: [OPERAND, 0, 64],
        B: [OPERAND, 1, 16],
        OUT: [RESULT, 0, 64],
        HALF: [CONSTANT, 0, 0],
    }
    assert plan.scalars == struct.pack("<f", 0.5).ljust(16, b"\0")
    assert (plan.engine, plan.workspace_bytes, plan.candidates) == ("eng1", 512, 3)
    assert (plan.cudnn_version, plan.device_name, plan.fills) == (91900, "NVIDIA H200", ())


def test_by_value_constants_are_little_endian_in_slots_of_sixteen_bytes():
    uids = [X, B, OUT, HALF, 90, 91]
    given = {"90": {"value": "3f800000"}, "91": {"value": -7, "index": 0}}
    plan = made(variant_pack_uids=uids, pass_by_values=given)
    assert (rows(plan)[90], rows(plan)[91]) == ([CONSTANT, 16, 0], [CONSTANT, 32, 0])
    assert struct.unpack("<f", plan.scalars[16:20]) == (1.0,)
    assert struct.unpack("<q", plan.scalars[32:40]) == (-7,)
    assert len(plan.scalars) == 48
    omitted = made(pass_by_values={str(B): given["90"]})  # the frontend took the operand's uid
    assert omitted.bindings[1] == (UNBOUND, OPERAND, 1, 16)
    assert omitted.bindings[-1] == (B, CONSTANT, 16, 0)


@pytest.mark.parametrize(
    ("modification", "fills", "tables"),
    [
        ([1, 128, ["42200000"]], [(128, 1, 40, 0)], []),
        ([2, 32, []], [], []),
        ([0, 64, [1.0, -2.0]], [], [(1.0, -2.0)]),
        ([0, 64, ["3F800000", "C0000000"]], [], [(1.0, -2.0)]),
    ],
    ids=["zeros", "nothing", "floats", "floats in hexadecimal"],
)
def test_workspace_modifications_become_memsets_and_floats_an_operand(modification, fills, tables):
    plan = with_modification(modification)
    assert (plan.fills, plan.tables) == ((*fills,), (*tables,))
    assert rows(plan)[80] == ([OPERAND, 2, 8] if tables else [SLOT, modification[1], 0])
    assert (plan.plan_workspace_offset, plan.workspace_bytes) == (256, 512 + 12)
    assert ExecutionPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_part_of_an_operand_is_a_view_of_its_row():
    """Whether the plan uses the whole operand, too, or its part alone, or no part."""
    parts = {B: [70, 8], X: [71, 32]}
    for used, whole in (([X, OUT, 70, 71], UNBOUND), ([X, B, OUT, 70, 71], B)):
        plan = made(variant_pack_uids=used, variant_pack_replacements=parts)
        assert plan == made(variant_pack_uids=used, variant_pack_replacements=[*parts.items()])
        assert plan.bindings[:3] == (
            (X, OPERAND, 0, 64),
            (whole, OPERAND, 1, 16),
            (OUT, RESULT, 0, 64),
        )
        assert plan.bindings[3:] == ((70, VIEW, 1, 8), (71, VIEW, 0, 32))


def test_blob_of_an_unknown_kind_is_a_library_error():
    for changes in ({"variant_pack_uids": [X, 77]}, {"cudnn_backend_data": '{"deviceName":"x"}'}):
        with pytest.raises(jc.LibraryError, match=r"newest\.txt"):
            made(**changes)


def test_equal_gpus_get_equal_text():
    a, b = made(), made(cudnn_backend_data=TEXT.replace(":7,", ":31,").replace(" 15}", " 99}"))
    assert a.text == b.text == plans.canonical_properties(TEXT)
    assert (a, hash(a)) == (b, hash(b))


# -- what is stored --------------------------------------------------------------------------------

FLOAT, BFLOAT16 = "CUDNN_DATA_FLOAT", "CUDNN_DATA_BFLOAT16"
CONST, PART, FILLED, TABLE, LEFT = 90, 70, 80, 81, 82  # uids of the frontend's own
LISTED = {
    X: (BFLOAT16, [4, 8, 1, 1]),
    B: (BFLOAT16, [1, 8, 1, 1]),
    OUT: (BFLOAT16, [4, 8, 1, 1]),
    HALF: (FLOAT, [1, 1, 1, 1]),
    **dict.fromkeys((CONST, PART), (FLOAT, [1])),
    FILLED: (FLOAT, [10]),
    TABLE: (FLOAT, [2]),
    LEFT: (FLOAT, [8, 4]),
}
FACTS = {
    "cudnnVersion": 91900,
    "operationGraph": {
        "tensors": [
            {
                "name": str(uid),
                "dataType": kind,
                "dim": dims,
                "stride": [math.prod(dims[i + 1 :]) for i in range(len(dims))],
                "reordering": "CUDNN_TENSOR_REORDERING_NONE",
                "isVirtual": False,
                "isByValue": uid in (HALF, CONST),
            }
            for uid, (kind, dims) in LISTED.items()
        ]
    },
    "GPUProfile": {"deviceName": "NVIDIA H200"},
    "engine": {"engineId": 1},
}
RICH = {
    "cudnn_backend_data": json.dumps(FACTS, separators=(",", ":")),
    "variant_pack_uids": [*LISTED],
    "variant_pack_replacements": {X: [PART, 32]},
    "pass_by_values": {CONST: {"value": "3f800000"}},
    "workspace_modifications": {
        FILLED: [1, 128, [40]],
        TABLE: [0, 0, [1.0, -2.0]],
        LEFT: [2, 0, []],
    },
    "fe_workspace_size": 256,
}


def build(spec, site=None):
    return decode(spec, RICH, "eng1", 512, 3, 1, (("TILE", 3),), ("NOTE",))


H200 = profiles.get("H200")
KEY_SPEC = boundary(SPEC.for_planning).planned.canonical().unvalued()
GOOD = json.loads(json.dumps(build(KEY_SPEC).to_json()))
ODD = (None, True, -7, 10**30, 1.5, "x", "\ud800", ["x"], [[1, 2]], [["a", 0, 0, 0]], {"a": 1})
ANY = [("engine", "x"), ("behavior_notes", ["x"]), ("tables", [[1, 2]])]  # as good as others


def changed(rows):
    """Rows with one left out, one twice, and each number larger."""
    for i, row in enumerate(rows):
        yield rows[:i] + rows[i + 1 :]
        yield [*rows, row]
        for j, number in enumerate(row):
            yield [*rows[:i], [*row[:j], number + 10**6, *row[j + 1 :]], *rows[i + 1 :]]


def placed(*rows, omitted=()):
    """The good rows with these, by uid, and without the uids of operands and results that the plan
    omits."""
    given = {row[0]: [*row] for row in rows}
    kept = [given.pop(row[0], row) for row in GOOD["bindings"] if row[0] not in omitted]
    head = [[UNBOUND, *row[1:]] if row[0] in omitted else row for row in GOOD["bindings"][:3]]
    return [*head, *(row for row in kept if row[0] > 3), *given.values()]


BOTH = [  # refused by the executor, too
    placed((LEFT, SLOT, 128, 0)),
    placed((LEFT, SLOT, 16, 0)),
    placed((LEFT, SLOT, 8, 0)),
    placed((LEFT, SLOT, 144, 0)),
    placed((FILLED, SLOT, 112, 0)),
    placed((FILLED, SLOT, 224, 0)),
    placed((PART, VIEW, 0, 2)),
    placed((PART, VIEW, 0, 64)),
    placed((PART, VIEW, 1, 16)),
    placed((X, VIEW, 1, 0), omitted=[X]),
    placed((X, OPERAND, 0, 64), omitted=[X]),
    placed((OUT, VIEW, 0, 0), omitted=[OUT]),
    placed((OUT, SLOT, 176, 0), omitted=[OUT]),
    placed((B, CONSTANT, 16, 0), omitted=[B]),
    [*GOOD["bindings"], *([uid, CONSTANT, 16, 0] for uid in range(100, 640))],
]


def text(**changes):
    return json.dumps({**FACTS, **changes}, separators=(",", ":"))


def listing(change):
    tensors = FACTS["operationGraph"]["tensors"]
    return text(operationGraph={"tensors": change(tensors)})


WRONG = {
    "text": [
        GOOD["text"][:-9],
        "[]",
        text(cudnnVersion=91901),
        text(GPUProfile={"deviceName": "NVIDIA Other"}),
        text(engine={"engineId": 2}),
        listing(lambda t: t[1:]),
        listing(lambda t: [{**t[0], "dataType": "CUDNN_DATA_HALF"}, *t[1:]]),
        listing(lambda t: [{**t[0], "dim": [8, 8, 1, 1]}, *t[1:]]),
        listing(lambda t: [{**t[0], "isByValue": True}, *t[1:]]),
        listing(lambda t: [*t, {**t[0], "name": "99"}]),
        listing(lambda t: [{**t[0], "stride": [16, 1, 1, 1]}, *t[1:]]),
        listing(lambda t: [{**t[0], "stride": [-8, 1, 1, 1]}, *t[1:]]),
        listing(lambda t: [{**t[0], "dim": [8, 8, 1, 1]}, *t]),
    ],
    "engine": [],
    "cudnn_version": [91901],
    "device_name": ["NVIDIA Other"],
    "workspace_bytes": [0, 2**45],
    "plan_workspace_offset": [264, 64, 10**9],
    "bindings": [
        *changed(GOOD["bindings"]),
        [[2, 0, 0, 64], [1, *GOOD["bindings"][1][1:]], *GOOD["bindings"][2:]],
        *BOTH,
    ],
    "fills": [*changed(GOOD["fills"])][2:],
    "scalars": ["", "00", "01" + GOOD["scalars"][2:], GOOD["scalars"] + "00"],
    "candidates": [0],
    "engine_id": [2],
    "knobs": [[["TILE"]], [["TILE", "3"]]],
    "tables": [[], [[1.0]], [[1.0, -2.0], [1.0]], [["1.0", 2.0]]],
    "behavior_notes": [[3]],
}


def test_what_the_executor_refuses_is_refused_when_it_is_read():
    """Else it would stay in the cache, and every load would fail."""
    refused = []
    good = GOOD["bindings"]
    some = -1, 0, 1, 2, 3, 8, 16, 32, 64, 80, 128, 144, 10**6
    rows = [*changed(good), *BOTH]
    for place, row in enumerate(good):
        for i, number in itertools.product(range(4), some):
            rows.append([*good[:place], [*row[:i], number, *row[i + 1 :]], *good[place + 1 :]])
    for uid, kind, value, size in itertools.product((X, B, OUT), range(5), (0, 1, 16), (0, 16, 64)):
        rows.append(placed((uid, kind, value, size), omitted=[uid]))
    values = [GOOD | {"bindings": row} for row in rows] + [
        GOOD | {"text": t} for t in WRONG["text"][5:]
    ]
    for value in (GOOD, *values):
        try:
            _new_call_site.__wrapped__(ExecutionPlan.from_json(value), "f")
        except jc.LibraryError:
            refused.append(value["bindings"])
            with pytest.raises(ValueError, match="expected "):
                plan_of(value, KEY_SPEC)
    assert plan_of(GOOD, KEY_SPEC).to_json()
    assert all(row in refused for row in BOTH)


@pytest.fixture
def store(made_up_plans, monkeypatch, tmp_path):
    """The cache's folder, in which planning leaves the plan; with the builds."""
    built = []
    monkeypatch.setattr(planner, "_build", lambda *given: built.append(given) or build(*given))
    monkeypatch.setattr(os, "fsync", lambda file: None)  # it takes most of the time
    jc.configure(plan_cache=tmp_path)
    return PlanCache(tmp_path), built


@pytest.mark.parametrize("field", GOOD)
def test_an_altered_field_is_discarded_and_planned_anew(field, store, caplog, tmp_path):
    """And `cache verify` counts it, and `cache import` refuses it."""
    folder, built = store
    key = key_text("plan", KEY_SPEC, planner.identity(H200))
    path, archive = folder.path(digest(key)), tmp_path / "x.zip"
    want = planner.plan(SPEC, H200, "f")
    odd = [value for value in ODD if (field, value) not in ANY and value != GOOD[field]]
    values = [GOOD | {field: wrong} for wrong in (*odd, *WRONG[field])]
    values += [{k: v for k, v in GOOD.items() if k != field}, GOOD | {f"{field}s": GOOD[field]}]
    for value in values:
        path.write_bytes(encode(Content(key, value, "")))
        assert len(folder.verify(check_entry)[1]) == 1, (field, value[field])
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(path.name, path.read_bytes())
        other = PlanCache(tmp_path / "other")
        assert [*import_(other, archive, check_entry).refused] == [path.name]
        planner.clear()
        built.clear()
        assert planner.plan(SPEC, H200, "f") == want
        assert len(built) == 1, value
        assert folder.get(key) == GOOD
    assert folder.verify(check_entry) == (1, [])
    export(folder, archive)
    path.write_bytes(encode(Content(key, values[0], "")))
    assert [import_(folder, archive, check_entry)[:2] for _ in range(2)] == [(1, 0), (0, 1)]
    planner.clear()
    assert planner.plan(SPEC, H200, "f") == want
    assert len(built) == 1
    assert caplog.text.count("is ignored (") == 1


@pytest.mark.parametrize(
    "rows",
    [
        [[[0, 1, 2], False, ""]],
        [[[0, 1], True, ""], [[2], False, ""]],
        [[[2], True, ""], [[0, 1], True, ""]],
        [[[0, 1, 2], 1, ""]],
        [[[0, 1, 2.0], True, ""]],
        [[[0, 1, 2], True, 5]],
        [[[0, 1, 1], True, ""]],
        [],
        5,
    ],
    ids=str,
)
def test_an_altered_split_is_discarded_and_searched_anew(rows, store, monkeypatch, caplog):
    def build(spec, site):
        raise jc.UnsupportedGraphError("no engine", why="too odd")

    monkeypatch.setattr(planner, "_build", build)
    want = auto.plan_graph(SPEC, H200, "f")
    (path,) = store[0].folder.glob("*.plan")
    content = read_entry(path.read_bytes(), path.stem)
    path.write_bytes(encode(content._replace(value={"segments": rows})))
    auto.clear()
    assert auto.plan_graph(SPEC, H200, "f") == want
    assert store[0].get(content.key) == content.value
    assert caplog.text.count("is ignored (foreign: ") == 1


def test_a_job_refuses_a_plan_that_is_not_for_its_graph(made_up_plans, monkeypatch):
    row = {"calls": [0, 1, 2], "plan": build(SPEC).to_json(), "reason": ""}
    monkeypatch.setattr(job, "participants", lambda devices: [0, 1])
    monkeypatch.setattr(job, "agreed", lambda *_, **__: {"segments": [row], "measured": []})
    device = SimpleNamespace(device_kind="NVIDIA H200")
    (plan,) = auto.plan_graph(SPEC, H200, "f", [device]).execution_plans
    assert plan == build(SPEC)
    row["plan"]["workspace_bytes"] = -1
    with pytest.raises(jc.JobError, match="workspace_bytes: expected 0 to "):
        auto.plan_graph(SPEC, H200, "f", [device])
