"""jc.flax.accelerate shares Variables and leaves the model as it is; jc.flax.report says why."""

import collections
import functools

import flax.struct
import jax
import jax.numpy as jnp
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
        up, down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)
        self.mlp = nnx.List([up, nnx.gelu, down])
        self.heads = nnx.Dict(one=nnx.Linear(4, 16, rngs=rngs))

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        y = functools.reduce(lambda y, layer: layer(y), self.mlp, x)
        return x + self.heads["one"](y)


def tokens():
    return jax.random.normal(jax.random.key(1), (2, 8, 16))


def held(model, kind, of):
    return {path: of(v) for path, v in nnx.iter_graph(model) if isinstance(v, kind)}


def test_variables_are_shared_and_the_model_is_as_it_was():
    theirs = Block(nnx.Rngs(0))
    variables, modules = held(theirs, nnx.Variable, id), held(theirs, nnx.Module, type)
    ours, report = jnn.accelerate(theirs), jnn.report(theirs)
    assert held(theirs, nnx.Variable, id) == held(ours, nnx.Variable, id) == variables
    assert held(theirs, nnx.Module, type) == modules
    swapped = {path: SWAPPED.get(kind, kind) for path, kind in modules.items()}
    kinds = held(ours, nnx.Module, type)
    assert issubclass(kinds.pop(()), swapped.pop(()))  # whose forward is accelerated, too
    assert kinds == swapped
    assert len(report.swapped) == sum(kind in SWAPPED for kind in modules.values()) == 9
    assert (report.kept, report) == ((), jnn.report(ours))
    found = [nnx.jit(nnx.value_and_grad(loss))(m, tokens()) for m in (ours, theirs)]
    close(*map(without_key_bias, found))
    abstract = jnn.accelerate(nnx.eval_shape(lambda: Block(nnx.Rngs(5))))
    nnx.update(abstract, nnx.state(theirs))
    close(nnx.merge(*nnx.split(abstract))(tokens()), theirs(tokens()))


def test_what_is_not_replaced_and_what_to_do_with_dropout_in_training():
    with pytest.raises(AttributeError, match=r"use flax\.nnx\.Embed"):
        _ = jnn.Embed
    model = jnn.accelerate(
        nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), *Block(nnx.Rngs(0)).mlp)
    )
    with jc.target("H200"), pytest.raises(jc.GraphError, match=r"lambda model, \*args"):
        jc.plans(model, tokens())


def test_models_of_a_trace():
    theirs, x = Block(nnx.Rngs(0)), tokens()
    close(nnx.jit(lambda m, x: jnn.accelerate(m)(x))(theirs, x), theirs(x))


class Holder(nnx.Module):
    def __init__(self, rngs):
        layer = nnx.Linear(4, 4, rngs=rngs)
        self.layer, self.me = layer, self
        self.list = nnx.data([layer, [nnx.Linear(4, 4, rngs=rngs)]])
        self.dict = nnx.data({"a": (layer, 3), "b": Pair(layer, "x")})
        self.bound = self.twice
        self.leaves = jax.tree_util.Partial(layer)

    def twice(self, x):
        return self.layer(self.layer(x))


def test_what_stands_in_several_places_does_so_again():
    theirs = Holder(nnx.Rngs(0))
    ours, report = jnn.accelerate(theirs), jnn.report(theirs)
    assert type(ours.layer) is type(ours.list[1][0]) is jnn.Linear
    places = (ours.list[0], ours.dict["a"][0], ours.dict["b"].first, ours.leaves.func)
    assert all(place is ours.layer for place in places)
    assert (ours.me, ours.bound.__self__) == (ours, ours)
    assert (theirs.me, theirs.bound.__self__, type(theirs.list[0])) == (theirs, theirs, nnx.Linear)
    where = "layer, list.0, dict.a.0, dict.b.0, leaves"
    assert [(e.path, e.swapped) for e in report.entries] == [(where, True), ("list.1.0", True)]
    x = jnp.ones((2, 4))
    close(nnx.jit(lambda m, x: m.bound(x))(nnx.clone(ours), x), theirs.twice(x))


@flax.struct.dataclass
class Held:
    layer: nnx.Linear


class Mixed(nnx.Module):
    def __init__(self, rngs):
        def attention(**named):
            return nnx.MultiHeadAttention(2, 4, **named, decode=False, rngs=rngs)

        self.own = Own(4, 4, rngs=rngs)
        self.ours = jnn.Linear(4, 4, rngs=rngs)
        self.hooked = nnx.Linear(4, 4, dot_general=self.dot, rngs=rngs)
        self.embed = nnx.Embed(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropped = attention(dropout_rate=0.1)
        self.mine = attention(attention_fn=self.dot)
        self.wide = attention(dtype="float64")
        self.held = nnx.data(Held(nnx.Linear(3, 4, rngs=rngs)))

    @staticmethod
    def dot(*operands, **named):
        return jax.lax.dot_general(*operands, **named)


KEPT = {
    "own": "derived from Linear",
    "hooked": "a custom dot_general",
    "embed": "has no such layer",
    "norm": "XLA fuses it",
    "mine": "a custom attention_fn",
    "wide": "graphs do not support float64",
    **{f"wide.{n}": "graphs do not support float64" for n in ("query", "key", "value", "out")},
    "held.layer": "a container other than a list",
}


def test_report_says_what_not_and_why():
    with jax.enable_x64(True):
        theirs = Mixed(nnx.Rngs(0))
        ours, report = jnn.accelerate(theirs), jnn.report(theirs)
        assert jnn.report(ours) == report
    kept = {entry.path: entry.why for entry in report.kept}
    assert kept.keys() == KEPT.keys()
    for path, words in KEPT.items():
        assert words in kept[path]
        name, *_ = path.split(".")
        assert type(getattr(ours, name)) is type(getattr(theirs, name))
    swapped = {entry.path: entry.why for entry in report.swapped}
    assert "dropout" in swapped["dropped"]
    assert type(ours.mine.query) is jnn.LinearGeneral
    assert type(theirs.mine.query) is nnx.LinearGeneral
    assert str(report).splitlines()[-1] == f"{len(report.swapped)} swapped, {len(report.kept)} kept"

    ours.eval()
    assert (ours.dropped.deterministic, theirs.norm.use_running_average) == (True, False)


def named_as(module):
    """A wrapped method of an object whose class claims to be defined in this module."""
    kind = type("Model", (), {"__module__": module, "apply": lambda self, x: x})
    return functools.partial(jax.jit(kind().apply))


def test_a_single_layer_and_models_of_other_frameworks():
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    assert type(jnn.accelerate(layer)) is jnn.Linear
    assert [e.path for e in jnn.report(layer).swapped] == ["model"]
    for given, fix in (
        (nnx.Linear, "pass the module itself"),
        (linen.Dense(3), '"Flax Linen" in docs/flax_and_others.md'),
        (linen.Dense(3).apply, "Flax Linen"),
        (named_as("equinox._module"), '"Equinox" in'),
        (named_as("haiku._src.transform"), '"Haiku" in'),
    ):
        with pytest.raises(jc.GraphTypeError, match=fix):
            jnn.accelerate(given)
