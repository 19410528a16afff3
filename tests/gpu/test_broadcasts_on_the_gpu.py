"""Every broadcast that is planned is computed rightly: cuDNN accepts some that it gets wrong.

``limits.known_reasons`` refuses those. Here each pattern that passes it, around each kind of
anchor, runs on fresh inputs.
"""

import itertools

import jax
import oracle
import pytest
from helpers import normal

import jax_cudnn as jc
from jax_cudnn._core.planning.limits import known_reasons

pytestmark = pytest.mark.usefixtures("by_cudnn")  # or XLA would be tested where cuDNN refuses

CONV = ((4, 8, 6, 10), (16, 8, 3, 3))
CONV3D = ((4, 8, 3, 6, 10), (16, 8, 3, 3, 3))
MATMUL = ((4, 6, 8), (4, 8, 16))

ANCHORS = {
    "wgrad": (
        ((4, 8, 6, 10), (4, 16, 6, 10)), (16, 8, 3, 3),
        lambda g, x, dy: g.conv_wgrad(x, dy, padding=[1, 1]).set_dim([16, 8, 3, 3]),
    ),
    "dgrad": (
        ((4, 16, 6, 10), (16, 8, 3, 3)), (4, 8, 6, 10),
        lambda g, dy, w: g.conv_dgrad(dy, w, padding=[1, 1]),
    ),
    "conv": (CONV, (4, 16, 6, 10), lambda g, x, w: g.conv_fprop(x, w, padding=[1, 1])),
    "conv3d": (CONV3D, (4, 16, 3, 6, 10), lambda g, x, w: g.conv_fprop(x, w, padding=[1, 1, 1])),
    "matmul": (MATMUL, (4, 6, 16), lambda g, x, w: g.matmul(x, w)),
    "none, rank 4": (((4, 16, 6, 10),), (4, 16, 6, 10), lambda g, x: x),
    "none, rank 3": (((4, 6, 16),), (4, 6, 16), lambda g, x: x),
    "none, rank 2": (((6, 16),), (6, 16), lambda g, x: x),
}  # fmt: skip
EPILOGUES = {
    "add": lambda g, y, b: g.add(y, b),
    "mul, relu": lambda g, y, b: g.relu(g.mul(b, y)),
    "select": lambda g, y, b: g.binary_select(y, b, g.cmp_gt(b, 0.0)),
    "select by a mask": lambda g, y, b: g.binary_select(y, g.neg(y), b),
    "select by indices": lambda g, y, b: g.binary_select(y, b, g.cmp_ge(g.gen_index(y, 1), 3)),
    "gradient of relu": lambda g, y, b: g.relu_backward(y, b),
    # Scaled, because the gradient multiplies the rounding of large arguments to TF32.
    "gradient of tanh": lambda g, y, b: g.tanh_backward(b, g.mul(y, 0.1)),
}
# How many patterns of the operand are planned: all, four, two or one, see limits.py.
PLANNED = {
    ("conv3d", "add"): 4,
    ("wgrad", "add"): 2,
    ("matmul", "add"): 8,
    ("none, rank 3", "add"): 4,
    ("none, rank 2", "add"): 4,
    ("conv", "select"): 4,
    ("matmul", "select by a mask"): 8,
    ("none, rank 4", "select"): 1,
    ("conv", "gradient of relu"): 1,
}
# cuDNN itself refuses some that it computes elsewhere.
MAY_BE_REFUSED = ("select by a mask", "gradient of tanh", "select by indices")


def graphs(anchor, epilogue):
    """All graphs of an anchor and a pattern of the operand beside it that may be planned."""
    shapes, full, around = ANCHORS[anchor]
    for pattern in itertools.product((False, True), repeat=len(full)):
        shape = tuple(size if kept else 1 for size, kept in zip(full, pattern, strict=True))

        def function(g, *operands):
            return EPILOGUES[epilogue](g, around(g, *operands[:-1]), operands[-1])

        graph = jc.graph(function)
        _, trace = graph.trace(*(jax.ShapeDtypeStruct(s, "float32") for s in (*shapes, shape)))
        if not known_reasons(trace.spec):
            yield (*shapes, shape), graph


@pytest.mark.parametrize("what", PLANNED, ids=", ".join)
def test_as_many_patterns_are_planned_as_are_right(what):
    assert len(list(graphs(*what))) == PLANNED[what]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("anchor", ANCHORS)
def test_planned_broadcasts_are_right(anchor, epilogue, dtype, key):
    checked = 0
    for shapes, graph in graphs(anchor, epilogue):
        operands = [x.astype(dtype) for x in normal(key, *shapes)]
        if epilogue == "select by a mask":
            operands[-1] = operands[-1] > 0
        _, trace = graph.trace(*operands)
        try:
            got = jax.jit(graph)(*operands)
        except jc.UnsupportedGraphError:
            assert epilogue in MAY_BE_REFUSED
            continue
        oracle.check_outputs(trace.spec, operands, [got], on_gpu=True)
        checked += 1
    assert checked or epilogue in MAY_BE_REFUSED
