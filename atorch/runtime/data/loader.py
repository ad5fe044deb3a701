"""Data loaders that split each global batch evenly over the ranks that see different samples.

`batch_size` is the global batch (strong scaling): rank r of n takes every n-th sample of it. So the same arguments give
the same training on any number of ranks. Streams are sharded before they are read where that is possible (`batches`):
each rank then has batches of its own part.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError, CheckpointError, near_miss, shown
from atorch.logs import logger
from atorch.model.pytree import refilled
from atorch.runtime.data.batches import in_step, part_of
from atorch.runtime.data.samplers import LargeSampler, RankBatches, RankSampler, RankShare, WithoutFirst, uneven

LARGE = 2**24  # the most samples for torch's samplers, which list all indices: 36 bytes each on every rank
_LOADER_ARGUMENTS = frozenset(inspect.signature(DataLoader.__init__).parameters) - {"self", "dataset"}


class Loader(DataLoader[Any]):
    """A DataLoader with `set_epoch`, which reshuffles any sampler that draws its indices."""

    was_read = False
    """True once iteration has begun."""
    is_part = False
    """True if it reads a part of a stream, which may end before those of other ranks."""
    group: dist.ProcessGroup | None = None
    """Ranks that stop together with this one; all of them must iterate."""

    _epoch, _given = 0, 0  # batches given to the loop in this epoch
    _start = 0  # batches that the next iteration leaves out
    _began: torch.Tensor | None = None  # torch's random state when the epoch began
    _after: WithoutFirst | None = None  # in `_resumed`, the batches of indices that are left

    def __iter__(self) -> Any:
        self.was_read = True
        return self._counted(self._resumed() if self._start else self._begun())

    def _begun(self) -> Iterator[Any]:
        self._given, self._began = 0, torch.get_rng_state()
        return self._together(super().__iter__())

    def _resumed(self) -> Iterator[Any]:
        """The batches from `_start`; restored random states stay as they are."""
        self._given, self._start = self._start, 0
        with preserved_rng():
            if self._began is not None:  # samplers and workers draw their seeds again
                torch.set_rng_state(self._began)
            if self._must_read:
                batches = super().__iter__()
            else:
                self._after = left = WithoutFirst(super()._index_sampler, self._given)
                try:
                    batches = super().__iter__()
                finally:
                    self._after = None
                left.begin()
        return itertools.islice(self._together(batches), self._given if self._must_read else 0, None)

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches if self.group is None else in_step(batches, self.group)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._given += 1
            yield batch
        self._given = 0

    @property
    def _must_read(self) -> bool:
        """True if batches can be left out only by reading them."""
        return isinstance(self.dataset, IterableDataset) or self.batch_sampler is None

    @property
    def _index_sampler(self) -> Any:
        """The batches of indices to read, under the name by which torch asks for them."""
        return super()._index_sampler if self._after is None else self._after

    @property
    def _order(self) -> str:
        """The origin of the order of samples: "epoch" and "stream" are the same on any number of ranks."""
        if isinstance(self.dataset, IterableDataset):
            return "part" if self.is_part else "stream"
        kinds = (DistributedSampler, RankShare)
        return "epoch" if isinstance(self.sampler, kinds) or isinstance(self.batch_sampler, kinds) else "drawn"

    @property
    def _global_batch(self) -> int | None:
        holder: Any = self.dataset if isinstance(self.dataset, StreamShard) else self.sampler
        num_ranks = int(getattr(holder, "num_replicas", 0) or getattr(holder, "size", 1))
        return None if self.batch_size is None else self.batch_size * num_ranks

    @property
    def _length(self) -> int | None:
        dataset: Any = self.dataset
        return len(dataset) if hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset) else None

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, the batches that the loop was given in it, and the random state that it began with.

        Batches are global, so a position means the same on any number of processes.
        """
        return {
            "epoch": self._epoch, "given": self._given, "batch_size": self._global_batch, "order": self._order,
            "began": self._began, "length": self._length,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin at a position of `state_dict`; on other processes `began` is None.

        Raises:
            CheckpointError: within an epoch, global batches have another size, or samples another order.
        """
        if state["given"] and state["batch_size"] != self._global_batch:
            raise CheckpointError(
                f"the checkpoint was saved within an epoch of global batches of {state['batch_size']} samples, and "
                f"they have {self._global_batch} now: samples would be seen twice or never. Use the same batch_size"
            )
        if state["given"] and state.get("length", self._length) != self._length:
            logger.warning(
                "the checkpoint was saved within an epoch of %s samples, and there are %s now: some may be seen "
                "twice or never in this epoch", state["length"], self._length,
            )  # fmt: skip
        is_same = state["order"] == self._order and (state["began"] is not None or self._order in ("epoch", "stream"))
        if state["given"] and not is_same:
            raise CheckpointError(
                "the checkpoint was saved within an epoch whose samples came in another order: a sampler of your "
                "own, or a stream's parts, depends on the number of processes. Resume on as many processes, or from "
                "the end of an epoch"
            )
        if state["epoch"] != self._epoch:
            self.set_epoch(state["epoch"])
        self._start = self._given = state["given"]
        self._began = state["began"]

    def set_epoch(self, epoch: int) -> None:
        """Set the order of epoch `epoch`: the same in every run, different in each epoch."""
        if epoch != self._epoch:
            self._epoch, self._given, self._start = epoch, 0, 0
        drawers: tuple[Any, ...] = (self.sampler, self.batch_sampler, self.dataset)
        for drawer in drawers:
            if hasattr(drawer, "set_epoch"):
                drawer.set_epoch(epoch)


class StreamShard(IterableDataset[Any]):
    """Rank `rank`'s share of a stream: every `size`-th sample; drops a remainder that does not fill all ranks."""

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
        arguments: those of DataLoader, but `batch_size` is the global batch; without one each rank draws one sample
            at a time. None means that the dataset's samples are full batches, which only a single rank can take.
            Never changed.
        rank, size: this process's index among the ranks that see different samples, and their number.
        sampler_cls: a class with DistributedSampler's interface, used instead of it.

    Raises:
        ArgumentError: an unknown argument, a batch that does not divide by `size`, a sampler that contradicts other
            arguments, or a dataset without a full batch.
    """
    arguments = dict(arguments)
    for name in arguments:
        if name not in _LOADER_ARGUMENTS:
            meant = "give it as dataset" if name == "dataset" else near_miss(str(name), _LOADER_ARGUMENTS)
            raise ArgumentError(f"dataloader_args has {name!r}, which is not a setting of a DataLoader; {meant}")
    for name in ("shuffle", "drop_last", "persistent_workers"):
        if not isinstance(arguments.get(name) or False, int):
            raise ArgumentError(f"dataloader_args has {name} {arguments[name]!r}; it is True or False")
    _check_order(dataset, arguments, sampler_cls)
    arguments.setdefault("pin_memory", device_type == "cuda")
    if arguments.get("batch_sampler") is not None:
        batches = arguments["batch_sampler"]
        arguments["batch_sampler"] = batches if size == 1 else RankBatches(batches, rank, size, seed)
        return _made(dataset, arguments)
    arguments["batch_size"] = _local_batch(arguments.get("batch_size", size), size)
    if isinstance(dataset, IterableDataset):
        return _of_stream(dataset, arguments, rank, size)
    _need_a_batch(dataset, arguments, size)
    arguments["sampler"] = _sampler(dataset, arguments, rank, size, sampler_cls, seed)
    arguments.pop("shuffle", None)
    return _made(dataset, arguments)


def _of_stream(stream: IterableDataset[Any], arguments: dict[str, Any], rank: int, size: int) -> Loader:
    part = None if size == 1 else part_of(stream, rank, size)
    if part is None:
        return _made(stream if size == 1 else StreamShard(stream, rank, size), arguments)
    loader = _made(part, {**arguments, "drop_last": True})  # the last batches of ranks would have different sizes
    loader.is_part = True
    return loader


def _made(dataset: Dataset[Any], arguments: Mapping[str, Any]) -> Loader:
    for name in ("collate_fn", "worker_init_fn"):
        if arguments.get(name) is not None and not callable(arguments[name]):
            raise ArgumentError(f"dataloader_args has {name} {shown(arguments[name])}, which cannot be called")
    try:
        return Loader(dataset, **arguments)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"no DataLoader can be made with these dataloader_args: {error}") from error


def shares_out(loader: object, rows: int) -> bool:
    """True if a batch of `rows` rows is a share: from a loader of `make_loader` that gives all ranks equally many."""
    if not isinstance(loader, Loader) or not loader.was_read:
        return False
    if isinstance(loader.batch_sampler, RankBatches):
        return True
    is_stream = loader.is_part or isinstance(loader.dataset, StreamShard)
    shares = is_stream or isinstance(loader.sampler, (DistributedSampler, RankSampler))
    return shares and rows == loader.batch_size  # a collate_fn that packs samples changes the number of rows


def _check_order(dataset: Any, arguments: Mapping[str, Any], sampler_cls: object) -> None:
    """Check that only one argument decides the order of the samples."""
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ArgumentError(
            f"dataset is a {type(dataset).__name__}; it needs __getitem__ and __len__, or to be an IterableDataset"
        )
    deciding = [name for name in ("sampler", "batch_sampler") if arguments.get(name) is not None]
    if sampler_cls is not None and (deciding or is_stream):
        other = deciding[0] if deciding else "an IterableDataset"
        raise ArgumentError(f"distributed_sampler_cls is given with {other}, and both decide the order; give one")
    if deciding and arguments.get("shuffle"):
        raise ArgumentError(
            f"dataloader_args has both {deciding[0]} and shuffle; the sampler decides the order, so leave shuffle out"
        )


def _local_batch(batch_size: Any, size: int) -> int | None:
    if batch_size is None:
        if size > 1:
            raise ArgumentError(
                "dataloader_args has batch_size None, so that the dataset's samples are whole batches, which cannot "
                f"be split over {size} data-parallel processes; let the loader make batches of batch_size samples"
            )
        return None
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ArgumentError(
            f"dataloader_args has batch_size {batch_size!r}; it is the number of samples of a global batch"
        )
    if batch_size % size:
        raise ArgumentError(uneven(batch_size, size, "batch_size"))
    return batch_size // size


def _need_a_batch(dataset: Dataset[Any], arguments: Mapping[str, Any], size: int) -> None:
    num_samples = len(dataset)  # type: ignore[arg-type]
    needed = (arguments["batch_size"] or 1) * size if arguments.get("drop_last") else 1
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
    sampler, drop_last = arguments.get("sampler"), bool(arguments.get("drop_last"))
    if sampler is None:
        shuffle = bool(arguments.get("shuffle"))
        if sampler_cls is not None:
            made = sampler_cls(dataset, num_replicas=size, rank=rank, shuffle=shuffle, seed=seed)
            if not hasattr(made, "__iter__"):
                raise ArgumentError(f"distributed_sampler_cls returned {shown(made)}; it returns a sampler of indices")
            return made
        # The sampler must drop too: if it padded, samples that fill no batch might make one more batch.
        kind = LargeSampler if len(dataset) > LARGE else DistributedSampler  # type: ignore[arg-type]
        return kind(dataset, num_replicas=size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
    shares = getattr(sampler, "num_replicas", None)
    if shares is None:
        return sampler if size == 1 else RankSampler(sampler, rank, size, seed, drop_last)
    if (shares, getattr(sampler, "rank", rank)) != (size, rank):
        raise ArgumentError(
            f"the sampler in dataloader_args is for rank {getattr(sampler, 'rank', rank)} of {shares}, but this "
            f"process is {rank} of {size} that see different samples; let auto_accelerate divide the samples: give the "
            "class as distributed_sampler_cls"
        )
    return sampler  # type: ignore[no-any-return]


def to_device(data: Any, device: torch.device | str) -> Any:
    """Move every tensor in nested dicts, lists, tuples and dataclass-like mappings to `device`."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=torch.device(device).type != "cpu")  # host code may read copies at once
    if isinstance(data, Mapping):
        return refilled(data, {key: to_device(value, device) for key, value in data.items()})
    if hasattr(data, "to") and callable(data.to):  # also of a PackedSequence, a tuple whose lengths stay on the CPU
        return data.to(device)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(item, device) for item in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(item, device) for item in data)
    return data
