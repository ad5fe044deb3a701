"""Saving in some boxes and loading in others; which rank writes; what a save refuses."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from atorch.checkpoint.boxes import Box, LogicalTensor, flat_boxes, whole_box
from atorch.checkpoint.commit import steps
from atorch.checkpoint.files import save
from atorch.checkpoint.reading import Checkpoint
from atorch.checkpoint.shard_file import BLOCK_BYTES, DTYPES
from atorch.errors import CheckpointError
from tests.checkpoint.jobs import Ranks, as_bits, bits, in_boxes, save_state, saved_number, small_blocks, whole
from tests.checkpoint.test_boxes import cut
from tests.pool import Pool

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits as values of a dtype, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(
        0, 2 if dtype is torch.bool else 256, (math.prod(shape) * dtype.itemsize,), generator=generator
    )
    return flat.to(torch.uint8).view(dtype).view(shape)


def laid_out(values: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """The same values in other strides."""
    dims = list(range(values.dim()))
    draw.shuffle(dims)
    turned = as_bits(values).permute(dims).contiguous()
    return turned.permute([dims.index(dim) for dim in range(values.dim())]).view(values.dtype)


def divided(draw: random.Random, values: torch.Tensor, ranks: int) -> list[list[Box]]:
    """The boxes of each rank: cut anyhow or as flat ranges, each on one rank or several."""
    if draw.random() < 0.5:
        boxes = cut(draw, whole_box(values.shape), 8)
    else:
        ends = sorted({0, values.numel(), *(draw.randint(0, values.numel()) for _ in range(3))})
        boxes = [
            box for start, stop in zip(ends, ends[1:], strict=False) for box, _ in flat_boxes(values.shape, start, stop)
        ]
    held: list[list[Box]] = [[] for _ in range(ranks)]
    for box in boxes:
        for rank in draw.sample(range(ranks), draw.randint(1, ranks)):
            held[rank].append(box)
    return held


@settings(max_examples=40)
@given(st.lists(st.tuples(SHAPES, st.sampled_from(sorted(DTYPES))), min_size=1, max_size=4), st.integers(0, 2**32))
def test_any_boxes_load_into_any_others(kinds, seed):
    draw = random.Random(seed)
    ranks = draw.randint(1, 4)
    tensors = {f"t.{i}": noise(shape, DTYPES[dtype], seed + i) for i, (shape, dtype) in enumerate(kinds)}
    held = {name: divided(draw, values, ranks) for name, values in tensors.items()}
    with tempfile.TemporaryDirectory() as folder, small_blocks():

        def of_rank(rank: int) -> dict[str, LogicalTensor]:
            return {
                name: in_boxes(laid_out(values, random.Random(seed)), held[name][rank])
                for name, values in tensors.items()
                if held[name][rank] or not values.numel()
            }

        seeds = [torch.arange(rank, 40) for rank in range(ranks)]
        paths = Ranks(ranks).run(lambda rank: save(folder, 7, of_rank(rank), {"t": seeds[0]}, {"seed": seeds[rank]}))
        assert paths == [Path(folder, "step-000000007")] * ranks
        with Checkpoint.open(folder) as checkpoint:
            assert checkpoint.names == {name: (tuple(v.shape), v.dtype) for name, v in tensors.items()}
            assert torch.equal(checkpoint.plain["t"], seeds[0])
            assert all(torch.equal(checkpoint.by_rank(rank)["seed"], seeds[rank]) for rank in range(ranks))
            for name, values in tensors.items():
                assert bits(checkpoint.read(name)) == bits(values)
                for boxes in divided(draw, values, 3):
                    target = in_boxes(laid_out(noise(values.shape, values.dtype, 0), draw), boxes)
                    checkpoint.load({name: target})
                    for box, piece in target.pieces:
                        assert bits(piece) == bits(values[box.slices(whole_box(values.shape))])


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_in_a_file_that_safetensors_reads(tmp_path: Path, name: str) -> None:
    values = noise((3, 5), DTYPES[name], 1)
    path = save(tmp_path, 0, {"w": whole(values), "empty": whole(values[:0])}, {}) / "rank-00000.safetensors"
    with Checkpoint.open(tmp_path) as checkpoint:
        assert bits(checkpoint.read("w")) == bits(values)
        assert checkpoint.read("empty").shape == (0, 5)
        assert checkpoint.read("empty").dtype == values.dtype
    assert bits(load_file(path)["w"]) == bits(values)


def test_values_are_cast_on_both_ways(tmp_path: Path) -> None:
    values = torch.randn(6, 4)
    save(
        tmp_path,
        1,
        {"w": LogicalTensor((6, 4), torch.bfloat16, [(whole_box((6, 4)), values.t().contiguous().t())])},
        {},
    )
    target = torch.zeros(6, 4, dtype=torch.float64, requires_grad=True)
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.load({"w": whole(target)})
    assert torch.equal(target.detach(), values.bfloat16().double())


def test_blocks_beyond_the_first_and_parts_of_large_pieces(tmp_path: Path) -> None:
    """Three blocks of the real size; of a part, only the blocks that it touches are read."""
    length = BLOCK_BYTES // 4
    values = torch.arange(3 * length, dtype=torch.int32).view(3, length)
    path = save(tmp_path, 1, {"w": whole(values), "turned": whole(values.t())}, {}) / "rank-00000.safetensors"
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("w"), values)
        assert torch.equal(checkpoint.read("turned"), values.t())
    with path.open("r+b") as file:  # in the second block of w
        file.seek(path.stat().st_size - 5 * BLOCK_BYTES + 1)
        file.write(b"\xff")
    row, column = torch.zeros(1, 100, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32)
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.load({"w": LogicalTensor((3, length), torch.int32, [(Box((2, 8), (1, 100)), row)])})
        assert torch.equal(row[0], values[2, 8:108])
        with pytest.raises(
            CheckpointError, match=r"rank-00000.safetensors: 'w' \[0:3, 0:\d+\] has changed.* its block 1"
        ):
            checkpoint.load({"w": LogicalTensor((3, length), torch.int32, [(Box((0, 8), (3, 1)), column)])})


def test_conjugates_and_negatives_are_saved_as_they_read(tmp_path: Path) -> None:
    values = torch.randn(5, dtype=torch.complex64)
    save(tmp_path, 1, {"conj": whole(values.conj()), "neg": whole(values.conj().imag)}, {"conj": values.conj()})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("conj"), values.conj().resolve_conj())
        assert torch.equal(checkpoint.read("neg"), -values.imag)
        assert torch.equal(checkpoint.plain["conj"], values.conj())


def test_of_equal_boxes_the_least_loaded_rank_writes(tmp_path: Path) -> None:
    values = {f"w{i}": torch.full((100,), float(i)) for i in range(6)}
    own = [torch.ones(300), torch.ones(100), torch.ones(100)]

    def work(rank: int) -> Path:
        mine = {f"own{rank}": whole(own[rank])}
        return save(tmp_path, 1, {**mine, **{name: whole(value) for name, value in values.items()}}, {})

    (path, *others) = Ranks(3).run(work)
    assert others == [path, path]
    names = [sorted(load_file(path / f"rank-{rank:05}.safetensors")) for rank in range(3)]
    assert sorted(sum(names, [])) == ["own0", "own1", "own2", *values]
    sizes = [(path / f"rank-{rank:05}.safetensors").stat().st_size for rank in range(3)]
    assert max(sizes) - min(sizes) < 600


def test_old_ones_are_removed_and_a_step_is_replaced(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save_state(tmp_path, step, keep_last=2, keep_every=20)
    assert steps(tmp_path) == [20, 30, 40]
    assert (tmp_path / "newest").read_text() == "step-000000040\n"
    save_state(tmp_path, 30, 7)
    assert (saved_number(tmp_path, 30), saved_number(tmp_path)) == (7, 40)
    save_state(tmp_path, 1, keep_last=1)
    assert steps(tmp_path) == [1, 40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "step-000000001", "step-000000040"]
    save_state(tmp_path, 50)
    assert steps(tmp_path) == [1, 40, 50]


def test_steps_of_no_folder(tmp_path: Path) -> None:
    assert steps(tmp_path / "none") == []
    with pytest.raises(CheckpointError, match="none holds no checkpoint; there is no complete one"):
        Checkpoint.open(tmp_path / "none")
    save_state(tmp_path, 3)
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 4; there are 3"):
        Checkpoint.open(tmp_path, 4)
    with pytest.raises(CheckpointError, match="has no rank 1: it was saved by 1"):
        Checkpoint.open(tmp_path).by_rank(1)


WEIGHT = torch.ones(4, 2)
REFUSED = {
    "hole": (lambda rank: in_boxes(WEIGHT, [Box((rank, 0), (1, 2))]), r"'w': 4 of its 8 elements are in no box"),
    "overlap": (
        lambda rank: in_boxes(WEIGHT, [Box((0, 0), (2 + rank, 2)), Box((2 + rank, 0), (2 - rank, 2))]),
        r"'w': its boxes \[0:[23], 0:2\] and \[[02]:[34], 0:2\] overlap",
    ),
    "shapes": (
        lambda rank: whole(torch.ones(2 + rank)),
        r"'w' is F32 \(2,\) on rank 0 and F32 \(3,\) on rank 1; save one",
    ),
    "dtypes": (lambda rank: whole(WEIGHT.double() if rank else WEIGHT), r"'w' is F32 .* and F64 \(4, 2\) on rank 1"),
    "outside": (
        lambda rank: LogicalTensor((4, 2), torch.float32, [(Box((rank, 0), (4, 2)), WEIGHT)]),
        r"'w': values of shape \(4, 2\) for its box \[1:5, 0:2\] of \(4, 2\)",
    ),
    "sizes": (
        lambda rank: LogicalTensor((4, 2), torch.float32, [(whole_box((4, 2)), WEIGHT[rank:])]),
        r"'w': values of shape \(3, 2\) for its box \[0:4, 0:2\]",
    ),
    "quantised": (
        lambda rank: LogicalTensor((4, 2), torch.quint8 if rank else torch.float32, []),
        r"'w' is of torch.quint8, which checkpoints do not hold; convert it",
    ),
    "sparse": (
        lambda rank: whole(WEIGHT.to_sparse() if rank else WEIGHT),
        r"'w' \[0:4, 0:2\] has no values of its own",
    ),
    "meta": (lambda rank: whole(WEIGHT.to("meta") if rank else WEIGHT), r"'w' \[0:4, 0:2\] has no values of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_save_refuses_on_all_ranks_by_name(tmp_path: Path, case: str) -> None:
    tensor, told = REFUSED[case]
    save_state(tmp_path, 1)
    for error in Ranks(2).run(lambda rank: save(tmp_path, 2, {"w": tensor(rank)}, {})):
        assert isinstance(error, CheckpointError)
        with pytest.raises(CheckpointError, match=told):
            raise error
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["newest", "step-000000001"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"step": -1}, "step is -1; it is an integer from 0"),
        ({"step": True}, "step is True"),
        ({"keep_last": 0}, "keep_last is 0; it is an integer from 1, or None"),
        ({"keep_every": 2.0}, "keep_every is 2.0"),
        ({"plain": {"fn": max}}, r"^plain\.fn is <built-in function max>"),
        ({"by_rank": {"fn": max}}, r"^by_rank\.fn is <built-in function max>"),
        ({"tensors": {"$w": whole(WEIGHT)}}, r"'\$w' cannot name a tensor"),
        ({"tensors": {3: whole(WEIGHT)}}, "3 is no name of a tensor"),
        ({"tensors": {"\ud800": whole(WEIGHT)}}, "has no form in UTF-8"),
        ({"tensors": {"__metadata__": whole(WEIGHT)}}, "'__metadata__' is no name of a tensor"),
        ({"folder": "a\0b"}, "cannot hold a checkpoint"),
        (
            {"tensors": {"w": in_boxes(WEIGHT, [Box((0, 0), (4, 1)), Box((0, 1), (4, 1))]), "w@1": whole(WEIGHT)}},
            "'w@1' would name two tensors of a file",
        ),
    ],
)
def test_what_a_save_refuses(tmp_path: Path, arguments, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        save(**{"folder": tmp_path, "step": 1, "tensors": {}, "plain": {}, **arguments})
    assert steps(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("weigth", (64, 33), r"'weigth' is not in .*step-000000001; did you mean 'weight'"),
        ("weight", (33, 64), r"'weight' has the shape \(64, 33\) in .*, and \(33, 64\) here"),
    ],
)
def test_what_a_load_refuses(tmp_path: Path, name: str, shape: tuple[int, ...], told: str) -> None:
    save_state(tmp_path, 1)
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=told):
        checkpoint.load({name: whole(torch.zeros(shape))})


def share(rank: int, size: int, values: torch.Tensor) -> LogicalTensor:
    """The rows of a rank, as equal as they can be."""
    first, last = (len(values) * at // size for at in (rank, rank + 1))
    return in_boxes(values, [Box((first, 0), (last - first, values.shape[1]))])


def work_of_pool(rank: int, size: int, folder: str, step: int, loads: bool) -> None:
    values = torch.arange(35.0).view(7, 5)
    if loads:
        target = share(rank, size, torch.zeros(7, 5))
        with Checkpoint.open(folder) as checkpoint:
            checkpoint.load({"w": target, "b": whole(bias := torch.zeros(5))})
            assert checkpoint.plain == {"lr": math.inf}
            assert checkpoint.by_rank(checkpoint.world_size - 1) == {"rank": checkpoint.world_size - 1}
        for box, piece in target.pieces:
            assert torch.equal(piece, values[box.slices(whole_box((7, 5)))])
        assert torch.equal(bias, values[0])
    save(folder, step, {"w": share(rank, size, values), "b": whole(values[0])}, {"lr": math.inf}, {"rank": rank})
    for tensors, told in (
        ({"w": in_boxes(values, [Box((rank, 0), (1, 5))])}, "are in no box"),
        ({rank: whole(values)}, "no name of a tensor"),
    ):
        with pytest.raises(CheckpointError, match=told):
            save(folder, step + 1, tensors, {})
    with pytest.raises(CheckpointError, match="of step 77"):
        Checkpoint.open(folder, 77)
    if size > 1:
        with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError, match="'other' is not in"):
            checkpoint.load({"other" if rank else "b": whole(values[0])})


def test_two_processes_to_one_to_two(pool, tmp_path: Path) -> None:
    for step, ranks in enumerate((2, 1, 2)):
        pool.run(work_of_pool, str(tmp_path), step, step > 0, ranks=ranks)
    assert steps(tmp_path) == [0, 1, 2]
    manifest = json.loads((tmp_path / "step-000000002" / "manifest.json").read_text())
    assert manifest["world_size"] == 2


def counted_load(rank: int, size: int, folder: str, damaged: bool) -> int:
    """Load a tensor whole on all ranks, and another in halves; the bytes that this rank has read."""
    preadv, counts = os.preadv, []

    def counting(handle: int, buffers: list[memoryview], start: int) -> int:
        counts.append(preadv(handle, buffers, start))
        return counts[-1]

    same, cut = torch.zeros(9, BLOCK_BYTES // 8), share(rank % 2, 2, torch.zeros(8, BLOCK_BYTES // 16))
    with Checkpoint.open(folder) as checkpoint, mock.patch.object(os, "preadv", counting):
        if damaged:
            with pytest.raises(CheckpointError, match="has changed since it was written"):
                checkpoint.load({"same": whole(same), "cut": cut})
        else:
            checkpoint.load({"same": whole(same), "cut": cut})
            assert torch.equal(same[:, 5], torch.arange(9.0))
            assert all(torch.equal(values[:, 0], torch.arange(4.0) + box.offsets[0]) for box, values in cut.pieces)
    return sum(counts)


@pytest.mark.parametrize("damaged", [False, True])
def test_replicas_read_a_file_once(pool: Pool, tmp_path: Path, damaged: bool) -> None:
    """Of eight; a damaged block is refused by all of them, and nobody waits for the others."""
    numbers = torch.arange(9.0)[:, None]
    same, cut = numbers.expand(9, BLOCK_BYTES // 8), numbers[:8].expand(8, BLOCK_BYTES // 16)
    path = save(tmp_path, 1, {"same": whole(same), "cut": whole(cut)}, {}) / "rank-00000.safetensors"
    if damaged:
        with path.open("r+b") as file:
            file.seek(BLOCK_BYTES * 3)
            file.write(b"\xff")
    counts = pool.run(counted_load, str(tmp_path), damaged, ranks=8)
    assert sum(counts) <= 1.1 * path.stat().st_size
    assert max(counts) <= 2 * BLOCK_BYTES


def peak_of_load(rank: int, size: int, folder: str, rows: int) -> int:
    """The bytes by which memory grows while this rank loads its share of `rows`, of a MiB each."""
    piece = torch.empty(rows // size, 2**18)
    target = LogicalTensor((rows, 2**18), torch.float32, [(Box((rank * len(piece), 0), tuple(piece.shape)), piece)])
    with Checkpoint.open(folder) as checkpoint:
        Path("/proc/self/clear_refs").write_text("5")
        before = highest()
        checkpoint.load({"w": target})
        return highest() - before


def highest() -> int:
    """The peak of this process's memory in bytes, since the last time that it was cleared."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status)[1])  # type: ignore[index]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak of memory")
@pytest.mark.parametrize(("ranks", "rows"), [(2, 256), pytest.param(4, 3816, marks=pytest.mark.slow)])
def test_a_rank_holds_its_part_and_some_blocks(pool: Pool, tmp_path: Path, ranks: int, rows: int) -> None:
    """Of 256 MiB on two ranks, of 4 GB on four, while they are in the page cache."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        save(folder, 1, {"w": whole(torch.ones(1, 1).expand(rows, 2**18))}, {})
        peak = max(pool.run(peak_of_load, folder, rows, ranks=ranks))
    logging.getLogger("measured").warning(f"{peak:,} bytes on each of {ranks} ranks for {rows * 2**20:,} bytes")
    assert peak <= rows // ranks * 2**20 + 8 * BLOCK_BYTES
