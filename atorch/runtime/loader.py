"""The data of each process: a global batch is split evenly over the ranks that see different samples.

`batch_size` is the global batch (strong scaling), so the same arguments give the same training on any number of
processes: rank r of n takes every n-th sample of each global batch.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from atorch.errors import ArgumentError, near_miss

_LOADER_ARGUMENTS = frozenset(inspect.signature(DataLoader.__init__).parameters) - {"self", "dataset"}


class Loader(DataLoader[Any]):
    """A DataLoader with `set_epoch`, which reshuffles whatever sampler draws its indices."""

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of epoch `epoch`: the same on every run, another one each epoch."""
        drawers: tuple[Any, ...] = (self.sampler, self.batch_sampler, self.dataset)
        for drawer in drawers:
            if hasattr(drawer, "set_epoch"):
                drawer.set_epoch(epoch)


class RankSampler(Sampler[Any]):
    """Rank `rank`'s share of what another sampler draws: every `size`-th index, the same number on each rank.

    The inner sampler's random numbers are drawn from `seed + epoch`, so that all ranks see one order. A rest that does
    not fill all ranks starts again from the first indices, as DistributedSampler does.
    """

    def __init__(self, sampler: Sampler[Any], rank: int, size: int, seed: int) -> None:
        self.sampler, self.rank, self.size, self.seed, self.epoch = sampler, rank, size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + self.epoch)
            indices = list(self.sampler)
        missing = -len(indices) % self.size
        return iter([*indices, *itertools.islice(itertools.cycle(indices), missing)][self.rank :: self.size])

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.size)  # type: ignore[arg-type]


class RankBatches(Sampler[list[Any]]):
    """Rank `rank`'s share of each global batch that a user's batch sampler draws."""

    def __init__(self, batches: Sampler[list[Any]], rank: int, size: int, seed: int) -> None:
        self.batches, self.rank, self.size, self.seed, self.epoch = batches, rank, size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + self.epoch)
            batches = list(self.batches)
        for batch in batches:
            if len(batch) % self.size:
                raise ArgumentError(_uneven(len(batch), self.size, "a batch of batch_sampler"))
            yield batch[self.rank :: self.size]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class RankStream(IterableDataset[Any]):
    """Rank `rank`'s share of a stream: of every `size` samples, the one at its place; an uneven rest is left out."""

    def __init__(self, stream: IterableDataset[Any], rank: int, size: int) -> None:
        self.stream, self.rank, self.size = stream, rank, size

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.stream)
        while len(group := list(itertools.islice(samples, self.size))) == self.size:
            yield group[self.rank]


def make_loader(
    dataset: Dataset[Any],
    arguments: Mapping[str, Any],
    rank: int,
    size: int,
    *,
    sampler_cls: Callable[..., Sampler[Any]] | None = None,
    seed: int = 0,
    device_type: str = "cpu",
) -> Loader:
    """This rank's loader over its share of `dataset`.

    Args:
        arguments: DataLoader's own, where `batch_size` is the global batch; without one each rank draws one sample
            at a time. Never changed.
        rank, size: this process's place among the ranks that see different samples.
        sampler_cls: a class with DistributedSampler's interface, used instead of it.

    Raises:
        ArgumentError: an unknown argument, a batch that does not divide by `size`, or a dataset without a full batch.
    """
    arguments = dict(arguments)
    for name in arguments:
        if name not in _LOADER_ARGUMENTS:
            raise ArgumentError(
                f"dataloader_args has {name!r}, which DataLoader does not take; "
                f"{near_miss(str(name), _LOADER_ARGUMENTS)}"
            )
    arguments.setdefault("pin_memory", device_type == "cuda")
    if arguments.get("batch_sampler") is not None:
        batches = arguments["batch_sampler"]
        arguments["batch_sampler"] = batches if size == 1 else RankBatches(batches, rank, size, seed)
        return Loader(dataset, **arguments)
    arguments["batch_size"] = _local_batch(arguments.get("batch_size"), size)
    if isinstance(dataset, IterableDataset):
        return Loader(dataset if size == 1 else RankStream(dataset, rank, size), **arguments)
    _need_a_batch(dataset, arguments, size)
    arguments["sampler"] = _sampler(dataset, arguments, rank, size, sampler_cls, seed)
    arguments.pop("shuffle", None)
    return Loader(dataset, **arguments)


def _local_batch(batch_size: Any, size: int) -> int:
    if batch_size is None:
        return 1
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ArgumentError(
            f"dataloader_args has batch_size {batch_size!r}; it is the number of samples of a global batch"
        )
    if batch_size % size:
        raise ArgumentError(_uneven(batch_size, size, "batch_size"))
    return batch_size // size


def _uneven(num: int, size: int, what: str) -> str:
    return (
        f"{what} is {num}, the global batch, which does not divide over {size} data-parallel processes; "
        f"use {num // size * size or size} or {-(-num // size) * size}"
    )


def _need_a_batch(dataset: Dataset[Any], arguments: Mapping[str, Any], size: int) -> None:
    num_samples = len(dataset)  # type: ignore[arg-type]
    needed = arguments["batch_size"] * size if arguments.get("drop_last") else 1
    if num_samples < needed:
        raise ArgumentError(
            f"the dataset has {num_samples} samples and the global batch is {needed}"
            f"{' with drop_last' if arguments.get('drop_last') else ''}, so the loader would be empty; "
            "use a smaller batch_size or more data"
        )


def _sampler(
    dataset: Dataset[Any],
    arguments: Mapping[str, Any],
    rank: int,
    size: int,
    sampler_cls: Callable[..., Sampler[Any]] | None,
    seed: int,
) -> Sampler[Any]:
    given, shuffle = arguments.get("sampler"), bool(arguments.get("shuffle"))
    if given is not None:
        if shuffle:
            raise ArgumentError(
                "dataloader_args has both sampler and shuffle; the sampler decides the order, leave shuffle out"
            )
        shares_itself = hasattr(given, "num_replicas")
        return given if size == 1 or shares_itself else RankSampler(given, rank, size, seed)
    make = sampler_cls or DistributedSampler
    return make(dataset, num_replicas=size, rank=rank, shuffle=shuffle, seed=seed)


def to_device(data: Any, device: torch.device | str) -> Any:
    """`data` with every tensor in nested dicts, lists, tuples and dataclass-like mappings moved to `device`."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, Mapping):
        moved = {key: to_device(value, device) for key, value in data.items()}
        return moved if type(data) is dict else _like(data, moved)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(item, device) for item in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(item, device) for item in data)
    if hasattr(data, "to") and callable(data.to):
        return data.to(device)
    return data


def _like(data: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """A mapping of `data`'s class where that can be made of a dict (transformers' BatchEncoding can), else a dict."""
    try:
        return type(data)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved
