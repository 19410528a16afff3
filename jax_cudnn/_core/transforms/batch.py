"""vmap of a graph: folds the new dimension into existing dimensions of its nodes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..graph.by_reference import Batched
from ..graph.node import BY_REFERENCE, LEAD, Fold
from ..graph.spec import Call, GraphSpec, Origin, Tensor, intern
from ..graph.tensor import GraphTensor
from .derivation import Derivation, vocabulary
from .derived import Derived

_MOST = 32  # combinations of folds that are compared


class NoFold(Exception):
    """A node of the graph cannot take another dimension."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.name)
        self.call = call


@functools.lru_cache(maxsize=2048)
def batch(spec: GraphSpec, size: int, batched: frozenset[str]) -> tuple[Derived, tuple[bool, ...]]:
    """The graph for ``batched`` operands, which have a new leading dimension of ``size``; and
    which of its results have that dimension.

    Keys are the operands' names. Of all ways to fold the dimension into convolutions and matmuls,
    the one that moves the fewest bytes is chosen; if there are very many, each node's fold is
    chosen in turn.

    Raises:
        NoFold: a node cannot take another dimension.
    """
    ways = [_ways(spec, call) for call in spec.anchors]
    few = math.prod(ways) <= _MOST
    combinations = itertools.product(*map(range, ways)) if few else [None]
    attempts = (_Attempt(spec, size, batched, choice) for choice in combinations)
    best = min((a for a in attempts if a.applies), key=lambda a: a.price)
    return best.derived(), tuple(name in best.batched for name in spec.outputs)


def _ways(spec: GraphSpec, call: Call) -> int:
    """An upper bound on the number of an anchor's folds, for any choice of batched operands."""
    ports = [port for port, _ in call.inputs]
    tensors = {port: spec.tensor(name) for port, name in (*call.inputs, *call.outputs)}
    subsets = itertools.chain.from_iterable(
        itertools.combinations(ports, n) for n in range(1, len(ports) + 1)
    )
    found = [_split(call.node.folds(frozenset(s), 1, tensors)) for s in subsets]
    return max(1, *(len(folds) for folds, *_ in found)) + any(other for _, other, _ in found)


def _split(found: Iterable[Fold]) -> tuple[list[Fold], Fold | None, bool]:
    """A node's folds, that to other nodes, and whether XLA may compute the batched node by its
    reference."""
    found = [*found]
    folds = [fold for fold in found if fold is not BY_REFERENCE and fold.computed is None]
    return folds, next((f for f in found if f.computed is not None), None), BY_REFERENCE in found


@dataclass(frozen=True)
class _Form:
    """Where a tensor has the new dimension: nowhere (None), leading (LEAD) or folded into an axis,
    in which each element is repeated ``repeat`` times. ``thin``: leading, with size 1."""

    axis: int | None = None
    repeat: int = 1
    thin: bool = False


class _Attempt:
    """The batched graph for one choice of the anchors' folds."""

    def __init__(
        self, spec: GraphSpec, size: int, batched: frozenset[str], choice: Sequence[int] | None
    ) -> None:
        self.spec, self.size, self.price, self.applies = spec, size, 0.0, True
        self.batched = set(batched)
        self.g = g = Derivation(spec)
        self._forms: dict[str, dict[_Form, GraphTensor]] = {}
        self._computed: set[str] = set()
        self._read = {*spec.outputs, *(name for c in spec.calls for _, name in c.inputs)}
        self._keys = {}
        for t in spec.tensors:
            if t.value is not None:
                self._forms[t.name] = {_Form(): g.constant(t, len(t.shape))}
            elif t.name in spec.inputs:
                form = _Form(LEAD) if t.name in batched else _Form()
                self._forms[t.name] = {form: g.declare(self._shaped(t, form))}
                self._keys[self._forms[t.name][form].name] = t.name
        choices = iter(choice or ())
        for call in spec.calls:
            chosen = call.node.anchor and choice is not None
            self._add(call, next(choices) if chosen else None)

    def derived(self) -> Derived:
        results = [
            self._get(name, _Form(LEAD) if name in self.batched else _Form())
            for name in self.spec.outputs
        ]
        names = dict(zip(self.spec.outputs, (x.name for x in results), strict=True))
        origin = replace(self.spec.origin, residuals=(), family=())
        made = Derived.of(
            self.g.finished(results, origin), self._keys, [*names.values()], vocabulary().repeats
        )
        if made.spec is None or self.spec.origin == Origin():
            return made
        # Operations outside the graph may have renamed results.
        at = dict(zip(self.spec.outputs, made.results, strict=True))
        kept = (at[name] for name in self.spec.origin.residuals)
        left = tuple(s.of for s in kept if s is not None and s.of in made.spec.outputs)
        family = tuple(_batched_whole(member, self.size) for member in self.spec.origin.family)
        origin = replace(origin, residuals=left, family=family)
        return replace(made, spec=intern(replace(made.spec, origin=origin)))

    # -- calls ----------------------------------------------------------------------------------

    def _add(self, call: Call, choice: int | None) -> None:
        tensors = {port: self.spec.tensor(name) for port, name in (*call.inputs, *call.outputs)}
        ports = frozenset(port for port, name in call.inputs if name in self.batched)
        if not ports:
            if choice:
                self.applies = False  # the same as for choice 0
            values = {name: self._get(name, _Form()) for _, name in call.inputs}
            for name, x in self.g.replay(self.spec, call, values).items():
                self._forms[name] = {_Form(): x}
            self._computed |= {name for _, name in call.outputs}
            return
        folds, other, by_reference = _split(call.node.folds(ports, self.size, tensors))
        folds = self._sorted(call, ports, folds, tensors)
        movable = [port for port, name in call.inputs if self.spec.tensor(name).value is None]
        if other is not None and (len(ports) == len(movable) or not folds):
            front = sum(self._cost(name, _Form(LEAD)) for _, name in call.inputs)
            prices = [self._price(call, ports, fold, tensors) for fold in folds]
            if choice == len(folds) if choice is not None else front < min(prices, default=0):
                self.price += front
                self._map(call, other, tensors)
                return
        if choice is not None:
            self.applies &= choice < max(len(folds), 1)  # none: by reference, or not at all
            folds = folds[min(choice, len(folds) - 1) :][:1]
        node, fold = call.node, None
        if folds:
            fold = min(folds, key=lambda fold: self._price(call, ports, fold, tensors))
            node = fold.node or node
            forms = self._needed(call, ports, fold, tensors)
        elif node.xla_only or by_reference:
            inner, outs = (tuple(port for port, _ in side) for side in (call.inputs, call.outputs))
            node = Batched(node, self.size, tuple(p for p in inner if p in ports), inner, outs)
            forms = {port: _Form(LEAD if port in ports else None) for port in inner}
        else:
            raise NoFold(call)
        self.price += sum(self._cost(name, forms[port]) for port, name in call.inputs)
        values = {port: self._get(name, forms[port]) for port, name in call.inputs}
        for (port, name), x in zip(call.outputs, self.g.apply(node, **values), strict=True):
            form = _Form(LEAD if fold is None else fold.axes.get(port))
            shaped = self._shaped(tensors[port], form)
            self._forms[name] = {form: self.g.fixed(self.g.ordered(x, shaped.order), shaped.dtype)}
            self.batched.add(name)
            self._computed.add(name)

    def _map(self, call: Call, fold: Fold, tensors: Mapping[str, Tensor]) -> None:
        """Adds the call as other nodes, with a leading dimension."""
        assert fold.computed is not None
        front = _Form(LEAD)
        made = fold.computed(self.g, {port: self._get(name, front) for port, name in call.inputs})
        for port, name in call.outputs:
            self._forms[name] = {front: self.g.rounded(made[port], tensors[port].dtype)}
            self.batched.add(name)
            self._computed.add(name)

    def _sorted(
        self,
        call: Call,
        ports: frozenset[str],
        folds: Sequence[Fold],
        tensors: Mapping[str, Tensor],
    ) -> list[Fold]:
        """The folds that apply. Of equally cheap folds the first is chosen, so those come first
        that the node's operands already have."""
        read = {port for port, name in call.outputs if name in self._read}
        folds = [fold for fold in folds if read.isdisjoint(fold.summed)]
        if call.node.anchor:
            return folds
        named = {port: self._forms[name] for port, name in call.inputs}
        # In the order of the ports, which is not that of a set: all processes make one program.
        known = [port for port, _ in call.inputs if port in ports]
        largest = sorted(known, key=lambda port: -math.prod(tensors[port].shape))

        def unlike(fold: Fold) -> tuple[bool, ...]:
            return tuple(_Form(fold.axes[port]) not in named[port] for port in largest)

        return sorted(folds, key=unlike)

    def _needed(
        self, call: Call, ports: frozenset[str], fold: Fold, tensors: Mapping[str, Tensor]
    ) -> dict[str, _Form]:
        """The form in which the call takes each operand."""
        forms = {}
        for port, name in call.inputs:
            axis, shape = fold.axes.get(port), tensors[port].shape
            if axis is None:
                forms[port] = _Form()
            elif axis == LEAD:
                thin = port not in ports and port in fold.broadcast
                forms[port] = _Form(LEAD, thin=thin)
            else:
                extent = _extent(call, fold, port, tensors)
                if port in ports:
                    forms[port] = _Form(axis, extent if shape[axis] == 1 else 1)
                else:
                    broadcasts = shape[axis] == 1 and port in fold.broadcast
                    forms[port] = _Form() if broadcasts else _Form(axis)
            if self.spec.tensor(name).value is not None:
                forms[port] = _Form(LEAD, thin=True) if axis == LEAD else _Form()
        return forms

    def _price(
        self, call: Call, ports: frozenset[str], fold: Fold, tensors: Mapping[str, Tensor]
    ) -> float:
        forms = self._needed(call, ports, fold, tensors)
        return sum(self._cost(name, forms[port]) for port, name in call.inputs)

    # -- forms of a tensor ------------------------------------------------------------------------

    def _cost(self, name: str, form: _Form) -> float:
        """The bytes moved to convert a tensor to a form. A new shape alone costs nothing for an
        operand, but cuts a computed tensor out of its fused graph."""
        known, tensor = self._forms[name], self.spec.tensor(name)
        if form in known or tensor.value is not None:
            return 0
        size = self.size if isinstance(self.size, int) else 1
        nbytes = float(_elements(tensor)) * size * (form.repeat if form.repeat else 1)
        moved = form.repeat > 1 or (_Form() in known and len(known) == 1 and not form.thin)
        for other in (form, *known):
            axis = other.axis
            if axis is not None and axis > 0 and math.prod(tensor.shape[:axis]) != 1:
                moved = True
        return nbytes * (moved + (name in self._computed))

    def _get(self, name: str, form: _Form) -> GraphTensor:
        forms = self._forms[name]
        if form not in forms:
            forms[form] = self._made(name, form)
        return forms[form]

    def _made(self, name: str, form: _Form) -> GraphTensor:
        g, tensor = self.g, self.spec.tensor(name)
        shape, forms = tensor.shape, self._forms[name]
        if tensor.value is not None:
            return g.constant(tensor, len(shape) + (form.axis == LEAD))
        if form.thin:
            thin = g.reshaped(self._get(name, _Form()), (1, *shape))
            return self._ordered(thin, self._shaped(tensor, form))
        if form.axis == LEAD:
            source, x = next((f, x) for f, x in forms.items() if f.repeat == 1 and not f.thin)
            if source.axis is None:
                return g.broadcast(g.reshaped(x, (1, *shape)), (self.size, *shape))
            at = source.axis
            split = g.reshaped(x, (*shape[:at], self.size, *shape[at:]))
            return g.transposed(split, (at, *(i for i in range(split.ndim) if i != at)))
        assert form.axis is not None
        at, each = form.axis, form.repeat
        before, after = shape[:at], shape[at:]
        if name in self.batched:
            x = self._get(name, _Form(LEAD))
            x = g.transposed(x, (*range(1, at + 1), 0, *range(at + 1, x.ndim)))
        else:
            x = g.reshaped(forms[_Form()], (*before, 1, *after))
            x = g.broadcast(x, (*before, self.size, *after))
        if each != 1:
            x = g.broadcast(x, (*before, self.size, each, *after[1:]))
            after = (each, *after[1:])
        x = g.reshaped(x, (*before, self.size * after[0], *after[1:]))
        return self._ordered(x, self._shaped(tensor, form))

    def _ordered(self, x: GraphTensor, like: Tensor) -> GraphTensor:
        if like.order is None or x._state.order == like.order:
            return x
        return self.g.ordered(x, like.order)

    def _shaped(self, tensor: Tensor, form: _Form) -> Tensor:
        """A tensor with the new dimension. If that precedes all others, the stated memory order is
        kept."""
        shape, order = list(tensor.shape), tensor.order
        if form.axis is None:
            return tensor
        if form.axis == LEAD:
            shape.insert(0, self.size)
            order = None if order is None else (0, *(axis + 1 for axis in order))
        else:
            shape[form.axis] *= self.size * form.repeat
            order = order if order is not None and order[0] == form.axis else None
        return replace(tensor, shape=tuple(shape), order=order)


def _batched_whole(spec: GraphSpec, size: int) -> GraphSpec:
    """A graph with all operands batched; itself where a node cannot take another dimension."""
    try:
        derived = batch(spec, size, frozenset(spec.inputs))[0]
    except NoFold:
        return spec
    return derived.spec or spec


def _elements(tensor: Tensor) -> int:
    return math.prod(size if isinstance(size, int) else 1 for size in tensor.shape)


def _extent(call: Call, fold: Fold, port: str, tensors: Mapping[str, Tensor]) -> int:
    """The size of the call along the axis into which an operand is folded."""
    if port not in fold.broadcast:
        return 1
    sizes = [
        tensors[other].shape[axis]
        for other, axis in fold.axes.items()
        if axis == fold.axes[port] and other in dict(call.inputs)
    ]
    return 0 if 0 in sizes else max(sizes)
