"""What XLA's compiler for an H200 makes of programs with our layers; nothing here needs one."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
import jax_cudnn.flax as jnn

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
        reason="XLA's compiler for CUDA is not installed",
    ),
]
if importlib.util.find_spec("cudnn"):
    from absent_gpus import compiled, h200s, operations

CUDNN, CUBLAS = "jax_cudnn", "__cublas$lt$matmul"


def aval(*shape, dtype="bfloat16", sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def layer(cls, *arguments, **named):
    """A function of a state and x, and the state's shapes."""
    made = nnx.eval_shape(lambda: cls(*arguments, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **named))
    graphdef, state = nnx.split(made)
    return lambda state, x: nnx.merge(graphdef, state)(x), state


def blocks(size):
    """Float4 with scales, and back."""

    @jc.graph
    def run(g, x):
        y, scale = g.block_scale_quantize(x, block_size=size)
        y.set_data_type("float4_e2m1fn")
        return y, scale

    back = jc.graph(lambda g, y, s: g.block_scale_dequantize(y, s, block_size=[1, size]))
    return lambda x: back(*run(x))


@jc.graph(implementation="xla")
def to_float8(g, x):
    return g.relu(x).set_data_type("float8_e5m2")


def fp8_attention(x):
    return jc.ops.dot_product_attention_fp8(x, x, x)


NARROW = {  # a function, a shape, bits of the mantissa, and how many values are rounded
    "NVFP4": (blocks(16), (1, 128, 256), 1, 1),
    "MXFP4": (blocks(32), (1, 128, 256), 1, 1),
    "MXFP8": (lambda x: jc.ops.dequantize_mxfp8(*jc.ops.quantize_mxfp8(x)), (1, 2, 64, 32), 3, 1),
    "a result that is read": (lambda x: to_float8(x).astype("float32") * 2, (8, 128), 2, 1),
    "attention": (fp8_attention, (2, 64, 4, 40), 3, 3),  # x, the weights and the result
}


@pytest.mark.parametrize("name", NARROW)
def test_values_are_rounded_also_where_xla_leaves_out_a_cast_and_back(name):
    """By operations that XLA keeps."""
    run, shape, bits, count = NARROW[name]
    text = compiled(run, aval(*shape, dtype="float32")).as_text()
    assert len(re.findall(rf"reduce-precision\(.*mantissa_bits={bits}\b", text)) >= count
    assert text.count(" round-nearest-even(") >= count


@pytest.mark.parametrize("axes", [None, (0, None, None, 0), (None, 0, None, None)])
def test_a_product_of_tokens_is_its_call_alone(axes):
    """Its dimensions are merged, also with one of vmap: nothing is copied for that."""

    def linear(x, w, b, r):
        return jc.ops.matmul(x, w, bias=b, residual=r, activation="gelu")

    shapes = [(4, 128, 256), (256, 512), (512,), (4, 128, 512)]
    shapes = [(3, *s) if a == 0 else s for s, a in zip(shapes, axes or [None] * 4, strict=True)]
    function = linear if axes is None else jax.vmap(linear, axes)
    assert operations(compiled(function, *(aval(*shape) for shape in shapes))) == [CUDNN]


def test_attention_whose_mask_may_hide_all_keys_is_one_plan_each_way():
    """What stands beside it, the mean of the values in hidden rows, takes no memory of its own
    that grows with queries times keys."""
    x, mask = aval(2, 1024, 4, 64), aval(2, 1, 1024, 1024, dtype=bool)

    def loss(q, k, v, mask):
        y = jc.ops.dot_product_attention(q, k, v, mask=mask)
        return jnp.sum(jnp.sin(y.astype("float32")))

    program = compiled(jax.grad(loss, (0, 1, 2)), x, x, x, mask)
    assert operations(program).count(CUDNN) == 2
    scores = 2 * 4 * 1024 * 1024 * 2
    assert program.memory_analysis().temp_size_in_bytes < scores


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_products_of_sharded_tokens_gather_nothing(kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=h200s(4), axis_types=(kind,) * 2)
    run, state = layer(jnn.Linear, 512, 2048)
    spread = {"kernel": P(None, "model"), "bias": P("model")}
    state = jax.tree.map_with_path(
        lambda path, x: aval(
            *x.shape, dtype=x.dtype, sharding=NamedSharding(mesh, spread[path[0].key])
        ),
        state,
    )
    x = aval(8, 256, 512, sharding=NamedSharding(mesh, P(None, "data")))
    with jax.set_mesh(mesh):
        program = compiled(run, state, x, mesh=mesh)
    found = operations(program)
    assert found.count(CUDNN) + found.count(CUBLAS) == 1  # whichever the shipped table takes
    assert not [name for name in found if name.startswith(("all-", "collective"))]
    assert "bf16[8,128,1024]" in program.as_text()


def gradient(function):
    """Of all arguments."""
    fast = jc.accelerate(function)
    return lambda *x: jax.grad(lambda *x: (fast(*x).astype("float32") ** 2).sum(), (0, 1, 2))(*x)


def moved(program):
    """Names of what transposes or copies arrays, alone or in a fusion."""
    entry = re.sub(r"(?s).*\nENTRY", "", program.as_text())
    return re.findall(r"^ +(?:ROOT )?%(\S*(?:transpose|copy)\S*) =", entry, re.MULTILINE)


def test_an_accelerated_attention_reads_heads_where_they_lie():
    def by_heads(q, k, v):  # as Flax and jax.nn have them: (batch, queries, heads, features)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / 8
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)

    def heads_first(q, k, v):
        return jax.nn.softmax(q @ k.mT / 8) @ v

    for function, shape in ((by_heads, (2, 1024, 4, 64)), (heads_first, (2, 4, 1024, 64))):
        program = compiled(gradient(function), *[aval(*shape)] * 3)
        ran = operations(program)
        assert ran.count(CUDNN) == 2
        assert not moved(program)
        assert len(ran) <= 4, ran  # and the loss' gradient


def test_a_gradient_is_written_once_for_the_bias_and_the_products():
    def mlp(x, w, b):
        return jax.nn.gelu(x @ w + b)

    program = compiled(gradient(mlp), aval(8192, 768), aval(768, 3072), aval(3072, dtype="float32"))
    assert "f32[8192,3072]" not in re.sub(r"(?s).*\nENTRY", "", program.as_text())


def test_a_transposed_weight_is_read_as_it_is_held():
    def logits(x, e, b):
        return jnp.tanh(x @ e.T + b)

    program = compiled(gradient(logits), aval(4096, 512), aval(8192, 512), aval(8192))
    assert operations(program).count(CUDNN) == 3
    assert not moved(program)
