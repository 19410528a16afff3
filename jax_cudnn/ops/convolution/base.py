"""The common base of the three convolutions: spatial attributes and the relation of shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError, one_of
from ..._core.graph.dims import Shape, integers
from ..._core.graph.dtypes import FLOATS, FP8, PRODUCTS
from ..._core.graph.layout import lies_so, shared
from ..._core.graph.node import Fold, Node, frozen, matched
from ..._core.graph.planned import CHANNELS_LAST, Anchor, Engines, Work
from ..._core.graph.promotion import product_dtype
from ..._core.reasons import Kind, Reason
from ..._core.rules import Derivation, GraphSpec, GraphTensor, Handles, Tensor, Tensors, Values
from ..matmul.nodes import Matmul, turned
from ..transformations import alike, grown, product_jvp

MODES = ("CROSS_CORRELATION", "CONVOLUTION")
_FEW = 8  # channels that cuDNN's 16-bit kernels read at once


class Roles(NamedTuple):
    """The ports (inputs or output) that hold the image, weight and result of the forward."""

    image: str
    weight: str
    result: str


SOLVERS: dict[str, type[Convolution]] = {}
"""The convolution that computes the image, the weight, or the result."""


@frozen
class Convolution(Node):
    """Spatial attributes of the three convolutions and the relation between their shapes.

    ``Y[n,k,y] = sum over c, r of image[n, g*i + c, stride*y + dilation*r - pre_padding] *
    weight[k,c,r]``, where ``i`` is the number of channels in ``weight`` and ``g`` the group of
    ``k``; in ``convolution_mode`` CONVOLUTION the weight is flipped in each spatial dimension.
    """

    pre_padding: tuple[int, ...] = ()
    post_padding: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    convolution_mode: str = "CROSS_CORRELATION"

    roles: ClassVar[Roles]
    anchor = Anchor(product=True, order=CHANNELS_LAST)
    dtypes = PRODUCTS

    @classmethod
    def create(
        cls,
        padding: Sequence[int] | None = None,
        stride: Sequence[int] = (),
        dilation: Sequence[int] = (),
        convolution_mode: Any = "CROSS_CORRELATION",
        *,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        **dims: Any,
    ) -> Self:
        if padding is not None and (pre_padding is not None or post_padding is not None):
            raise GraphError(
                "padding is given twice",
                expected="padding=[...], or pre_padding=[...] with post_padding=[...]",
                got=f"padding={padding}, pre_padding={pre_padding}, post_padding={post_padding}",
            )
        both = () if padding is None else integers("padding", padding)
        sizes: Any = {name: integers(name, x) for name, x in dims.items() if x is not None}
        return cls(
            pre_padding=integers("pre_padding", both if pre_padding is None else pre_padding),
            post_padding=integers("post_padding", both if post_padding is None else post_padding),
            stride=integers("stride", stride, 1),
            dilation=integers("dilation", dilation, 1),
            convolution_mode=one_of("convolution_mode", convolution_mode, MODES),
            **sizes,
        )

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        # All measured on an H200 with cuDNN 9.19, which accepts each of them.
        first, second = (tensors[port] for port in self.ports.input_names)
        if first.name == second.name:  # fails at execution, or computes wrong results
            return Reason("both operands are the same tensor")
        if self.convolution_mode != "CROSS_CORRELATION" and len(graph.calls) > 1:
            return Reason(
                "it has a flipped weight and the graph has other operations"  # relative error 1.1
            )
        dtypes = {first.dtype, second.dtype}
        if len(dtypes) > 1 and not dtypes <= {*FP8}:  # relative error 6.7, float16 by bfloat16
            return Reason(
                "the operands of a convolution or matmul have different types "
                f"({first.dtype} and {second.dtype})",
                Kind.FACTORS,
            )
        return _in_mixed_orders(tensors, self.roles.result, graph)

    def engines(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Engines:
        # Measured on an H200 with cuDNN 9.19: engine 8, which multiplies float32 without TF32,
        # computes wrong results if the epilogue adds a tensor computed independently in the graph.
        made = {tensors[self.ports.output_names[0]].name}
        for call in graph.calls:
            if not call.node.anchor and made.isdisjoint(name for _, name in call.inputs):
                return Engines(wrong=(8,))
            made.update(name for _, name in call.outputs)
        return Engines()

    def linear_in(self, ports: Collection[str]) -> bool:
        return len(ports) == 1

    jvp = product_jvp

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        # Each of image, weight and result is linear in the other two, by one of the convolutions.
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(Convolution)}
        operands = {p: tensors[p] for p in self.ports.input_names}
        known = alike(g, {**inputs, **cotangents}, operands)
        (port,) = operands.keys() - inputs.keys()
        kind = SOLVERS[Roles._fields[self.roles.index(port)]]
        dims: dict[str, Any] = {}
        if port != self.roles.result:
            dims["out_dims"] = tensors[port].shape
        given = {
            there: known[here]
            for here, there in zip(self.roles, kind.roles, strict=True)
            if here != port
        }
        return {port: g.apply(kind(**own, **dims), **given)[0]}

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        image, weight, result = self.roles
        dense = tensors[image].shape[1] == tensors[weight].shape[1]
        # Batch, features and channels each belong to two of the three tensors. A fold fits if the
        # batched inputs are exactly the inputs among those two.
        for fold, applies in (
            ({image: 0, result: 0}, True),
            ({weight: 0, result: 1}, dense),
            ({image: 1, weight: 1}, dense),
        ):
            inputs = [port for port in fold if port in self.ports.input_names]
            if applies and len(inputs) == 1 and batched == {*inputs}:
                yield self._folded(fold, size, tensors)
        groups = {image: 1, weight: 0, result: 1}
        yield self._folded(groups, size, tensors)
        before, after, stride, _ = self.spatial(len(tensors[weight].shape) - 2)
        one = {*tensors[weight].shape[2:], *stride} == {1} and {*before, *after} == {0}
        if one and dense and all(tensor.dtype in FLOATS for tensor in tensors.values()):
            yield Fold({}, computed=functools.partial(self._of_one_element, size, tensors))

    def _folded(self, axes: Mapping[str, int], size: int, tensors: Tensors) -> Fold:
        return Fold(axes)

    def _of_one_element(
        self, size: int, tensors: Tensors, g: Derivation, inputs: Values
    ) -> dict[str, GraphTensor]:
        """Convolutions with windows of one element, as a batch of matmuls over channels."""
        weight = tensors[self.roles.weight].shape

        def rows(x: GraphTensor) -> GraphTensor:  # (V, N, C, *x) as (V, N * x, C)
            last = g.transposed(x, (0, 1, *range(3, x.ndim), 2))
            return g.reshaped(last, (size, math.prod(last.shape[1:-1]), last.shape[-1]))

        known = {
            role: g.reshaped(inputs[port], (size, *weight[:2])) if role == "weight" else rows(x)
            for role, port in self.roles._asdict().items()
            if (x := inputs.get(port)) is not None
        }
        product = Matmul(compute_data_type=self.compute_data_type)
        (port,) = self.ports.output_names
        if port == self.roles.weight:
            (out,) = g.apply(product, A=turned(g, known["result"]), B=known["image"])
            return {port: g.reshaped(out, (size, *weight))}
        if port == self.roles.image:
            (out,) = g.apply(product, A=known["result"], B=known["weight"])
        else:
            (out,) = g.apply(product, A=known["image"], B=turned(g, known["weight"]))
        n, channels, *x = tensors[port].shape
        out = g.reshaped(out, (size, n, *x, channels))
        return {port: g.transposed(out, (0, 1, out.ndim - 1, *range(2, out.ndim - 1)))}

    def work(self, tensors: Tensors) -> Work:
        image, weight, result = (tensors[port].shape for port in self.roles)
        features, channels, *window = weight
        groups = image[1] // channels
        kinds = {
            f"{len(window)}-D": len(window) != 2,
            "depthwise": groups > 1 and channels == 1,
            "grouped": groups > 1 and channels > 1,
            "few channels": groups == 1 and channels < _FEW,
            "few features": groups == 1 and features < _FEW,
            "dilated": any(step > 1 for step in self.dilation),
        }
        pattern = " ".join((self.method, *(kind for kind, holds in kinds.items() if holds)))
        return Work(2 * math.prod(result) * math.prod(weight[1:]), pattern)

    def forward_shape(self, image: Tensor, weight: Tensor) -> Shape:
        """The shape of Y for an image and a weight; GraphError if they do not fit.

        Both are tensors of the graph or outputs of a gradient; the errors quote their names.
        """
        (n, c, *x), (k, i, *r) = image.shape, weight.shape
        if len(x) != len(r) or not x:
            raise GraphError(
                f"{image.name} and {weight.name} have different numbers of spatial dimensions",
                expected="image (N, C, *spatial) and weight (K, C / groups, *spatial) of one rank",
                got=f"{image.name} {list(image.shape)}, {weight.name} {list(weight.shape)}",
            )
        if not i or not c or c % i or k % (c // i):
            raise GraphError(
                f"the channels of {image.name} and {weight.name} do not fit",
                expected="C a multiple of the weight's channels, and K a multiple of the groups",
                got=f"C = {c}, {weight.name} of shape {list(weight.shape)} (K = {k})",
                fix="weights are (K, C / groups, *spatial): OIHW order, not HWIO; images are NCHW",
            )
        y = []
        pre, post, stride, dilation = self.spatial(len(x))
        for axis, size in enumerate(x):
            window = dilation[axis] * (r[axis] - 1) + 1
            padded = size + pre[axis] + post[axis]
            if isinstance(padded, int) and padded < window:
                raise GraphError(
                    f"the window is larger than spatial dimension {axis} of {image.name}",
                    expected=f"at most {padded} ({size} and padding {pre[axis]} + {post[axis]})",
                    got=f"{window} (size {r[axis]}, dilation {dilation[axis]})",
                )
            y.append((padded - window) // stride[axis] + 1)
        return (n, k, *y)

    def spatial(self, rank: int, from_view: bool = False) -> list[tuple[int, ...]]:
        """Padding before and after, stride and dilation with defaults; checks their rank.
        ``from_view``: the rank is that of cuDNN's view, which may add leading dimensions.
        """
        filled = []
        for name, default in (
            ("pre_padding", 0),
            ("post_padding", 0),
            ("stride", 1),
            ("dilation", 1),
        ):
            value = getattr(self, name) or (default,) * rank
            if 0 < len(value) < rank and from_view:
                value = (default,) * (rank - len(value)) + value
            if len(value) != rank:
                raise GraphError(
                    f"{name} has the wrong length",
                    expected=f"{rank} integers, one per spatial dimension",
                    got=f"{name}={list(value)}",
                )
            filled.append(value)
        return filled

    def cross_correlated(self, weight: jax.Array) -> jax.Array:
        """The weight with which a cross-correlation computes this convolution."""
        if self.convolution_mode == "CROSS_CORRELATION":
            return weight
        return jnp.flip(weight, tuple(range(2, weight.ndim)))

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        import cudnn

        rank = len(next(iter(tensors.values())).get_dim()) - 2
        pre, post, stride, dilation = self.spatial(rank, from_view=True)
        mode = getattr(cudnn._pybind_module.convolution_mode, self.convolution_mode)  # pyright: ignore
        return (
            getattr(pygraph, self.method)(
                *tensors.values(),
                pre_padding=list(pre),
                post_padding=list(post),
                stride=list(stride),
                dilation=list(dilation),
                convolution_mode=mode,
                **common,
            ),
        )


@frozen
class ConvolutionGradient(Convolution):
    """A gradient's output shape is an attribute, because with strides several shapes fit."""

    out_dims: tuple[int, ...] | None = None

    def _folded(self, axes: Mapping[str, int], size: int, tensors: Tensors) -> Fold:
        (out,) = self.ports.output_names
        shape = grown(tensors[out].shape, axes[out], size)
        return Fold(axes, dataclasses.replace(self, out_dims=shape))

    def deterministic(self) -> Node | None:
        return None  # some engines are

    def smallest(self, first: Shape, second: Shape) -> Shape:
        """The shape that follows from those of the inputs, for one group."""
        raise NotImplementedError

    def result_shape(self, *inputs: Shape) -> Shape:
        """``out_dims``, or if omitted the shape that follows from the inputs."""
        if self.out_dims is not None:
            return self.out_dims
        shape = self.smallest(*inputs)
        if any(isinstance(size, int) and size < 1 for size in shape[2:]):
            raise GraphError(
                f"no size of {self.ports.output_names[0]} gives this loss",
                expected="padding smaller than the window's reach, and a loss that fits the image",
                got=f"spatial dimensions {list(shape[2:])}",
            )
        return shape

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        (out,) = self.ports.output_names
        shape, loss = self.result_shape(*(t.shape for t in inputs.values())), inputs["loss"]
        of_forward = {**inputs, out: dataclasses.replace(loss, name=out, shape=shape)}
        image, weight = (of_forward[port] for port in self.roles[:2])
        want = self.forward_shape(image, weight)
        if want != loss.shape:
            raise GraphError(
                "the shapes of this gradient do not fit each other",
                expected=f"{loss.name} {list(want)}: the convolution of {image.name} "
                f"{list(image.shape)} with {weight.name} {list(weight.shape)}",
                got=f"{loss.name} {list(loss.shape)}",
                fix="out_dims (or .set_dim on the result) must be the shape of the image or weight "
                "of the forward",
            )
        return {out: (shape, product_dtype(inputs))}


def _in_mixed_orders(tensors: Tensors, result: str, graph: GraphSpec) -> Reason | None:
    """Why cuDNN cannot run a convolution of these arrays, or None; names the port ``result`` only
    if it is the only one in a different order.

    cuDNN reads a filter in another order (HWIO, or OIHW with channels-last images) as if it were
    in the order of the images (relative errors of 1.1 to 1.4). It writes a float32 result of the
    epilogue in the order of the convolution's result; cuDNN 9.28 accepts this in 16 bits, but no
    such plan has been run on a GPU. All measured on an H200 with cuDNN 9.19.
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
