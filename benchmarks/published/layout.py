"""The layout of a published run: its degrees of parallelism, its sharding, and its batch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from atorch.errors import ArgumentError
from benchmarks.published.frameworks import Framework, framework_of
from benchmarks.published.hardware import NODE
from benchmarks.published.table import BLANK, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of a run over its devices, and of its batch over devices and time."""

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
    shared_by: int  # neighbouring data-parallel ranks that shard as `zero` says; `data` for all
    micro_batch: float
    num_micro_batches: float

    @property
    def global_batch(self) -> float:
        """Sequences of a step."""
        return self.data * self.micro_batch * self.num_micro_batches


def layout_of(row: Row) -> Layout:
    """The layout of a run.

    Raises:
        ArgumentError: degrees do not multiply to the devices, or the batch is unknown.
    """
    tensor, pipeline, context = (_count(row, name) for name in ("tp", "pp", "cp"))
    devices, data = _devices(row, tensor * pipeline * context)
    framework = framework_for(row)
    micro, times = _batch(row, data, pipeline, framework)
    level, keeps = _sharding(row)
    keeps |= level == 3 and pipeline > 1 and framework.gathers_once_in_pipelines
    if not level and tensor * pipeline > 1 and row.text("zero") == "" and row.text("fsdp") in BLANK:
        level = framework.zero_when_split
    return Layout(
        devices=devices,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        interleave=_count(row, "vpp"),
        context=context,
        expert=_count(row, "ep"),
        splits_norms=tensor > 1 and (framework.splits_norms if row.text("sp") == "" else row.text("sp") not in BLANK),
        zero=level,
        keeps_gathered=keeps,
        shared_by=_shared_by(row, level, data, tensor * context) or data,
        micro_batch=micro,
        num_micro_batches=times,
    )


def framework_for(row: Row) -> Framework:
    """The framework that trains the run."""
    is_split = _count(row, "tp") > 1 or _count(row, "pp") > 1
    return framework_of(row.text("framework"), is_split=is_split, knows_runs=row.knows_runs)


def _count(row: Row, column: str) -> int:
    return int(row.number(column) or 1)


def _devices(row: Row, split: int) -> tuple[int, int]:
    """All devices, and the data-parallel ranks among them."""
    devices, data = row.number("n_gpus"), row.number("dp")
    if not devices:
        if not data:
            raise ArgumentError("neither n_gpus nor dp is given; one of them is needed")
        devices = data * split
    if not data or data * split != devices:
        # Some tables count ranks of a context group as data-parallel, and some leave dp out.
        data = devices / split
    if data < 1 or data != int(data):
        tensor, pipeline, context = (_count(row, name) for name in ("tp", "pp", "cp"))
        raise ArgumentError(f"tp {tensor}, pp {pipeline} and cp {context} do not divide {devices:g} devices")
    return int(devices), int(data)


def _batch(row: Row, data: int, pipeline: int, framework: Framework) -> tuple[float, float]:
    """Sequences of a micro-batch, and micro-batches of a step. Without a pipeline one is enough."""
    micro, accumulated, whole = (row.number(name) or None for name in ("micro_batch", "grad_accum", "global_batch"))
    if not micro and pipeline > 1 and not accumulated:
        if not framework.cuts_by_stages:
            raise ArgumentError("of a pipeline's micro_batch and grad_accum one is needed beside global_batch")
        accumulated = float(pipeline)
    if not micro:
        micro = whole / data / (accumulated or 1) if whole else None
    if not accumulated and not whole and pipeline == 1:
        accumulated = 1.0
    if not micro or not (accumulated or whole):
        raise ArgumentError("of micro_batch, grad_accum and global_batch two are needed")
    times = whole / (micro * data) if whole else accumulated
    if micro < 1 or (whole is None and (accumulated or 1) < 1):
        raise ArgumentError(f"micro_batch is {micro:g}; it is at least one sequence")
    if not times or times < 1:
        raise ArgumentError(f"global_batch {whole:g} is less than dp {data:g} micro-batches of {micro:g}")
    return micro, times


def _sharding(row: Row) -> tuple[int, bool]:
    """ZeRO's level, and true if gathered parameters are kept for backward: from `fsdp`, else from `zero`."""
    name = row.text("fsdp")
    if name in BLANK:
        return _level(row.text("zero")), False
    if "ddp" in name or "no_shard" in name or name == "1":
        return 0, False
    if "zero1" in name or name == "os":
        return 1, False
    if "zero2" in name and "fsdp" not in name and "hybrid" not in name:
        return 2, False
    if not re.search(r"fsdp|hsdp|full|hybrid|grad_op|zero-?[23]|^\d+$|^(true|yes|on)$", name):
        raise ArgumentError(
            f"fsdp is {name!r}; known are FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD, FSDP2, zero1, …"
        )
    return 3, "grad_op" in name or "zero2" in name


def _level(words: str) -> int:
    """A level of ZeRO in words: "1", "ZeRO-3", "stage 2"; a distributed optimizer is the first."""
    if words in BLANK:
        return 0
    digits = re.search(r"\d+", words)
    level = int(digits[0]) if digits else 1 if words in ("true", "yes", "on") or "optim" in words else None
    if level is None or level > 3:
        raise ArgumentError(f"zero is {words!r}; it is a level from 0 to 3, or blank")
    return level


def _shared_by(row: Row, level: int, data: int, neighbours: int) -> int:
    """Ranks of a sharding group that is smaller than all ranks: those of a node, or as many as `fsdp` says; else 0.

    Hybrid sharding gathers inside of a node: Zhao et al. 2023, arXiv 2304.11277, section 3.2.2.
    """
    words = row.text("fsdp")
    if level == 3 and words.isdecimal():
        return math.gcd(data, int(words))
    if level == 3 and ("hybrid" in words or "hsdp" in words):
        per_node = int(row.number("gpus_per_node") or NODE)
        return math.gcd(data, max(1, per_node // neighbours))
    words_of_group = row.text("zero_group")
    if level == 1 and words_of_group == "all":
        return 0
    group = int(words_of_group) if words_of_group.isdecimal() else framework_for(row).optimizer_group
    return math.gcd(data, group) if level == 1 and group else 0
