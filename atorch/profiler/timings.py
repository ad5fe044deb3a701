"""Timings of products, attention, copies and collectives of many sizes on this process's device.

Every timing is of calls back to back, as in training: a device can start one while the last still runs. Values are
random, since a processor draws less power, and runs faster, on constant ones. Each function keeps to a budget of
seconds: it proceeds from small to large sizes and stops before the first that would exceed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.nn import functional

from atorch.cluster.microbenchmark import seconds
from atorch.distributed.collectives import from_rank_zero

TimedWork = Callable[[], object]
TimingName = TypeVar("TimingName")

_SIDES: Mapping[str, Sequence[int]] = {
    "cpu": (32, 64, 128, 256, 512, 1024, 2048),
    "cuda": (256, 512, 1024, 2048, 4096, 8192),
}
_LENGTHS: Mapping[str, Sequence[int]] = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
_MESSAGES: Sequence[int] = tuple(2**power for power in range(10, 29, 2))  # bytes: 1 KiB to 256 MiB
_MAX_CALLS = 1000


def products(dtype: torch.dtype, place: torch.device, budget_s: float) -> dict[tuple[int, int, int], float]:
    """(m, k, n) → seconds of a product of matrices (m, k) and (k, n): squares, and those of a transformer's layers."""

    def make(shape: tuple[int, int, int]) -> TimedWork:
        m, k, n = shape
        left, right = (torch.randn(size, device=place).to(dtype) for size in ((m, k), (k, n)))
        return partial(torch.matmul, left, right)

    flops: dict[tuple[int, int, int], float] = {}
    for side in _SIDES[place.type]:
        for m, k, n in ((side, side, side), (4 * side, side, side), (side, 4 * side, side), (side, side, 4 * side)):
            flops[m, k, n] = 2.0 * m * k * n
    return _growing(flops, make, place, budget_s)


def attentions(dtype: torch.dtype, place: torch.device, budget_s: float) -> dict[tuple[int, ...], float]:
    """(batch, heads, seq, head_dim) → seconds of scaled dot-product attention, forward and backward, without a mask."""
    heads, head_dim = (4, 64) if place.type == "cpu" else (32, 128)

    def make(shape: tuple[int, ...]) -> TimedWork:
        query, key, value, grad = (torch.randn(shape, device=place).to(dtype) for _ in range(4))
        inputs = [tensor.requires_grad_() for tensor in (query, key, value)]

        def both_ways() -> None:
            with torch.enable_grad():
                output = functional.scaled_dot_product_attention(query, key, value)
                torch.autograd.grad(output, inputs, grad)

        return both_ways

    amounts: dict[tuple[int, ...], float] = {(1, heads, seq, head_dim): float(seq**2) for seq in _LENGTHS[place.type]}
    return _growing(amounts, make, place, budget_s)


def host_copies(place: torch.device, budget_s: float) -> dict[tuple[str, int], float]:
    """(direction, bytes) → seconds of a copy between pinned memory of the host and the device."""

    def make(name: tuple[str, int]) -> TimedWork:
        direction, num_bytes = name
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty(num_bytes, dtype=torch.uint8, device=place)
        source, target = (host, on_device) if direction == "to device" else (on_device, host)
        return partial(target.copy_, source, non_blocking=True)

    ways = ("to device", "to host")
    return _growing({(way, size): float(size) for size in _MESSAGES for way in ways}, make, place, budget_s)


def collectives(group: dist.ProcessGroup, place: torch.device, budget_s: float) -> dict[tuple[str, int], float]:
    """(kind, bytes) → seconds of a collective in `group`; all processes of the job call this at once.

    Rank 0's clock decides the number of calls and sizes, so all processes make the same calls.
    """
    timings: dict[tuple[str, int], float] = {}
    end = time.perf_counter() + budget_s
    for num_bytes in _MESSAGES:
        whole = torch.zeros(num_bytes // 4 // group.size() * group.size(), device=place)
        part = torch.zeros(whole.numel() // group.size(), device=place)
        works = {
            "all_reduce": partial(dist.all_reduce, whole, group=group),
            "all_gather": partial(dist.all_gather, list(whole.chunk(group.size())), part, group=group),
        }
        for kind, work in works.items():
            work()
            calls = from_rank_zero(_calls(work, place, budget_s / 2 / (2 * len(_MESSAGES))))
            timings[kind, 4 * whole.numel()] = _best_row(work, place, calls, rows=2)
        longest = max(timings[kind, 4 * whole.numel()] for kind in works)
        if from_rank_zero(time.perf_counter() + 4 * 8 * longest > end):  # four calls of both, of four times the bytes
            break
    return timings


def _growing(
    amounts: Mapping[TimingName, float], make: Callable[[TimingName], TimedWork], place: torch.device, budget_s: float
) -> dict[TimingName, float]:
    """The seconds of each work, smallest first, until the budget is used; time is assumed proportional to the amount.

    Half of the budget is divided equally, for repeating short work; the other half is for long work.
    """
    timings: dict[TimingName, float] = {}
    end = time.perf_counter() + budget_s
    per_unit = 0.0
    for name in sorted(amounts, key=amounts.__getitem__):
        if time.perf_counter() + 4 * per_unit * amounts[name] > end:
            break
        work = make(name)
        work()  # loads kernels, fills caches
        timings[name] = _best_row(work, place, _calls(work, place, budget_s / 2 / len(amounts)), rows=3)
        per_unit = timings[name] / amounts[name]
    return timings


def _calls(work: TimedWork, place: torch.device, budget_s: float) -> int:
    return max(1, min(_MAX_CALLS, int(budget_s / 4 / seconds(work, place))))


def _best_row(work: TimedWork, place: torch.device, calls: int, rows: int) -> float:
    def row() -> None:
        for _ in range(calls):
            work()

    return min(seconds(row, place) / calls for _ in range(rows if calls > 1 else 1))
