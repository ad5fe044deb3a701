"""Random numbers that differ between the ranks of a group inside a region, and agree outside of it.

Dropout of split tensors must differ between ranks; dropout of tensors that every rank holds whole must not. A region's
stream is seeded from the state at its entry, so that a recomputation draws the same numbers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

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
