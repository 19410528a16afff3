"""float8 attention over pages, of a Graph and a pygraph: the dense attention of gathered pages."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformations
from helpers import has_cudnn
from transformations import relative_error

import jax_cudnn as jc
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.graph.layout import packed_strides
from jax_cudnn._core.planning import frontend

if importlib.util.find_spec("cudnn") is None:
    pytest.skip("nvidia-cudnn-frontend is not installed", allow_module_level=True)

B, H, N, S, D, P, U, EACH = 3, 4, 2, 24, 64, 20, 16, 4
KEYS = U * EACH
NAMES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
FACTORS = dict(zip(NAMES, (0.3, 0.4, 0.7, 1 / 448, 448.0, 2.0), strict=True))
RESULTS = ("O", "Stats", "Amax_S", "Amax_O")


def write(
    g, *, pages="kv", order=(0, 1, 2, 3), wide=1, shared=False, queries=S, dims=(),
    kind="FP8_E4M3", lengths=True, marked=RESULTS, **attributes,
):  # fmt: skip
    """Pages of values are ``wide`` times as large as those of keys."""
    kinds = frontend.load().data_type

    def tensor(name, *dim, kind="INT32", order=(0, 1, 2, 3)):
        dim = [*dict(dims).get(name, dim)]
        stride, kind = packed_strides(dim, order), getattr(kinds, kind)
        return g.tensor(name=name, dim=dim, stride=stride, data_type=kind)

    given = {"q": tensor("q", B, H, queries, D, kind="FP8_E4M3")}
    for name, scale in (("k", 1), ("v", wide)):
        dim = (P, N, U * scale, D) if name in pages else (B, N, KEYS, D)
        given[name] = tensor(name, *dim, kind=kind, order=order)
        if name in pages:
            table = f"paged_attention_{name}_table"
            given[table] = tensor(f"t{name}", B, 1, EACH // scale, 1)
    if shared:
        given |= {"v": given["k"], table: given["paged_attention_k_table"]}
    given |= {name: tensor(name, 1, 1, 1, 1, kind="FLOAT") for name in FACTORS}
    if lengths:
        given |= {f"seq_len_{n}": tensor(f"l{n[0]}", B, 1, 1, 1) for n in ("q", "kv")}
    given |= {"generate_stats": True, "paged_attention_max_seq_len_kv": KEYS, "attn_scale": 0.3}
    results = g.sdpa_fp8(**given, use_padding_mask=lengths, name="a", **attributes)
    types = kinds.FP8_E4M3, *[kinds.FLOAT] * 3
    for result, kind, _ in zip(results, types, marked, strict=False):
        result.set_output(True).set_data_type(kind)
    results[0].set_dim([B, H, queries, D])


def graph(**how):
    with jc.Graph() as g:
        write(g, **how)
    return g


def carried_over(**how):
    cudnn = frontend.load()
    g = cudnn.pygraph(io_data_type=cudnn.data_type.FP8_E4M3)
    write(g, **how)
    return jc.from_pygraph(g)


def arrays(*, pages="kv", wide=1, shared=False, **how):
    """Operands by name; some pages are unused, one sequence has a single key."""
    random, found = np.random.default_rng(0), {"q": (B, H, S, D)}
    for name, size in (("k", U), ("v", U * wide)):
        found[name] = (P, N, size, D) if name in pages else (B, N, KEYS, D)
    found = {n: 3 * random.standard_normal(shape, "f4") for n, shape in found.items()}
    found = {n: jnp.asarray(x, "float8_e4m3fn") for n, x in found.items()}
    for name, count in (("tk", EACH), ("tv", EACH // wide)):
        found[name] = random.permutation(P)[: B * count]
    if shared:
        found |= {"v": found["k"], "tv": found["tk"]}
    found |= {"lq": np.array([S, S - 1, S]), "lk": np.array([KEYS, 9, 1])}
    for name in ("tk", "tv", "lq", "lk"):
        found[name] = jnp.asarray(found[name].reshape(B, 1, -1, 1), "int32")
    return found | {n: jnp.full((1,) * 4, x, "float32") for n, x in FACTORS.items()}


def dense(x, **how):
    """The results of the dense node."""
    gathered = lambda x, t: jnp.moveaxis(x[t[:, 0, :, 0]], 2, 1).reshape(B, N, KEYS, D)  # noqa: E731
    k, v = (x[n] if len(x[n]) == B else gathered(x[n], x[f"t{n}"]) for n in "kv")
    of = {name: x[name] for name in FACTORS} | {"seq_len_q": x["lq"], "seq_len_kv": x["lk"]}
    bounds = {name: how[name] for name in how if "bound" in name}
    run = jc.graph(lambda g, q, k, v, of: g.sdpa_fp8(q, k, v, **of, attn_scale=0.3, **bounds))
    return [np.asarray(y, "f4") for y in run.with_options(implementation="xla")(x["q"], k, v, of)]


TWO_SIZES = "pages of two sizes"
CASES = {
    "pages": {},
    "tokens first, causal": {"order": (0, 2, 1, 3), "right_bound": 0},
    "pages of keys": {"pages": "k"}, "pages of values": {"pages": "v", "left_bound": 7},
    TWO_SIZES: {"wide": 2},
    "one cache and table": {"shared": True},
}  # fmt: skip


def outputs(g, x):
    got = g({t.get_name(): x[t.get_name()] for t in g.get_inputs()})
    return [np.asarray(y, "f4") for y in (got[f"a::{name}"] for name in RESULTS)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("made", [graph, carried_over])
def test_values_are_those_of_gathered_pages(made, name):
    x = arrays(**CASES[name])
    for got, want in zip(outputs(made(**CASES[name]), x), dense(x, **CASES[name]), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES.keys() - {TWO_SIZES}))
def test_values_on_a_gpu(name):
    x, g = arrays(**CASES[name]), graph(**CASES[name])
    got, want = outputs(g.with_options(implementation="cudnn"), x), dense(x, **CASES[name])
    there = np.isfinite(want[1])  # rows after the lengths are not defined
    for at, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = (np.where(there, y, 0) if at < 2 else y for y in (a, b))
        assert relative_error(a, b) < 0.07, RESULTS[at]


@pytest.mark.deviceless
@pytest.mark.parametrize("name", sorted(CASES.keys() - {TWO_SIZES}))
def test_hopper_has_a_plan(name):
    (segment,) = graph(**CASES[name]).plan(gpus=["H200"])["H200"].segments
    assert segment.plan.engine.startswith("eng9_") or not has_cudnn(92800)


@pytest.mark.deviceless
def test_a_decoding_step_has_no_plan_on_hopper_nor_have_some_pages():
    plans = graph(queries=1).plan(gpus=["H200", "B200"])
    assert [bool(p.execution_plans) for p in plans.values()] == [False, True]
    odd = graph(dims=dict.fromkeys("kv", (P, N, 48, D))).plan(gpus=["H200"])["H200"]
    assert "power of 2" in odd.segments[0].reason
    two = graph(**CASES[TWO_SIZES]).plan(gpus=["H200"])["H200"]
    assert "two sizes wrongly" in two.segments[0].reason


@pytest.mark.deviceless
def test_batches_are_one_plan_in_bounds_and_derivatives_are_of_the_reference():
    g, x, mapped = graph(marked=RESULTS[:1]), arrays(), ("q", "tk", "tv", "lq", "lk")
    run = lambda *operands: g({**x, **dict(zip(mapped, operands, strict=True))})["a::O"]  # noqa: E731
    with jc.target("H200"):
        (plan,) = jc.plans(jax.vmap(run), *(jnp.stack([x[n]] * 2) for n in mapped)).values()
    assert len(plan.execution_plans) == len(plan.segments) == 1
    spec = g._built.spec
    wild = boundary(spec).clipped([jnp.full(t.shape, 10**6, t.dtype) for t in spec.input_tensors])
    found = dict(zip(spec.inputs, wild, strict=True))
    assert [int(found[name].max()) for name in mapped[1:]] == [P - 1, P - 1, S, KEYS]
    errors = transformations.compare(spec, [x[n] for n in spec.inputs], ("vjp", "jvp", "vmap"))
    assert max(errors.values()) < 0.07, errors


WRONG = {
    "lacks seq_len_q, seq_len_kv": {"lengths": False},
    "numbers of heads do not fit": {"dims": dict.fromkeys("kv", (P, 3, U, D))},
    "disagree on dimension 'd'": {"dims": {"k": (P, N, U, 2 * D)}},
    "'k' has the wrong dtype": {"kind": "BFLOAT16"},
    "'page_table_k' has the wrong shape": {"dims": {"tk": (B - 1, 1, EACH, 1)}},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_does_not_fit_is_said(words):
    with pytest.raises((jc.GraphError, jc.GraphTypeError), match=words):
        graph(**WRONG[words])


def test_int64_numbers_do_not_wrap():
    x = arrays()
    for wrong in (2**40, 2**31, -(2**33)):
        with pytest.raises(jc.GraphError, match="'tk' is out of range"):
            outputs(graph(), x | {"tk": np.asarray(x["tk"], "i8") + wrong})
