"""The numerics page: what each operation computes in, and where values are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jax_cudnn._core.graph.dtypes import FLOATS, FP8, INTEGERS
from jax_cudnn._core.graph.node import REGISTRY, Node
from jax_cudnn._core.graph.spec import Tensor
from jax_cudnn._core.planning.choice import NOTES_OF_FULL_FLOAT32

_HEAD = f"""# Numerics

Written by `python -m benchmarks numerics` from the operations; a test compares.

**Compute type.** An operation computes and accumulates in the type of its column below, whatever
its operands' dtype. For convolutions and matmuls `compute_data_type=`, of the method of `g` or of
`jax_cudnn.graph`, selects float16, or fast_float_for_fp8 for float8 operands: both accumulate with
fewer bits.

**Rounding points, fused.** An operand has its array's dtype. A value inside the graph is rounded
once, to its tensor's dtype: float32 unless `intermediate_data_type=` or `.set_data_type(...)` says
otherwise. What a product multiplies with a 16-bit operand has that one's dtype, if it would have it
as an output; integers and booleans keep theirs, and moved elements that of their source. An output
is rounded once, to the promoted dtype of the operands unless `.set_data_type(...)` says otherwise.
So `relu(conv(x, w) + b)` in bfloat16 rounds once in one graph.

**Rounding points, split.** The same computation as several graphs, or in `jnp`, rounds every result
that passes from one to the next to that array's dtype: twice more here. Pooling, reshape, transpose
and concatenate in a graph are XLA's: what they take and give crosses memory in the tensors' dtypes.

**To integers** values round to the nearest (ties to even) and saturate; to float8 they saturate,
but on a GPU give NaN beyond float16's range (65504), through which cuDNN converts.

**TF32.** Products of float32 operands may be computed in TF32 (10 bits of mantissa, about 3e-4 of
relative error) at precision DEFAULT, as in lax on a GPU. HIGH and HIGHEST (as `precision=` or
`jax.default_matmul_precision`) leave out engines that note {" or ".join(NOTES_OF_FULL_FLOAT32)}:
convolutions then run in float32. cuDNN has no float32 matmul without TF32: there matmuls of float32
run in XLA (`implementation="cudnn"` refuses them).

**float8 products** accumulate in the tensor cores of SM90 with fewer bits than float32 (about 1e-4
of relative error was measured on an H200), whatever the compute type.

**Determinism.** A plan gives the same bits in each run, except for engines that note
NONDETERMINISTIC, which operations of the last column may have; `deterministic=True`, or XLA's flag
`--xla_gpu_deterministic_ops`, leaves them out.

The reference (on CPU and TPU) rounds at the same points.

| operation | computes in | result | TF32 | deterministic | to know |
|---|---|---|---|---|---|
"""


def render() -> str:
    """The page as Markdown."""
    rows = (_row(method, REGISTRY[method]) for method in sorted(REGISTRY))
    return _HEAD + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _row(method: str, node: type[Node]) -> Iterator[str]:
    yield f"`{method}`"
    yield "nothing: elements are moved" if node.moves else _by_kind(node, _compute)
    yield _by_kind(node, _result)
    yield "yes" if node.product and "float32" in node.dtypes else ""
    settled = node.create(**node.examples[0].attributes).deterministic
    yield "" if node.moves or node.leftover else ("always" if settled else "on request")
    yield node.rounding


# The first of these types that a node takes stands for its kind.
_KINDS = {"": FLOATS[1:], "integers": INTEGERS, "float8": FP8, "booleans": ("bool",)}


def _by_kind(node: type[Node], ask: Callable[[Node, dict[str, Tensor]], str]) -> str:
    """What a node answers for operands of each kind, where it differs from the first answer."""
    created = node.create(**node.examples[0].attributes)
    answers: dict[str, str] = {}
    for kind, dtypes in _KINDS.items():
        dtype = next((dtype for dtype in dtypes if dtype in node.dtypes), None)
        if dtype is None or (kind == "booleans" and answers):  # else booleans are masks
            continue
        answer = ask(created, _operands(node, dtype))
        if answer not in answers.values():
            answers[kind] = answer
    only = len(answers) == 1
    return ", ".join(a if only or not kind else f"{a} ({kind})" for kind, a in answers.items())


def _operands(node: type[Node], dtype: str) -> dict[str, Tensor]:
    """The first example's operands of this type, but masks and what is always of another."""
    example = node.examples[0]
    variadic = {port.name for port in node.ports.inputs if port.variadic}
    kept = {"bool", "uint8"} | {*example.dtypes.values()} - {*node.dtypes}
    masks = {name: given for name, given in example.dtypes.items() if given in kept}
    arrays = {n: given for n, given in example.inputs.items() if not isinstance(given, float)}
    shapes = {
        name: (1,) * len(next(iter(arrays.values()))) if isinstance(given, float) else given
        for name, given in example.inputs.items()
    }
    return {
        port: Tensor(port, tuple(shape), masks.get(name, dtype))
        for name, given in shapes.items()
        for i, shape in enumerate(given if name in variadic else [given])
        for port in [f"{name}_{i}" if name in variadic else name]
    }


def _compute(node: Node, operands: dict[str, Tensor]) -> str:
    return node.default_compute(operands)


def _result(node: Node, operands: dict[str, Tensor]) -> str:
    found = {dtype for _, dtype in node.infer(operands).values()}
    given = {tensor.dtype for tensor in operands.values()}
    same = found == given or found == given - {"bool", "uint8"}
    return "the operands' dtype" if same else ", ".join(sorted(found))
