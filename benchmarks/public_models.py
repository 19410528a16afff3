"""What ``jax_cudnn.accelerate`` finds in public models, as their authors wrote them.

    pip install "transformers==4.57.1" dm-haiku equinox
    python -m benchmarks.public_models --into benchmarks/results/public_models_h200.json

Small models with random weights, planned for an H200 that need not be there, and run by the
references on a CPU. Nothing of the models is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn as jc
from jax_cudnn.commands.timing import environment

from .measure import short
from .tables import table

KINDS = ("attention", "product", "convolution", "normalization")
GPU = "H200"
_SHOWN = ("jax", "flax", "transformers", "equinox", "dm-haiku", "cudnn")
_CALL = re.compile(r"custom_call @jax_cudnn\(")


@dataclass(frozen=True)
class Model:
    """A model: ``apply(parameters, *inputs)`` in a dtype, its parameters, its inputs, and how many
    attentions its authors wrote."""

    name: str
    apply: Callable[[Any], Callable[..., Any]]
    parameters: Any
    inputs: tuple[Any, ...]
    attentions: int


def measure(model: Model) -> dict[str, Any]:
    """What is found in the forward and runs on cuDNN; attention with its derivative in a function
    that differentiates the model itself; cuDNN's calls in the forward and in a
    training step; errors of values and gradients in bfloat16, divided by those of the original,
    both against float32."""
    plain = model.apply(jnp.bfloat16)
    fast = jc.accelerate(plain)
    report = fast.report(model.parameters, *model.inputs, gpu=GPU).to_json()
    found, on_cudnn = Counter(), Counter()
    for region in report["regions"]:
        found[region["kind"]] += region["times"]
        on_cudnn[region["kind"]] += region["times"] * (region["runs_on"] == "cuDNN")

    def loss(apply: Callable[..., Any]) -> Callable[..., Any]:
        return lambda p: jnp.mean(apply(p, *model.inputs).astype("float32") ** 2)

    def results(apply: Callable[..., Any]) -> tuple[Any, Any]:
        with jc.target(GPU):
            value = jax.jit(apply)(model.parameters, *model.inputs)
            return value, jax.jit(jax.grad(loss(apply)))(model.parameters)

    with jc.target(GPU):
        calls = [
            len(
                _CALL.findall(jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text())
            )
            for f, args in (
                (fast, (model.parameters, *model.inputs)),
                (jax.grad(loss(fast)), (model.parameters,)),
            )
        ]
    whole = jc.accelerate(jax.value_and_grad(loss(plain)), only="attention")
    of_step = whole.report(model.parameters, gpu=GPU).to_json()["regions"]
    exact, theirs, ours = (results(f) for f in (model.apply(jnp.float32), plain, fast))
    ratios = [_error(b, e) / _error(a, e) for e, a, b in zip(exact, theirs, ours, strict=True)]
    return {
        "attentions": model.attentions,
        "found": dict(found),
        "on_cudnn": dict(on_cudnn),
        "in_step": sum(region["times"] for region in of_step),
        "calls": calls,
        "error_ratio": [short(ratio, 3) for ratio in ratios],
        "missed": sorted({m["why"] for m in report["missed"]}),
    }


def _error(got: Any, want: Any) -> float:
    """The norm of the difference of all arrays."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return float(np.sqrt(sum(np.sum((np.float64(a) - np.float64(b)) ** 2) for a, b in pairs)))


def render(result: dict[str, Any]) -> str:
    """The table of docs/accelerate.md."""
    rows = []
    for name, entry in result["models"].items():
        cells = [
            f"{n} ({entry['on_cudnn'][kind]})" if (n := entry["found"].get(kind)) else ""
            for kind in KINDS
        ]
        ratios = " / ".join(f"{ratio:g}" for ratio in entry["error_ratio"])
        calls = " / ".join(map(str, entry["calls"]))
        step = str(entry["in_step"] or "")
        rows.append([name, str(entry["attentions"] or ""), *cells, step, calls, ratios])
    versions = ", ".join(f"{name} {result['environment'][name]}" for name in _SHOWN)
    titles = ("model", "attentions written", *(f"{kind}s" for kind in KINDS))
    titles = (*titles, "attentions with their derivative in a step")
    titles = (*titles, "cuDNN's calls, forward / step", "error ratio, value / gradient")
    return f"{result['about']} {versions}.\n\n{table(titles, rows)}"


# -- models ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _removed_arguments() -> Iterator[None]:
    """``jnp.clip(a_min=, a_max=)``, which transformers 4.57 passes and newer JAX does not take."""
    clip = jnp.clip

    def older(x: Any, *args: Any, a_min: Any = None, a_max: Any = None, **given: Any) -> Any:
        given |= {k: v for k, v in (("min", a_min), ("max", a_max)) if v is not None}
        return clip(x, *args, **given)

    jnp.clip = older
    try:
        yield
    finally:
        jnp.clip = clip


def models() -> Iterator[Model]:
    yield from _transformers()
    yield _equinox()
    yield _haiku()


def _transformers() -> Iterator[Model]:
    import transformers as t

    noise = np.random.default_rng(0)
    tokens = noise.integers(3, 120, (2, 32)).astype("int32")
    image = noise.normal(size=(2, 3, 32, 32)).astype("float32")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 128}
    words = {**sizes, "vocab_size": 128, "max_position_embeddings": 64}
    no = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    pair = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    pair |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    pair |= {"d_model": 64, "vocab_size": 128, "dropout": 0.0}
    gpt2 = t.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=64,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    whisper = t.WhisperConfig(
        **pair, num_mel_bins=8, max_source_positions=16, max_target_positions=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    clip = t.CLIPConfig(
        text_config=words, vision_config={**sizes, "image_size": 32, "patch_size": 8}
    )
    ids = {"input_ids": tokens}
    both = {**ids, "decoder_input_ids": tokens}
    grouped = {**words, "num_key_value_heads": 2}
    listed = [
        ("GPT-2", t.FlaxGPT2LMHeadModel, gpt2, ids, 2),
        ("BERT", t.FlaxBertForMaskedLM, t.BertConfig(**words, **no), ids, 2),
        ("RoBERTa", t.FlaxRobertaForMaskedLM, t.RobertaConfig(**words, **no), ids, 2),
        ("T5", t.FlaxT5ForConditionalGeneration, t.T5Config(
            d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=128,
            dropout_rate=0.0), both, 6),
        ("BART", t.FlaxBartForConditionalGeneration,
         t.BartConfig(**pair, max_position_embeddings=64), both, 6),
        ("Whisper", t.FlaxWhisperForConditionalGeneration, whisper,
         {"input_features": noise.normal(size=(2, 8, 32)).astype("float32"),
          "decoder_input_ids": tokens}, 6),
        ("Llama", t.FlaxLlamaForCausalLM, t.LlamaConfig(**grouped), ids, 2),
        ("Mistral", t.FlaxMistralForCausalLM,
         t.MistralConfig(**grouped, sliding_window=8), ids, 2),
        ("Gemma", t.FlaxGemmaForCausalLM,
         t.GemmaConfig(**{**words, "num_key_value_heads": 1}, head_dim=16), ids, 2),
        ("ViT", t.FlaxViTForImageClassification,
         t.ViTConfig(**sizes, **no, image_size=32, patch_size=8), {"pixel_values": image}, 2),
        ("CLIP", t.FlaxCLIPModel, clip, {**ids, "pixel_values": image}, 4),
        ("ResNet", t.FlaxResNetForImageClassification,
         t.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
         {"pixel_values": image}, 0),
    ]  # fmt: skip
    for name, kind, config, inputs, attentions in listed:
        yield _of_transformers(name, kind, config, inputs, attentions)


def _of_transformers(name: str, kind: Any, config: Any, inputs: Any, attentions: int) -> Model:
    made = kind(config, seed=0)

    def apply(dtype: Any) -> Callable[..., Any]:
        model = kind(config, dtype=dtype, _do_init=False)

        def run(parameters: Any, *values: Any) -> Any:
            given = dict(zip(inputs, values, strict=True))
            train = {} if name == "ResNet" else {"train": True, "dropout_rng": jax.random.key(0)}
            return model(**given, params=parameters, **train)[0]

        return run

    return Model(f"{name} (transformers)", apply, made.params, (*inputs.values(),), attentions)


def _equinox() -> Model:
    import equinox as eqx

    class Block(eqx.Module):
        """Attention and a feed-forward of ``equinox.nn``, with residuals."""

        attention: eqx.nn.MultiheadAttention
        norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
        mlp: eqx.nn.MLP

        def __init__(self, key: Any) -> None:
            first, second = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(4, 64, key=first)
            self.norms = eqx.nn.LayerNorm(64), eqx.nn.LayerNorm(64)
            self.mlp = eqx.nn.MLP(64, 64, 128, 1, jax.nn.gelu, key=second)

        def __call__(self, x: Any) -> Any:
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

    block = Block(jax.random.key(0))
    parameters, static = eqx.partition(block, eqx.is_array)
    x = np.random.default_rng(0).normal(size=(2, 32, 64)).astype("float32")

    def apply(dtype: Any) -> Callable[..., Any]:
        def run(parameters: Any, x: Any) -> Any:
            model = eqx.combine(jax.tree.map(lambda p: p.astype(dtype), parameters), static)
            return jax.vmap(model)(x.astype(dtype))

        return run

    return Model("transformer block (Equinox)", apply, parameters, (x,), 1)


def _haiku() -> Model:
    import haiku as hk

    def block(x: Any) -> Any:
        """Attention and a feed-forward of Haiku's modules, with residuals."""
        start = hk.initializers.VarianceScaling(1.0)
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1])))
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = x + hk.MultiHeadAttention(4, 16, w_init=start)(y, y, y, mask)
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        return x + hk.Linear(64)(jax.nn.gelu(hk.Linear(128)(y)))

    made = hk.without_apply_rng(hk.transform(block))
    x = np.random.default_rng(0).normal(size=(2, 32, 64)).astype("float32")
    parameters = made.init(jax.random.key(0), x)

    def apply(dtype: Any) -> Callable[..., Any]:
        def run(parameters: Any, x: Any) -> Any:
            cast = jax.tree.map(lambda p: p.astype(dtype), parameters)
            return made.apply(cast, x.astype(dtype))

        return run

    return Model("transformer block (Haiku)", apply, parameters, (x,), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", default="", metavar="NAME")
    options = parser.parse_args()
    jc.configure(tuning="off")
    found = {}
    with _removed_arguments():
        for model in models():
            if options.only.lower() in model.name.lower():
                found[model.name] = measure(model)
                print(model.name, json.dumps(found[model.name]), flush=True)
    result = {
        "environment": environment("flax", "transformers", "equinox", "dm-haiku"),
        "about": "Planned for an H200, small sizes, random weights.",
        "models": found,
    }
    options.into.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
