"""A score_mod as a value: its meaning in jnp, and how it is batched."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...._core.errors import GraphTypeError
from ...._core.graph.dims import Shape
from ...._core.graph.node import Node
from ...._core.graph.reference import applied, rounded
from ...._core.graph.spec import GraphSpec, intern
from ...._core.reasons import Reason
from ...._core.rules import Tensors
from ...transformations import grown
from ..reference import OPERANDS

PORT = OPERANDS
"""The port with the list of operands of score_mod."""
TILE = 128  # cuDNN computes whole tiles of this many queries and keys
_EXAMPLES = 8  # batch elements on which a function is tried


def axis_of(node: Node) -> int | None:
    """The axis of an index node; None for other nodes."""
    return getattr(node, "axis", None) if node.method == "gen_index" else None


def is_operand(port: str) -> bool:
    return port.startswith(PORT)


@dataclass(frozen=True, repr=False)
class ScoreMod:
    """The graph of a score_mod.

    ``spec`` takes the scores (B, H, Sq, Skv), followed by the operands at the node's ``ports``, and
    has one result. All computed values have the scores' shape. Values are float32, and booleans are
    1 and 0. ``hides``: it may hide all keys of some query. ``masks_first``: it is a causal mask of
    a function of the score alone, which may also be applied to hidden scores.
    """

    spec: GraphSpec
    ports: tuple[str, ...]
    hides: bool
    masks_first: bool = False

    @property
    def named(self) -> dict[str, str]:
        """The node's port for each operand after the scores, by its name in the graph."""
        return dict(zip(self.spec.inputs[1:], self.ports, strict=True))

    def __repr__(self) -> str:  # distinguishes specs
        flags = self.hides, self.masks_first
        return f"ScoreMod({self.ports}, {flags}, {str(self.spec)!r})"

    def __str__(self) -> str:
        return f"<{' '.join(call.node.method for call in self.spec.calls)}>"

    def __call__(
        self, score: jax.Array, first: Any, operands: Mapping[str, jax.Array]
    ) -> jax.Array:
        """The modified scores, for scores (B, H, S, T) whose first query is ``first``."""
        constants = ((t.name, t.value or 0) for t in self.spec.constants)
        values: dict[str, Any] = {name: score.dtype.type(value) for name, value in constants}
        values[self.spec.inputs[0]] = score
        for name, port in self.named.items():
            values[name] = operands[port].astype(self.spec.tensor(name).dtype)
        for call in self.spec.calls:
            ((_, name),) = call.outputs
            if (axis := axis_of(call.node)) is not None:
                result = jax.lax.broadcasted_iota(jnp.int32, score.shape, axis)
                result = result + first if axis == 2 else result
            else:
                inputs = {port: jnp.asarray(values[n]) for port, n in call.inputs}
                (result,) = applied(call.node, inputs)
            values[name] = rounded(result, self.spec.tensor(name).dtype)
        return jnp.broadcast_to(values[self.spec.outputs[0]], score.shape)

    @property
    def counts_examples(self) -> bool:
        """Whether it reads the batch index."""
        return any(axis_of(call.node) == 0 for call in self.spec.calls)

    def stretches(self, tensors: Tensors) -> dict[str, Shape]:
        """The operands broadcast over queries, which cuDNN would misread, with the shapes to which
        they are copied."""
        scores = (*tensors["q"].shape[:3], tensors["k"].shape[2])  # on a mesh, of one device
        shapes = {port: stretched(tensors[port].shape, scores) for port in self.ports}
        return {port: shape for port, shape in shapes.items() if shape != tensors[port].shape}

    def refused(self, tensors: Tensors) -> Reason | None:
        """Why cuDNN does not run it, or None."""
        for port, shape in self.stretches(tensors).items():
            return Reason(
                f"cuDNN misreads {port} of shape {list(tensors[port].shape)}, which is broadcast "
                f"over queries: broadcast it to {list(shape)}"
            )
        # Planning crashes the process (SIGSEGV in cuDNN 9.19; 9.28 plans some of these graphs).
        operands = {*self.spec.inputs[1:]}
        compared = {
            name
            for call in self.spec.calls
            if call.node.method.startswith("cmp_") and operands & {n for _, n in call.inputs}
            for _, name in call.outputs
        }
        masks = [n for c in self.spec.calls for p, n in c.inputs if p == "mask" and n in compared]
        if len(masks) < 2:
            return None
        return Reason(
            "cuDNN's planner fails if score_mod selects twice by comparisons with operands: "
            "combine the conditions with &, in one jnp.where"
        )

    def folded(self, size: int, mapped: Iterable[str]) -> ScoreMod:
        """For a batch ``size`` times as large, which the operands ``mapped`` have too."""
        named, mapped = self.named, {*mapped}
        tensors = tuple(
            t
            if t.value is not None or named.get(t.name, PORT) not in {PORT, *mapped}
            else dataclasses.replace(t, shape=grown(t.shape, 0, size))
            for t in self.spec.tensors
        )
        spec = intern(dataclasses.replace(self.spec, tensors=tensors))
        return dataclasses.replace(self, spec=spec)


@functools.lru_cache(256)
def takes_infinity(mod: ScoreMod, scores: Shape) -> bool:
    """Whether a function returns neither NaN nor +inf, and has a finite derivative, for scores of
    -inf after the last queries and keys, up to whole tiles.

    It is tried for some batch elements and all heads: for some queries after the last with all
    keys, and for all keys after the last with some queries; operands there are arbitrary.
    """
    b, h, queries, keys = min(scores[0], _EXAMPLES), *scores[1:]
    rows, columns = (-(-size // TILE) * TILE for size in (queries, keys))
    behind = [(q, slice(None)) for q in {queries, rows - 1} if queries < rows]
    if keys < columns:
        behind += [(q, slice(keys, None)) for q in {0, queries // 2, queries - 1}]
    return all(is_number(mod, (b, h, 1, columns), q, at) for q, at in behind)


def is_number(mod: ScoreMod, scores: Shape, first: int, keys: slice = slice(None)) -> bool:
    """Whether a function returns neither NaN nor +inf at -inf, and its derivative is finite, at
    these keys."""
    noise = np.random.default_rng(0)

    def some(dtype: str) -> np.ndarray:
        drawn = noise.integers(-8, 9, scores) if "int" in dtype else noise.normal(size=scores)
        return drawn.astype(dtype)

    with unwatched():
        dtypes = {port: mod.spec.tensor(name).dtype for name, port in mod.named.items()}
        operands = {port: jnp.asarray(some(dtype)) for port, dtype in dtypes.items()}
        hidden = jnp.full(scores, -jnp.inf, mod.spec.input_tensors[0].dtype)
        both = jax.jvp(lambda x: mod(x, first, operands), (hidden,), (jnp.ones_like(hidden),))
        value, slope = (np.asarray(x)[..., keys] for x in both)
    return bool(np.all(value < np.inf) & np.all(np.isfinite(slope)))


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Compute during tracing or lowering, on the CPU if available, without the checks (NaN,
    transfers) that JAX applies to the traced program."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.ensure_compile_time_eval())
        for watched in (jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow")):
            stack.enter_context(watched)
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may exclude it
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield


def stretched(shape: Shape, scores: Shape) -> Shape:
    """The smallest shape of an operand that cuDNN reads correctly with scores (B, H, Sq, Skv): one
    element per query, or only one per head."""
    if shape[2] == scores[2] or (shape[0] == 1 and shape[2:] == (1, 1)):
        return shape
    return (*shape[:2], scores[2], shape[3])


def check_function(function: Any) -> None:
    """GraphTypeError if it is not a function."""
    if not callable(function):
        raise GraphTypeError(
            "score_mod is not a function",
            expected="f(score, b, h, q, kv, *score_mod_operands)",
            got=f"{type(function).__name__}: {function!r}"[:200],
        )


def listed(operands: Any) -> Sequence[Any]:
    """The operands of score_mod; GraphTypeError if they are not a tuple or list."""
    if operands is None or isinstance(operands, (tuple, list)):
        return operands or ()
    raise GraphTypeError(
        f"{PORT} is not a tuple",
        expected="a tuple or a list of arrays; (x,) for one array",
        got=f"{type(operands).__name__}: {operands!r}"[:200],
    )
