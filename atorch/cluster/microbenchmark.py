"""Timings of this process's device and links, in a fraction of a second each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import skip_init

from atorch.cluster.spec import DeviceSpec, LinkSpec

if TYPE_CHECKING:
    from atorch.distributed.world import World

MATMUL_DTYPES: Sequence[str] = ("float32", "bfloat16", "float16")
_BUDGET_S = 0.1  # for each dtype; peers measure at the same time, as in training


def seconds(work: Callable[[], object], place: torch.device) -> float:
    """Seconds of `work` on `place`, at least a nanosecond."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    start = time.perf_counter()
    work()
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return max(time.perf_counter() - start, 1e-9)


def measured(device: DeviceSpec, place: torch.device) -> DeviceSpec:
    """`device` with the measured rates of `place`, which count as fully reached."""
    with torch.no_grad():
        peaks = {dtype: _matmul_flops(getattr(torch, dtype), place) for dtype in MATMUL_DTYPES}
        return replace(device, peak_flops=peaks, memory_bandwidth=copy_bandwidth(place), launch_s=launch_seconds(place))


def _matmul_flops(dtype: torch.dtype, place: torch.device) -> float:
    """FLOP/s of square matmuls, as large as the budget allows several times."""
    best, spent, size = 0.0, 0.0, 64 if place.type == "cpu" else 1024
    while spent < _BUDGET_S / 2 and size <= 8192:
        left = torch.ones(size, size, dtype=dtype, device=place)
        product = partial(torch.matmul, left, left)
        first = seconds(product, place)  # also loads kernels
        second = first if spent + 2 * first > _BUDGET_S else seconds(product, place)
        best, spent = max(best, 2 * size**3 / min(first, second)), spent + first + second
        if spent + 8 * second > _BUDGET_S:
            break
        size *= 2
    return best


def copy_bandwidth(place: torch.device, repeats: int = 3) -> float:
    """Bytes/s read and written by a copy that exceeds caches."""
    source = torch.ones(2**23 if place.type == "cpu" else 2**27, device=place)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(seconds(partial(target.copy_, source), place) for _ in range(repeats))
    return 2 * source.element_size() * source.numel() / best


def launch_seconds(place: torch.device) -> float:
    """Seconds of the host per operator call in a model, including Python's modules and autograd.

    A layer without bias calls two operators, one of which is a view of its weight, and its activation one. Estimates
    with it are 0.8 to 1.15 of the measured time for blocks of well-known models: `benchmarks/host_time.py`.
    """
    chain = nn.Sequential()
    for _ in range(16):
        layer = skip_init(nn.Linear, 8, 8, bias=False, device=place)  # consumes no random numbers of the caller
        chain.extend((layer, nn.SiLU()))
        nn.init.eye_(layer.weight)
    tiny = torch.ones(8, 8, device=place, requires_grad=True)

    def step() -> None:
        with torch.enable_grad():
            chain(tiny).sum().backward()

    step()
    return min(seconds(step, place) for _ in range(3)) / (3 * 3 * 16)  # backward counts as two forwards


def measured_link(world: World) -> LinkSpec:
    """The link measured by all-reduces of 8 bytes and 4 MiB over all processes; a default for a single process."""
    if world.size == 1 or not dist.is_initialized():
        return LinkSpec(bandwidth=1e10, latency_s=1e-5)
    times = []
    for num_floats in (2, 2**20):
        data = torch.zeros(num_floats, device=world.device)
        dist.all_reduce(data)
        times.append(min(seconds(partial(dist.all_reduce, data), world.device) for _ in range(3)))
    latency = times[0] / (2 * (world.size - 1))
    carried = 2 * (world.size - 1) / world.size * 4 * 2**20
    return LinkSpec(bandwidth=carried / max(times[1] - times[0], 1e-6), latency_s=latency)
