"""From the frontend's blob to an ExecutionPlan's plain rows, its text and its attributes."""

import dataclasses
import hashlib
import json
import struct

import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core.planning import execution_plan as plans
from jax_cudnn._core.planning.execution_plan import (
    CONSTANT,
    OPERAND,
    RESULT,
    SLOT,
    UNBOUND,
    VIEW,
    ExecutionPlan,
    Uids,
    decode,
)


@jc.graph
def scaled(g, x, b):
    return g.relu(x * 0.5 + b)


SPEC = scaled.trace(jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros((1, 8), jnp.bfloat16))[1].spec
UIDS = Uids.of(SPEC)
(X, B), (OUT,), (HALF,) = UIDS.inputs.values(), UIDS.outputs.values(), UIDS.constants.values()
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
    return made(variant_pack_uids=uids, workspace_modifications=what, fe_workspace_size=256)


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
    assert plan.plan_workspace_offset == 256
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


def test_equal_gpus_get_equal_text_and_digest():
    a, b = made(), made(cudnn_backend_data=TEXT.replace(":7,", ":31,").replace(" 15}", " 99}"))
    assert a.text == b.text == plans.canonical_properties(TEXT)
    assert (a, hash(a)) == (b, hash(b))
    assert dataclasses.replace(a, text="{}").digest != a.digest
    assert a.digest == hashlib.sha256(a.text.encode()).hexdigest()
