"""jc.flax.accelerate: the same Variables in other layers, the model as it was, and the report."""

import collections
import doctest
import functools
import importlib

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax_cases import close, loss, without_key_bias

import jax_cudnn as jc
import jax_cudnn.flax as jnn
from jax_cudnn.flax.layer import SWAPPED

Pair = collections.namedtuple("Pair", "first second")


class Own(nnx.Linear):
    """A user's layer, which computes something else."""

    def __call__(self, inputs):
        return -super().__call__(inputs)


class Block(nnx.Module):
    def __init__(self, rngs, **named):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs, **named)
        self.mlp = nnx.Sequential(
            nnx.Linear(16, 32, rngs=rngs), nnx.gelu, nnx.Linear(32, 16, rngs=rngs)
        )

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.heads = nnx.Dict(one=nnx.Linear(16, 4, rngs=rngs))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["one"](x)


def model():
    return Model(nnx.Rngs(0))


def tokens():
    return jax.random.normal(jax.random.key(1), (2, 8, 16))


def variables(model):
    return {path: id(v) for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}


def classes(model):
    return {path: type(m) for path, m in nnx.iter_graph(model) if isinstance(m, nnx.Module)}


def test_variables_are_shared_and_the_model_is_as_it_was():
    theirs = model()
    before = variables(theirs), classes(theirs)
    ours, report = jnn.accelerate(theirs)
    assert (variables(theirs), classes(theirs)) == before
    assert variables(ours) == before[0]
    assert type(ours) is Model
    swapped = {p: SWAPPED.get(kind, kind) for p, kind in before[1].items()}
    assert classes(ours) == swapped
    assert len(report.swapped) == sum(kind in SWAPPED for kind in before[1].values()) == 17
    assert report.kept == ()


def test_results_and_gradients_are_the_models():
    theirs = model()
    ours, _ = jnn.accelerate(theirs)
    found = [nnx.jit(nnx.value_and_grad(loss))(m, tokens()) for m in (ours, theirs)]
    close(*map(without_key_bias, found))
    ours.heads["one"].kernel[...] = jnp.zeros((16, 4))
    assert not theirs(tokens()).any()


def test_state_of_each_loads_into_the_other():
    theirs = model()
    ours, _ = jnn.accelerate(Model(nnx.Rngs(5)))
    assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(nnx.state(theirs))
    nnx.update(ours, nnx.state(theirs))
    close(ours(tokens()), theirs(tokens()))


class Holder(nnx.Module):
    def __init__(self, rngs):
        layer = nnx.Linear(4, 4, rngs=rngs)
        self.layer, self.again, self.me = layer, layer, self
        self.list = nnx.data([layer, [nnx.Linear(4, 4, rngs=rngs)]])
        self.dict = nnx.data({"a": (layer, 3), "b": Pair(layer, "x")})
        self.sizes = (1, 2)
        self.bound = self.twice
        self.partial = functools.partial(nnx.relu)
        self.leaves = jax.tree_util.Partial(layer)

    def twice(self, x):
        return self.layer(self.layer(x))


def test_what_stands_in_several_places_does_so_again():
    theirs = Holder(nnx.Rngs(0))
    ours, report = jnn.accelerate(theirs)
    assert type(ours.layer) is jnn.Linear
    places = (ours.again, ours.list[0], ours.dict["a"][0], ours.dict["b"].first)
    assert all(place is ours.layer for place in places)
    assert type(ours.list[1][0]) is jnn.Linear
    assert (ours.me, ours.bound.__self__) == (ours, ours)
    assert (theirs.me, theirs.bound.__self__, type(theirs.list[0])) == (theirs, theirs, nnx.Linear)
    assert ours.list is not theirs.list
    assert (ours.sizes, ours.partial) == (theirs.sizes, theirs.partial)
    assert type(ours.leaves) is jax.tree_util.Partial
    assert ours.leaves.func is ours.layer
    assert type(ours.dict["b"]) is Pair
    where = "layer, again, list.0, dict.a.0, dict.b.0, leaves"
    assert [(e.path, e.swapped) for e in report.entries] == [(where, True), ("list.1.0", True)]
    x = jnp.ones((2, 4))
    close(nnx.jit(lambda m, x: m.bound(x))(nnx.clone(ours), x), theirs.twice(x))


class Mixed(nnx.Module):
    def __init__(self, rngs):
        self.own = Own(4, 4, rngs=rngs)
        self.ours = jnn.Linear(4, 4, rngs=rngs)
        self.hooked = nnx.Linear(4, 4, dot_general=self.dot, rngs=rngs)
        self.embed = nnx.Embed(4, 4, rngs=rngs)
        self.dropped = nnx.MultiHeadAttention(2, 4, dropout_rate=0.1, decode=False, rngs=rngs)
        self.mine = nnx.MultiHeadAttention(2, 4, attention_fn=self.dot, decode=False, rngs=rngs)
        self.function = functools.partial(nnx.dot_product_attention, is_causal=True)

    @staticmethod
    def dot(*operands, **named):
        return jax.lax.dot_general(*operands, **named)


def test_report_says_what_not_and_why():
    theirs = Mixed(nnx.Rngs(0))
    ours, report = jnn.accelerate(theirs)
    told = {entry.path: entry for entry in report.entries}
    for path, words in {
        "own": "derived from Linear",
        "ours": "a layer of jax_cudnn",
        "hooked": "a dot_general of its own",
        "embed": "no such layer",
        "mine": "an attention_fn of its own",
        "function": "jax_cudnn.ops.attention_fn",
    }.items():
        assert not told[path].swapped
        assert words in told[path].why
        assert type(getattr(ours, path)) is type(getattr(theirs, path))
    assert told["dropped"].swapped
    assert "dropout" in told["dropped"].why
    assert type(ours.mine.query) is jnn.LinearGeneral
    assert type(theirs.mine.query) is nnx.LinearGeneral
    lines = str(report).splitlines()
    assert lines[0].split() == ["path", "class", "swapped", "why"]
    assert lines[-1] == f"{len(report.swapped)} swapped, {len(report.kept)} kept"
    assert len(lines) == len(report.entries) + 2
    assert report.to_json()[0].keys() == {"path", "name", "swapped", "why"}


class Unreached(nnx.Module):
    """With layers where accelerate does not look, and layers derived from Flax's."""

    def __init__(self, rngs):
        self.held = nnx.data(Held(nnx.Linear(3, 4, rngs=rngs)))
        self.own = Own(4, 4, rngs=rngs)
        self.attention = type("Attention", (nnx.MultiHeadAttention,), {})(
            2, 4, decode=False, rngs=rngs
        )


@flax.struct.dataclass
class Held:
    layer: nnx.Linear


def test_report_tells_of_layers_out_of_reach():
    ours, report = jnn.accelerate(Unreached(nnx.Rngs(0)))
    assert type(ours.held.layer) is nnx.Linear
    told = {entry.path: entry for entry in report.kept}
    assert "a container that accelerate does not look into" in told["held.layer"].why
    assert {"own", "attention", "held.layer"} == {*told}  # no defaults that they have of Flax
    assert all(path.startswith("attention.") for path in (e.path for e in report.swapped))


class Call:
    """An object of Python's that calls a layer."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


_SHARED = nnx.Linear(4, 4, rngs=nnx.Rngs(1))


class Closed(nnx.Module):
    """With functions that hold it, or a layer of it, in several ways."""

    def __init__(self, rngs):
        self.layer, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        layers = [self.layer]
        self.named = lambda x: self.dropout(self.layer(x))
        self.listed = nnx.Sequential(lambda x: layers[0](x), nnx.relu)
        self.default = lambda x, layer=self.layer: layer(x)
        self.partial = functools.partial(self.named)
        self.compiled = jax.jit(self.method)
        self.mapped = jax.vmap(self.method)
        self.of_file = lambda x: _SHARED(x)
        self.object = Call(self.layer)
        self.swapped = functools.partial(Closed.method, self)
        self.free = jax.jit(lambda x, scale=2.0: scale * x)

    def method(self, x):
        return self.layer(x)


def test_report_tells_of_functions_that_hold_modules():
    ours, report = jnn.accelerate(Closed(nnx.Rngs(0)))
    told = {entry.path: entry.why for entry in report.kept if "holds a module" in entry.why}
    paths = {"named", "listed.layers.0", "default", "partial", "compiled", "mapped"}
    assert {*told} == paths | {"of_file", "object"}
    x = jnp.ones((2, 4))
    ours.eval()
    close(ours.dropout(x), x)
    assert not ours.named(x).all()  # the given one's dropout, in its mode
    assert type(ours.swapped.args[0].layer) is jnn.Linear


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (lambda rngs: nnx.Linear(16, 16, rngs=rngs), {"activation": "relu"}),
        (lambda rngs: nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs), {"is_causal": True}),
    ],
    ids=["activation", "is_causal"],
)
def test_a_layer_with_attributes_of_a_users_own_is_kept(layer, named):
    theirs = layer(nnx.Rngs(0))
    for name, value in named.items():
        setattr(theirs, name, value)
    ours, report = jnn.accelerate(theirs)
    assert {entry.path: entry.why for entry in report.kept}["model"].endswith(next(iter(named)))
    assert vars(ours).items() >= named.items()
    close(ours(tokens()), theirs(tokens()))
    with pytest.raises(jc.GraphError, match="rename it"):
        SWAPPED[type(theirs)].of(theirs)


def test_laxs_dot_general_is_none_of_ones_own():
    layer = nnx.LinearGeneral(4, 4, dot_general=jax.lax.dot_general, rngs=nnx.Rngs(0))
    assert jnn.accelerate(layer)[1].kept == ()


def test_layers_in_a_dtype_that_is_always_flaxs_are_kept():
    with jax.enable_x64(True):
        model = Block(nnx.Rngs(0), dtype="float64")
        ours, report = jnn.accelerate(model)
        told = {entry.path: entry.why for entry in report.kept}
        assert {*told} == {
            "attention",
            *(f"attention.{n}" for n in ("query", "key", "value", "out")),
        }
        assert {*told.values()} == {"no graph computes in float64"}
        assert type(ours.attention) is nnx.MultiHeadAttention


def test_a_batch_norm_by_itself_is_kept():
    theirs = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    ours, report = jnn.accelerate(theirs)
    assert type(ours.layers[1]) is nnx.BatchNorm
    assert ours.layers[1] is not theirs.layers[1]
    (kept,) = report.kept
    assert kept.path == "layers.1"
    assert "XLA fuses it" in kept.why
    ours.eval()
    assert not theirs.layers[1].use_running_average


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (linen.Dense(3), "jax_cudnn.ops.attention_fn"),
        (nnx.Linear, "the class Linear"),
        (nnx.State({}), "State"),
        (None, "NoneType"),
        (3, "int"),
    ],
    ids=["linen", "class", "state", "None", "number"],
)
def test_what_is_no_module_is_refused(given, words):
    with pytest.raises(jc.GraphTypeError, match=words):
        jnn.accelerate(given)


def test_modules_that_are_nested_too_deep():
    deep = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    for _ in range(600):
        deep = nnx.Sequential(deep)
    with pytest.raises(jc.GraphError, match="nested too deep"):
        jnn.accelerate(deep)


def test_every_layer_is_made_once(monkeypatch):
    made = []
    of = jnn.Linear.of.__func__
    monkeypatch.setattr(
        jnn.Linear, "of", classmethod(lambda cls, layer: made.append(layer) or of(cls, layer))
    )
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    jnn.accelerate(nnx.Sequential(layer, layer))
    assert len(made) == 1


def test_a_layer_by_itself_and_nothing_to_swap():
    ours, report = jnn.accelerate(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    assert type(ours) is jnn.Linear
    assert [e.path for e in report.swapped] == ["model"]
    again, report = jnn.accelerate(ours)
    assert again is not ours
    assert again.kernel is ours.kernel
    assert (report.swapped, len(report.kept)) == ((), 1)


def test_classes_derived_from_our_layers_are_nobodys_stand_in():
    before = dict(SWAPPED)
    derived = type("Derived", (jnn.Linear,), {})
    assert before == SWAPPED
    assert type(jnn.accelerate(derived(3, 4, rngs=nnx.Rngs(0)))[0]) is derived


def test_abstract_models_and_models_of_a_trace():
    abstract, _ = jnn.accelerate(nnx.eval_shape(model))
    leaves = jax.tree.leaves(nnx.state(abstract))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert type(abstract.heads["one"]) is jnn.Linear
    theirs, x = model(), tokens()
    close(nnx.jit(lambda m, x: jnn.accelerate(m)[0](x))(theirs, x), theirs(x))
    close(jax.jit(lambda x: jnn.accelerate(theirs)[0](x))(x), theirs(x))


def test_transformations():
    theirs, x = model(), tokens()
    ours, _ = jnn.accelerate(theirs)
    want = theirs(x)
    close(nnx.merge(*nnx.split(ours))(x), want)
    close(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(ours, x), want)
    grads = [nnx.grad(nnx.remat(loss))(m, x) for m in (ours, theirs)]
    close(*map(without_key_bias, grads))


def test_modes_and_caches_of_the_new_model():
    ours, _ = jnn.accelerate(Mixed(nnx.Rngs(0)))
    ours.eval()
    assert ours.dropped.deterministic
    ours.train()
    assert not ours.dropped.deterministic
    for _, module in nnx.iter_graph(ours):
        if isinstance(module, nnx.MultiHeadAttention):
            module.init_cache((1, 5, 4))
    assert ours.dropped.cached_key.shape == (1, 5, 2, 2)


@pytest.mark.deviceless
def test_a_step_is_planned_on_cudnn(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    theirs = nnx.eval_shape(lambda: Block(nnx.Rngs(0), dtype="bfloat16"))
    graph, state = nnx.split(jnn.accelerate(theirs)[0])
    x = jax.ShapeDtypeStruct((4, 256, 16), "bfloat16")

    def total(state, x):
        return nnx.merge(graph, state)(x).astype("float32").sum()

    with jc.target("H200"):
        plans = jc.plans(jax.grad(total), state, x)
    attention = {name: plan for name, plan in plans.items() if "attention" in name}
    name = "dot_product_attention_qkv"
    assert [*attention] == [name, f"{name} (backward)"]
    assert all(plan.engine for plan in attention.values())


@pytest.mark.gpu
def test_training_on_the_gpu():
    """Steps of both, from the same parameters."""
    losses = []
    for accelerated in (False, True):
        trained = Block(nnx.Rngs(0), dtype="bfloat16")
        if accelerated:
            trained, _ = jnn.accelerate(trained)
        x = jax.random.normal(jax.random.key(1), (4, 256, 16), "bfloat16")

        @nnx.jit
        def step(trained, x):
            value, gradients = nnx.value_and_grad(loss)(trained, x)
            params = nnx.state(trained, nnx.Param)
            nnx.update(trained, jax.tree.map(lambda p, g: p - 0.1 / x.size * g, params, gradients))
            return value

        losses.append([float(step(trained, x)) for _ in range(5)])
    np.testing.assert_allclose(*losses, rtol=2e-2)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.parametrize("module", ["accelerate", "attention", "paged_cache", "report"])
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(f"jax_cudnn.flax.{module}"))
    assert result.attempted >= 3
    assert result.failed == 0
