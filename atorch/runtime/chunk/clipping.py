"""The norm of all gradients of a model in chunks, and clipping by it.

A chunk's gradients are parts of parameters where processes share the chunk: their powers are summed over its group, as
those of any other sharded gradient (`runtime/clip`). Padding never counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch.distributed as dist
from torch import Tensor

from atorch.runtime.chunk.memory import ChunkSet
from atorch.runtime.clip import Key, by_sharding, clip_sharded


def clip_chunked(
    chunks: ChunkSet,
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    over: Sequence[dist.ProcessGroup] = (),
    parts: Mapping[Tensor, Key] = MappingProxyType({}),
    counted_elsewhere: Collection[Tensor] = (),
) -> Tensor:
    """Scale the gradients of `parameters` down, in place, where their norm exceeds `max_norm`; returns the norm before.

    As `clip.clip_grads`; of those in `chunks` it takes what the chunks keep. On the chunks' device; all ranks call it.
    """
    unique = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    elsewhere = set(map(id, counted_elsewhere))
    counted = _kept(chunks, [each for each in unique if id(each) not in elsewhere], parts)
    copies = _kept(chunks, [each for each in unique if id(each) in elsewhere], parts)
    only_scaled = [gradient for gradients in copies.values() for gradient in gradients]
    return clip_sharded(counted, max_norm, norm_type, chunks.device, over, only_scaled)


def _kept(chunks: ChunkSet, parameters: Iterable[Tensor], parts: Mapping[Tensor, Key]) -> dict[Key, list[Tensor]]:
    """Gradients by what they are spread over, in the parameters' order."""
    shared: Key = () if chunks.group is None else (chunks.group,)
    found: dict[Key, list[Tensor]] = {}
    for parameter in parameters:
        if (place := chunks.place(parameter)) is None:
            spread = by_sharding([parameter], parts)
        else:
            kept = place[0].gradient_of(place[1])
            spread = {(*shared, *parts.get(parameter, ())): [] if kept is None else [kept]}
        for key, gradients in spread.items():
            found.setdefault(key, []).extend(gradients)
    return found
