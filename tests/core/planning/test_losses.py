"""Patterns of graphs, and the table of those at which cuDNN loses."""

import jax
import pytest

import jax_cudnn as jc
from jax_cudnn._core.planning import losses


def traced(function, shapes, dtypes="bfloat16", **options):
    dtypes = [dtypes] * len(shapes) if isinstance(dtypes, str) else dtypes
    structs = map(jax.ShapeDtypeStruct, shapes, dtypes)
    return jc.graph(function, **options).trace(*structs)[1].spec


def node(method, **named):
    return lambda g, *arrays: getattr(g, method)(*arrays, **named)


def total(*dims):
    return node("reduction", mode="ADD", out_dims=[*dims])


def product(after=lambda g, y, *terms: sum(terms, start=y)):
    return lambda g, x, w, *terms: after(g, g.matmul(x, w), *terms)


def batch_norm(g, x, r, *of):
    return g.relu(g.batchnorm(x, *of, 1e-5, 0.1)[0] + r)


def prologue(g, x, w):
    return g.relu(g.matmul(g.relu(x).set_data_type("bfloat16"), w))


def of_int8(g, x, w):
    return g.matmul(x, g.identity(w).set_data_type("bfloat16"))


MATRICES = (1, 16, 32), (1, 32, 8)
IMAGE, LOSS, HALF = (2, 16, 9, 9), (2, 16, 7, 7), (2, 16, 4, 4)
ROWS = [(8, 2048), (1, 2048)]
NORMED = [IMAGE, IMAGE, *[(1, 16, 1, 1)] * 4], ["bfloat16", "bfloat16", *["float32"] * 4]
DGRAD = node("conv_dgrad", out_dims=[*IMAGE])
STRIDED_DGRAD = node("conv_dgrad", out_dims=[*IMAGE], stride=[2, 2])
INFERENCE = node("layernorm", epsilon=1e-5, norm_forward_phase="INFERENCE")
CONV = node("conv_fprop")
TABLE = [
    ("layernorm inference of long rows", INFERENCE, [(8, 4097), (1, 4097), (1, 4097)]),
    # What is read decides whether a normalization is inference.
    ("rmsnorm inference", lambda g, x, s: g.rmsnorm(x, s, epsilon=1e-5)[0], ROWS),
    ("batchnorm + residual epilogue", batch_norm, *NORMED),
    ("conv_fprop depthwise", CONV, [IMAGE, (16, 1, 3, 3)]),
    ("conv_dgrad depthwise strided", STRIDED_DGRAD, [HALF, (16, 1, 3, 3)]),
    ("prologue of int8 + matmul", of_int8, MATRICES, ["bfloat16", "int8"]),
    ("prologue + matmul + epilogue", prologue, MATRICES),
    ("matmul + bias", product(), [*MATRICES, (1, 1, 8)]),
    ("matmul + epilogue", product(), [*MATRICES, (1, 16, 8)]),  # a residual
    ("matmul + epilogue", product(lambda g, y, b: g.relu(y + b)), [*MATRICES, (1, 1, 8)]),
    ("reduction of rows", total(4, 1, 3, 3), [(4, 8, 3, 3)]),  # channels lie last
    ("reduction of columns", total(1, 8, 1, 1), [(4, 8, 3, 3)]),
    ("reduction of columns int8", total(1, 8), [(4, 8)], "int8"),
    ("pointwise", lambda g, x: g.relu(x * 2.0), [(4, 8)], "float32"),
]


@pytest.mark.parametrize("row", TABLE, ids=[f"{i} {row[0]}" for i, row in enumerate(TABLE)])
def test_a_graph_is_filed_under_what_it_is_at_heart(row):
    name, *graph = row
    assert losses.pattern(traced(*graph)) == name


def test_a_loss_says_by_how_much_and_where_it_was_measured(monkeypatch):
    patterns = {
        "conv_dgrad depthwise": [[10, 10, 0.5, "a"], [10, 10, 0.5, "b"]],
        "pointwise": [[32, 128, 0.8, "c"], [32, 128, 0.8, "d"]],
        "matmul": [[10, 10, 0.5, "alone"]],
    }
    where = {"device": "NVIDIA X", "date": "2026-01-05", "cudnn": "9.99.0"}
    monkeypatch.setattr(losses, "table", lambda: {"91": {**where, "patterns": patterns}})
    depthwise, relu = (DGRAD, [LOSS, (16, 1, 3, 3)]), (node("relu"), [(4, 8)])
    found = losses.loss(traced(*depthwise), 91)
    assert found == losses.Loss("conv_dgrad depthwise", 0.5, *where.values(), ("a",), False)
    assert "about 50% of the time" in str(found)
    for absent, gpu in (((product(), MATRICES), 91), (depthwise, 90)):  # not listed, not measured
        assert losses.loss(traced(*absent), gpu) is None
    # Who names an engine gets it; determinism is not left to XLA, but where nothing depends on it.
    assert losses.loss(traced(*relu, engine=1), 91) is None
    assert losses.loss(traced(*depthwise, deterministic=True), 91) is None
    assert losses.loss(traced(*relu, deterministic=True), 91) is not None


def test_the_nearest_measured_graphs_decide(monkeypatch):
    """Small ones lose, large ones win: a graph goes with those of its size."""
    rows = [[2**i, 2**i, 0.5 if i < 20 else 2.0, f"{i}"] for i in (8, 10, 12, 26, 28, 30)]
    where = {"device": "NVIDIA X", "date": "2026-01-05", "cudnn": "9.99.0"}
    monkeypatch.setattr(losses, "table", lambda: {"91": {**where, "patterns": {"pointwise": rows}}})
    small, large = (traced(node("relu"), [(n, 64)]) for n in (8, 2**20))
    assert losses.loss(small, 91).cases == ("10", "8", "12")
    assert losses.loss(large, 91) is None
    assert losses.nearest(large, 91).ratio == pytest.approx(2.0)
