"""References to the tensors of a Graph: by node and port, name, uid, tensor, or array."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Mapping
from typing import Any

from .._core.errors import GraphError, nearest
from .._core.graph.source import user_line
from .tensors import NamedTensor

# Names of results in cuDNN's frontend that differ from the port's name.
_PYGRAPH = {
    "inv_var": "INV_VARIANCE",
    "mean": "MEAN",
    "next_running_mean": "NEXT_RUNNING_MEAN",
    "next_running_var": "NEXT_RUNNING_VAR",
    "DScale": "DSCALE",
    "DBias": "DBIAS",
}


def result_name(method: str, port: str) -> str:
    """The frontend's name of an operation's result."""
    if method == "reduction":
        return "OUT_0"
    if method == "rmsnorm_backward":
        return {"DScale": "Dscale", "DBias": "Dbias"}.get(port, port)
    return _PYGRAPH.get(port, port)


def is_uid(reference: Any) -> bool:
    """Whether a reference is a Python or NumPy integer."""
    return isinstance(reference, numbers.Integral) and not isinstance(reference, bool)


class References:
    """Finds the tensor of a reference.

    Arrays are identified by identity and are not kept alive: a graph needs only their shapes.
    """

    def __init__(self, tensors: Mapping[str, NamedTensor]) -> None:
        self._tensors = tensors
        self._named: dict[str, NamedTensor] = {}
        self._aliases: dict[str, NamedTensor] = {}
        self._arrays: dict[int, tuple[Any, NamedTensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": {}}  # not valid in copies and other processes

    def copied(self, tensors: Mapping[str, NamedTensor]) -> References:
        """The same references to the tensors of a copied graph."""
        made = References(tensors)
        made._named = {text: tensors[tensor.name] for text, tensor in self._named.items()}
        made._aliases = {text: tensors[tensor.name] for text, tensor in self._aliases.items()}
        made._arrays = {
            key: (alive, tensors[tensor.name]) for key, (alive, tensor) in self._arrays.items()
        }
        return made

    def name(self, name: str, tensor: NamedTensor) -> None:
        """Makes a name like ``conv2d::image`` refer to a tensor."""
        self._named.setdefault(name, tensor)

    def alias(self, name: str, tensor: NamedTensor) -> None:
        """Makes a name that error messages do not list refer to a tensor."""
        self._aliases.setdefault(name.lower(), tensor)

    def result(self, node: str, method: str, port: str, tensor: NamedTensor) -> None:
        """Makes cuDNN's and the port's name refer to a node's result, in upper or lower case."""
        self.name(f"{node}::{result_name(method, port)}", tensor)
        self.alias(f"{node}::{result_name(method, port)}", tensor)
        self.alias(f"{node}::{port}", tensor)

    def remember(self, array: Any, tensor: NamedTensor) -> None:
        """Makes an array or a tensor of pygraph refer to a tensor, as long as it lives."""
        self._arrays[id(array)] = _weakly(array), tensor

    def recall(self, array: Any) -> NamedTensor | None:
        """The tensor for which an array was passed, or None."""
        alive, tensor = self._arrays.get(id(array), (None, None))
        return tensor if alive is not None and alive() is array else None

    def places(self, tensor: NamedTensor) -> list[str]:
        """The nodes and ports that read or compute a tensor."""
        return [name for name, named in self._named.items() if named is tensor and "::" in name]

    def find(self, reference: Any) -> NamedTensor:
        """The tensor; raises GraphError that lists the known references if there is none."""
        found = self.lookup(reference)
        if found is None:
            raise self._unknown(reference)
        return found

    def lookup(self, reference: Any) -> NamedTensor | None:
        """The tensor, or None; raises GraphError for an ambiguous name."""
        if isinstance(reference, NamedTensor):
            found = self._tensors.get(reference.name)
            if found is None or found._builder.family is not reference._builder.family:
                return None  # copies of a graph, with other options, share its references
            return found
        if isinstance(reference, str):
            return self._by_text(reference)
        if is_uid(reference):
            return next((t for t in self._tensors.values() if t.uid == reference), None)
        return self.recall(reference)

    def _by_text(self, text: str) -> NamedTensor | None:
        labelled = [t for t in self._tensors.values() if t.label == text]
        if text in self._named:
            return self._named[text]
        if len(labelled) > 1:
            raise GraphError(
                f"several tensors are named {text!r}",
                got=", ".join(tensor.name for tensor in labelled),
                fix="refer to them by node and port, by uid, or by the tensor itself",
                where=user_line(),
            )
        return labelled[0] if labelled else self._aliases.get(text.lower())

    def _unknown(self, reference: Any) -> GraphError:
        labels = [tensor.label for tensor in self._tensors.values() if tensor.label]
        known = [*dict.fromkeys((*labels, *self._named))]
        got = (
            reference
            if isinstance(reference, (str, numbers.Integral))
            else f"a {type(reference).__name__}"
        )
        return GraphError(
            f"the graph has no tensor {got!r}",
            expected=f"one of {', '.join(known)}; a uid, a tensor of this graph, or an array that "
            "was passed while building it",
            fix=nearest(reference, known),
            where=user_line(),
        )


def _weakly(array: Any) -> Any:
    try:
        return weakref.ref(array)
    except TypeError:  # a few types, which hold no large memory
        return lambda: array
