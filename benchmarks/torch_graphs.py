"""What runs in PyTorch, in this process and on this GPU: its programs, as CUDA graphs where they
can be.

PyTorch is imported when a side is made, and not needed: without it the sides are not measured.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .case import BACKWARD, FORWARD, TRAINING

RUNNING = "running_"
MISSING = "not measured: torch is not installed"

Call = Callable[[], "Pending"]


@dataclass(frozen=True)
class Pending:
    """Results that are under way, as ``jax.block_until_ready`` waits for them."""

    tensors: dict[str, Any]

    def block_until_ready(self) -> Pending:
        tensor = next(iter(self.tensors.values()))
        if tensor.is_cuda:
            importlib.import_module("torch").cuda.synchronize(tensor.device)
        return self

    def arrays(self) -> dict[str, jax.Array]:
        """As JAX's arrays."""
        self.block_until_ready()
        return {
            name: jax.dlpack.from_dlpack(tensor.detach().contiguous())
            for name, tensor in self.tensors.items()
        }


def installed() -> bool:
    try:
        importlib.import_module("torch")
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Inside, torch.compile has compiled nothing; behind it, unused memory is given back."""
    if not installed():
        yield
        return
    torch = importlib.import_module("torch")
    torch._dynamo.reset()
    # Else the backward, which overwrites what it does not need again, could run only once.
    settings: Any = importlib.import_module("torch._functorch.config")
    settings.donated_buffer = False
    try:
        yield
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Step:
    """One program of one set of operands; ``restore`` undoes what it wrote into them."""

    run: Call
    restore: Callable[[], None] = lambda: None


def program(
    function: Callable[..., Any],
    program: str,
    learned: Sequence[str],
    sets: Sequence[tuple[Mapping[str, jax.Array], Any]],
    captured: bool = True,
) -> Call:
    """One program of a function of tensors: that of all sets of operands and gradient of y, one
    after the other; the results are those of the first.

    Its backward is autograd's of a forward that has run here. On a GPU it is a CUDA graph, so that
    what PyTorch's interpreter takes for each operation is in no time. Where it is not ``captured``,
    because that ends the process, it is the work before it that hides that time.
    """
    torch = importlib.import_module("torch")
    (device,) = next(iter(sets[0][0].values())).devices()

    def made() -> list[Step]:
        return [_step(torch, function, program, learned, *given) for given in sets]

    if captured and device.platform != "cpu":
        return _captured(torch, made)
    steps = made()

    def run() -> Pending:
        first, *_ = [step.run() for step in steps]
        return first

    return run


def _step(
    torch: Any,
    function: Callable[..., Any],
    program: str,
    learned: Sequence[str],
    operands: Mapping[str, jax.Array],
    dy: Any,
) -> Step:
    """One program of one set of operands, of which running statistics are written in place."""
    shared = {name: torch.from_dlpack(x) for name, x in operands.items()}
    given = {
        name: x.clone() if name.startswith(RUNNING) else x.detach() for name, x in shared.items()
    }
    running = {name: x for name, x in given.items() if name.startswith(RUNNING)}

    def restore() -> None:
        for name, x in running.items():
            x.copy_(shared[name])

    if program == FORWARD:

        def forward() -> Pending:
            with torch.no_grad():
                return Pending({"y": function(**given), **running})

        return Step(forward, restore)
    for name in learned:
        given[name] = given[name].requires_grad_()
    if program == TRAINING:
        return Step(lambda: Pending({"y": function(**given), **running}), restore)
    assert program == BACKWARD
    y, along = function(**given), torch.from_dlpack(dy)
    wanted = [given[name] for name in learned]

    def backward() -> Pending:
        found = torch.autograd.grad(y, wanted, along, retain_graph=True)
        return Pending(dict(zip(learned, found, strict=True)))

    return Step(backward)


def _captured(torch: Any, made: Callable[[], list[Step]]) -> Call:
    """Steps as one CUDA graph.

    They are made and warmed up on the stream that is captured: a backward runs on that of its
    forward. Captured is the calling thread alone: JAX has others.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        steps = made()
        for step in steps:
            for _ in range(2):
                step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        held = [step.run() for step in steps]
    for step in steps:
        step.restore()
    torch.cuda.synchronize()

    def replay(_operands: Any = steps) -> Pending:  # which the graph reads
        graph.replay()
        return held[0]

    return replay


def total(x: jax.Array) -> Callable[[], Pending]:
    """The sum of an array's elements, read where JAX has it."""
    torch = importlib.import_module("torch")
    tensor = torch.from_dlpack(x)
    return lambda: Pending({"sum": tensor.sum()})
