"""In which order a convolution's arrays lie in memory: what cuDNN takes, and reads as another.

All measured on an H200 with cuDNN 9.19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.graph.layout import lies_so

if TYPE_CHECKING:
    from .._core.graph.node import Tensors
    from .._core.graph.spec import GraphSpec


def in_mixed_orders(tensors: Tensors, result: str, graph: GraphSpec) -> str | None:
    """Why cuDNN is not asked for a convolution of these arrays, by port, or None; of several in
    another order the port ``result`` is named last.

    A filter in another order (HWIO), or OIHW beside channels-last images, is read as if it lay like
    these (relative errors of 1.1 to 1.4). A float32 result of the epilogue in another order is
    written as if it lay like the convolution's; in 16 bits, which cuDNN 9.28 takes, such a plan has
    run on no GPU.
    """
    rank = len(tensors[result].shape)
    rows, last = tuple(range(rank)), (0, *range(2, rank), 1)
    orders = [o for o in (last, rows) if all(lies_so(t, o, last) for t in tensors.values())]
    if not orders:
        odd = [port for port, tensor in tensors.items() if not lies_so(tensor, last, last)]
        port = next((p for p in odd if p != result), odd[0])
        return (
            f"{port} lies in memory in the order {list(tensors[port].order or last)}; cuDNN reads "
            f"channels-last ({list(last)}) arrays, or row-major ({list(rows)}) ones throughout"
        )
    for call in graph.calls:
        for port, name in call.outputs:
            tensor = graph.tensor(name)
            image = name in graph.outputs and len(tensor.shape) == rank
            if image and not any(lies_so(tensor, order, last) for order in orders):
                return (
                    f"{port} of {call.name} lies in memory in the order "
                    f"{list(tensor.order or last)}, beside arrays of a convolution in the order "
                    f"{list(orders[0])}: leave out set_stride, or transpose it behind the call"
                )
    return None
