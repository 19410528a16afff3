"""The sides of the bench of normalizations that run in PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .. import torch_graphs
from ..torch_graphs import Call, Pending, Step
from .cases import BACKWARD, FORWARD, TRAINING, NormCase

EAGER, COMPILED, TUNED = "torch", "torch.compile", "torch.compile max-autotune"
_MODES = {EAGER: None, COMPILED: "default", TUNED: "max-autotune-no-cudagraphs"}
SIDES = tuple(_MODES)


def program(
    side: str,
    program: str,
    case: NormCase,
    sets: Sequence[tuple[Mapping[str, jax.Array], jax.Array]],
) -> Call:
    """One program of a side: that of all sets of operands and gradient, one after the other, as
    JAX's sides are; its results are those of the first.

    Its backward is autograd's of a forward that has run here.
    """
    torch = importlib.import_module("torch")
    mode = _MODES[side]
    (device,) = sets[0][1].devices()

    def normalize(**tensors: Any) -> Any:
        return case.torch(torch.nn.functional, **tensors)

    if mode is not None:
        normalize = torch.compile(normalize, mode=mode, dynamic=False)

    def made() -> list[Step]:
        return [_step(torch, program, case, *given, normalize) for given in sets]

    return torch_graphs.program(made, device.platform)


def _step(
    torch: Any, program: str, case: NormCase, operands: Mapping[str, Any], dy: Any, normalize: Any
) -> Step:
    shared = {name: torch.from_dlpack(x) for name, x in operands.items()}
    given = {  # running statistics are written in place
        name: x.clone() if name.startswith("running_") else x.detach() for name, x in shared.items()
    }
    running = {name: x for name, x in given.items() if name.startswith("running_")}

    def restore() -> None:
        for name, x in running.items():
            x.copy_(shared[name])

    if program == FORWARD:

        def forward() -> Pending:
            with torch.no_grad():
                return Pending({"y": normalize(**given), **running})

        return Step(forward, restore)
    for name in case.learned:
        given[name] = given[name].requires_grad_()
    if program == TRAINING:
        return Step(lambda: Pending({"y": normalize(**given), **running}), restore)
    assert program == BACKWARD
    y, along = normalize(**given), torch.from_dlpack(dy)
    learned = [given[name] for name in case.learned]

    def backward() -> Pending:
        found = torch.autograd.grad(y, learned, along, retain_graph=True)
        return Pending(dict(zip(case.learned, found, strict=True)))

    return Step(backward, restore)
