"""Saving and loading a checkpoint, with checksums, against `torch.distributed.checkpoint`, which has none.

Both write the same sharded tensors down to the disk, into new folders, and read them back from the page cache. They
take turns in one set of processes. Ratios are of medians.

The last rows compare training steps beside a save in the background with steps alone; they need a machine left alone.

    python benchmarks/checkpoint_speed.py
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from command import answer_of, main
from compare import Row, Samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from atorch.checkpoint.boxes import Box, LogicalTensor
from atorch.checkpoint.files import BackgroundWriter, save
from atorch.checkpoint.reading import Checkpoint

BARS = {"save": 0.5, "load": 1.2}
STEPS = 20


def measure(quick: bool = False) -> list[Row]:
    """The rows of one process and of two."""
    rows = []
    for processes in (1, 2):
        seconds = answer_of(__file__, 32 if quick else 256, 3 if quick else 15, processes=processes)
        samples = Samples({name: np.array(times) for name, times in seconds.items()})
        for what, bar in BARS.items():
            ratio = samples.ratio(f"{what} atorch", f"{what} dcp")
            claim = f"{what} on {processes}: atorch with checksums / DCP ({samples.median_ms(f'{what} dcp'):.0f} ms)"
            rows.append(Row(claim, f"**{ratio:.2f}**", f"≤ {bar}", ratio.value <= bar))
        ratio = samples.ratio("beside", "alone")
        alone = samples.median_ms("alone") / STEPS
        claim = f"a step on {processes} beside a save in the background / alone ({alone:.0f} ms)"
        rows.append(Row(claim, f"**{ratio:.3f}**", "≤ 1.05", ratio.value <= 1.05))
    return rows


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Seconds of some steps, after each of which the processes meet."""
    start = time.perf_counter()
    for _ in range(STEPS):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
    return time.perf_counter() - start


def in_process(mebibytes: int, rounds: int) -> dict[str, list[float]] | None:
    """Seconds of each call, on rank 0."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    few, many = [(4096, 1024)] * (mebibytes // 16), [(1024,)] * (mebibytes // 2)
    state = {f"t{i}": distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) for i, shape in enumerate(few + many)}
    boxes = {}
    for name, value in state.items():
        local, shape = value.to_local(), tuple(value.shape)
        box = Box((rank * len(local), *(0 for _ in shape[1:])), tuple(local.shape))
        boxes[name] = LogicalTensor(shape, value.dtype, [(box, local)])
    place = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(place)
    folder, order = Path(place[0]), random.Random(0)
    calls: dict[str, Callable[[], object]] = {
        "save atorch": lambda: save(folder / "atorch", 1, boxes, {}),
        "save dcp": lambda: dcp.save(state, checkpoint_id=folder / "dcp"),
        "load atorch": lambda: Checkpoint.open(folder / "atorch").load(boxes),
        "load dcp": lambda: dcp.load(state, checkpoint_id=folder / "dcp"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*calls, "alone", "beside")}
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())))
    optimizer, batch, writer = torch.optim.SGD(model.parameters(), 0.01), torch.randn(256, 512), BackgroundWriter()
    for _ in range(rounds + 1):
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
            os.sync()  # removing the last files is no part of a save
        for what in ("save", "load"):
            for name in order.sample([f"{what} atorch", f"{what} dcp"], 2):
                dist.barrier()
                start = time.perf_counter()
                calls[name]()
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
        for name in order.sample(["alone", "beside"], 2):
            if name == "beside":
                save(folder / "background", 1, boxes, {}, background=writer)
            seconds[name].append(train(model, optimizer, batch))
            writer.wait()
    if rank != 0:
        return None
    shutil.rmtree(folder)
    return {name: times[1:] for name, times in seconds.items()}


if __name__ == "__main__":
    main(measure, in_process=in_process)
