"""Random number generators: their states saved and restored, and streams that differ between the ranks of a group.

Dropout of split tensors must differ between ranks; dropout of tensors that every rank holds whole must not. A region's
stream is seeded from the state at its entry, so that a recomputation draws the same numbers.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RandomState:
    """States of Python's, numpy's and torch's generators (CPU, CUDA)."""

    python: Any
    numpy: Any
    host: torch.Tensor
    devices: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls, only: torch.device | None = None) -> RandomState:
        """The current states; `only`: those of the host and this device, whatever its index."""
        if only is None:
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        else:
            cuda = [torch.cuda.get_rng_state(only)] if only.type == "cuda" else []
        return cls(random.getstate(), _of_numpy(), torch.get_rng_state(), tuple(cuda))

    def restore(self, only: torch.device | None = None) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        _numpy_once.cache_clear()
        torch.set_rng_state(self.host)
        for number, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, number if only is None else only)

    def as_plain(self) -> dict[str, Any]:
        """The states as numbers, texts and tensors."""
        (version, words, gauss), (kind, keys, *rest) = self.python, self.numpy
        return {
            "python": [version, torch.tensor(words), gauss],
            "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
            "torch": self.host,
            "devices": list(self.devices),
        }

    @classmethod
    def of_plain(cls, saved: Mapping[str, Any]) -> RandomState:
        """The states of `as_plain`; of CUDA devices, those that there are."""
        (version, words, gauss), (kind, keys, *rest) = saved["python"], saved["numpy"]
        numpy, devices = (kind, keys.numpy().astype(np.uint32), *rest), saved["devices"][: torch.cuda.device_count()]
        return cls((version, tuple(words.tolist()), gauss), numpy, saved["torch"], tuple(devices))

    def is_same(self, other: RandomState) -> bool:
        states, others = (self.host, *self.devices), (other.host, *other.devices)
        return (
            self.python == other.python
            and (self.numpy is other.numpy or all(map(np.array_equal, self.numpy, other.numpy)))
            and len(states) == len(others)
            and all(map(torch.equal, states, others))
        )


def _of_numpy() -> Any:
    """numpy's state. Reading it takes 0.25 ms, so it is cached until the memory of the generator changes."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state()
    state: Any = _numpy_once(ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES))
    # numpy keeps a second, already drawn Gaussian outside that memory (state[3] is set): then the cache may be stale.
    return np.random.get_state() if state[3] else state


_MT19937_BYTES = 4 * 625  # 624 words of state and the position among them


@functools.lru_cache(maxsize=1)
def _numpy_once(memory: bytes) -> Any:
    return np.random.get_state()


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restores all generators at the end, as if nothing had been drawn inside."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.restore()


_STEP = 4  # CUDA's generators count in fours


class RankStream:
    """The default generator of a device, with a stream of this rank's own between `enter` and `leave`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outside: tuple[torch.Generator, torch.Tensor] | None = None

    def enter(self, device: torch.device) -> None:
        """Draw from this rank's stream from now on."""
        generator = _generator(device)
        if device.type == "cuda":  # advanced by its offset: a draw would wait for the device
            seed = generator.initial_seed() ^ (generator.get_offset() + 1) * 0x9E3779B97F4A7C15
            generator.set_offset(generator.get_offset() + _STEP)
        else:
            seed = int(torch.randint(2**62, (), device=device, generator=generator))
        self._outside = generator, generator.get_state()
        generator.manual_seed((seed + (self._rank + 1) * 0xBF58476D1CE4E5B9) % 2**63)

    def leave(self) -> None:
        """Restore the stream that all ranks share."""
        if self._outside is not None:
            generator, state = self._outside
            self._outside = None
            generator.set_state(state)


def share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of the group the first rank's random state, so that dropout of whole tensors agrees."""
    for generator in dict.fromkeys((_generator(torch.device("cpu")), _generator(device))):
        state = generator.get_state()
        dist.broadcast(state, group=group, group_src=0)
        generator.set_state(state)


def random_state(device: torch.device) -> torch.Tensor:
    return _generator(device).get_state()


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
