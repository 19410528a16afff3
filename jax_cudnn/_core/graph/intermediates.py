"""The dtypes of values inside a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from .dtypes import is_floating, itemsize
from .spec import Call


def intermediate_dtypes(
    calls: Sequence[Call], said: Mapping[str, str], fixed: Collection[str], wide: str
) -> dict[str, str]:
    """The dtypes of a graph's tensors.

    A floating value inside of it is ``wide`` (float64 stays), and one that is only moved has its
    source's dtype. One that a product multiplies with a 16-bit operand has that operand's, if it
    would have that as a result, too: cuDNN multiplies operands of one dtype.

    Args:
        calls: the graph's operations in order.
        said: the dtypes that tensors have as results, or were given.
        fixed: tensors that keep these.
        wide: what other floats have.
    """
    dtypes = dict(said)
    sources: dict[str, tuple[str, ...]] = {}  # of values that may have another dtype than `wide`
    for call in calls:
        node = call.node
        for _, name in call.outputs:
            if name in fixed:
                continue
            kept = node.anchor is not None and node.anchor.keeps_dtypes
            if node.moves:
                sources[name] = tuple(source for _, source in call.inputs)
                dtypes[name] = dtypes[sources[name][0]]
            elif is_floating(said[name]) and not (node.xla_only or kept):
                sources[name] = ()
                dtypes[name] = "float64" if said[name] == "float64" else wide
    narrow = {
        name
        for call in calls
        for factor in _beside_16_bits(call, dtypes, said)
        for name in _with_sources(factor, said, sources)
    }
    return intermediate_dtypes(calls, said, {*fixed, *narrow}, wide) if narrow else dtypes


def _beside_16_bits(
    call: Call, dtypes: Mapping[str, str], said: Mapping[str, str]
) -> Iterator[str]:
    """Factors of a product that have another dtype than the other one, and would have it."""
    factors = [name for _, name in call.inputs]
    if call.node.product and len(factors) == 2:
        for name, other in (factors, factors[::-1]):
            if itemsize(dtypes[other]) == 2 and dtypes[name] != dtypes[other] == said[name]:
                yield name


def _with_sources(
    name: str, said: Mapping[str, str], sources: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """A value and all that it is moved from; nothing where an array is among it, or another dtype:
    what moves elements leaves them as they are."""
    found = [name]
    for moved in found:  # it grows
        found += sources.get(moved, ())
    return found if all(x in sources and said[x] == said[name] for x in found) else []
