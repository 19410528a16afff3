"""The numerics page: what each operation computes in, and where values are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jax_cudnn._core.graph.dtypes import FLOATS, FP8, INTEGERS
from jax_cudnn._core.graph.node import Node, registry
from jax_cudnn._core.graph.promotion import default_compute
from jax_cudnn._core.graph.spec import Tensor
from jax_cudnn._core.planning.choice import NOTES_OF_FULL_FLOAT32

_HEAD = f"""# Numerics

What is computed in which type, and where values are rounded. Generated from the operations by
`python -m benchmarks numerics`.

## Compute type

An operation computes and accumulates in the type that [the table](#operations) gives, whatever the
dtype of its operands. Convolutions and matmuls take `compute_data_type=`, of the method of `g` or
of `jax_cudnn.graph`, for float16, or fast_float_for_fp8 with float8 operands. Both accumulate with
fewer bits.

## Rounding in one graph

Each value inside a graph is rounded once, to the dtype of its tensor:

| value | dtype |
|---|---|
| operand | its array's |
| intermediate value | float32, `intermediate_data_type=`, or `.set_data_type(...)` |
| factor of a product with a 16-bit operand | that operand's, if it were the output's, too |
| integers and booleans | their own |
| moved elements (slices, reshapes) | their source's |
| output | the promoted dtype of the operands, or `.set_data_type(...)` |

So `relu(conv(x, w) + b)` in bfloat16 rounds once in one graph. The same computation as several
graphs, or in `jnp`, rounds each result that passes from one to the next: two more roundings here.
XLA runs pooling, reshape, transpose and concatenate inside a graph; their operands and results are
stored in the dtypes of the tensors.

The reference, which runs on CPU and TPU, rounds at the same points.

## What XLA runs on a GPU

Parts of a graph that XLA runs on a GPU are computed as plain JAX would: XLA's libraries fuse no
other form. Results that the graph returns, and values that a part on cuDNN reads, have their
dtypes, and float8, float4 and integer values are rounded everywhere. The rest differs from the
table above:

- Intermediate values are not rounded to 16 bits where XLA keeps float32.
- A product of 16-bit operands is rounded to 16 bits, and so is each sum and factor after it, if
  only sums, factors, activations and normalizations stand between it and 16-bit results. Each costs
  as much as rounding the result. The error relative to float64 is at most 2.5 times as large for a
  scale, a bias and a residual together. A product stays in float32 if a float32 result, a sum over
  its elements, an exponential or a quotient depends on it.
- A value that is written in bfloat16 and summed besides is summed, in float32, as it is written:
  so a bias' gradient is that of the rounded gradient which the products read, as in plain JAX.
- float8 products with 16-bit results likewise, in bfloat16; their scales are rounded to it, too.
- A factor for each feature of a convolution, or `batchnorm_inference` after one, is multiplied
  into the weight, which is rounded once more.
- Mean and variance of 16-bit elements are E[x] and E[x^2] - E[x]^2 in float32: of images, of rows
  whose statistics are kept, and of rows of more than 12288 elements. The relative error of 1 /
  deviation is at most 5e-7 * (1 + mean^2 / (variance + epsilon)); Flax computes it so by default.
- `reduction` with MIN, MAX and AMAX gives NaN where an element is NaN; cuDNN ignores these.
- The gradient of the largest element of a product may be lost. XLA may compute the product again
  where it looks for the element, round it otherwise, and find none that is equal, for jnp.max as
  well ([JAX's issue 40564](https://github.com/jax-ml/jax/issues/40564) is about jnp.maximum). It
  was seen on two H200s for the largest values that `sdpa_mxfp8_backward` returns.

## Conversions

Conversions to integers round to nearest, ties to even, and saturate. Conversions to float8 saturate
as well, except that on a GPU values beyond float16's range (65504) become NaN, because cuDNN
converts through float16.

## TF32

At precision DEFAULT, products of float32 operands may use TF32 (10 bits of mantissa, about 3e-4
relative error), as in lax on a GPU. HIGH and HIGHEST (`precision=` or
`jax.default_matmul_precision`) exclude engines that note {" or ".join(NOTES_OF_FULL_FLOAT32)}:
convolutions then run in float32. cuDNN has no float32 matmul without TF32: float32 matmuls then
run in XLA, and `implementation="cudnn"` raises an error.

## float64

XLA runs graphs and operations on float64 arrays in float64 throughout, derivatives included.

## float8

The tensor cores of SM90 accumulate float8 products with fewer bits than float32 (about 1e-4
relative error, measured on an H200), whatever the compute type.

`jc.ops.float8_matmul` rounds operands to float8: relative errors of random arrays, in the norm,
are about 4 % for the result and 6 % for gradients. Its scales are powers of 2, which do not round.

## Determinism

A plan gives the same bits in each run, except for engines with the note NONDETERMINISTIC, which
operations marked "on request" may use. `deterministic=True`, or XLA's flag
`--xla_gpu_deterministic_ops`, excludes them.

## Operations

<details markdown><summary>All operations: compute type, result, TF32, determinism</summary>

| operation | computes in | result | TF32 | deterministic | notes |
|---|---|---|---|---|---|
"""


def render() -> str:
    """The page as Markdown."""
    rows = (_row(method, registry()[method]) for method in sorted(registry()))
    return _HEAD + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n\n</details>\n"


def _row(method: str, node: type[Node]) -> Iterator[str]:
    made = node.create(**node.examples[0].attributes)
    moves = made.algebra.moves
    yield f"`{method}`"
    yield "moves elements" if moves else _by_kind(node, _compute)
    yield _by_kind(node, _result)
    yield "yes" if node.anchor.product and "float32" in node.dtypes else ""
    always = made.deterministic() == made
    yield "" if moves or node.xla_only else ("always" if always else "on request")
    yield node.about.rounding


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
    """The first example's operands of this type, but masks, indices, and what is of another."""
    example = node.examples[0]
    variadic = {port.name for port in node.ports.inputs if port.variadic}
    kept = {"bool", "uint8"} | {*example.dtypes.values()} - {*node.dtypes}
    others = {n for n, given in example.dtypes.items() if given in kept} | {*node.indices.positions}
    masks = {name: given for name, given in example.dtypes.items() if name in others}
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
    return default_compute(node, operands)


def _result(node: Node, operands: dict[str, Tensor]) -> str:
    found = {dtype for _, dtype in node.infer(operands).values()}
    given = {tensor.dtype for tensor in operands.values()}
    same = found == given or found == given - {"bool", "uint8"}
    return "the operands' dtype" if same else ", ".join(sorted(found))
