# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The Graph wrapper
#
# `jc.Graph` has the interface of `cudnn.Graph`, for JAX arrays. Like `@jc.graph`, it
# builds a function that works under `jit`, `grad`, `vmap` and JAX's other transformations. You
# manage no handles and no workspace, and need no torch.

# %%
import json

import cudnn
import jax
import jax.numpy as jnp
import numpy as np
from helpers import check, draw, normal

import jax_cudnn as jc

x = normal((4, 32, 14, 14), jnp.bfloat16)
w = normal((64, 32, 3, 3), jnp.bfloat16) / 17
b = normal((1, 64, 1, 1), jnp.bfloat16)
wide_x, wide_w = x.astype(jnp.float32), w.astype(jnp.float32)
want = jax.nn.relu(jax.lax.conv(wide_x, wide_w, (1, 1), "SAME") + b)

# %% [markdown]
# ## A graph from arrays
# Operations take arrays, but use only their shape, dtype and memory order. `inputs` and `outputs`
# set the order in which calls take and return arrays.

# %%
inputs = ["conv2d::image", "conv2d::weight", "bias.0::bias"]
with jc.Graph(name="conv_bias_relu", inputs=inputs, outputs=["y"]) as graph:
    y = graph.conv_fprop(
        image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="conv2d"
    )
    y = graph.relu(graph.bias(input=y, bias=b))
    y.set_output(True).set_name("y")

check(graph(x, w, b), want)
check(jax.jit(graph)(x, w, b), want)

# %% [markdown]
# ## References
# You can refer to a tensor by node and port, by name, by uid, by the tensor itself, or by the array
# that it was made from. Nodes without a name are `relu.0`, `relu.1`, ...; positional arguments are
# `conv2d::0`.

# %%
result = graph.find_tensor("y")
for reference in ("relu.0::OUT_0", "y", result.get_uid(), result):
    assert graph.find_tensor(reference) is result
for reference in ("conv2d::image", x):
    assert graph.find_tensor(reference) is graph.get_inputs()[0]
print([(tensor.get_name(), tensor.get_uid()) for tensor in graph.get_inputs()])
print(result.get_name(), result.get_dim(), result.get_stride(), result.get_data_type())

# %% [markdown]
# An unknown reference is an error that suggests the nearest names.

# %%
try:
    graph.find_tensor("conv2d::images")
except jc.GraphError as error:
    print(error.summary, "-", error.fix)
else:
    raise AssertionError

# %% [markdown]
# ## Setting the order later
# `set_io_tuples` sets the order inside the `with` block or after it, until the first call: compiled
# programs have a fixed order. `with_options()` returns a graph whose order can be set again.

# %%
other = graph.with_options()
other.set_io_tuples([b, x, w], [result])
check(other(b, x, w), want)

# %% [markdown]
# ## Calls with a dictionary
# A call with a dictionary returns a new dictionary that includes the outputs. An output that you
# supply only sets the shape and dtype of its result. It is not written.

# %%
given = {"conv2d::image": x, graph.find_tensor("conv2d::weight"): w, "bias.0::bias": b}
out = graph(given)
assert len(given) == 3
check(out["relu.0::OUT_0"], want)
out = graph({**given, "y": jax.ShapeDtypeStruct((4, 64, 196), jnp.float32)})
assert (out["y"].shape, out["y"].dtype) == ((4, 64, 196), jnp.float32)

# %% [markdown]
# ## Templates
# Shape and dtype can come from a JAX array, a tracer, a `jax.ShapeDtypeStruct`, a NumPy array, or
# any array that supports DLPack, such as those of CuPy and torch. `graph.tensor` declares an
# input by its dims; `graph.tensor_like` takes them from an array, so one array can be two inputs.

# %%
template = jax.ShapeDtypeStruct((16, 8), jnp.float32)
same = jnp.ones((16, 8))
with jc.Graph(io_data_type=jnp.float32, outputs=["out"]) as small:
    one = small.tensor_like(template, name="one")
    two = small.tensor_like(np.zeros((16, 8), np.float32), name="two")
    three = small.tensor_like(same, name="three")
    four = small.tensor(name="four", dim=[16, 8])
    total = small.add(small.add(small.add(one, two), three), four)
    total.set_output(True).set_name("out").set_uid(77)
small.set_io_tuples(["one", "two", "three", "four"], [77])
np.testing.assert_allclose(small(same, 2 * same, 3 * same, 4 * same), 10 * same)

# %% [markdown]
# ## Strides
# Strides give the memory order, which XLA provides: channels-last images of an NHWC model reach
# cuDNN without a copy. Dims keep their order, so the array has cuDNN's shape.


# %%
def channels_last(n, c, h, w):
    return [c * h * w, 1, c * w, c]


half = {"io_data_type": cudnn.data_type.HALF, "compute_data_type": cudnn.data_type.FLOAT}
with jc.Graph(**half, inputs=["X", "W"], outputs=["Y"]) as strided:
    image = strided.tensor(name="X", dim=x.shape, stride=channels_last(*x.shape))
    weight = strided.tensor(name="W", dim=w.shape, stride=channels_last(*w.shape))
    strided.conv_fprop(image, weight, padding=[1, 1], name="c").set_output(True).set_name("Y")


def of_channels_last(image, weight):  # NHWC and OHWI arrays
    y = strided(image.transpose(0, 3, 1, 2), weight.transpose(0, 3, 1, 2))
    return y.transpose(0, 2, 3, 1)


images, weights = (a.astype(jnp.float16).transpose(0, 2, 3, 1) for a in (x, w))
y = jax.jit(of_channels_last)(images, weights)
check(y.transpose(0, 3, 1, 2), jax.lax.conv(wide_x, wide_w, (1, 1), "SAME"))
print(strided.find_tensor("Y").get_stride(), y.shape, y.dtype)

# %% [markdown]
# ## Data types
# `io_data_type` is the default for inputs and outputs, `intermediate_data_type` for values inside
# the graph, and `compute_data_type` for the accumulation of products. Each tensor can override it.
# Types of cuDNN, JAX, NumPy and torch are accepted.

# %%
with jc.Graph(intermediate_data_type="bfloat16", inputs=[x], outputs=["y", "z"]) as typed:
    y = typed.exp(x).set_name("y")
    z = typed.neg(y).set_name("z").set_data_type("FLOAT")
    y.set_output(True)
    z.set_output(True)
y, z = typed(x)
assert (y.dtype, z.dtype) == (jnp.bfloat16, jnp.float32)
check(-z, jnp.exp(wide_x))

# %% [markdown]
# ## Scalars in host memory
# cuDNN reads an epsilon as a scalar in host memory. A Python scalar or a NumPy array of one element
# is a constant of the plan, and a new value does not make a new plan. A JAX array is an operand,
# which has no value until the program runs: then XLA runs the normalization.

# %%
rows, scale, shift = jnp.ones((8, 64, 1, 1)), jnp.ones((1, 64, 1, 1)), jnp.zeros((1, 64, 1, 1))
rows = rows * normal(rows.shape)
epsilon = np.full((1, 1, 1, 1), 1e-5, np.float32)
with jc.Graph(
    inputs=["ln::input", "ln::scale", "ln::bias", "ln::epsilon"],
    outputs=["ln::Y", "ln::MEAN", "ln::INV_VARIANCE"],
) as norm:
    results = norm.layernorm(
        name="ln",
        input=rows,
        scale=scale,
        bias=shift,
        epsilon=epsilon,
        norm_forward_phase="TRAINING",
    )
    for tensor in results:
        tensor.set_output(True)
y, mean, inverse = norm(rows, scale, shift, 1e-5)
check(mean, rows.mean(1, keepdims=True))
check(y, (rows - mean) * inverse)
assert norm.plan(gpus=["H200"])["H200"].engine != "XLA"

# %% [markdown]
# ## JSON
# A graph prints as JSON: context, nodes and tensors, under the keys of cuDNN's frontend.

# %%
text = json.loads(str(small))
print(json.dumps(text["nodes"][0], indent=1))
print(text["tensors"]["out"])

# %% [markdown]
# ## Transformations
# The graph is a function of its arrays.

# %%
gradient = jax.grad(lambda w: graph(x, w, b).astype(jnp.float32).sum())(w)
wanted = jax.grad(lambda w: jax.nn.relu(jax.lax.conv(wide_x, w, (1, 1), "SAME") + b).sum())(wide_w)
check(gradient, wanted)
batched = jax.vmap(graph, in_axes=(0, None, None))(jnp.stack([x, 2 * x]), w, b)
check(batched[0], want)
primal, tangent = jax.jvp(lambda x: graph(x, w, b), (x,), (x,))
check(tangent, want - jnp.where(want > 0, b, 0))

# %% [markdown]
# ## Plans
# Heuristics, notes, engines and workspace, which cuDNN's wrapper hides, are open here. The methods
# have pygraph's names; as keywords of `Graph` and `with_options` they are the fields of
# `jc.Options`. The matmul_bias notebook shows a plan's candidates and how to time them.

# %%
plan = graph.plan(gpus=["H200"])["H200"]
print(plan)
draw(plan)
chosen = graph.with_options(heuristics=["FALLBACK"])
print(chosen.plan(gpus=["H200"])["H200"])
with jc.target("H200"):
    pinned = graph.with_options(**plan.pinned).plan()
assert pinned.engine == plan.engine
assert graph.support(gpus=["A100", "H200"])

# %% [markdown]
# ## One graph per shape and dtype
# `graph_cache` caches the graphs that a function builds. The cache is bounded and thread-safe. Its
# key is the shape, dtype and memory order of arrays, and the value of all other arguments.


# %%
@jc.graph_cache
def matmul_relu(a, b, negative_slope=0.0):
    with jc.Graph(inputs=["m::A", "m::B"], outputs=["r::OUT_0"]) as graph:
        c = graph.matmul(a, b, name="m")
        graph.leaky_relu(c, negative_slope=negative_slope, name="r").set_output(True)
    return graph


@jax.jit
def network(a, b):
    c = matmul_relu(a, b)(a, b)
    return matmul_relu(c, b, negative_slope=0.1)(c, b)


a = normal((2, 32, 32))
check(network(a, a), jax.nn.leaky_relu(jax.nn.relu(a @ a) @ a, 0.1))
network(a + 1, a)
assert matmul_relu.cache_info().currsize == 2
print(matmul_relu.cache_info())

# %% [markdown]
# ## A graph of cuDNN's frontend
# `from_pygraph` turns an existing `cudnn.pygraph` into a JAX function. It needs no handle and no
# build.

# %%
types = cudnn.data_type
g = cudnn.pygraph(
    io_data_type=types.BFLOAT16,
    intermediate_data_type=types.FLOAT,
    compute_data_type=types.FLOAT,
)
image = g.tensor(name="image", dim=[*x.shape], stride=channels_last(*x.shape))
weight = g.tensor(name="weight", dim=[*w.shape], stride=channels_last(*w.shape))
y = g.conv_fprop(image, weight, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
y = g.relu(y).set_output(True)
function = jc.from_pygraph(g, inputs=[image, weight], outputs=[y])
check(jax.jit(function)(x, w), jax.nn.relu(jax.lax.conv(wide_x, wide_w, (1, 1), "SAME")))
gradient = jax.grad(lambda w: function(x, w).astype(jnp.float32).sum())(w)
assert gradient.shape == w.shape
