"""The memory orders of a convolution's arrays: what cuDNN supports, and what it misreads.

All measured on an H200 with cuDNN 9.19.
"""

from __future__ import annotations

from ..._core.graph.layout import lies_so, shared
from ..._core.reasons import Reason
from ..._core.rules import GraphSpec, Tensors


def in_mixed_orders(tensors: Tensors, result: str, graph: GraphSpec) -> Reason | None:
    """Why cuDNN cannot run a convolution of these arrays, or None; names the port ``result`` only
    if it is the only one in a different order.

    cuDNN reads a filter in another order (HWIO, or OIHW with channels-last images) as if it were
    in the order of the images (relative errors of 1.1 to 1.4). It writes a float32 result of the
    epilogue in the order of the convolution's result; cuDNN 9.28 accepts this in 16 bits, but no
    such plan has been run on a GPU.
    """
    rank = len(tensors[result].shape)
    rows, last = tuple(range(rank)), (0, *range(2, rank), 1)
    orders = shared(tensors.values(), (last, rows), last)
    if not orders:
        odd = [port for port, tensor in tensors.items() if not lies_so(tensor, last, last)]
        port = next((p for p in odd if p != result), odd[0])
        return Reason(
            f"{port} has the memory order {list(tensors[port].order or last)}; cuDNN reads arrays "
            f"that are all channels-last ({list(last)}) or all row-major ({list(rows)})"
        )
    for call in graph.calls:
        for port, name in call.outputs:
            tensor = graph.tensor(name)
            image = name in graph.outputs and len(tensor.shape) == rank
            if image and not shared([tensor], orders, last):
                return Reason(
                    f"{port} of {call.name} has the memory order {list(tensor.order or last)}, but "
                    f"the arrays of the convolution have the order {list(orders[0])}: omit "
                    "set_stride, or transpose the result after the call"
                )
    return None
