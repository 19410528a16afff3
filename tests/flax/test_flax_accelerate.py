"""jc.flax.accelerate: the same Variables in other layers, the model as it was, and the report."""

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
    ours, report = jnn.accelerate(theirs)
    assert held(theirs, nnx.Variable, id) == held(ours, nnx.Variable, id) == variables
    assert held(theirs, nnx.Module, type) == modules
    swapped = {path: SWAPPED.get(kind, kind) for path, kind in modules.items()}
    assert held(ours, nnx.Module, type) == swapped
    assert len(report.swapped) == sum(kind in SWAPPED for kind in modules.values()) == 9
    assert report.kept == ()
    found = [nnx.jit(nnx.value_and_grad(loss))(m, tokens()) for m in (ours, theirs)]
    close(*map(without_key_bias, found))
    other, _ = jnn.accelerate(Block(nnx.Rngs(5)))
    nnx.update(other, nnx.state(theirs))
    close(nnx.merge(*nnx.split(other))(tokens()), theirs(tokens()))


def test_abstract_models_and_models_of_a_trace():
    abstract, _ = jnn.accelerate(nnx.eval_shape(lambda: Block(nnx.Rngs(0))))
    leaves = jax.tree.leaves(nnx.state(abstract))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert type(abstract.heads["one"]) is jnn.Linear
    theirs, x = Block(nnx.Rngs(0)), tokens()
    close(nnx.jit(lambda m, x: jnn.accelerate(m)[0](x))(theirs, x), theirs(x))
    close(jax.jit(lambda x: jnn.accelerate(theirs)[0](x))(x), theirs(x))


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


def test_what_stands_in_several_places_does_so_again(monkeypatch):
    made = []
    of = jnn.Linear.of.__func__
    counting = classmethod(lambda cls, layer: made.append(layer) or of(cls, layer))
    monkeypatch.setattr(jnn.Linear, "of", counting)
    theirs = Holder(nnx.Rngs(0))
    ours, report = jnn.accelerate(theirs)
    assert len(made) == 2
    assert type(ours.layer) is type(ours.list[1][0]) is jnn.Linear
    places = (ours.again, ours.list[0], ours.dict["a"][0], ours.dict["b"].first, ours.leaves.func)
    assert all(place is ours.layer for place in places)
    assert (ours.me, ours.bound.__self__) == (ours, ours)
    assert (theirs.me, theirs.bound.__self__, type(theirs.list[0])) == (theirs, theirs, nnx.Linear)
    assert ours.list is not theirs.list
    assert (ours.sizes, ours.partial) == (theirs.sizes, theirs.partial)
    assert (type(ours.leaves), type(ours.dict["b"])) == (jax.tree_util.Partial, Pair)
    where = "layer, again, list.0, dict.a.0, dict.b.0, leaves"
    assert [(e.path, e.swapped) for e in report.entries] == [(where, True), ("list.1.0", True)]
    x = jnp.ones((2, 4))
    close(nnx.jit(lambda m, x: m.bound(x))(nnx.clone(ours), x), theirs.twice(x))


# -- what is kept, and the report ------------------------------------------------------------------


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
        self.function = functools.partial(nnx.dot_product_attention, is_causal=True)
        self.wide = attention(dtype="float64")
        self.held = nnx.data(Held(nnx.Linear(3, 4, rngs=rngs)))
        self.usual = nnx.LinearGeneral(4, 4, dot_general=jax.lax.dot_general, rngs=rngs)
        self.marked = nnx.Linear(4, 4, rngs=rngs)
        self.marked.activation = "relu"  # a user's own attribute
        derived = type("Derived", (jnn.Linear,), {})
        self.derived = derived(4, 4, rngs=rngs)

    @staticmethod
    def dot(*operands, **named):
        return jax.lax.dot_general(*operands, **named)


KEPT = {
    "own": "derived from Linear",
    "ours": "a layer of jax_cudnn",
    "derived": "a layer of jax_cudnn",
    "hooked": "a dot_general of its own",
    "embed": "no such layer",
    "norm": "XLA fuses it",
    "mine": "an attention_fn of its own",
    "function": "jax_cudnn.ops.attention_fn",
    "wide": "no graph computes in float64",
    **{f"wide.{n}": "no graph computes in float64" for n in ("query", "key", "value", "out")},
    "held.layer": "a container that accelerate does not look into",
    "marked": "activation",
}


def test_report_says_what_not_and_why():
    with jax.enable_x64(True):
        theirs = Mixed(nnx.Rngs(0))
        ours, report = jnn.accelerate(theirs)
    kept = {entry.path: entry.why for entry in report.kept}
    assert kept.keys() == KEPT.keys()
    for path, words in KEPT.items():
        assert words in kept[path]
        name, *_ = path.split(".")
        assert type(getattr(ours, name)) is type(getattr(theirs, name))
    swapped = {entry.path: entry.why for entry in report.swapped}
    assert "dropout" in swapped["dropped"]
    assert swapped["usual"] == ""
    assert type(ours.mine.query) is jnn.LinearGeneral
    assert type(theirs.mine.query) is nnx.LinearGeneral
    with pytest.raises(jc.GraphError, match="rename it"):
        jnn.Linear.of(theirs.marked)
    lines = str(report).splitlines()
    assert lines[0].split() == ["path", "class", "swapped", "why"]
    assert lines[-1] == f"{len(report.swapped)} swapped, {len(report.kept)} kept"
    assert len(lines) == len(report.entries) + 2
    assert report.to_json()[0].keys() == {"path", "name", "swapped", "why"}

    ours.eval()
    assert (ours.dropped.deterministic, theirs.norm.use_running_average) == (True, False)
    ours.dropped.init_cache((1, 5, 4))
    assert ours.dropped.cached_key.shape == (1, 5, 2, 2)


_SHARED = nnx.Linear(4, 4, rngs=nnx.Rngs(1))


class Closed(nnx.Module):
    """With functions that hold it, or a layer of it, in several ways."""

    def __init__(self, rngs):
        self.layer, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        layers = [self.layer]
        self.named = lambda x: self.dropout(self.layer(x))
        self.listed = lambda x: layers[0](x)
        self.default = lambda x, layer=self.layer: layer(x)
        self.partial = functools.partial(self.named)
        self.compiled = jax.jit(self.method)
        self.object = functools.partial(jax.vmap(self.method))
        self.of_file = lambda x: _SHARED(x)
        self.swapped = functools.partial(Closed.method, self)
        self.free = jax.jit(lambda x, scale=2.0: scale * x)

    def method(self, x):
        return self.layer(x)


def test_report_tells_of_functions_that_hold_modules():
    ours, report = jnn.accelerate(Closed(nnx.Rngs(0)))
    found = {entry.path for entry in report.kept if "holds a module" in entry.why}
    assert found == {"named", "listed", "default", "partial", "compiled", "of_file", "object"}
    x = jnp.ones((2, 4))
    ours.eval()
    close(ours.dropout(x), x)
    assert not ours.named(x).all()  # the given one's dropout, in its mode
    assert type(ours.swapped.args[0].layer) is jnn.Linear


def test_a_layer_by_itself_nothing_to_swap_and_what_is_no_module():
    ours, report = jnn.accelerate(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    assert (type(ours), [e.path for e in report.swapped]) == (jnn.Linear, ["model"])
    again, report = jnn.accelerate(ours)
    assert again is not ours
    assert again.kernel is ours.kernel
    assert (report.swapped, len(report.kept)) == ((), 1)
    for given, words in (
        (linen.Dense(3), "jax_cudnn.ops.attention_fn"),
        (nnx.Linear, "the class Linear"),
        (None, "NoneType"),
    ):
        with pytest.raises(jc.GraphTypeError, match=words):
            jnn.accelerate(given)


def test_modules_that_are_nested_too_deep():
    deep = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    for _ in range(600):
        deep = nnx.Sequential(deep)
    with pytest.raises(jc.GraphError, match="nested too deep"):
        jnn.accelerate(deep)
