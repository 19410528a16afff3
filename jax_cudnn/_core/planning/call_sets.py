"""Sets of a graph's calls, as bits of an integer: their predecessors and neighbours, and the bytes
that cross their edge."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..graph.spec import GraphSpec, Tensor


class _Edge(NamedTuple):
    """A tensor: the call that makes it (0 for an operand), and those that read it."""

    maker: int
    users: int
    returned: bool
    tensor: Tensor


class CallSets:
    """The calls of a graph as bits: bit ``i`` is call ``i``."""

    def __init__(self, spec: GraphSpec) -> None:
        count = len(spec.calls)
        self.all = (1 << count) - 1
        self.anchors = _union(1 << i for i, call in enumerate(spec.calls) if call.node.anchor)
        self.leftover = _union(1 << i for i, call in enumerate(spec.calls) if call.node.leftover)
        makers: dict[str, int] = defaultdict(int)
        users: dict[str, int] = defaultdict(int)
        for i, call in enumerate(spec.calls):
            for _, name in call.inputs:
                users[name] |= 1 << i
            makers.update((name, 1 << i) for _, name in call.outputs)
        self._edges = [
            _Edge(makers[t.name], users[t.name], t.name in spec.outputs, t)
            for t in spec.tensors
            if t.literal is None
        ]
        self._made_before = [0] * count  # the makers of a call's operands
        self._users, self._beside, self._edges_at = [0] * count, [0] * count, [0] * count
        for number, edge in enumerate(self._edges):
            for i in members(edge.maker):
                self._users[i] |= edge.users
            for i in members(edge.users):
                self._made_before[i] |= edge.maker
            for i in members(edge.users | edge.maker):
                self._beside[i] |= edge.users | edge.maker
                self._edges_at[i] |= 1 << number
        self._before: list[int] = []  # the makers, theirs, and so on
        for makers_of in self._made_before:  # calls are in topological order
            self._before.append(makers_of | _of(self._before, makers_of))

    def traffic(self, calls: int) -> int:
        """Bytes that a segment of these calls reads and writes."""
        edges = [self._edges[number] for number in members(_of(self._edges_at, calls))]
        inner = (e.maker & calls and not (e.returned or e.users & ~calls) for e in edges)
        return sum(e.tensor.nbytes for e, within in zip(edges, inner, strict=True) if not within)

    def beside(self, calls: int) -> int:
        """Other calls that make, read or share a tensor with these."""
        return _of(self._beside, calls) & ~calls

    def before(self, calls: int, glued: Sequence[int] = ()) -> int:
        """All calls on whose results these depend, where those of each ``glued`` set run at
        once."""
        found, new = 0, _with(calls, glued)
        while new:
            makers = _with(_of(self._before, new), glued)
            new = makers & ~found if glued else 0
            found |= makers
        return found

    def _makers(self, calls: int) -> int:
        """The calls that make the operands of these."""
        return _of(self._made_before, calls)

    def users(self, calls: int) -> int:
        """The calls that read what these make."""
        return _of(self._users, calls)

    def after(self, calls: int) -> int:
        """All calls that depend on these."""
        found, new = 0, calls
        while new:
            new = self.users(new) & ~found
            found |= new
        return found

    def is_returned(self, calls: int) -> bool:
        """Whether the graph returns something of these."""
        return any(edge.returned and edge.maker & calls for edge in self._edges)

    def is_closed(self, calls: int, glued: Sequence[int] = ()) -> bool:
        """Whether they can run at once: none depends on a call outside that depends on another
        of them."""
        return not self.before(self._makers(calls) & ~calls, glued) & calls

    def connected(self, calls: int) -> list[int]:
        """The parts of a set between which no tensor is made, read or shared."""
        parts = []
        while calls:
            grown, found = calls & -calls, 0
            while grown != found:
                found, grown = grown, grown | self.beside(grown) & calls
            parts.append(found)
            calls &= ~found
        return parts

    def in_order(self, fixed: Sequence[int], foreign: int) -> list[int]:
        """Sets that hold each call once and can run sequentially.

        Each of ``fixed`` is one of them. The other calls are grouped, ``foreign`` ones apart
        from the rest: a group is connected, and no call of another kind lies between its calls.
        """
        home = {i: group for group in fixed for i in members(group)}
        stages: dict[int, int] = {}
        waiting = self.all
        while waiting:
            ready = next(
                unit
                for unit in (home.get(i, 1 << i) for i in members(waiting))
                if not self._makers(unit) & ~unit & waiting
            )
            stage = max((stages[i] for i in members(self._makers(ready) & ~ready)), default=0)
            stage += ready in fixed  # never in the stage of another that it reads
            stage += stage % 2 != bool(ready & foreign)
            stages.update((i, stage) for i in members(ready))
            waiting &= ~ready
        free = members(self.all & ~_union(fixed))
        groups = [*fixed]
        for stage in sorted({stages[i] for i in free}):
            groups += self.connected(_union(1 << i for i in free if stages[i] == stage))
        return sorted(groups, key=lambda group: (stages[members(group)[0]], group & -group))


def members(calls: int) -> list[int]:
    """The positions of the calls in a set."""
    return [i for i in range(calls.bit_length()) if calls >> i & 1]


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(int.__or__, sets, 0)


def _of(sets: Sequence[int], calls: int) -> int:
    """The union of the sets of these calls."""
    return _union(sets[i] for i in members(calls))


def _with(calls: int, groups: Sequence[int]) -> int:
    """The set with all of each group of which it has a call."""
    return calls | _union(group for group in groups if group & calls)
