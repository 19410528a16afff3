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
# `jc.Graph` has the interface of cuDNN's own `cudnn.Graph`, for JAX arrays. What it builds is what
# `@jc.graph` builds: a function that `jit`, `grad`, `vmap` and the rest take. There are no handles,
# no workspace, and no torch.

# %%
import json

import cudnn
import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn as jc

random = np.random.default_rng(0)


def normal(shape, dtype=jnp.float32):
    """Random numbers, which are the same wherever the notebook runs."""
    return jnp.asarray(random.standard_normal(shape), dtype)


def close(got, want, tolerance=1e-2):
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < tolerance, error


x = normal((4, 32, 14, 14), jnp.bfloat16)
w = normal((64, 32, 3, 3), jnp.bfloat16) / 17
b = normal((1, 64, 1, 1), jnp.bfloat16)
wide_x, wide_w = x.astype(jnp.float32), w.astype(jnp.float32)
want = jax.nn.relu(jax.lax.conv(wide_x, wide_w, (1, 1), "SAME") + b)

# %% [markdown]
# ## A graph from arrays
# Operations take arrays, of which they use shape, dtype and memory order. `inputs` and `outputs`
# say in which order calls take and return them.

# %%
inputs = ["conv2d::image", "conv2d::weight", "bias.0::bias"]
with jc.Graph(name="conv_bias_relu", inputs=inputs, outputs=["y"]) as graph:
    y = graph.conv_fprop(
        image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="conv2d"
    )
    y = graph.relu(graph.bias(input=y, bias=b))
    y.set_output(True).set_name("y")

close(graph(x, w, b), want)
close(jax.jit(graph)(x, w, b), want)

# %% [markdown]
# ## References
# A tensor is referred to by node and port, by a name, by its uid, by itself, or by the array that
# it stands for. Nodes without a name are `relu.0`, `relu.1`, ...; positional arguments are
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
# A reference that means nothing is an error with the nearest names.

# %%
try:
    graph.find_tensor("conv2d::images")
except jc.GraphError as error:
    print(error.summary, "-", error.fix)
else:
    raise AssertionError

# %% [markdown]
# ## The order of calls, later
# `set_io_tuples` says it inside of the `with` or behind it, until the graph is called: compiled
# programs have an order. `with_options()` makes a graph whose order may be said again.

# %%
other = graph.with_options()
other.set_io_tuples([b, x, w], [result])
close(other(b, x, w), want)

# %% [markdown]
# ## Calls with a dictionary
# They return a new dictionary with the outputs in it. An output that is supplied says in which
# shape and dtype its result is returned; it is not written.

# %%
given = {"conv2d::image": x, graph.find_tensor("conv2d::weight"): w, "bias.0::bias": b}
out = graph(given)
assert len(given) == 3
close(out["relu.0::OUT_0"], want)
out = graph({**given, "y": jax.ShapeDtypeStruct((4, 64, 196), jnp.float32)})
assert (out["y"].shape, out["y"].dtype) == ((4, 64, 196), jnp.float32)

# %% [markdown]
# ## Templates
# What says shape and dtype may be a JAX array, a tracer, a `jax.ShapeDtypeStruct`, a NumPy array,
# or any array that DLPack knows, CuPy's and torch's among them. `graph.tensor` declares an input by
# its dims; `graph.tensor_like` makes one of an array, so that one array can be two inputs.

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
# Strides are memory order. XLA is asked for it: channels-last images of an NHWC model reach cuDNN
# as they lie. Each dim keeps its place, so the array's shape is cuDNN's.


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
close(y.transpose(0, 3, 1, 2), jax.lax.conv(wide_x, wide_w, (1, 1), "SAME"))
print(strided.find_tensor("Y").get_stride(), y.shape, y.dtype)

# %% [markdown]
# ## Data types
# `io_data_type` is that of inputs and outputs for which none is named, `intermediate_data_type`
# that of values inside, `compute_data_type` that in which products accumulate; each tensor may have
# its own. Names may be cuDNN's, JAX's, NumPy's or torch's.

# %%
with jc.Graph(intermediate_data_type="bfloat16", inputs=[x], outputs=["y", "z"]) as typed:
    y = typed.exp(x).set_name("y")
    z = typed.neg(y).set_name("z").set_data_type("FLOAT")
    y.set_output(True)
    z.set_output(True)
y, z = typed(x)
assert (y.dtype, z.dtype) == (jnp.bfloat16, jnp.float32)
close(-z, jnp.exp(wide_x))

# %% [markdown]
# ## Numbers in the host's memory
# cuDNN wants an epsilon as a number in the host's memory. Given as a Python number or as a NumPy
# array of one element it is a constant of the plan, and another value makes no other plan. Given as
# a JAX array it is an operand, which only exists when the program runs: then XLA normalizes.

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
close(mean, rows.mean(1, keepdims=True))
close(y, (rows - mean) * inverse)
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
close(gradient, wanted)
batched = jax.vmap(graph, in_axes=(0, None, None))(jnp.stack([x, 2 * x]), w, b)
close(batched[0], want)
primal, tangent = jax.jvp(lambda x: graph(x, w, b), (x,), (x,))
close(tangent, want - jnp.where(want > 0, b, 0))

# %% [markdown]
# ## Plans
# What cuDNN's wrapper keeps to itself is open here: heuristics, notes, engines, workspace. The
# methods have pygraph's names; as keywords of `Graph` and of `with_options` they are the fields of
# `jc.Options`. A plan's candidates, and measuring them, are shown in matmul_bias.

# %%
plan = graph.plan(gpus=["H200"])["H200"]
print(plan)
chosen = graph.with_options(heuristics=["FALLBACK"])
print(chosen.plan(gpus=["H200"])["H200"])
with jc.target("H200"):
    pinned = graph.with_options(**plan.pinned).plan()
assert pinned.engine == plan.engine
assert graph.support(gpus=["A100", "H200"])

# %% [markdown]
# ## One graph for each kind of arrays
# `graph_cache` is the dictionary that one would write around a function that builds graphs:
# bounded, safe for threads, keyed by the shape, dtype and memory order of arrays and by the value
# of all else.


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
close(network(a, a), jax.nn.leaky_relu(jax.nn.relu(a @ a) @ a, 0.1))
network(a + 1, a)
assert matmul_relu.cache_info().currsize == 2
print(matmul_relu.cache_info())

# %% [markdown]
# ## A graph of cuDNN's frontend
# Who has a `cudnn.pygraph` already keeps it: `from_pygraph` makes a JAX function of its nodes. It
# needs no handle and no build.

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
close(jax.jit(function)(x, w), jax.nn.relu(jax.lax.conv(wide_x, wide_w, (1, 1), "SAME")))
gradient = jax.grad(lambda w: function(x, w).astype(jnp.float32).sum())(w)
assert gradient.shape == w.shape
