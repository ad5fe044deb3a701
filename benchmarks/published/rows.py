"""A row of a table of published runs, and what the planner makes of it: a shape, a profile, a cost, a cluster.

What a run was is read from the columns up to `attn`, and from `framework`; what was measured is kept apart. Notes are
not read at all.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from atorch.cluster import ClusterSpec
from atorch.cost import Cost, ModelProfile, plain_cost
from atorch.cost.splits import (
    REPLICA_AXES,
    accumulate,
    arrange,
    replicate,
    shard,
    shard_optimizer,
    split_context,
    split_experts,
    split_pipeline,
    split_tensor,
)
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.errors import ArgumentError
from benchmarks.published.frameworks import Framework, framework_of
from benchmarks.published.hardware import cluster_described
from benchmarks.published.models import known_dimensions

GIVEN = (
    *("row_id", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "arch"),
    *("hardware", "gpu_mem_gb", "gpus_per_node", "n_gpus", "dp", "fsdp", "zero", "tp", "sp", "pp", "vpp", "cp", "ep"),
    *("micro_batch", "grad_accum", "global_batch", "precision", "ckpt", "compile", "attn", "framework"),
)
MEASURED = ("step_time_s", "tok_s_gpu", "peak_mem_gib", "mem_metric", "status")

_UNKNOWN = ("", "none", "n/a", "nan", "null", "-", "?")
_BLANK = (*_UNKNOWN, "no", "false", "0", "0.0", "notchosen")


@dataclass(frozen=True)
class Row:
    """A run as it was published: texts, blank where nothing was."""

    given: Mapping[str, str]
    measured: Mapping[str, str]

    @property
    def row_id(self) -> str:
        """The run's name."""
        return self.given["row_id"]

    def text(self, column: str) -> str:
        """What a column of the run says, in lower case."""
        return self.given.get(column, "").strip().lower()

    def number(self, column: str) -> float | None:
        """What a column of the run says, None where it is blank."""
        return _number(self.given.get(column, ""), column)

    def result(self, column: str) -> float | None:
        """What was measured, None where it is blank."""
        return _number(self.measured.get(column, ""), column)


def read_rows(path: Path) -> list[Row]:
    """The rows of a table; columns beyond those above are left out."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(
                {name: each.get(name) or "" for name in GIVEN},
                {name: each.get(name) or "" for name in MEASURED},
            )
            for each in csv.DictReader(file)
        ]


def _number(text: str, column: str) -> float | None:
    if text.strip().lower() in _UNKNOWN:
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError as error:
        raise ArgumentError(f"{column} is {text!r}; it is a number, or blank") from error
    if not 0 <= value < math.inf:
        raise ArgumentError(f"{column} is {text!r}; it is a number of at least 0, or blank")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a run is spread over its devices, and its batch over them and over time."""

    devices: int
    data: int
    tensor: int
    pipeline: int
    interleave: int
    context: int
    expert: int
    splits_norms: bool
    zero: int  # level, 0 to 3
    keeps_gathered: bool
    micro_batch: float
    num_micro_batches: float

    @property
    def global_batch(self) -> float:
        """Sequences of a step."""
        return self.data * self.micro_batch * self.num_micro_batches


def layout_of(row: Row) -> Layout:
    """How the run is spread.

    Raises:
        ArgumentError: degrees do not multiply to the devices, or the batch cannot be told.
    """
    tensor, pipeline, context = (_count(row, name) for name in ("tp", "pp", "cp"))
    devices = row.number("n_gpus")
    data = row.number("dp")
    if devices is None:
        if data is None:
            raise ArgumentError("neither n_gpus nor dp is given; one of them is needed")
        devices = data * tensor * pipeline * context
    if data is None or data * tensor * pipeline * context != devices:
        # Some count ranks of a context group among the data-parallel ones, and not all publish dp.
        data = devices / (tensor * pipeline * context)
    if data < 1 or data != int(data):
        raise ArgumentError(f"tp {tensor}, pp {pipeline} and cp {context} do not divide {devices:g} devices")
    micro, accumulated, whole = (row.number(name) for name in ("micro_batch", "grad_accum", "global_batch"))
    if not micro:
        micro = whole / data / (accumulated or 1) if whole else None
    if not micro or not (accumulated or whole):
        raise ArgumentError("of micro_batch, grad_accum and global_batch two are needed")
    times = whole / (micro * data) if whole else accumulated
    if not times or times < 1:
        raise ArgumentError(f"global_batch {whole:g} is less than dp {data:g} micro-batches of {micro:g}")
    level, keeps = _sharding(row)
    if not level and tensor * pipeline > 1 and row.text("zero") == "" and row.text("fsdp") in _BLANK:
        level = framework_for(row).zero_when_split
    return Layout(
        devices=int(devices),
        data=int(data),
        tensor=tensor,
        pipeline=pipeline,
        interleave=_count(row, "vpp"),
        context=context,
        expert=_count(row, "ep"),
        splits_norms=tensor > 1 and row.text("sp") not in _BLANK,
        zero=level,
        keeps_gathered=keeps,
        micro_batch=micro,
        num_micro_batches=times,
    )


def _count(row: Row, column: str) -> int:
    return int(row.number(column) or 1)


def _sharding(row: Row) -> tuple[int, bool]:
    """ZeRO's level, and whether gathered parameters are kept for backward: what `fsdp` says, else `zero`."""
    name = row.text("fsdp")
    level = row.number("zero") if name in _BLANK else None
    if level is not None:
        return int(level), int(level) == 2
    if name in _BLANK or "ddp" in name or "no_shard" in name:
        return 0, False
    if "zero1" in name or name == "os":
        return 1, False
    if "zero2" in name and "fsdp" not in name and "hybrid" not in name:
        return 2, False
    return 3, "grad_op" in name or "zero2" in name


def shape_of(row: Row) -> TransformerShape:
    """The model's shape: what the row says, then what is known of the model it names, then what is usual.

    Raises:
        ArgumentError: a dimension is missing that neither the name nor the number of parameters tells.
    """
    known = dict(known_dimensions(row.given["model"]))
    _reduce(known, row.number("layers"))
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len"):
        if row.number(name):
            known[name] = int(row.number(name) or 0)
    missing = [name for name in ("layers", "hidden", "heads", "seq_len") if not known.get(name)]
    if missing:
        raise ArgumentError(f"{', '.join(missing)} of model {row.given['model']!r} not given, and it is not known")
    if known["hidden"] < known["heads"]:
        raise ArgumentError(f"hidden is {known['hidden']}, which is less than heads, {known['heads']}")
    style = _style(row)
    known.setdefault("kv_heads", known["heads"])
    known.setdefault("head_dim", known["hidden"] // known["heads"])
    known.setdefault("ffn", round(known["hidden"] * 8 / 3) if style["gated"] else 4 * known["hidden"])
    style = {**style, **known}
    if not known.get("vocab"):
        style["vocab"] = _vocab(row, TransformerShape(**{**style, "vocab": 0}))
    if style.get("latent") is not None and "mla" not in row.text("arch") and row.text("arch"):
        style["latent"] = None
    return TransformerShape(**style)


def _reduce(known: dict[str, Any], layers: float | None) -> None:
    """A model that is run with fewer layers keeps the share of those without experts, at least one."""
    experts = known.get("experts")
    if layers and experts is not None and experts.dense_layers and layers < known["layers"]:
        dense = max(1, round(experts.dense_layers * layers / known["layers"]))
        known["experts"] = replace(experts, dense_layers=dense)


def _style(row: Row) -> dict[str, Any]:
    """What kind of block the architecture's words describe."""
    words = f"{row.text('arch')} {row.text('model')}"
    is_gpt = any(word in words for word in ("gpt", "gelu", "mpt", "bloom", "opt-"))
    gated = any(word in words for word in ("swiglu", "geglu", "gated")) or not is_gpt
    tied = re.search(r"tie\w*[ _]emb\w*(?:=(\w+))?", words)
    return {
        "gated": gated,
        "tied": (tied[1] or "true") == "true" if tied else is_gpt,
        "norm": "rmsnorm" if gated else "layernorm",
        "learned_positions": is_gpt and "rope" not in words and "rotary" not in words,
        "bias": is_gpt and "no bias" not in words,
    }


def _vocab(row: Row, without: TransformerShape) -> int:
    """What the number of parameters leaves for the embedding."""
    total = row.number("params_b")
    if total is None:
        raise ArgumentError(f"vocab of model {row.given['model']!r} is not given, nor are params_b to tell it from")
    rest = 1e9 * total - transformer_profile(without).num_params
    return max(1024, round(rest / without.hidden / (1 if without.tied else 2)))


def framework_for(row: Row) -> Framework:
    """What trains the run."""
    is_split = _count(row, "tp") > 1 or _count(row, "pp") > 1
    return framework_of(row.text("framework"), is_split=is_split)


def profile_of(row: Row) -> ModelProfile:
    """The profile of one micro-batch of the run."""
    return _profile(shape_of(row), _implementation(row, framework_for(row)))


@lru_cache(maxsize=256)
def _profile(shape: TransformerShape, implementation: Implementation) -> ModelProfile:
    return transformer_profile(shape, 1, implementation)


def _implementation(row: Row, framework: Framework) -> Implementation:
    """The framework's, with the attention that the row names and the width of what is computed in."""
    attention = row.text("attn")
    written = any(word in attention for word in ("unfused", "softmax", "eager", "math")) or attention == "notchosen"
    itemsize = 4.0 if dtype_of(row) == "float32" else 2.0
    return replace(framework.implementation, flash_attention=not written, itemsize=itemsize)


def dtype_of(row: Row) -> Literal["float32", "float16", "bfloat16", "float8"]:
    """What matrices are multiplied in; a mix that is not named is of 16 bits."""
    words = row.text("precision")
    if "fp8" in words or "float8" in words:
        return "float8"
    if "bf16" in words or "bfloat16" in words:
        return "bfloat16"
    if "fp16" in words or "float16" in words or "half" in words:
        return "float16"
    if words in ("none", "no", "notchosen", "false") or "32" in words:
        return "float32"
    return "float16" if "v100" in row.text("hardware") else "bfloat16"


def cost_of(row: Row) -> Cost:
    """The run as the planner's state.

    Raises:
        ArgumentError: the row cannot be understood; its text is the reason.
    """
    layout, framework = layout_of(row), framework_for(row)
    profile, dtype = profile_of(row), dtype_of(row)
    cost = arrange(plain_cost(profile, int(layout.global_batch)), _axes(layout, framework))
    cost = replace(
        _precision(cost, framework, dtype),
        ops_scale=framework.launches,
        attention_scale=framework.attention_scale,
        hop_wait_s=framework.hop_wait_s,
    )
    cost = split_context(split_tensor(cost, splits_norms=layout.splits_norms))
    cost = split_pipeline(
        split_experts(cost, layout.expert),
        schedule="interleaved" if layout.interleave > 1 else "1f1b",
        interleave=layout.interleave,
    )
    cost = _recompute(accumulate(cost, layout.num_micro_batches), row.text("ckpt"))
    return _data_parallel(cost, layout, framework)


def _axes(layout: Layout, framework: Framework) -> dict[str, int]:
    """Ranks that see different samples are divided where neighbours alone share the optimizer's state out."""
    zero = math.gcd(layout.data, framework.optimizer_group) if layout.zero == 1 and framework.optimizer_group else 1
    return {
        "tensor": layout.tensor,
        "context": layout.context,
        "zero": zero,
        "data": layout.data // zero,
        "pipeline": layout.pipeline,
    }


def _precision(cost: Cost, framework: Framework, dtype: str) -> Cost:
    """Bytes an element, as the framework mixes precisions; in fp32 nothing is mixed."""
    cost = replace(
        cost,
        dtype=dtype,
        grads_persist=framework.grads_persist,
        fresh_itemsize=framework.fresh_itemsize,
        placeholder_itemsize=framework.placeholder_itemsize,
        held_gathers=framework.held_in_pipelines if cost.size("pipeline") > 1 else framework.held_gathers,
        step_itemsize=framework.step_itemsize,
        bucket_bytes=framework.buffer_bytes if cost.size("data", "zero") > 1 else 0.0,
        balances_flops=framework.balances_flops,
        optim_itemsize=8.0,
    )
    if dtype == "float32":
        return replace(cost, param_itemsize=4.0, grad_itemsize=4.0)
    if framework.keeps_masters:
        return replace(cost, param_itemsize=2.0, grad_itemsize=framework.grad_itemsize, master_itemsize=4.0)
    return replace(cost, param_itemsize=4.0, grad_itemsize=4.0, cast_itemsize=2.0, cast_traffic_bytes=6.0)


def _recompute(cost: Cost, words: str) -> Cost:
    """Checkpointing: of whole blocks, or only of what is cheap to compute again."""
    if words in _BLANK:
        return cost
    return replace(cost, recompute=1.0, recompute_keeps="selective" if "selective" in words else "inputs")


def _data_parallel(cost: Cost, layout: Layout, framework: Framework) -> Cost:
    if layout.zero == 3 or layout.keeps_gathered:
        itemsize = 4.0 if cost.dtype == "float32" else framework.gathered_itemsize
        return shard(cost, itemsize=itemsize, keeps_gathered=layout.keeps_gathered)
    if layout.data > 1 and layout.zero < 2:
        cost = replace(cost, bucket_itemsize=framework.bucket_itemsize)
    if layout.zero == 0:
        return replicate(cost, overlaps=framework.overlaps, bucket_bytes=framework.bucket_bytes)
    cost = shard_optimizer(
        cost,
        over=("zero",) if layout.zero == 1 and framework.optimizer_group else REPLICA_AXES,
        reduces="all_reduce" if framework.optimizer_group else "reduce_scatter",
        overlaps=framework.overlaps,
        bucket_bytes=framework.bucket_bytes,
        gathers="broadcast" if framework.broadcasts else "all_gather",
    )
    if layout.zero == 2:
        return replace(cost, grad_shards=cost.optim_shards)
    return cost


def cluster_of(row: Row) -> ClusterSpec:
    """The cluster that the run was on, or the nearest one that is known."""
    per_node = row.number("gpus_per_node")
    return cluster_described(
        row.text("hardware"), row.number("gpu_mem_gb"), layout_of(row).devices, int(per_node) if per_node else None
    )
