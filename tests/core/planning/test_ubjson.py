"""The decoder of UBJSON, with documents made by hand."""

import struct

import pytest

from jax_cudnn._core.planning import ubjson

DOCUMENTS = {
    "numbers": (
        b"[Zi\x80U\xffI\x75\x30l\xff\xfe\xee\x90L" + struct.pack(">q", 1 << 40) + b"]",
        [None, -128, 255, 30000, -70000, 1 << 40],
    ),
    "double": (b"D" + struct.pack(">d", -1e300), -1e300),
    "text": (b"SU\x05" + "\u00e9\u4e2d".encode(), "\u00e9\u4e2d"),
    "nested": (
        b"{i\x01a{i\x01b[i\x01Z]}i\x00[[][T]]}",
        {"a": {"b": [1, None]}, "": [[], [True]]},
    ),
    "counted array": (b"[#i\x03i\x01i\x02i\x03", [1, 2, 3]),
    "typed array": (b"[$U#i\x03\x01\x02\xff", [1, 2, 255]),
    "counted object": (b"{#i\x02i\x01ai\x05i\x01bT", {"a": 5, "b": True}),
    "nested typed": (b"[$[#i\x02i\x01]]", [[1], []]),
}


@pytest.mark.parametrize("what", DOCUMENTS)
def test_documents_are_decoded(what):
    document, value = DOCUMENTS[what]
    assert ubjson.decode(document) == value


WRONG = [b"", b"?", b"[?]", b"Si\xff", b"S[", b"Si\x01\xff", b"{i\x01a", b"ZZ"]
TRUNCATED = [d[:n] for d, _ in DOCUMENTS.values() for n in range(len(d))]


def test_what_is_no_document_is_a_value_error():
    for document in WRONG + TRUNCATED:
        with pytest.raises(ValueError, match="not a UBJSON document"):
            ubjson.decode(document)
