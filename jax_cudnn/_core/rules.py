"""The types of what a node's methods get."""

from __future__ import annotations

from collections.abc import Mapping

from .graph.planned import Handles as Handles
from .graph.spec import GraphSpec as GraphSpec
from .graph.spec import Tensor
from .graph.tensor import GraphTensor
from .transforms.derivation import Derivation as Derivation

Values = Mapping[str, GraphTensor]
Tensors = Mapping[str, Tensor]
