"""Decoders in closed form: shapes of public models and of configs, and the profile of how one of them is trained.

`shapes.json` has facts of repositories' `config.json` on the Hub: of those that litgpt lists (Lightning-AI/litgpt,
litgpt/config.py) and of well-known others; a row may name its `source`. Numbers of parameters that follow from them are
tested against published ones. Tensors that a shape does not express (norms of queries, biases of queries alone, towers
of images) are less than 1 % of its parameters; attention over a window counts as over all tokens.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atorch.cost.adapted_profile import NF4_ITEMSIZE, Adapters, adapted_profile
from atorch.cost.profile import ModelProfile
from atorch.cost.transformer import Experts, Implementation, LatentAttention, TransformerShape, transformer_profile
from atorch.errors import ArgumentError
from atorch.files.strict_json import Format, read_json
from atorch.logs import logger

if TYPE_CHECKING:
    from atorch.auto.planner.request import PlanRequest
    from atorch.cluster.spec import DeviceSpec

ShapeFacts = Mapping[str, Any]
"""Fields of a `TransformerShape`, but for the length of a sample."""

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_EXPERTS: Mapping[str, str] = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "olmoe": "num_experts"}
_DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2", "smollm3")


def catalogue() -> Mapping[str, ShapeFacts]:
    """The facts of each public model by its id on the Hub."""
    rows: Any = read_json(Path(__file__).with_name("shapes.json"), Format("catalogue of shapes", ArgumentError))
    return {name: {key: row[key] for key in row if key not in ("ids", "source")} for row in rows for name in row["ids"]}


def known(named: str) -> ShapeFacts | None:
    """The facts of a public model, whatever the case of its id; those of a copy under another owner, with a warning."""
    ids = {name.lower(): (name, facts) for name, facts in catalogue().items()}
    if named.lower() in ids:
        return ids[named.lower()][1]
    owner, _, end = named.lower().rpartition("/")
    original, facts = next((ids[name] for name in ids if owner and name.endswith(f"/{end}")), ("", None))
    if original:
        logger.warning("%s is not in the catalogue: it is taken for a copy of %s", named, original)
    return facts


def alike(named: str) -> str:
    """A question for ids of public models like this one; empty if there are none."""
    ends = {name.lower().rpartition("/")[2]: name for name in catalogue()}
    near = difflib.get_close_matches(named.lower().rpartition("/")[2], ends, n=3)
    return f"did you mean {' or '.join(ends[end] for end in near)}? Else " if near else ""


def instead(named: str) -> str:
    """The end of an error about an id that is not known: ids like it, and how to give the shape."""
    return (
        f"{alike(named)}give a config.json, a folder that has one, a job FILE.py:NAME, or the model's shape: --layers, "
        "--hidden, --heads, --kv-heads, --head-dim, --ffn, --vocab, --tied"
    )


def cached_config(named: str) -> Path | None:
    """The `config.json` of a repository in the local Hugging Face cache; nothing is downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        path = try_to_load_from_cache(named, "config.json")
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None


def facts_of_config(path: Path) -> ShapeFacts:
    """The facts of a decoder's `config.json`.

    Raises:
        ArgumentError: the model is of another kind, or a figure is missing.
    """
    data: Any = read_json(path, Format("config", ArgumentError))
    kind = data.get("model_type") if isinstance(data, dict) else None
    if kind not in (*_DENSE, *_EXPERTS):
        raise ArgumentError(
            f"{path} has model_type {kind!r}, and how a model is trained can be given for "
            f"{', '.join((*_DENSE, *_EXPERTS))}; write a job (FILE.py:NAME) with its adapters and optimizer"
        )
    try:
        hidden, heads, ffn = (int(data[name]) for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
        facts: dict[str, Any] = {
            **{"layers": int(data["num_hidden_layers"]), "hidden": hidden, "heads": heads, "ffn": ffn},
            "kv_heads": int(data.get("num_key_value_heads") or heads),
            "head_dim": int(data.get("head_dim") or hidden // heads),
            "vocab": int(data["vocab_size"]),
            "tied": bool(data.get("tie_word_embeddings", kind.startswith("gemma"))),
        }
        if kind in _EXPERTS:
            count, top_k = int(data[_EXPERTS[kind]]), int(data["num_experts_per_tok"])
            facts["experts"] = {"count": count, "top_k": top_k, "ffn": int(data.get("moe_intermediate_size") or ffn)}
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{path} has no usable {error}; a config of a {kind} is like Hugging Face's") from error
    return facts


def shape_of(facts: ShapeFacts, seq_len: int) -> TransformerShape:
    """The transformer of these facts, with samples of `seq_len` tokens."""
    parts: Mapping[str, Any] = {"experts": Experts, "latent": LatentAttention}
    made: Any = {name: parts[name](**value) if name in parts else value for name, value in facts.items()}
    return TransformerShape(seq_len=seq_len, **made)


def profile_of(shape: TransformerShape, request: PlanRequest, device: DeviceSpec) -> ModelProfile:
    """The profile of training a decoder as the request says; by default all of it, in fp32, by AdamW.

    Frozen weights are in 16 bits unless `dtype` is "fp32", and with `qlora` those of blocks in 4 bits. Adapters keep
    their inputs in fp32, as peft's do (`_cast_input_dtype`, src/peft/tuners/tuners_utils.py).

    Raises:
        ArgumentError: adapters are wanted for latent attention, or bf16 on a device without it.
    """
    dtype = request.dtype or ("fp32" if request.adapters is None else "bf16")
    if dtype == "bf16" and device.capability is not None and device.capability < (8, 0):
        raise ArgumentError(f"{device.name} does not compute in bf16; give the dtype fp16")
    fused = request.attention != "eager"
    keep = Implementation(
        itemsize=4.0 if dtype == "fp32" else 2.0,
        flash_attention=fused,
        fused_softmax=fused,
        # Transformers' loss (loss/loss_utils.py) takes a log-softmax of logits in fp32, and has two gradients of it.
        **{"fused_norm": False, "fused_activation": False, "loss_bytes": 8.0, **request.trainer_traits.kernels},
    )
    if request.adapters is None:
        profile = transformer_profile(shape, implementation=keep)
    else:
        rank, targets = request.adapters
        quantized = NF4_ITEMSIZE if request.qlora else 0.0
        adapters = Adapters(
            rank=rank,
            targets=targets,
            base_itemsize=keep.itemsize,
            quantized_itemsize=quantized,
            apart_itemsize=4.0,
        )
        profile = adapted_profile(shape, adapters, 1, keep)
    attention: Any = "fused" if fused else "replaceable"
    narrow = "float16" if dtype == "fp16" else "bfloat16"
    return replace(
        profile, attention=attention, narrow_dtype=narrow, **optimizer_fields(profile, request.optimizer or "adamw")
    )


def optimizer_fields(profile: ModelProfile, name: str) -> dict[str, Any]:
    """The optimizer's fields of a profile. States are in elements of a trainable parameter's bytes.

    8-bit states have an fp32 factor for every 256 of them: Dettmers et al. 2021, arXiv 2110.02861. Adafactor keeps a
    row's and a column's means: Shazeer and Stern 2018, arXiv 1804.04235. Muon's step orthogonalises matrices of blocks
    by five iterations of 4 m²n + 2 m³ FLOPs, and AdamW steps the rest: Jordan et al. 2024, torch.optim.Muon. Traffic
    of Adafactor and Muon is counted in torch's steps, as `trace` does.
    """
    itemsize = profile.trainable_bytes / max(1, profile.num_trainable)
    if name in ("adamw", "adamw_bf16", "adamw8bit"):
        state_bytes = {"adamw": 2.0 * itemsize, "adamw_bf16": 4.0, "adamw8bit": 2.0 * (1.0 + 4.0 / 256)}[name]
        return {"optim_state_per_param": state_bytes / itemsize, "optim_temporaries": name == "adamw"}
    if name in ("lion", "sgd"):
        return {"optim_state_per_param": float(name == "lion"), "optim_temporaries": False}
    matrices = [
        (segment.count * product.count, *sorted((product.inner, product.columns)))
        for segment in profile.segments
        for product in segment.matmuls
        if product.trainable and (name == "adafactor" or segment.is_block)
    ]
    if name == "adafactor":
        state = sum(count * (inner + columns) for count, inner, columns in matrices) / max(1, profile.num_trainable)
        return {"optim_state_per_param": state, "optim_traffic": 4.94, "optim_is_elementwise": False}
    flops = sum(count * 5.0 * (4.0 * m * m * n + 2.0 * m**3) for count, m, n in matrices)
    share = sum(count * m * n for count, m, n in matrices) / max(1, profile.num_trainable)
    return {
        "optim_state_per_param": 2.0 - share,
        "optim_traffic": 11.75,
        "optim_flops": flops / max(1, profile.num_trainable),
        "optim_is_elementwise": False,
    }
