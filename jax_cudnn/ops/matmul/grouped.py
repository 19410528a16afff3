"""Products of groups of rows with the weights of their experts: mixture of experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError, one_of
from ..._core.graph.builder import register
from ..._core.graph.dims import Dims, Shape, integers
from ..._core.graph.dtypes import PRODUCTS, arithmetic
from ..._core.graph.node import Fold, Indices, Node, check_ports, frozen, int_tuple, matched
from ..._core.graph.planned import ROW_MAJOR, About, Anchor, Edge, Example, Work
from ..._core.graph.promotion import product_dtype, product_operands
from ..._core.reasons import Kind, Reason
from ..._core.rules import Derivation, GraphSpec, GraphTensor, Handles, Tensor, Tensors, Values
from ..transformations import alike, along, product_jvp
from .nodes import turned

MODES = ("NONE", "GATHER", "SCATTER")
_POSITIONS = ("first_token_offset", "token_index", "token_ks")
_ENDS = 92800  # the first cuDNN that was seen to take the end of the last group


def _ends(offsets: int, experts: int) -> bool:
    """Whether this many offsets include the end of the last group; GraphError if they do not fit.

    The number of groups is a multiple of that of the experts, by which the frontend tells both
    forms apart. A single expert needs the end.
    """
    if experts > 1 and offsets and offsets % experts == 0:
        return False
    if experts and offsets > 1 and (offsets - 1) % experts == 0:
        return True
    raise GraphError(
        "first_token_offset has the wrong number of entries",
        expected=f"for {experts} experts the starts of a multiple of {experts} groups, or one "
        "entry more, the end of the last group (needed for a single expert)",
        got=f"{offsets} entries",
    )


def _bounds(offsets: jax.Array, rows: int) -> jax.Array:
    """Offsets from 0 in [0, rows] that do not decrease; cuDNN reads the first one as 0."""
    return jax.lax.cummax(jnp.clip(offsets, 0, rows).at[0].set(0), axis=0)


def _experts(offsets: jax.Array, rows: int, experts: int) -> jax.Array:
    """The expert of each row, (rows, 1); -1 for rows of no group."""
    bounds = _bounds(offsets.reshape(-1), rows)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    group = jnp.sum(bounds <= row, axis=1, keepdims=True, dtype=jnp.int32) - 1
    past = _ends(len(bounds), experts) & (row >= bounds[-1])
    return jnp.where(past, -1, group % experts)


@frozen
class Grouped(Node):
    """What both products share."""

    anchor = Anchor(product=True, order=ROW_MAJOR)
    dtypes = PRODUCTS
    indices = Indices(positions=_POSITIONS)

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        if len({tensors[port].dtype for port in self.ports.input_names[:2]}) > 1:
            return Reason("its operands have different dtypes", Kind.DTYPE)
        if graph.has_float32_product and graph.options.precision in ("high", "highest"):
            return Reason("cuDNN multiplies float32 in TF32 only", Kind.DTYPE)
        if len(graph.calls) > 1:
            # Only operands are clipped, and a row of no group is not written.
            return Reason("it is planned alone: nothing else in its plan was measured")
        if "token_index" in tensors:
            return Reason("cuDNN 9.19 read outside of the arrays of a gather, on an H200")
        return None

    def linear_in(self, ports: Collection[str]) -> bool:
        return len(ports) == 1 and not {*ports} & {*_POSITIONS}

    jvp = product_jvp

    def known(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> tuple[str, dict[str, GraphTensor]]:
        """The factor whose cotangent is wanted, and the other with that of the result."""
        factors = {port: tensors[port] for port in self.ports.input_names[:2]}
        given = {port: x for port, x in inputs.items() if port in factors}
        (port,) = factors.keys() - given.keys()
        return port, alike(g, {**given, **cotangents}, factors)

    def boundary(self, tensors: Tensors) -> Edge:
        initial = dict.fromkeys(self.results, 0.0)
        return Edge(initial=initial, clipped=functools.partial(self.clipped, tensors))

    def clipped(self, tensors: Tensors, given: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Offsets that do not decrease, in the bounds of the rows that are multiplied."""
        rows = tensors["OUT_0" if "OUT_0" in tensors else "token"].shape[1]
        return {"first_token_offset": _bounds(given["first_token_offset"], rows)}


@register
@frozen
class MoeGroupedMatmul(Grouped):
    r"""Grouped product of a mixture of experts: each row of a group times its expert's weight,
    :math:`y_{rn} = \sum_k t_{rk} w_{e(r)kn}`.

    Args:
        token: (1, S, K), float, float8 or int8.
        weight: (E, K, N), the dtype of ``token``. ``.set_stride`` on an operand declares that it
            is stored transposed, which avoids a copy.
        first_token_offset: (G, 1, 1) in int32: the row at which each group begins. The first one
            counts as 0. G is a multiple of E, and group g has expert g mod E. The last group ends
            with the last row, or with a further entry, (G + 1, 1, 1), there; E = 1 needs it.
        token_index: (1, R, 1) in int32, for "GATHER" and "SCATTER".
        token_ks: (1, R, 1) in int32, for "SCATTER".
        mode: "NONE", "GATHER", "SCATTER", or a member of ``cudnn.moe_grouped_matmul_mode``.
            "NONE": rows are those of ``token``. "GATHER": row r is ``token[token_index[r]]``, and
            the result has R rows. "SCATTER": R = S, and row r of the product becomes row
            ``token_index[r] * top_k + token_ks[r]`` of the result.
        top_k: for "SCATTER", the experts of a token: S is a multiple of it.

    Returns:
        OUT_0, (1, S, N) or (1, R, N), accumulated in float32; in int32 for int8. Rows that no group
        gives are 0; of a row that several rows are scattered to, any is taken.

    Offsets count as at least the one before; they and indices are clipped to their arrays. cuDNN
    runs "NONE", XLA the others.
    Raises GraphError if shapes or mode do not fit, GraphTypeError for dtypes.
    :func:`jax_cudnn.ops.ragged_dot` takes sizes of groups instead. Source: cuDNN frontend
    documentation, "MoE Grouped Matmul".
    """

    method = "moe_grouped_matmul"
    ports = Dims.parse(
        "token: one s k, weight: e k n, first_token_offset: *f, ?token_index: *i, ?token_ks: *j "
        "-> OUT_0: one m n"
    )
    about = About(
        requires="mode NONE, planned alone; float8 needs SM 90; cuDNN 9.28 for the end of the last "
        "group, and for weights in row-major order",
        jax_names=("ragged_dot", "ragged_dot_general"),
    )
    examples = (
        Example.of("token: 1 64 32, weight: 4 32 48, first_token_offset: int32 4 1 1"),
        Example.of(
            "token: 1 24 32, weight: 3 32 16, first_token_offset: int32 7 1 1, "
            "token_index: int32 1 48 1",
            "float16",
            mode="GATHER",
        ),
        Example.of("token: 1 24 16, weight: 1 16 8, first_token_offset: int32 2 1 1", "float32"),
    )

    mode: str = "NONE"
    top_k: int = 1

    @classmethod
    def create(cls, *, mode: Any = "NONE", top_k: int = 1) -> MoeGroupedMatmul:
        return cls(one_of("mode", mode, MODES), *integers("top_k", (top_k,), 1))

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        sizes: Any = matched(self, inputs)
        needed = _POSITIONS[1 : 1 + MODES.index(self.mode)]
        if {*inputs} & {*_POSITIONS[1:]} != {*needed}:
            raise GraphError(
                f"mode {self.mode!r} takes other operands",
                expected=", ".join(needed) or "no token_index and no token_ks",
                got=", ".join(inputs),
            )
        rows = sizes["s"]
        index = inputs["token_index"].shape[1:2] if self.mode == "GATHER" else (rows,)
        moves = dict.fromkeys(_POSITIONS[1:], (1, *index, 1))
        token, weight = (1, None, None), (None, None, None)
        offsets = {"first_token_offset": (None, 1, 1)}
        check_ports(inputs, {"token": token, "weight": weight, **offsets, **moves})
        _ends(inputs["first_token_offset"].shape[0], inputs["weight"].shape[0])
        if self.mode == "SCATTER" and isinstance(rows, int) and rows % self.top_k:
            raise GraphError(
                "the rows are not a multiple of top_k",
                expected="top_k rows for each token",
                got=f"{rows} rows, top_k={self.top_k}",
            )
        dtype = product_dtype({port: inputs[port] for port in ("token", "weight")})
        return {"OUT_0": ((1, *index, inputs["weight"].shape[2]), dtype)}

    def clipped(self, tensors: Tensors, given: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        tokens = tensors["token"].shape[1]
        most = {"token_index": tokens // self.top_k - 1, "token_ks": self.top_k - 1}
        if self.mode == "GATHER":
            most["token_index"] = tokens - 1
        found = {p: jnp.clip(given[p], 0, size) for p, size in most.items() if p in given}
        return super().clipped(tensors, given) | found

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        if self.mode != "NONE":
            return NotImplemented
        port, known = self.known(g, cotangents, inputs, tensors)
        offsets = {"first_token_offset": inputs["first_token_offset"]}
        if port == "token":
            operands = {"token": known["OUT_0"], "weight": turned(g, known["weight"])}
            (out,) = g.apply(self, **operands, **offsets)
            return {port: out}
        node = MoeGroupedMatmulBwd(
            out_dims=tensors[port].shape, compute_data_type=self.compute_data_type
        )
        (out,) = g.apply(node, doutput=known["OUT_0"], token=known["token"], **offsets)
        return {port: out}

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        return along(self, "n", batched, tensors)

    def work(self, tensors: Tensors) -> Work:
        return Work(
            2 * math.prod((*tensors["OUT_0"].shape, tensors["weight"].shape[1])), self.method
        )

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        import cudnn

        offsets, weight = tensors["first_token_offset"].get_dim(), tensors["weight"].get_dim()
        if _ends(offsets[0], weight[0]) and cudnn.backend_version() < _ENDS:
            raise RuntimeError("the end of the last group is an offset, which needs cuDNN 9.28")
        mode = getattr(cudnn.moe_grouped_matmul_mode, self.mode)
        return (pygraph.moe_grouped_matmul(**tensors, mode=mode, top_k=self.top_k, **common),)

    def reference(
        self, token: Any, weight: Any, *, precision: Any = None, **positions: jax.Array
    ) -> tuple[jax.Array, ...]:
        kind = arithmetic(self.compute_data_type)
        token, weight = product_operands(token, weight, accumulator=kind)
        rows = token[0]
        if self.mode == "GATHER":
            index = positions["token_index"][0, :, 0]
            rows = rows[jnp.clip(index, 0, len(rows) - 1)]
        expert = _experts(positions["first_token_offset"], rows.shape[0], weight.shape[0])

        def add(total: jax.Array, one: Any) -> tuple[jax.Array, None]:
            number, matrix = one
            own = jnp.where(expert == number, rows, 0)
            part = jnp.matmul(own, matrix, precision=precision, preferred_element_type=kind)
            return total + part, None

        # Zeros that vary as the operands do, inside of shard_map, too.
        zeros = jnp.matmul(rows * 0, weight[0] * 0, preferred_element_type=kind)
        numbers = jnp.arange(weight.shape[0], dtype=jnp.int32)
        result, _ = jax.lax.scan(add, jnp.zeros_like(zeros), (numbers, weight))
        if self.mode == "SCATTER":
            count = rows.shape[0]
            index = jnp.clip(positions["token_index"][0], 0, count // self.top_k - 1)
            slot = index * self.top_k + jnp.clip(positions["token_ks"][0], 0, self.top_k - 1)
            place = jnp.where(expert < 0, count, slot)[:, 0]
            # The row of each slot, as a gather has derivatives that a scatter lacks.
            row = jnp.arange(count, dtype=jnp.int32)
            row = jnp.full_like(row, -1).at[place].max(row, mode="drop")
            result = jnp.where(row[:, None] < 0, 0, result[jnp.maximum(row, 0)])
        return (result[None],)


@register
@frozen
class MoeGroupedMatmulBwd(Grouped):
    r"""Weight gradient of a grouped product: :math:`dw_{ekn} = \sum_{r: e(r)=e} t_{rk} dy_{rn}`.

    Args:
        doutput: (1, S, N), the gradient of the result.
        token: (1, S, K), the rows, in the order of the groups.
        first_token_offset: (G, 1, 1) or (G + 1, 1, 1) in int32, as for ``moe_grouped_matmul``.
        out_dims: the shape of dweight; by default (G, K, N), one expert for each entry of
            ``first_token_offset``. ``.set_dim([...])`` on the result is equivalent, as in pygraph.

    Returns:
        dweight, (E, K, N); 0 for experts without rows.

    Dtypes and errors as of ``moe_grouped_matmul``. cuDNN has it from 9.22 on, with
    CUDA 13 only: with CUDA 12 it runs in XLA. Source: cuDNN frontend documentation,
    "MoE Grouped Matmul".
    """

    method = "moe_grouped_matmul_bwd"
    ports = Dims.parse("doutput: one s n, token: one s k, first_token_offset: *f -> dweight: e k n")
    about = About(requires="cuDNN 9.22 for CUDA 13; with CUDA 12 it runs in XLA; planned alone")
    examples = (
        Example.of("doutput: 1 64 48, token: 1 64 32, first_token_offset: int32 4 1 1"),
        Example.of(
            "doutput: 1 24 16, token: 1 24 8, first_token_offset: int32 7 1 1",
            "float16",
            out_dims=[3, 8, 16],
        ),
    )

    out_dims: tuple[int, ...] | None = int_tuple(default=None, kw_only=True)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        sizes: Any = matched(self, inputs)
        row = (1, None, None)
        check_ports(inputs, dict.fromkeys(inputs, row) | {"first_token_offset": (None, 1, 1)})
        offsets = inputs["first_token_offset"].shape[0]
        shape = (self.out_dims or (offsets,))[0], sizes["k"], sizes["n"]
        if self.out_dims not in (None, shape):
            raise GraphError(
                "out_dims do not fit",
                expected=f"(E, {shape[1]}, {shape[2]})",
                got=f"{self.out_dims}",
            )
        _ends(offsets, shape[0])
        dtype = product_dtype({port: inputs[port] for port in ("doutput", "token")})
        return {"dweight": (shape, dtype)}

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        port, known = self.known(g, cotangents, inputs, tensors)
        weight = known["dweight"]
        node = MoeGroupedMatmul(compute_data_type=self.compute_data_type)
        operands = (
            {"token": known["token"], "weight": weight}
            if port == "doutput"
            else {"token": known["doutput"], "weight": turned(g, weight)}
        )
        (out,) = g.apply(node, **operands, first_token_offset=inputs["first_token_offset"])
        return {port: out}

    def work(self, tensors: Tensors) -> Work:
        rows, columns = tensors["doutput"].shape[1:]
        return Work(2 * rows * columns * tensors["token"].shape[2], self.method)

    def keywords(self) -> dict[str, Any]:
        return {}

    def reference(
        self, doutput: Any, token: Any, first_token_offset: Any, *, precision: Any = None
    ) -> tuple[jax.Array, ...]:
        kind = arithmetic(self.compute_data_type)
        y, t = product_operands(doutput[0], token[0], accumulator=kind)
        experts = (self.out_dims or first_token_offset.shape)[0]
        expert = _experts(first_token_offset, t.shape[0], experts)

        def one(number: jax.Array) -> jax.Array:
            own = jnp.where(expert == number, t, 0)
            return jnp.matmul(own.T, y, precision=precision, preferred_element_type=kind)

        return (jax.lax.map(one, jnp.arange(experts, dtype=jnp.int32)),)
