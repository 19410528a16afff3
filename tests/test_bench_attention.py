"""The bench of attention: all sides compute the same, and figures are what they are called."""

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_bench_norms import Machine

import jax_cudnn as jc
from jax_cudnn.__main__ import main
from jax_cudnn.bench import losses, queued, run, sides, timing, torch_graphs
from jax_cudnn.bench.attention import cases as attention_cases
from jax_cudnn.bench.attention import figures, power, torch_sides
from jax_cudnn.bench.attention import measure as attention
from jax_cudnn.bench.attention import tables as attention_tables
from jax_cudnn.bench.attention.case import LIMIT, Side
from jax_cudnn.bench.attention.checks import difference
from jax_cudnn.bench.attention.figures import Effort, Running, times
from jax_cudnn.bench.attention.float8 import NARROW
from jax_cudnn.bench.attention.formulations import (
    Attended,
    by_blocks,
    gathered,
    in_jax_nn,
    in_pages,
    plain,
    recomputed,
)
from jax_cudnn.bench.attention.parts import JAX_NN, qkv
from jax_cudnn.bench.attention.prepared import Prepared
from jax_cudnn.bench.attention.published import PUBLISHED
from jax_cudnn.bench.attention.ragged import PADDED
from jax_cudnn.bench.attention.torch_sides import CUDNN, EFFICIENT, FLASH, FLEX
from jax_cudnn.bench.halves import halves
from jax_cudnn.bench.run import RESULTS
from jax_cudnn.bench.sides import BACKWARD, FORWARD, OURS, REFERENCE, TRAINING, WHOLE

pytestmark = pytest.mark.wide

FULL = {case.name: case for case in attention_cases.attention_cases()}
TINY = {case.name.partition("/")[0]: case for case in attention_cases.tiny_cases()}
QUICK = {"seconds": 0.0, "calls": 1, "rounds": 1, "say": str}
ENVIRONMENT = {
    "device": "GPU", "date": "2026-01-01", "cudnn": "1", "jax": "2", "nvidia-cudnn-frontend": "3",
    "torch": "4", "triton": "5", "driver": "6", "sm_version": 90,
}  # fmt: skip

needs_torch = pytest.mark.skipif(not torch_graphs.installed(), reason="torch is not installed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """What ``bench --attention --tiny`` writes, with its exit status."""
    folder = tmp_path_factory.mktemp("attention")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        status = main(["bench", "--attention", "--tiny", "--out", str(folder)])
    (path,) = folder.glob("attention_*-tiny.json")
    return status, path


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


def avals(case):
    return {
        name: getattr(x, "aval", x) for name, x in case.operands.items()
    }  # of drawn operands; others are arrays


def few(case, **changes):
    """The case with few sides."""
    xla = {"by blocks": case.xla["by blocks"], **changes.pop("xla", {})}
    return dataclasses.replace(case, **{"xla": xla, "others": {}, "torch": {}, **changes})


def document(entries, **environment):
    return {
        "environment": ENVIRONMENT | environment,
        "limit": LIMIT,
        "published": PUBLISHED,
        "attention": entries,
    }


def rendered(entries):
    return attention_tables.render_attention(document(entries))


# -- all of it, with small shapes ------------------------------------------------------------------


def test_all_sides_agree_and_all_figures_are_there(tiny):
    status, path = tiny
    result = json.loads(path.read_text())
    assert status == 0
    assert {"torch", "triton", "driver", "cudnn", "jax", "date"} <= result["environment"].keys()
    assert result["limit"] == LIMIT
    assert [*result["attention"]] == [case.name for case in TINY.values()]
    for case in TINY.values():
        entry = result["attention"][case.name]
        assert [*entry["programs"]] == [*case.programs]
        every = {WHOLE, OURS, REFERENCE, *case.others, *case.xla, *case.torch}
        for program, found in entry["programs"].items():
            assert found["status"] == "timed", (case.name, program, found)
            ran = found["errors"].keys()
            assert ran | found["not_run"].keys() == every
            assert not ran & found["not_run"].keys()
            here = {s for s, side in case.others.items() if s not in (JAX_NN, NARROW)}
            assert {WHOLE, OURS, REFERENCE, *case.xla, *here} <= ran
            assert (NARROW in ran) == (NARROW in case.others and program != BACKWARD)
            for kind in ("us", "host_us", "tflops", "of_limit", "calls", "repeats", "rounds"):
                assert found[kind].keys() == ran, kind
            most = 0.01 if case.tolerance is None else found["tolerance"]
            assert all(0 < error["relative"] < most for error in found["errors"].values())
            plain_sides = [*case.xla, REFERENCE]
            assert found["best_xla"] in plain_sides
            assert found["us"][found["best_xla"]]["median"] == min(
                found["us"][side]["median"] for side in plain_sides
            )
            assert sum(found["seconds"].values()) < entry["seconds"] + 0.2
            us = found["us"][OURS]["median"]
            assert found["flops"] == case.flops(program)
            assert found["tflops"][OURS] == pytest.approx(found["flops"] / us / 1e6, rel=1e-3)
            assert found["of_limit"][OURS] == pytest.approx(case.limit_us(program) / us, abs=1e-4)
            assert {side: held["graphs"] for side, held in found["plans"].items()} == {
                WHOLE: 1,
                OURS: 1,
            }
        if case.learned:
            both = entry["training_step"]
            each = [found["us"][OURS]["median"] for found in entry["programs"].values()]
            assert both["us"][OURS] == pytest.approx(sum(each), abs=2e-3)


@needs_torch
def test_on_a_cpu_torch_has_flash_attention_of_padded_examples_alone(tiny):
    _, path = tiny
    result = json.loads(path.read_text())["attention"]
    for kind, case in TINY.items():
        for found in result[case.name]["programs"].values():
            assert (FLASH in found["us"]) == (kind in ("causal", "packed", "float8"))
            assert not {CUDNN, EFFICIENT, FLEX} & found["us"].keys()
    reason = result[TINY["window"].name]["programs"][TRAINING]["not_run"]
    assert reason[CUDNN] == "scaled_dot_product_attention takes no window"


def test_all_is_rendered(tiny, capsys):
    _, path = tiny
    assert main(["bench", "--render", str(path)]) == 0
    text = capsys.readouterr().out
    result = json.loads(path.read_text())["attention"]
    tables = [
        [row for row in part.splitlines() if row.startswith("|")] for part in text.split("\n\n")
    ]
    forward, backward, both = (rows for rows in tables if rows)
    learned = [case.name for case in TINY.values() if case.learned]
    for rows, names in ((forward, [*result]), (backward, learned), (both, learned)):
        assert len({row.count("|") for row in rows}) == 1
        assert [row.split(" | ")[0] for row in rows[2:]] == [f"| {name}" for name in names]
    for rows, kind in ((forward, 0), (backward, 1)):
        for row in rows[2:]:
            found = [*result[row.split(" | ")[0][2:]]["programs"].values()][kind]
            cells = row.split(" | ")
            assert cells[1].startswith(f"{found['us'][OURS]['median']:.4g} (")
            assert cells[3] == f"{found['of_limit'][OURS]:.2f}"
            assert cells[6].endswith(found["best_xla"])
    assert "did not run: it has no backward" in text
    assert "not slower than" not in text  # of which a CPU says nothing


def test_without_torch_its_sides_say_so(no_torch):
    case = few(TINY["causal"], torch=TINY["causal"].torch)
    entry = attention.measure_attention([case], **QUICK)[case.name]
    assert entry["status"] == "timed"
    for found in entry["programs"].values():
        assert found["not_run"] == dict.fromkeys(case.torch, torch_graphs.MISSING)


# -- what is wrong or fails ------------------------------------------------------------------------


def with_gradient(side, factor):
    """The side with one gradient of q that is wrong by a factor."""

    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (x, None), lambda _, dx: ((factor * dx).astype(dx.dtype),))
    return dataclasses.replace(
        side, function=lambda q, **others: side.function(q=scaled(q), **others)
    )


def test_a_formulation_that_is_wrong_is_noticed_and_not_timed():
    of = Attended(causal=False)
    case = few(TINY["causal"], xla={"off": Side(plain(of))})
    entry = attention.measure_attention([case], **QUICK)[case.name]
    assert entry["status"] == "WRONG"
    for found in entry["programs"].values():
        assert found["status"] == "WRONG"
        assert re.fullmatch(r"errors \(norm, worst rows\) of off: .*", found["reason"])
        assert "off" not in found["us"]
        assert {OURS, WHOLE, "by blocks"} <= found["us"].keys()
    assert "WRONG: errors (norm, worst rows) of off" in rendered({case.name: entry})


def test_another_library_that_is_wrong_is_not_timed():
    """Which makes nothing of ours wrong."""
    case = few(TINY["causal"], others={JAX_NN: Side(plain(Attended(causal=False)))})
    entry = attention.measure_attention([case], **QUICK)[case.name]
    assert entry["status"] == "timed"
    for found in entry["programs"].values():
        assert JAX_NN not in found["us"]
        assert "errors (norm, worst rows) are" in found["not_run"][JAX_NN]


def test_copies_are_shared_and_arrays_of_their_own(key):
    bench = Prepared(few(TINY["causal"]), sides.Fillers())
    x, y = jax.random.normal(key, (2, 3)), jnp.ones(3)
    first, second = bench.copies(({"x": x},), 2), bench.copies((y, [x], None), 3)
    assert first[0][0]["x"] is second[0][1][0] is x
    assert first[1][0]["x"] is second[1][1][0]
    pointers = {given[1][0].unsafe_buffer_pointer() for given in second}
    assert len(pointers) == 3
    np.testing.assert_array_equal(second[2][1][0], x)


def test_some_rows_that_are_wrong_are_noticed():
    """Those of one head at the end, which are a twentieth of all in the norm."""
    case, size = few(TINY["causal"]), 512

    def half(q, k, v):
        y = case.xla["by blocks"].function(q, k, v)["y"]
        return {"y": y.at[0, -64:, 0].set(0)}

    long = dataclasses.replace(
        few(FULL["causal/1x2048x64-8x128"], xla={"off": Side(half)}),
        operands=qkv(1, size, 4, 2, 16),
    )
    found = attention.measure_attention([long], **QUICK)[long.name]["programs"][TRAINING]
    assert found["status"] == "WRONG"
    errors = found["errors"]["off"]
    assert errors["relative"] < 0.1
    assert errors["worst"] > 4 * found["tolerance"]


@pytest.mark.parametrize("side", [WHOLE, OURS])
def test_our_side_with_a_wrong_gradient_fails_the_command(side, tmp_path, monkeypatch):
    case = few(TINY["causal"])

    def ours(implementation):
        right = case.ours(implementation)
        wrong = (side == WHOLE) == (implementation == "cudnn")
        return with_gradient(right, 1.0625) if wrong else right

    mutated = dataclasses.replace(case, ours=ours)
    monkeypatch.setattr(attention_cases, "tiny_cases", lambda: [mutated])
    assert main(["bench", "--attention", "--tiny", "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())["attention"][case.name]["programs"]
    states = {program: entry["status"] for program, entry in found.items()}
    assert states == {TRAINING: "timed", BACKWARD: "WRONG"}
    assert f" of {side}: 0.06" in found[BACKWARD]["reason"]
    assert side not in found[BACKWARD]["us"]


def test_what_fails_leaves_the_others():
    def broken(*operands, **named):
        raise ValueError("not today")

    base = few(TINY["causal"])
    cases = [
        dataclasses.replace(
            base, name="whole", ours=lambda i: Side(broken) if i == "cudnn" else base.ours(i)
        ),
        dataclasses.replace(base, name="ours", ours=lambda i: base.ours(i) if i else Side(broken)),
        dataclasses.replace(few(base, xla={"odd": Side(broken)}), name="formulation"),
        dataclasses.replace(base, name="form", others={"odd": Side(broken, prepare=broken)}),
        dataclasses.replace(base, name="exact", exact=Side(broken)),
        dataclasses.replace(base, name="good", others={"none": "there is no such thing"}),
    ]
    told = []
    entries = attention.measure_attention(cases, **QUICK | {"say": told.append})
    assert {name: entry["status"] for name, entry in entries.items()} == {
        "whole": "timed",
        "ours": "failed",
        "formulation": "timed",
        "form": "timed",
        "exact": "failed",
        "good": "timed",
    }
    assert entries["exact"]["reason"] == "ValueError: not today"
    for program in (TRAINING, BACKWARD):
        found = {name: entry["programs"].get(program) for name, entry in entries.items()}
        assert found["ours"]["reason"] == "ValueError: not today"
        assert WHOLE in found["ours"]["us"]
        assert found["whole"]["not_run"] == {WHOLE: "ValueError: not today"}
        assert found["formulation"]["not_run"] == {"odd": "ValueError: not today"}
        assert found["form"]["not_run"] == {"odd": "ValueError: not today"}
        assert found["good"]["not_run"] == {"none": "there is no such thing"}
    assert [line.split(":")[0] for line in told] == [*entries]
    text = rendered(entries)
    assert "\n- exact: failed: ValueError: not today" in text
    assert "\n- formulation, form: odd did not run: ValueError: not today" in text
    assert "\n- good: none did not run: there is no such thing" in text


# -- the cases -------------------------------------------------------------------------------------


def test_cases_have_the_shapes_that_are_asked_for():
    wanted = [f"causal/1x{2**n}x64-8x128" for n in range(11, 16)]
    wanted += ["causal/2x8192x32-8x128", "packed/8x4096x32-8x128", "window/1x16384x64-8x128-1024"]
    wanted += ["bias/1x4096x32-8x128", "softcap/1x4096x32-8x128"]
    wanted += [f"float8/1x{size}x64-8x128" for size in (4096, 8192, 16384)]
    wanted += ["paged/64x8192x64-8x128", "paged/64x8192x64-8x128-lengths"]
    assert [*FULL] == wanted
    assert {name.partition("/")[0] for name in FULL} == {*TINY}
    shapes = {n: str(x) for n, x in FULL["causal/1x2048x64-8x128"].operands.items()}
    assert shapes == {
        "q": "bfloat16[1,2048,64,128]",
        "k": "bfloat16[1,2048,8,128]",
        "v": "bfloat16[1,2048,8,128]",
    }
    assert FULL["bias/1x4096x32-8x128"].learned == ("q", "k", "v", "bias")


def test_scores_are_held_where_that_might_be_fast():
    held = {name for name, case in FULL.items() if not {*case.xla} <= {"by blocks", "in pages"}}
    small = {"causal/1x2048x64-8x128", "causal/1x4096x64-8x128"}
    small |= {"bias/1x4096x32-8x128", "softcap/1x4096x32-8x128"}
    assert held == small | {name for name in FULL if name.startswith("paged")}


def test_only_what_can_be_captured_is():
    """torch's operators for examples of several lengths end the process in a graph's capture."""
    alone = {
        (case.name.partition("/")[0], side)
        for case in FULL.values()
        for side, ways in case.torch.items()
        if not isinstance(ways, str) and not all(way.captured for way in ways)
    }
    assert alone == {("packed", CUDNN), ("packed", FLASH), ("window", FLASH), ("paged", FLASH)}
    for kind, side in alone:
        case = next(case for name, case in FULL.items() if name.startswith(kind))
        assert not any(way.captured for way in case.torch[side])


def test_flops_are_counted_as_in_the_field():
    causal = FULL["causal/1x4096x64-8x128"]
    assert causal.flops(TRAINING) == 4 * 64 * 4096 * 4096 * 128 / 2
    assert causal.flops(BACKWARD) == 2.5 * causal.flops(TRAINING)
    assert FULL["bias/1x4096x32-8x128"].flops(TRAINING) == 4 * 32 * 4096 * 4096 * 128
    window = FULL["window/1x16384x64-8x128-1024"]
    seen = np.tril(np.ones((16384, 16384), bool)) & ~np.tril(np.ones((16384, 16384), bool), -1024)
    assert window.flops(TRAINING) == pytest.approx(4 * 64 * 128 * seen.sum(), rel=1e-3)
    packed = FULL["packed/8x4096x32-8x128"]
    lengths = packed.operands["lengths"]
    assert lengths.max() <= 4096
    assert packed.flops(TRAINING) == 4 * 32 * 128 * (lengths.astype(float) ** 2).sum() / 2
    paged = FULL["paged/64x8192x64-8x128"]
    assert paged.flops(FORWARD) == 4 * 64 * 64 * 8192 * 128


def test_the_limit_is_of_products_or_of_bytes():
    causal = FULL["causal/1x4096x64-8x128"]
    assert causal.limit_us(TRAINING) == pytest.approx(causal.flops(TRAINING) / 989.5e6)
    narrow = FULL["float8/1x4096x64-8x128"]
    assert narrow.limit_us(TRAINING) == pytest.approx(causal.limit_us(TRAINING) / 2)
    q, k = 2 * 4096 * 64 * 128, 2 * 4096 * 8 * 128
    assert causal.bytes(TRAINING) == 2 * q + 2 * k
    assert causal.bytes(BACKWARD) == 4 * q + 4 * k
    q, cache = 2 * 64 * 64 * 128, 2 * 8 * 128 * 2
    for name in ("paged/64x8192x64-8x128", "paged/64x8192x64-8x128-lengths"):
        paged = FULL[name]
        lengths = paged.operands["lengths"]
        size = 2 * q + cache * int(lengths.sum()) + 4 * 64 + paged.operands["page_table"].nbytes
        assert paged.bytes(FORWARD) == size
        assert paged.limit_us(FORWARD) == pytest.approx(size / 4.3e6)
    assert FULL["paged/64x8192x64-8x128-lengths"].operands["lengths"].min() >= 4096


def test_published_figures_stand_beside_the_same_shape():
    published = {name: case.published for name, case in FULL.items() if case.published}
    assert published == {
        "causal/1x4096x64-8x128": {"forward": 591, "backward": 474},
        "causal/1x16384x64-8x128": {"forward": 673, "backward": 579},
        "float8/1x4096x64-8x128": {"forward": 854},
        "float8/1x16384x64-8x128": {"forward": 1010},
    }
    assert {FULL[name].published_side for name in published} == {OURS, NARROW}


def test_only_what_an_example_has_is_looked_at(key):
    case = TINY["packed"]
    operands = case.arrays(key)
    lengths = np.asarray(operands["lengths"])
    behind = np.arange(64) >= lengths[:, None]
    assert (np.asarray(operands["dy"])[behind] == 0).all()
    assert (np.asarray(operands["q"])[behind] != 0).any()
    shown = case.shown({"y": jnp.ones(operands["q"].shape)})["y"]
    assert (np.asarray(shown).any((2, 3)) == ~behind).all()


def test_packed_operands_are_those_of_the_examples_one_behind_the_other(key):
    case = TINY["packed"]
    operands, side = case.arrays(key), case.ours(None)
    given = side.given(operands)
    q, lengths = np.asarray(operands["q"]), np.asarray(operands["lengths"])
    np.testing.assert_array_equal(
        given["q"], np.concatenate([q[i, :length] for i, length in enumerate(lengths)])
    )
    np.testing.assert_array_equal(given["offsets"], [0, *np.cumsum(lengths)])
    back = side.common({"q": given["q"]})
    np.testing.assert_array_equal(back["q"], case.shown({"q": operands["q"]})["q"])


# -- formulations ----------------------------------------------------------------------------------


def expected(of, q, k, v, bias=None, lengths=None):
    """Attention in NumPy and float64, one head after the other."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    y = np.zeros(q.shape)
    i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    seen = (j <= i) | (not of.causal)
    if of.window is not None:
        seen &= i - j < of.window
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        at = h * k.shape[2] // q.shape[2]
        scores = q[b, :, h] @ k[b, :, at].T / np.sqrt(q.shape[-1])
        if of.softcap is not None:
            scores = of.softcap * np.tanh(scores / of.softcap)
        if bias is not None:
            scores = scores + np.asarray(bias, np.float64)[0, h]
        shown = seen if lengths is None else seen & (j < lengths[b])
        weights = np.where(shown, np.exp(scores), 0)
        y[b, :, h] = weights @ v[b, :, at] / weights.sum(-1, keepdims=True)
    return y


KINDS = {
    "causal": Attended(),
    "window": Attended(window=20),
    "softcap": Attended(softcap=2.0),
    "bias": Attended(causal=False),
    "lengths": Attended(),
}


@pytest.mark.parametrize("kind", [*KINDS])
def test_formulations_compute_attention_and_its_gradients(kind, key):
    of, keys = KINDS[kind], jax.random.split(key, 5)
    operands = {
        name: jax.random.normal(k, shape)
        for name, shape, k in zip(
            ("q", "k", "v", "bias"),
            ((2, 64, 4, 16), (2, 64, 2, 16), (2, 64, 2, 16), (1, 4, 64, 64)),
            keys,
            strict=False,
        )
        if name != "bias" or kind == "bias"
    }
    dy = jax.random.normal(keys[4], operands["q"].shape)
    fixed = {}
    if kind == "lengths":
        fixed["lengths"] = jnp.array([64, 37], jnp.int32)
        rows = jnp.arange(64)[:, None, None] < fixed["lengths"][:, None, None, None]
        dy = dy * rows
    want = expected(of, **operands, **fixed)
    functions = {
        "in blocks of 16": by_blocks(of, "highest", 16),
        "in two blocks": by_blocks(of),
        "plain": plain(of),
        "again": recomputed(plain(of)),
    }
    if kind != "softcap":
        functions["jax.nn"] = in_jax_nn(of, "xla")

    def both(function):
        y, pull = jax.vjp(lambda given: function(**given, **fixed)["y"], operands)
        return y, pull(dy)[0]

    found = {name: jax.jit(lambda f=f: both(f))() for name, f in functions.items()}
    gradients = found["plain"][1]  # JAX's own, of what is held against NumPy
    shown = rows if kind == "lengths" else 1
    for name, (y, grads) in found.items():
        np.testing.assert_allclose(shown * y, shown * want, rtol=1e-4, atol=1e-5, err_msg=name)
        for operand, grad in grads.items():
            np.testing.assert_allclose(
                grad, gradients[operand], rtol=1e-3, atol=2e-5, err_msg=f"{name} {operand}"
            )


def test_blocks_that_see_nothing_are_left_out():
    assert len(Attended(causal=False).blocks(128, 16)) == 64
    assert len(Attended().blocks(128, 16)) == 36
    for window in (1, 2, 16, 17, 18, 40):
        of = Attended(window=window)
        blocks = {tuple(pair) for pair in of.blocks(128, 16)}
        seen = np.asarray(of.seen(jnp.arange(128), jnp.arange(128), None))[0, 0, 0]
        assert blocks == {(i // 16, j // 16) for i, j in np.argwhere(seen)}


def test_pages_are_those_of_the_table(key):
    case = TINY["paged"]
    operands = {
        n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
        for n, x in case.arrays(key).items()
    }
    keys, values, table = (
        np.asarray(operands[name]) for name in ("key_pages", "value_pages", "page_table")
    )
    whole = {
        name: np.stack(
            [np.concatenate([pages[page].swapaxes(0, 1) for page in row]) for row in table]
        )
        for name, pages in (("k", keys), ("v", values))
    }
    for name, x in whole.items():
        np.testing.assert_array_equal(gathered(**operands)[name], x)
    of = Attended(causal=False)
    want = expected(of, operands["q"], **whole, lengths=operands["lengths"])
    np.testing.assert_allclose(in_pages(**operands)["y"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["causal", "window", "bias"])
def test_ours_keeps_the_statistic_alone(kind):
    """Neither an operand again nor anything in another order."""
    for case in (case for name, case in FULL.items() if name.startswith(kind)):
        half = halves(case.ours("cudnn").function, avals(case), case.learned)
        kept = jax.eval_shape(half.training, avals(case))[1]
        batch, size, heads, _ = avals(case)["q"].shape
        assert sum(x.size * x.dtype.itemsize for x in kept) == 4 * batch * size * heads


# -- PyTorch's sides -------------------------------------------------------------------------------


@needs_torch
def test_torch_runs_again_and_again(key):
    case = TINY["causal"]
    operands = case.arrays(key)
    dy = operands.pop("dy")
    (side, _) = case.torch[FLASH]
    for program, name in ((FORWARD, "y"), (TRAINING, "y"), (BACKWARD, "k")):
        call = torch_sides.program(side.function, program, case.learned, [(operands, dy)])
        first, second = call().arrays(), call().arrays()
        np.testing.assert_array_equal(np.float32(first[name]), np.float32(second[name]))


@needs_torch
def test_keys_of_all_heads_give_the_gradients_of_those_there_are(key):
    """As a backend needs that serves no several heads of queries by one of keys."""
    case = TINY["causal"]
    operands, found = case.arrays(key), []
    for side in case.torch[FLASH]:
        given = dict(side.given(operands))
        dy = given.pop("dy")
        call = torch_sides.program(side.function, BACKWARD, case.learned, [(given, dy)])
        found.append(side.common(call().arrays()))
    for name, x in found[0].items():
        assert x.shape == operands[name].shape
        assert difference({name: found[1][name]}, {name: x.astype("float32")}).within(0.01)


@needs_torch
def test_of_several_ways_the_first_that_has_a_backward_is_taken():
    def broken(**tensors):
        raise ValueError("not today")

    def no_backward(**tensors):
        return right.function(**{n: x.detach() for n, x in tensors.items()})

    case = few(TINY["causal"])
    right = TINY["causal"].torch[FLASH][0]
    ways = {
        "first": [Side(broken), Side(no_backward), right],
        "forward": [Side(broken), Side(no_backward)],
        "none": [Side(broken)],
    }
    case = dataclasses.replace(case, torch=ways)
    found = attention.measure_attention([case], **QUICK)[case.name]["programs"]
    assert {"first", "forward", "none"} & found[TRAINING]["us"].keys() == {"first", "forward"}
    assert {"first", "forward", "none"} & found[BACKWARD]["us"].keys() == {"first"}
    assert found[BACKWARD]["not_run"]["none"] == "ValueError: not today"


@needs_torch
@pytest.mark.parametrize("captured", [False, True])
def test_a_graph_is_made_of_what_can_be_captured(captured, monkeypatch):
    graphs = []

    def recorded(torch, made):
        graphs.append(made)
        return made()[0].run

    monkeypatch.setattr(torch_graphs, "_captured", recorded)
    first, second = (torch_graphs.Pending({"y": None}) for _ in range(2))
    steps = [torch_graphs.Step(lambda: first), torch_graphs.Step(lambda: second)]
    assert torch_graphs.program(lambda: steps, "gpu", captured)() is first
    assert len(graphs) == captured


@needs_torch
def test_a_backend_without_a_gradient_of_the_bias_runs_the_forward(key):
    case = TINY["bias"]
    operands = case.arrays(key)
    del operands["dy"]
    constant = torch_sides.sdpa(CUDNN, False, learned=False)
    seen = []

    def noted(q, k, v, attn_mask, is_causal, enable_gqa):
        seen.append(attn_mask.requires_grad)
        return q

    torch = pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
        for function in (torch_sides.sdpa(CUDNN, False), constant):
            sets = [(operands, None)]
            torch_sides.program(function, TRAINING, case.learned, sets)()
    assert seen == [True, False]
    assert [way.backward for way in case.torch[CUDNN]] == [True, True, False, False]
    right = TINY["causal"].torch[FLASH][0]
    one = dataclasses.replace(right, backward=False)
    few_sides = few(TINY["causal"], torch={"forward": [one]})
    found = attention.measure_attention([few_sides], **QUICK)[few_sides.name]["programs"]
    assert "forward" in found[TRAINING]["us"]
    assert found[BACKWARD]["not_run"]["forward"] == "it has no backward"


# -- times -----------------------------------------------------------------------------------------


def test_what_runs_before_a_function_changes_from_round_to_round():
    """A load that makes the next function slow, as one does that leaves the GPU's clock low."""
    machine = Machine()
    hot = [False]

    def function(seconds, heats):
        def call():
            machine.free = max(machine.now, machine.free) + seconds * (2 if hot[0] else 1)
            hot[0] = heats
            return machine

        return call

    functions = {name: function(1e-3, False) for name in "abcd"} | {"load": function(1e-2, True)}
    found = queued.times(
        functions, dict.fromkeys(functions), calls=1, rounds=6, seconds=1e9, clock=machine
    )
    for name in "abcd":
        assert np.median(found[name].seconds) == pytest.approx(1e-3)
        assert max(found[name].seconds) == pytest.approx(2e-3)  # none is spared


@pytest.mark.parametrize("count", [1, 2, 5, 6, 9])
def test_each_follows_each_other_equally_often(count):
    rounds = [timing.balanced(count, number) for number in range(count + count % 2)]
    assert all(sorted(each) == [*range(count)] for each in rounds)
    assert timing.balanced(count, len(rounds)) == rounds[0]
    pairs = [pair for each in rounds for pair in itertools.pairwise(each)]
    assert {*pairs} == {*itertools.permutations(range(count), 2)}
    assert all(pairs.count(pair) <= 1 + count % 2 for pair in pairs)


def test_formulations_that_are_far_behind_have_few_rounds():
    running = {
        side: Running(lambda: jnp.zeros(()), lambda found: found, None, 1, 1, seconds)
        for side, seconds in {OURS: 1e-3, WHOLE: 5e-3, REFERENCE: 5e-3, "by blocks": 3e-3}.items()
    }
    found = times(running, {REFERENCE, "by blocks"}, Effort(0.0, 1, 9))
    assert {side: len(one.seconds) for side, one in found.items()} == {
        OURS: 7, WHOLE: 7, REFERENCE: 3, "by blocks": 7,
    }  # fmt: skip


def test_functions_may_be_called_differently_often():
    machine = Machine()
    functions = {"slow": machine.function(5e-6, 30e-3), "quick": machine.function(5e-6, 1e-3)}
    read = machine.function(1e-6, 1e-3)
    found = queued.times(
        functions,
        dict.fromkeys(functions, read),
        calls={"slow": 2, "quick": 10},
        rounds=7,
        seconds=1e9,
        clock=machine,
    )
    assert found["slow"].seconds == pytest.approx([30e-3] * 7)
    assert found["quick"].seconds == pytest.approx([1e-3] * 7)
    assert {name: one.issued for name, one in found.items()} == pytest.approx(
        {"slow": 6e-6, "quick": 5.2e-6},
        rel=0.02,  # with two fillers of 1 us
    )


def test_what_is_short_does_its_work_several_times():
    case = few(TINY["causal"])
    found = attention.measure_attention([case], **QUICK | {"calls": 2})[case.name]["programs"]
    for entry in found.values():
        assert entry["status"] == "timed"
        assert entry["repeats"] == {WHOLE: 16, OURS: 16, REFERENCE: 1, "by blocks": 1}


def test_what_is_slow_has_few_rounds_and_what_is_too_slow_none(monkeypatch):
    case = few(TINY["causal"])
    monkeypatch.setattr(figures, "_SLOW", 0.0)
    found = attention.measure_attention([case], **QUICK)[case.name]["programs"][TRAINING]
    assert {*found["rounds"].values()} == {3}
    monkeypatch.setattr(attention, "_TOO_LONG", 0.0)
    found = attention.measure_attention([case], **QUICK)[case.name]["programs"][TRAINING]
    assert found["us"] == {}
    assert found["status"] == "failed"
    assert re.fullmatch(r"not timed: a call takes \d+ s", found["not_run"][OURS])


# -- tables ----------------------------------------------------------------------------------------


def program(us, flops=1e9, **more):
    figures = {side: {"median": t, "q1": t, "q3": t} for side, t in us.items()}
    return {
        "status": "timed",
        "flops": flops,
        "us": figures,
        "tflops": {side: flops / t / 1e6 for side, t in us.items()},
        "of_limit": dict.fromkeys(us, 0.5),
        "best_xla": "by blocks",
        "plans": {},
        "host_hidden": dict.fromkeys(us, True),
        **more,
    }


def entry(*programs, **more):
    names = (TRAINING, BACKWARD)
    return {
        "status": "timed",
        "published": {"side": OURS},
        "xla": ["by blocks"],
        "programs": dict(zip(names, programs, strict=False)),
        **more,
    }


def test_goals_are_those_of_the_figures():
    slow = {"by blocks": 30.0, REFERENCE: 40.0, "jax_cudnn padded": 1.0, WHOLE: 1.0}
    entries = {
        "a": entry(
            program({OURS: 5.0, CUDNN: 4.95, **slow}),  # less than what is told apart
            program({OURS: 5.0, CUDNN: 4.0, **slow}),
            published={"forward": 250, "backward": 180, "side": OURS},
        ),
        "b": entry(
            program({OURS: 5.0, NARROW: 4.0, **slow}),
            published={"forward": 250, "side": NARROW},
        ),
    }
    text = rendered(entries)
    assert (
        "- not slower than the best other side: 2 of 3; not: a, backward (1.25 times torch cudnn)"
        in text
    )
    assert "- not below what is published: 2 of 3; not: a, forward (200 of 250)" in text
    rows = [row for row in text.splitlines() if row.startswith("| a |")]
    assert [row.split(" | ")[-1] for row in rows] == [
        "0.99 (torch cudnn) |",
        "0.80 (torch cudnn) |",
    ]
    assert "| 250 (jax_cudnn float8 operands 250) | 6.00 (by blocks) |" in text


def test_another_plan_that_is_forced_has_a_figure():
    times = {OURS: 5.0, WHOLE: 6.0, "by blocks": 9.0}
    same = {WHOLE: {"engines": ["eng2"]}, OURS: {"engines": ["eng2"]}}
    other = {WHOLE: {"engines": ["eng2"]}, OURS: {"engines": [], "why_xla": "it is faster"}}
    text = rendered(
        {"a": entry(program(times, plans=same)), "b": entry(program(times, plans=other))}
    )
    cells = {row.split(" | ")[0]: row.split(" | ") for row in text.splitlines() if "| 5 (" in row}
    assert (cells["| a"][4], cells["| b"][4]) == ("", "6")
    assert "\n- b forward: XLA runs it by default: it is faster" in text


def test_patterns_that_cudnn_loses_are_learned():
    def lost(whole, reference):
        us = {WHOLE: whole, OURS: whole, REFERENCE: reference}
        plans = {WHOLE: {"patterns": ["sdpa"], "XLA": 0}}
        return entry(program(us, plans=plans, best_xla=REFERENCE))

    def learned(*entries):
        result = document({f"case{i}": e for i, e in enumerate(entries)})
        result["environment"] |= {"jax": "2"}
        return losses.generate(result)["90"]["patterns"]

    assert learned(lost(100.0, 50.0)) == {}
    assert learned(lost(100.0, 50.0), lost(100.0, 80.0)) == {
        "sdpa": {f"case0, {TRAINING}": 0.5, f"case1, {TRAINING}": 0.8}
    }
    assert learned(lost(100.0, 50.0), lost(100.0, 99.0)) == {}


# -- the command -----------------------------------------------------------------------------------


def test_options_of_attention_go_together(capsys):
    for options in (["--norms"], ["--steps"], ["f:g"], ["--plot", "x.svg"]):
        assert main(["bench", "--attention", *options]) == 1
        assert "GraphError" in capsys.readouterr().err
    assert main(["bench", "--attention", "--tiny", "--only", "no such"]) == 1
    assert "causal/" in capsys.readouterr().err
    assert main(["bench", "--attention", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*FULL]


def test_each_case_is_written_when_it_is_done(tmp_path, monkeypatch):
    """A run that is ended early leaves what it has measured."""
    case = few(TINY["causal"])

    def ended(implementation):
        raise KeyboardInterrupt

    cases = [case, dataclasses.replace(case, name="later", ours=ended)]
    monkeypatch.setattr(attention_cases, "tiny_cases", lambda: cases)
    with pytest.raises(KeyboardInterrupt):
        run.run_attention(tmp_path, tiny=True)
    (path,) = tmp_path.glob("*.json")
    assert [*json.loads(path.read_text())["attention"]] == [case.name]


def test_attention_measured_anew_takes_the_place_of_earlier_one(tmp_path):
    path, environment = tmp_path / "attention.json", sides.environment()
    path.write_text(json.dumps(document({"a": entry()}) | {"environment": environment}))
    run.merge(document({"b": entry()}) | {"environment": environment}, path)
    assert [*json.loads(path.read_text())["attention"]] == ["a", "b"]
    assert main(["bench", "--render", str(path)]) == 0


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.deviceless
@pytest.mark.parametrize("name", [*FULL])
def test_each_program_is_one_plan_whose_engine_is_told(name):
    case = FULL[name]
    side = case.ours("cudnn")
    given = jax.eval_shape(side.given, avals(case))
    programs = [(sides.by_name(side.function), (given,))]
    if case.learned:
        half = halves(side.function, given, case.learned)
        trained = jax.eval_shape(half.training, given)
        read = (half.saved(given, trained), trained[0]["y"])
        programs = [(half.training, (given,)), (half.backward, read)]
    with jc.target("H200"):
        for function, operands in programs:
            held = sides.plans(function, operands)
            assert (held["graphs"], held["cuDNN"]) == (1, 1), held
            assert (held["XLA"] > 0) == name.startswith("float8")  # it casts to and from float8
            assert all(engine.startswith("eng") for engine in held["engines"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "packed", "window", "float8", "paged"])
def test_a_case_on_the_gpu_has_all_figures(kind):
    case = TINY[kind]
    found = attention.measure_attention([case], **QUICK | {"calls": 20})[case.name]
    assert found["status"] == "timed", found
    torch = {CUDNN, FLASH} if torch_graphs.installed() else set()
    for one in found["programs"].values():
        assert {WHOLE, OURS, REFERENCE, *case.xla} <= one["us"].keys(), one["not_run"]
        assert torch - {CUDNN if kind == "window" else ""} <= one["us"].keys()
        assert (PADDED in one["us"]) == (kind == "packed")
        assert one["plans"][WHOLE]["cuDNN"] >= 1
        assert one["host_hidden"][OURS]
        assert 0 < one["us"][OURS]["median"] < 1000


def test_shown_attention_is_the_committed_one():
    committed = RESULTS / "attention_h200.json"
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    shown = re.search(r"<!-- attention -->\n(.*?)\n<!-- /attention -->", readme, re.S)
    assert (shown is not None) == committed.exists()
    if shown is None:
        pytest.skip("no attention is measured yet")
    data = json.loads(committed.read_text())
    states = {name: entry["status"] for name, entry in data["attention"].items()}
    assert states == dict.fromkeys(FULL, "timed")
    assert shown[1] == attention_tables.render_attention(data)


# -- what the power limit does ---------------------------------------------------------------------


def test_power_is_measured_at_length_and_after_pauses(tmp_path, monkeypatch):
    """With a command in place of nvidia-smi that prints as it does."""
    smi = tmp_path / "nvidia-smi"
    rows = "100, 50.5, 200, 70\n" * 3 + "150, 60.5, 200, 70\n" * 3
    smi.write_text(f"#!/bin/sh\nprintf '{rows}'; echo \"$@\" >> {tmp_path}/asked; exec sleep 9\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in {"_PAUSE": 0.0, "_LONG": 0.5, "_BATCH": 1e-3}.items():
        monkeypatch.setattr(power, name, value)
    ran = []

    def function(x):
        jax.debug.callback(lambda x: ran.append(np.asarray(x)), x)
        return x * 2

    x = jnp.full(8, 3.0)
    found = power.power(function, (x,), 8e6, equal=True)
    assert [*found] == ["rested", "at_length", "equal_numbers"]
    for one in found.values():
        assert one["tflops"] == pytest.approx(8 / one["us"], abs=0.051)
    clock = {"MHz": 150.0, "W": 60.5, "most_MHz": 200.0, "most_W": 70.0}
    assert clock.items() <= found["at_length"].items()
    assert clock.items() <= found["equal_numbers"].items()
    assert {float(x[0]) for x in ran} == {3.0, 1.0}
    assert "clocks.sm,power.draw" in (tmp_path / "asked").read_text()
    text = power.told(found)
    assert "at 150 of 200 MHz and 60 of 70 W" in text
    assert text.count(" us (") == 3
    assert [*power.power(function, (x,), 8e6, equal=False)] == ["rested", "at_length"]


def test_power_is_left_out_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert power.power(lambda x: x, (jnp.ones(2),), 1.0, equal=True) is None


def test_power_stands_in_the_notes():
    found = {"rested": {"us": 5.0, "tflops": 2.0}, "at_length": {"us": 6.0, "tflops": 1.7}}
    text = rendered({"a": entry(program({OURS: 5.0, "by blocks": 9.0}, power=found))})
    assert "- all: jax_cudnn: calls at length 6 us (1.7 TFLOP/s), after pauses 5 us" in text
