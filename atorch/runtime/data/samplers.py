"""The order of samples: batches of indices, and each rank's share of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError

AT_ONCE = 2**16  # indices drawn, or computed, at once


class WithoutFirst:
    """Batches of indices without the first ones, which are left out once."""

    def __init__(self, batches: Any, start: int) -> None:
        self._batches, self._start = batches, start

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._indices = iter(self._batches)
        return self

    def __next__(self) -> Any:
        self.begin()
        return next(self._indices)

    def begin(self) -> None:
        """Leave out the first ones; their sampler draws its seed with the first."""
        for _ in itertools.islice(self._indices, self._start):
            pass
        self._start = 0


class LargeSampler(DistributedSampler[Any]):
    """DistributedSampler for datasets whose indices are too many to list: the order is computed, not stored."""

    def __iter__(self) -> Iterator[int]:
        num_all: int = len(self.dataset)  # type: ignore[arg-type]
        order = Permutation(num_all, self.seed + self.epoch) if self.shuffle else None
        for start in range(0, self.num_samples, AT_ONCE):
            turns = np.arange(start, min(start + AT_ONCE, self.num_samples), dtype=np.int64)
            places = (self.rank + self.num_replicas * turns) % num_all  # pads by wrapping around to the first samples
            yield from (places if order is None else order(places)).tolist()


class Permutation:
    """A random permutation of `num` numbers, of which any part can be computed by itself.

    A Feistel network over the next even power of two, reapplied to results outside the range (Black and Rogaway 2002,
    "Ciphers with Arbitrary Finite Domains"). Its rounds hash with the finalizer of splitmix64 (Steele et al. 2014).
    """

    ROUNDS = 6

    def __init__(self, num: int, seed: int) -> None:
        self._num, self._half = num, np.uint64(max(1, -(-(num - 1).bit_length() // 2)))
        self._keys = np.random.SeedSequence(seed).generate_state(self.ROUNDS, np.uint64)

    def __call__(self, places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        numbers = self._through(places.astype(np.uint64))
        while len(outside := np.flatnonzero(numbers >= self._num)):
            numbers[outside] = self._through(numbers[outside])
        return numbers.astype(np.int64)

    def _through(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = numbers >> self._half, numbers & mask
        for key in self._keys:
            left, right = right, left ^ (_hashed(right ^ key) & mask)
        return (left << self._half) | right


def _hashed(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: np.ndarray[Any, Any] = numbers ^ (numbers >> np.uint64(31))
    return hashed


class RankShare(Sampler[Any]):
    """Base of this rank's shares of another sampler, which is seeded with `seed + epoch`: all ranks see one order."""

    def __init__(self, sampler: Sampler[Any], rank: int, size: int, seed: int, drop_last: bool = False) -> None:
        self.sampler, self.rank, self.size, self.seed, self.epoch = sampler, rank, size, seed, 0
        self.drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class RankSampler(RankShare):
    """Rank `rank`'s share of another sampler's indices: every `size`-th index, equally many on each rank.

    Pads a remainder that does not fill all ranks with the first indices, as DistributedSampler does, or drops it with
    `drop_last`.
    """

    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        indices = itertools.chain.from_iterable(_drawn(self.sampler, self.seed + self.epoch))
        while group := list(itertools.islice(indices, self.size)):
            first = first or group
            if len(group) < self.size and self.drop_last:
                return
            yield (group + list(itertools.islice(itertools.cycle(first), self.size - len(group))))[self.rank]

    def __len__(self) -> int:
        num: int = len(self.sampler)  # type: ignore[arg-type]
        return num // self.size if self.drop_last else -(-num // self.size)


class RankBatches(RankShare):
    """Rank `rank`'s share of each global batch that a user's batch sampler draws."""

    def __iter__(self) -> Iterator[list[Any]]:
        for batches in _drawn(self.sampler, self.seed + self.epoch):
            for batch in batches:  # check all of them first: an uneven last one should not fail late in an epoch
                if len(batch) % self.size:
                    raise ArgumentError(uneven(len(batch), self.size, "a batch of batch_sampler"))
            for batch in batches:
                yield batch[self.rank :: self.size]

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


def _drawn(sampler: Sampler[Any], seed: int) -> Iterator[list[Any]]:
    """Chunks of the draws of `sampler`, with Python's, numpy's and torch's generators seeded equally on every rank.

    Takes smaller chunks of a sampler without a length, which may be endless.
    """
    at_once = AT_ONCE if _is_sized(sampler) else 1024
    state, draws = None, iter(())
    while True:
        with preserved_rng():
            if state is None:
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.manual_seed(seed)
                draws = iter(sampler)
            else:
                random.setstate(state[0])
                np.random.set_state(state[1])
                torch.set_rng_state(state[2])
            chunk = list(itertools.islice(draws, at_once))
            state = random.getstate(), np.random.get_state(), torch.get_rng_state()
        if not chunk:
            return
        yield chunk


def _is_sized(sampler: Sampler[Any]) -> bool:
    """True if a sampler has a length; torch's BatchSampler has one if its inner sampler has."""
    try:
        len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return False
    return True


def uneven(num: int, size: int, what: str) -> str:
    near = sorted({num // size * size, -(-num // size) * size} - {0})
    fewer = ", or fewer processes" if num < size else ""
    return (
        f"{what} is {num}, the global batch, which does not divide over {size} data-parallel processes; "
        f"use {' or '.join(map(str, near))}{fewer}"
    )
