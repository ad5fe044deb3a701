"""Growth of the cost of a start, a search and a plan of chunks: seconds, bytes, collectives, connections.

- A start is `auto_accelerate` with a strategy on one process of n. The others do not exist: torch's fake process group
  completes collectives at once. Seconds are this process's own work. Collectives, bytes and groups are counted by
  request. File descriptors are calculated: over gloo, one for each other member of each group of this process.
- A ranking is the work of a search's rank 0 on a described cluster, with the message that it broadcasts.
- Chunks are laid out and scheduled for a predicted pass through consecutive linear layers. Tracing a pass on fake
  tensors is measured separately. Both are CPU seconds of this process.

    python benchmarks/growth.py
"""

from __future__ import annotations

import itertools
import math
import pickle
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, main
from compare import Row

SIZES = (8, 64, 512, 4096, 16384)
NODE = 8  # processes
LAYERS, WIDTH = 24, 64
SPLIT = {"tensor_parallel in a node": NODE, "tensor 2 x pipeline 2 x fsdp 2": 2}  # over so many processes
KEPT = 1024  # bytes that a layer keeps for backward
CLUSTERS = {
    "1.3B on 1 H100": ("1.3B", "1xH100-80GB"),
    "1.3B on 8": ("1.3B", "8xH100-80GB"),
    "70B on 64": ("70B", "8x8xH100-80GB"),
    "70B on 512": ("70B", "64x8xH100-80GB"),
    "405B on 4,096": ("405B", "512x8xH100-80GB"),
    "405B on 16,384": ("405B", "2048x8xH100-80GB"),
}
SHAPES: dict[str, dict[str, int]] = {
    "1.3B": {"layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 5504, "vocab": 32000, "seq_len": 2048},
    "70B": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256, "seq_len": 8192},
    "405B": {
        "layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256, "seq_len": 8192,
    },
}  # fmt: skip
START_S, RANKING_S, RANKING_MIB = 10.0, 5.0, 1024.0
CHUNKED = {  # widths of the layers, the budget as a share of all parameters
    "equal layers": ((64,), 0.3),
    "equal layers, little room": ((64,), 0.02),
    "layers of all sizes": (tuple(range(16, 128)), 0.3),
}
PARAMETERS = (1_000, 10_000, 100_000)
TRACED = (500, 1_000, 4_000)
LAY_OUT_S, TRACE_S = 10.0, 0.01  # the last for each parameter


def strategies(size: int) -> dict[str, list[Any]]:
    """Strategies that are started, by name."""

    def over(*axes: tuple[str, int]) -> tuple[str, Any]:
        rest = size // math.prod(degree for _, degree in axes)
        return "parallel_mode", ([*axes, ("data", rest)], None)

    pipeline = ("pipeline_parallel", {"micro_batches": NODE})
    return {
        "ddp": ["ddp"],
        "zero1": ["zero1"],
        "fsdp, nodes as replicas": [over(("zero", NODE)), "fsdp"],
        "tensor_parallel in a node": [over(("tensor", NODE)), "tensor_parallel", "ddp"],
        "pipeline_parallel of 8 stages": [over(("pipeline", NODE)), pipeline, "ddp"],
        "tensor 2 x pipeline 2 x fsdp 2": [
            over(("tensor", 2), ("pipeline", 2), ("zero", 2)), "tensor_parallel", pipeline, "fsdp",
        ],
    }  # fmt: skip


class Block(torch.nn.Module):
    """A residual block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def a_model() -> torch.nn.Module:
    """Consecutive blocks, which tensor and pipeline parallelism can split."""
    return torch.nn.Sequential(*(Block() for _ in range(LAYERS)))


def measure(quick: bool = False) -> list[Row]:
    """All rows; `quick` leaves out the largest sizes."""
    rows = []
    sizes = SIZES[:3] if quick else SIZES
    for name in strategies(NODE):
        starts = [answer_of(__file__, "start", name, size, processes=None) for size in sizes]
        for size, start in zip(sizes, starts, strict=True):
            figures = (
                f"{start['seconds']:.2f} s; {start['collectives']} collectives of {start['bytes']:,} bytes; "
                f"{start['gathers']} object gathers; {start['groups']} calls for groups; "
                f"{start['descriptors']:,} file descriptors"
            )
            rows.append(Row(f"start of {name} on {size:,}", figures, f"≤ {START_S:g} s", start["seconds"] <= START_S))
        _, few, *_, many = starts  # the first size is one node, which may have no replicas
        sizes_compared = f"{sizes[-1]:,} / {sizes[1]}"
        grown = many["collectives"] / few["collectives"]
        rows.append(Row(f"collectives of {name}, {sizes_compared}", f"{grown:.2f}", "≤ 1", grown <= 1))
        grown = many["bytes"] / few["bytes"] / _n_log_n(sizes[-1], sizes[1])
        rows.append(Row(f"bytes of {name} beside n log n, {sizes_compared}", f"{grown:.2g}", "≤ 1", grown <= 1))
    for title, job in list(CLUSTERS.items())[: 2 if quick else None]:
        ranking = answer_of(__file__, "ranking", *job, processes=None)
        figures = (
            f"{ranking['seconds']:.2f} s; {ranking['mib']:.0f} MiB; {ranking['kept']} kept, told in "
            f"{ranking['told'] / 1e3:.0f} kB; the others {ranking['others']:.2f} s"
        )
        holds = ranking["seconds"] <= RANKING_S and ranking["mib"] <= RANKING_MIB
        rows.append(Row(f"ranking of {title}", figures, f"≤ {RANKING_S:g} s, {RANKING_MIB:g} MiB", holds))
    return [*rows, *measure_chunks(quick)]


def measure_chunks(quick: bool = False) -> list[Row]:
    """Rows of planning chunks, by the number of parameters."""
    rows = []
    for name in CHUNKED:
        for num in PARAMETERS[:2] if quick else PARAMETERS:
            plan = answer_of(__file__, "chunks", name, num, processes=None)
            figures = (
                f"layout {plan['layout']:.2f} s, {plan['chunks']:,} chunks; pinned {plan['pinned']:.2f} s; schedule "
                f"{plan['schedule']:.2f} s"
            )
            seconds = plan["layout"] + plan["pinned"] + plan["schedule"]
            rows.append(Row(f"chunks of {name}, {num:,}", figures, f"≤ {LAY_OUT_S:g} s", seconds <= LAY_OUT_S))
    for num in TRACED[:2] if quick else TRACED:
        seconds = answer_of(__file__, "trace", num, processes=None)["seconds"]
        figures, bound = f"{seconds:.1f} s, {1e3 * seconds / num:.2f} ms a parameter", num * TRACE_S
        rows.append(Row(f"pass traced, {num:,} parameters", figures, f"≤ {bound:g} s", seconds <= bound))
    return rows


def _n_log_n(large: int, small: int) -> float:
    return large * math.log2(large) / (small * math.log2(small))


def in_process(what: str, *arguments: Any) -> dict[str, float]:
    """One start, ranking, plan of chunks or trace."""
    torch.set_num_threads(1)
    measured = {"start": _start, "ranking": _ranking, "chunks": _chunks, "trace": _trace}
    return measured[what](*arguments)


class Counted(TorchDispatchMode):
    """Counts the collectives that this process requests."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_bytes = 0
        self.group_sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.note(func.overloadpacket.__name__, max(map(_bytes, args), default=0))
        return func(*args, **(kwargs or {}))

    def note(self, name: str, num_bytes: int) -> None:
        """Count one collective, in which this process receives `num_bytes`."""
        self.calls[name] += 1
        self.num_bytes += num_bytes


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


@contextmanager
def counting(size: int) -> Iterator[Counted]:
    """Count collectives inside, and atorch's exchanges, which atorch skips if there is no other process."""
    from atorch.distributed import collectives

    counted = Counted()

    def noting(name: str, num_bytes: Callable[[Any], int]) -> Callable[..., Any]:
        real = getattr(collectives, name)

        def call(value: Any, *args: Any, **kwargs: Any) -> Any:
            counted.note(name, num_bytes(value))
            return real(value, *args, **kwargs)

        return call

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = real_new_group(ranks, *args, **kwargs)
        counted.calls["new_group"] += 1
        if ranks is None or dist.get_rank() in ranks:
            counted.group_sizes.append(size if ranks is None else len(ranks))
        return made

    exchanges = {
        "all_reduce_max": lambda values: 8 * len(values),
        "from_rank_zero": lambda value: len(pickle.dumps(value)),
        "gather_objects": lambda value: size * len(pickle.dumps(value)),
    }
    real_new_group = dist.new_group
    with ExitStack() as stack:
        for name, num_bytes in exchanges.items():
            stack.enter_context(mock.patch.object(collectives, name, noting(name, num_bytes)))
        stack.enter_context(mock.patch.object(dist, "new_group", new_group))
        stack.enter_context(counted)
        yield counted


def _start(name: str, size: int) -> dict[str, float]:
    from atorch.distributed.local_collectives import fake_world

    model = a_model()
    data = torch.utils.data.TensorDataset(torch.zeros(4 * size * NODE, WIDTH))
    first_of_a_node = size // 2 // NODE * NODE  # and of a first stage: the fake group delivers no shapes
    with fake_world(size, rank=first_of_a_node), counting(size) as counted:
        from atorch import auto_accelerate  # imported here, so that names from `collectives` are the counting ones
        from atorch.auto import session  # noqa: F401
        from atorch.auto.opt_lib.tensor_parallel import LAYOUT_KEY, written
        from atorch.auto.strategy import Strategy
        from atorch.runtime.tensor_parallel import derive_layout

        strategy = Strategy.of(strategies(size)[name])
        if name in SPLIT:
            layout = derive_layout(model, lambda model: model(torch.randn(2, WIDTH)), SPLIT[name])
            kept = written(layout, {"plan": None, "parameter_bytes": None})
            strategy = replace(strategy, metadata={LAYOUT_KEY: kept})
        began = time.perf_counter()
        done, _, _ = auto_accelerate(
            model, torch.optim.AdamW, data, lambda batch, output: output.square().mean(), verify=False,
            model_input_format="unpack_sequence", dataloader_args={"batch_size": NODE * size},
            load_strategy=strategy,
        )  # fmt: skip
        seconds = time.perf_counter() - began
    assert done
    calls = counted.calls
    return {
        "seconds": seconds,
        "collectives": sum(number for name, number in calls.items() if name != "new_group"),
        "gathers": calls["gather_objects"],
        "bytes": counted.num_bytes,
        "groups": calls["new_group"],
        "descriptors": size - 1 + sum(members - 1 for members in counted.group_sizes),
    }


def _ranking(shape: str, devices: str) -> dict[str, float]:
    import atorch.auto.opt_lib  # noqa: F401  registers the methods
    from atorch.auto.planner.ranking import RankingSummary, SearchLimits, best_level, methods_of
    from atorch.cluster.spec import ClusterSpec
    from atorch.cost import plain_cost
    from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile

    cluster = ClusterSpec.load(devices)
    profile = transformer_profile(TransformerShape(**SHAPES[shape], head_dim=128), 1, Implementation(itemsize=4.0))
    start = plain_cost(profile, 4 * cluster.world_size, cluster.device.memory_bytes)
    before, began = _peak_mib(), time.perf_counter()
    ranking = best_level(profile, start, cluster, SearchLimits())
    seconds, mib = time.perf_counter() - began, _peak_mib() - before
    message = RankingSummary.of(ranking)
    began = time.perf_counter()
    rebuilt = message.ranking(methods_of(SearchLimits().space(profile, cluster, SearchLimits().levels[-1])))
    others = time.perf_counter() - began
    assert rebuilt == ranking
    return {
        "seconds": seconds,
        "mib": mib,
        "kept": len(ranking.fitting),
        "told": len(pickle.dumps(message)),
        "others": others,
    }


def _chunks(name: str, num: int) -> dict[str, float]:
    from atorch.runtime.chunk.chunked import ChunkPlanner, pass_schedule
    from atorch.runtime.chunk.pass_schedule import Access, AccessTrace

    widths, share = CHUNKED[name]
    parameters: dict[str, torch.nn.Parameter] = {}
    accesses: list[Access] = []
    for layer in range(num // 2):
        width = widths[layer * 37 % len(widths)]
        parameters[f"{layer}.weight"] = torch.nn.Parameter(torch.empty(width, width, device="meta"))
        parameters[f"{layer}.bias"] = torch.nn.Parameter(torch.empty(width, device="meta"))
        taken = frozenset((f"{layer}.weight", f"{layer}.bias"))
        accesses.append(Access("linear", taken, KEPT * (layer + 1)))
    gradients = []
    for layer in reversed(range(num // 2)):
        accesses.append(Access("backward", frozenset((f"{layer}.weight",)), KEPT * (layer + 1)))
        gradients += [(len(accesses), f"{layer}.bias"), (len(accesses), f"{layer}.weight")]
    traced = AccessTrace(accesses, gradients)
    total = sum(4 * parameter.numel() for parameter in parameters.values())
    budget = int(share * total) + KEPT * num // 2
    marks = [time.process_time()]
    layout = ChunkPlanner(parameters, traced, budget).lay_out()
    marks.append(time.process_time())
    pinned, beside = ChunkPlanner(parameters, traced, budget, state_bytes=8.0).pin(layout)
    marks.append(time.process_time())
    pass_schedule(layout, traced, budget - beside, pinned=pinned)
    marks.append(time.process_time())
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    return {"chunks": len(layout.chunks), "layout": seconds[0], "pinned": seconds[1], "schedule": seconds[2]}


def _trace(num: int) -> dict[str, float]:
    from atorch.auto.opt_lib.chunk.trace import trace_pass

    def model(num: int) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(num // 2)))

    def trace(model: torch.nn.Module) -> None:
        trace_pass(model, torch.zeros(4, 8, WIDTH), lambda model, batch: model(batch).sum(), device_type="cpu")

    trace(model(24))  # imports what it needs, before the clock starts
    large = model(num)
    began = time.process_time()
    trace(large)
    return {"seconds": time.process_time() - began}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(measure, in_process=in_process)
