"""The decoder of UBJSON against a plain encoder, documents made by hand, and the frontend's own."""

import struct

import cases
import pytest

from jax_cudnn._core.planning import build, execution_plan, ubjson
from jax_cudnn.deviceless import client, profiles


def encode(value):
    """A plain UBJSON encoder, to make documents with."""
    match value:
        case None | True | False:
            return {None: b"Z", True: b"T", False: b"F"}[value]
        case int() if 128 <= value < 256:
            return b"U" + struct.pack(">B", value)
        case int():
            marks = (("i", 7, ">b"), ("I", 15, ">h"), ("l", 31, ">i"), ("L", 63, ">q"))
            mark, form = next((m, f) for m, bits, f in marks if -1 << bits <= value < 1 << bits)
            return mark.encode() + struct.pack(form, value)
        case float():
            return b"D" + struct.pack(">d", value)
        case str():
            return b"S" + text(value)
        case list():
            return b"[" + b"".join(map(encode, value)) + b"]"
        case dict():
            return b"{" + b"".join(text(k) + encode(v) for k, v in value.items()) + b"}"


def text(value):
    return encode(len(value.encode())) + value.encode()


VALUES = [
    None, True, False, 0, -128, 127, 255, -129, 30000, -30000, 70000, 1 << 40, 0.0, 1.5, -1e300,
    "", "plan", "\u00e9\u4e2d", "x" * 300, [], [1, [2, ["three"]]], {},
    {"a": {"b": [1, None]}, "": 2}, [[], {}],
]  # fmt: skip


def test_decodes_what_was_encoded():
    decoded = ubjson.decode(encode(VALUES))
    assert decoded == VALUES
    assert [*map(type, decoded)] == [*map(type, VALUES)]
    assert all(ubjson.decode(encode(value)) == value for value in VALUES)


OPTIMISED = {
    "counted array": (b"[#i\x03i\x01i\x02i\x03", [1, 2, 3]),
    "typed array": (b"[$U#i\x03\x01\x02\xff", [1, 2, 255]),
    "typed doubles": (b"[$D#i\x01" + struct.pack(">d", 2.5), [2.5]),
    "float": (b"d" + struct.pack(">f", 0.5), 0.5),
    "counted object": (b"{#i\x02i\x01ai\x05i\x01bT", {"a": 5, "b": True}),
    "typed object": (b"{$i#i\x02i\x01a\x05i\x01b\x06", {"a": 5, "b": 6}),
    "empty counted": (b"[#i\x00", []),
    "typed strings": (b"[$S#i\x02i\x01ai\x02bc", ["a", "bc"]),
    "char": (b"Cx", "x"),
    "high precision": (b"Hi\x031.5", "1.5"),
    "nested typed": (b"[$[#i\x02i\x01]]", [[1], []]),
}


@pytest.mark.parametrize("what", OPTIMISED)
def test_decodes_optimised_containers(what):
    document, value = OPTIMISED[what]
    assert ubjson.decode(document) == value


WHOLE = encode({"name": "x" * 200, "list": [1, 2.5, None, {"deep": [300, 1 << 40]}]})
WRONG = [b"", b"?", b"[?]", b"Si\xff", b"S[", b"Si\x01\xff", b"{i\x01a", b"ZZ"]
TRUNCATED = [d[:n] for d in (WHOLE, *(d for d, _ in OPTIMISED.values())) for n in range(len(d))]


def test_what_is_no_document_is_a_value_error():
    for document in WRONG + TRUNCATED:
        with pytest.raises(ValueError, match="not a UBJSON document"):
            ubjson.decode(document)


def serialized(spec, profile):
    """In the worker: the plan that jax_cudnn builds and the blob that it was read from."""
    blobs, own = [], ubjson.decode
    build.ubjson.decode = lambda data: blobs.append(data) or own(data)
    try:
        return build.build_for_profile(spec, profile), blobs[-1]
    finally:
        build.ubjson.decode = own


@pytest.mark.deviceless
def test_the_frontends_blob_round_trips_and_cannot_be_cut():
    case = cases.matmul_scale_bias_relu
    spec = case.function.trace(*case.avals)[1].spec
    made, blob = client.call("test_ubjson:serialized", spec.canonical(), profiles.get("H200"))
    decoded = ubjson.decode(blob)
    assert {"cudnn_backend_data", "variant_pack_uids", "pass_by_values"} <= {*decoded}
    assert ubjson.decode(encode(decoded)) == decoded
    assert made.cudnn_version == execution_plan.decode(spec, decoded, "", 0, 1).cudnn_version
    for size in (1, len(blob) // 3, len(blob) // 2, len(blob) - 1):
        with pytest.raises(ValueError, match="not a UBJSON"):
            ubjson.decode(blob[:size])
