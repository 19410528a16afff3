"""Sets of a graph's calls, as bits of an integer: their predecessors and neighbours, and the bytes
that cross their edge."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence

from ..graph.spec import GraphSpec


class CallSets:
    """The calls of a graph as bits: bit ``i`` is call ``i``."""

    def __init__(self, spec: GraphSpec) -> None:
        count, anchors = len(spec.calls), {call.name for call in spec.anchors}
        self.all = (1 << count) - 1
        self.anchors = sum(1 << i for i, call in enumerate(spec.calls) if call.name in anchors)
        self.xla_only = sum(1 << i for i, call in enumerate(spec.calls) if call.node.xla_only)
        makers: dict[str, int] = defaultdict(int)
        users: dict[str, int] = defaultdict(int)
        for i, call in enumerate(spec.calls):
            for _, name in call.inputs:
                users[name] |= 1 << i
            makers.update((name, 1 << i) for _, name in call.outputs)
        # Of each tensor what makes it (0 for an operand), what reads it, whether it is returned.
        self._edges = [
            (makers[t.name], users[t.name], t.name in spec.outputs, t)
            for t in spec.tensors
            if t.literal is None
        ]
        self._makers, self._users = [0] * count, [0] * count
        self._beside, self._edges_at = [0] * count, [0] * count
        for number, (maker, read, _, _) in enumerate(self._edges):
            for i in members(maker):
                self._users[i] |= read
            for i in members(read):
                self._makers[i] |= maker
            for i in members(read | maker):
                self._beside[i] |= read | maker
                self._edges_at[i] |= 1 << number
        # The makers, theirs, and so on; the users likewise. Calls are in topological order.
        self._before, self._after = [0] * count, [0] * count
        for i, near in enumerate(self._makers):
            self._before[i] = near | _of(self._before, near)
        for i, near in [*enumerate(self._users)][::-1]:
            self._after[i] = near | _of(self._after, near)

    def traffic(self, calls: int) -> int:
        """Bytes that a segment of these calls reads and writes."""
        edges = (self._edges[number] for number in members(_of(self._edges_at, calls)))
        return sum(
            tensor.nbytes
            for maker, users, returned, tensor in edges
            if returned or users & ~calls or not maker & calls
        )

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

    def users(self, calls: int) -> int:
        """The calls that read what these make."""
        return _of(self._users, calls)

    def after(self, calls: int) -> int:
        """All calls that depend on these."""
        return _of(self._after, calls)

    def is_returned(self, calls: int) -> bool:
        """Whether the graph returns something of these."""
        return any(returned and maker & calls for maker, _, returned, _ in self._edges)

    def is_closed(self, calls: int, glued: Sequence[int] = ()) -> bool:
        """Whether they can run at once: none depends on a call outside that depends on another
        of them."""
        return not self.before(_of(self._makers, calls) & ~calls, glued) & calls

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
                if not _of(self._makers, unit) & ~unit & waiting
            )
            read = members(_of(self._makers, ready) & ~ready)
            stage = max((stages[i] for i in read), default=0)
            stage += ready in fixed  # never in the stage of another that it reads
            stage += stage % 2 != bool(ready & foreign)
            stages.update((i, stage) for i in members(ready))
            waiting &= ~ready
        free = members(self.all & ~sum(fixed))
        groups = [*fixed]
        for stage in sorted({stages[i] for i in free}):
            groups += self.connected(sum(1 << i for i in free if stages[i] == stage))
        return sorted(groups, key=lambda group: (stages[members(group)[0]], group & -group))


def members(calls: int) -> list[int]:
    """The positions of the calls in a set."""
    return [i for i in range(calls.bit_length()) if calls >> i & 1]


def _of(sets: Sequence[int], calls: int) -> int:
    """The union of the sets of these calls."""
    return functools.reduce(int.__or__, (sets[i] for i in members(calls)), 0)


def _with(calls: int, groups: Sequence[int]) -> int:
    """The set with all of each group of which it has a call."""
    return functools.reduce(int.__or__, (g for g in groups if g & calls), calls)
