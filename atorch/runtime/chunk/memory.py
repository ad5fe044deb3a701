"""The memory of chunks, and what each process keeps of them between the steps.

A chunk is flat: parameters of one dtype side by side. It is kept up to three times, as in PatrickStar (Fang et al.,
arXiv 2108.05818), each copy a tensor of its own: `compute`, in the dtype that operations see and the only one that
travels; `master`, which the optimizer steps, in fp32 (the very tensor `compute` where no wider copy is kept); and
`gradient`, in the dtype of `compute`. With n processes each keeps one n-th of every copy, its share: an equal slice of
the flat chunk, which cuts through parameters wherever it falls (ZeRO-3, arXiv 1910.02054).

Where there is a `master`, gradients may lie in the place of `compute`, as PatrickStar has them: 14 bytes a parameter
with Adam instead of 16. A gradient comes when its parameter is not needed any more, and the optimizer's step brings the
parameter back. There is one pass a step then, and nothing is accumulated.

Chunks lie on the host, or for good on the device where that one steps them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.errors import ArgumentError
from atorch.runtime.chunk.memory_ledger import MemoryLedger
from atorch.runtime.chunk.transfer import locked, put

if TYPE_CHECKING:
    from atorch.runtime.chunk.schedule.layout import ChunkLayout, ChunkSlot, ChunkSpec

Keep = Callable[[Tensor, Tensor, bool], object]
"""Copies the second tensor into the first, or adds it."""

HALVES = (torch.float16, torch.bfloat16)


class ChunkForm(NamedTuple):
    """Shape and strides of a parameter, in elements. It fills its slot: its elements lie without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> ChunkForm:
        """The form of `tensor`, or the nearest one without gaps."""
        return ChunkForm(tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride())

    def flat(self, value: Tensor) -> Tensor:
        """The elements of `value` in the order in which they lie in a slot; a view where that is its own order."""
        if value.stride() != self.stride:
            value = torch.empty_strided(self.shape, self.stride, dtype=value.dtype, device=value.device).copy_(value)
        return value.as_strided((value.numel(),), (1,))


class ChunkMemory:
    """One process's part of one chunk.

    Args:
        spec: which parameters lie where in the chunk.
        forms: of its parameters, by name.
        dtype: of `compute` and `gradient`.
        device: where all of it lies.
        wide: keep an fp32 `master` beside `compute`.
        shard: this process and the number of processes that share the chunk.
        in_place: let gradients lie in the place of `compute`, where there is a `master`.
        pinned: lock what travels in memory, so that copies to a CUDA device run beside computation.
        tier: where the bytes of all copies are entered, also while there is no gradient yet; without the optimizer's.
    """

    def __init__(
        self,
        spec: ChunkSpec,
        forms: Mapping[str, ChunkForm],
        dtype: torch.dtype,
        device: torch.device,
        *,
        wide: bool = False,
        shard: tuple[int, int] = (0, 1),
        in_place: bool = False,
        pinned: bool = False,
        tier: MemoryLedger | None = None,
    ) -> None:
        rank, size = shard
        if spec.numel % size:
            raise ArgumentError(f"chunk {spec.index} has {spec.numel} elements: pad it to a multiple of {size} shares")
        length = spec.numel // size
        self.spec, self.forms, self.dtype, self.device = spec, forms, dtype, device
        self.share = slice(rank * length, (rank + 1) * length)
        self.has_gradient: set[str] = set()
        self.gradient: Tensor | None = None
        self.is_stepped = False  # in backward, before the loop's step: nobody may look meanwhile
        self.writes = 0  # how often `compute` has changed: a copy that was made at another count is stale
        self._in_place, self._overwritten = in_place and wide, False
        self._pinned = pinned
        self.tier = MemoryLedger("host memory") if tier is None else tier
        copies = 2 if spec.trainable and not self._in_place else 1
        self.num_bytes = length * (copies * dtype.itemsize + (4 if wide else 0))
        self.tier.take(self.num_bytes, f"chunk {spec.index}")
        self.compute = self._empty(dtype)
        self.master = torch.empty(length, dtype=torch.float32, device=device) if wide else self.compute
        self._changed()

    def within(self, slot: ChunkSlot) -> slice:
        """The elements of the slot's parameter, counted within it, that lie in this share; empty where none do."""
        start, stop = (max(edge - slot.offset, 0) for edge in (self.share.start, self.share.stop))
        return slice(min(start, slot.numel), min(stop, slot.numel))

    def part(self, flat: Tensor, slot: ChunkSlot) -> Tensor | None:
        """The part of a slot in `flat`, a share: all, shaped like the parameter; else a 1-D piece, or None."""
        self.need_whole()
        held = self.within(slot)
        offset = slot.offset + held.start - self.share.start
        if held == slice(0, slot.numel) and 0 <= offset <= len(flat):
            form = self.forms[slot.name]
            return flat[offset : offset + slot.numel].as_strided(form.shape, form.stride)
        return flat[offset : offset + held.stop - held.start] if held.start < held.stop else None

    def whole(self, flat: Tensor, slot: ChunkSlot) -> Tensor:
        """The slot's parameter as a view of `flat`, all elements of the chunk."""
        form = self.forms[slot.name]
        return flat[slot.offset : slot.offset + slot.numel].as_strided(form.shape, form.stride)

    @torch.no_grad()
    def write(self, slot: ChunkSlot, value: Tensor) -> None:
        """Let the slot's parameter have `value`, a whole one of its shape, as far as it lies in this share."""
        for flat in {id(flat): flat for flat in (self.master, self.compute)}.values():
            if flat is self.master or not self._overwritten:
                self._put(flat, slot, value)
        self._changed()

    @torch.no_grad()
    def updated(self) -> None:
        """The optimizer has written `master`: round it into `compute`. Gradients in its place are gone."""
        if self.master is not self.compute:
            self.compute.copy_(self.master)
        if self._overwritten:
            self._overwritten = False
            self.has_gradient.clear()
        self._changed()

    @torch.no_grad()
    def follow(self) -> None:
        """Let the other copy have what somebody wrote into `master`, or else `compute`, since they were last alike.

        A master that, rounded, equals what was written keeps its value.
        """
        self.need_whole()
        if self._overwritten:  # until the step, the master is all there is
            return
        master, compute = self._seen
        if self.master._version != master:
            self.updated()
        elif self.compute._version != compute:
            same = self.master.to(self.dtype) == self.compute
            self.master.copy_(torch.where(same, self.master, self.compute.to(torch.float32)))
            self._changed()

    def need_whole(self) -> None:
        """Raise where the chunk is ahead of others, which the loop's step has not stepped yet.

        Raises:
            ArgumentError: with what such a loop may not do.
        """
        if self.is_stepped:
            raise ArgumentError(
                f"{self.spec.slots[0].name} and its chunk were stepped in backward (chunk's step_in_backward), and "
                "before optim.step() something looked at them: a second backward or forward pass, clipping, zero_grad, "
                "p.grad or a parameter. The step cannot be undone: leave out step_in_backward"
            )

    def prepare(self) -> None:
        """A pass begins, which reads `compute`.

        Raises:
            ArgumentError: gradients lie there, and wait for a step.
        """
        self.need_whole()
        if self._overwritten and self.has_gradient:
            raise ArgumentError(
                f"gradients of chunk {self.spec.index} lie in the place of its parameters, and another pass began "
                "before they were stepped on or cleared: call optim.step() or optim.zero_grad() after every backward, "
                "or keep gradients beside the parameters"
            )
        if self._overwritten:
            self.updated()
        self.follow()

    @torch.no_grad()
    def accumulate(self, slot: ChunkSlot, gradient: Tensor, keep: Keep = put) -> None:
        """Keep the gradient of the slot's parameter, a whole one, or add it to the one that is kept.

        Args:
            keep: copies the second into the first, or adds it to that; until it is done, nobody may look.

        Raises:
            ArgumentError: the gradient is sparse, or the parameter was frozen when the chunks were made.
        """
        if not self.spec.trainable:
            raise ArgumentError(
                f"{slot.name} has a gradient and was frozen when the chunks were made: let it require gradients "
                "before, and freeze it afterwards"
            )
        if gradient.layout != torch.strided:
            raise ArgumentError(
                f"{slot.name} has a sparse gradient; chunks keep dense ones: make its embedding with sparse=False"
            )
        self._put(self._gradient([slot.name]), slot, gradient, add=slot.name in self.has_gradient, keep=keep)
        self.has_gradient.add(slot.name)

    @torch.no_grad()
    def accumulate_part(self, slot: ChunkSlot, part: Tensor) -> None:
        """The same with the part of the gradient that lies in this share, as `gradient_of` gave it."""
        kept = self.part(self._gradient([slot.name]), slot)
        if kept is None or kept.shape != part.shape:
            raise ArgumentError(f"{slot.name} was given a gradient of shape {tuple(part.shape)}, which is not its own")
        put(kept, part, slot.name in self.has_gradient)
        self.has_gradient.add(slot.name)

    @torch.no_grad()
    def accumulate_share(self, share: Tensor, names: Iterable[str], keep: Keep = put) -> None:
        """The same with this process' share of the whole chunk's gradient, in which `names` have one."""
        fresh = set(names)
        kept = self._gradient(fresh)
        for slot in self.spec.slots:
            part, new = self.part(kept, slot), self.part(share, slot)
            if slot.name in fresh and part is not None and new is not None:
                keep(part, new, slot.name in self.has_gradient)
        self.has_gradient |= fresh

    def gradient_of(self, slot: ChunkSlot) -> Tensor | None:
        """The part of the slot's gradient that this process keeps; None where there is none."""
        if self.gradient is None or slot.name not in self.has_gradient:
            return None
        return self.part(self.gradient, slot)

    def gradients(self) -> Iterator[Tensor]:
        """The parts of all gradients that this process keeps."""
        for slot in self.spec.slots:
            part = self.gradient_of(slot)
            if part is not None:
                yield part

    def _put(self, flat: Tensor, slot: ChunkSlot, value: Tensor, add: bool = False, keep: Keep = put) -> None:
        part, held = self.part(flat, slot), self.within(slot)
        if part is None:
            return
        if held.stop - held.start < slot.numel:
            value = self.forms[slot.name].flat(value)[held]
        keep(part, value, add)

    def _gradient(self, names: Iterable[str]) -> Tensor:
        if self.gradient is None:
            self.gradient = self.compute if self._in_place else self._empty(self.dtype)
        if self._in_place:
            if again := self.has_gradient.intersection(names):
                raise ArgumentError(
                    f"{min(again)} has a second gradient, and the first one lies in the place of the parameter: step "
                    "after every backward, or keep gradients beside the parameters"
                )
            self.follow()
            self._overwritten = True
        return self.gradient

    def _changed(self) -> None:
        self.writes += 1
        self._seen = self.master._version, self.compute._version

    def _empty(self, dtype: torch.dtype) -> Tensor:
        numel = self.share.stop - self.share.start
        if self._pinned and numel:
            return locked(numel, dtype, self)
        return torch.empty(numel, dtype=dtype, device=self.device)


class ChunkSet:
    """The chunks of a model.

    They take the parameters' values, one after the other, and the parameters let go of theirs: at no time is there
    more than the model and one chunk. A parameter then holds no memory, but `stand_in`.

    Args:
        layout: which parameters lie in which chunk.
        parameters: those that the layout names.
        dtype: of floating-point compute copies; None for each parameter's own.
        wide: keep fp32 masters of trainable parameters whose compute copy has 16 bits.
        values: what parameters were before somebody rounded them to 16 bits; those taken are removed.
        in_place: let gradients lie in the place of 16-bit compute copies that have masters.
        group: the processes that share every chunk; None for this one alone.
        device: the one that computes.
        on_device: indices of the chunks that lie there for good.
        host: where the bytes on the host are entered.
        device_tier: where those of `on_device` are.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        parameters: Mapping[str, nn.Parameter],
        *,
        dtype: torch.dtype | None = None,
        wide: bool = True,
        values: MutableMapping[Tensor, Tensor] | None = None,
        in_place: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        on_device: Collection[int] = (),
        host: MemoryLedger | None = None,
        device_tier: MemoryLedger | None = None,
    ) -> None:
        self.layout, self.group, self.device = layout, group, torch.device(device)
        self.on_device = frozenset(on_device)
        self.host = MemoryLedger("host memory") if host is None else host
        self.device_tier = MemoryLedger("device memory") if device_tier is None else device_tier
        self.reduced: set[str] = set()
        """Parameters whose gradient has come from all processes that share it, since the last step."""
        self._places: dict[Tensor, tuple[ChunkMemory, ChunkSlot]] = {}
        chunks = []
        for spec in layout.chunks:
            mine = {slot.name: parameters[slot.name] for slot in spec.slots}
            memory = self._memory(spec, mine, dtype, wide, in_place, spec.index in on_device)
            for slot in spec.slots:
                self._take(mine[slot.name], memory, slot, {} if values is None else values)
            chunks.append(memory)
        self.chunks = tuple(chunks)

    @property
    def num_shares(self) -> int:
        """The number of processes that share every chunk."""
        return 1 if self.group is None else self.group.size()

    def place(self, parameter: Tensor) -> tuple[ChunkMemory, ChunkSlot] | None:
        """The place of a parameter; None for one that is not managed."""
        return self._places.get(parameter)

    def need_whole(self) -> None:
        """Raise ArgumentError where some chunks are ahead of others."""
        for memory in self.chunks:
            memory.need_whole()

    def parameters(self) -> Iterator[tuple[Tensor, ChunkSlot]]:
        """The managed parameters, and where they lie in their chunks."""
        return ((parameter, slot) for parameter, (_, slot) in self._places.items())

    def _memory(
        self,
        spec: ChunkSpec,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype | None,
        wide: bool,
        in_place: bool,
        on_device: bool,
    ) -> ChunkMemory:
        own = next(iter(parameters.values())).dtype
        compute = own if dtype is None or not own.is_floating_point else dtype
        return ChunkMemory(
            spec,
            {name: ChunkForm.of(parameter) for name, parameter in parameters.items()},
            compute,
            self.device if on_device else torch.device("cpu"),
            wide=wide and spec.trainable and compute in HALVES,
            shard=(0 if self.group is None else self.group.rank(), self.num_shares),
            in_place=in_place,
            pinned=self.device.type == "cuda" and not on_device,
            tier=self.device_tier if on_device else self.host,
        )

    def _take(
        self,
        parameter: nn.Parameter,
        memory: ChunkMemory,
        slot: ChunkSlot,
        values: MutableMapping[Tensor, Tensor],
    ) -> None:
        if parameter.is_meta:
            raise ArgumentError(f"{slot.name} is on the meta device and has no value; materialise the model first")
        value = values.pop(parameter, None)
        if value is None or not torch.equal(value.to(parameter.device, parameter.dtype), parameter.detach()):
            value = parameter.detach()  # never wider, or changed since it was rounded
        memory.write(slot, value)
        parameter.data = stand_in(parameter.shape, memory.dtype, self.device)
        self._places[parameter] = memory, slot


def stand_in(shape: Collection[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of that shape and of one element in memory: no number, so that nothing computed from it looks right."""
    nothing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nothing, dtype=dtype, device=device).expand(tuple(shape))
