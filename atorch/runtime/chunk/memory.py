"""The memory of chunks, and the share of it that each process keeps between steps.

A chunk is flat: parameters of one dtype side by side. As in PatrickStar (Fang et al., arXiv 2108.05818), it has up to
three copies, each a separate tensor. `compute` has the dtype that operations see, and is the only copy that travels.
`master` is the fp32 copy that the optimizer steps, or `compute` itself if there is no wider copy. `gradient` has the
dtype of `compute`. Each of n processes keeps one n-th of every copy, its share. Shares are equal slices of the flat
chunk, whose edges may cut through parameters (ZeRO-3, arXiv 1910.02054).

With a `master`, gradients may overwrite `compute`, as in PatrickStar: 14 bytes a parameter with Adam instead of 16. A
gradient comes when its parameter is no longer needed, and the optimizer's step restores the parameter. Then there is
one pass a step, without accumulation.

Chunks are on the host, or pinned on the device if the device steps them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.errors import ArgumentError
from atorch.runtime.chunk.transfer import MemoryLedger, locked, put

if TYPE_CHECKING:
    from atorch.runtime.chunk.layout import ChunkLayout, ChunkSlot, ChunkSpec

Keep = Callable[[Tensor, Tensor, bool], object]
"""Copies the second tensor into the first, or adds it."""

HALVES = (torch.float16, torch.bfloat16)


class ChunkForm(NamedTuple):
    """Shape and strides of a parameter, in elements, which lie without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> ChunkForm:
        """The form of `tensor`, or the nearest form without gaps."""
        return ChunkForm(tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride())

    def flat(self, value: Tensor) -> Tensor:
        """The elements of `value` in their order in the slot; a view if `value` has that order."""
        if value.stride() != self.stride:
            value = torch.empty_strided(self.shape, self.stride, dtype=value.dtype, device=value.device).copy_(value)
        return value.as_strided((value.numel(),), (1,))


class ChunkMemory:
    """One process's part of one chunk.

    Args:
        spec: the places of parameters in the chunk.
        forms: of its parameters, by name.
        dtype: of `compute` and `gradient`.
        device: the device of all copies.
        wide: keep an fp32 `master` in addition to `compute`.
        shard: this process's rank and the number of processes that share the chunk.
        in_place: let gradients overwrite `compute`, if there is a `master`.
        pinned: page-lock the memory that travels, so that copies to a CUDA device overlap computation.
        tier: ledger for the bytes of all copies, with the gradient's from the start, without optimizer states.
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
        self.is_stepped = False  # in backward, before the loop's step; nothing may read it until then
        self.writes = 0  # changes of `compute`: a copy made at another count is stale
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
        """The range of the slot's parameter, in its own elements, that lies in this share; may be empty."""
        start, stop = (max(edge - slot.offset, 0) for edge in (self.share.start, self.share.stop))
        return slice(min(start, slot.numel), min(stop, slot.numel))

    def part(self, flat: Tensor, slot: ChunkSlot) -> Tensor | None:
        """The part of a slot in the share `flat`: the whole parameter in its shape, a 1-D piece, or None."""
        self.need_whole()
        local = self.within(slot)
        offset = slot.offset + local.start - self.share.start
        if local == slice(0, slot.numel) and 0 <= offset <= len(flat):
            form = self.forms[slot.name]
            return flat[offset : offset + slot.numel].as_strided(form.shape, form.stride)
        return flat[offset : offset + local.stop - local.start] if local.start < local.stop else None

    def whole(self, flat: Tensor, slot: ChunkSlot) -> Tensor:
        """The slot's parameter as a view of `flat`, the full chunk."""
        form = self.forms[slot.name]
        return flat[slot.offset : slot.offset + slot.numel].as_strided(form.shape, form.stride)

    @torch.no_grad()
    def write(self, slot: ChunkSlot, value: Tensor) -> None:
        """Write `value`, of the parameter's shape, into the part of the slot in this share."""
        for flat in {id(flat): flat for flat in (self.master, self.compute)}.values():
            if flat is self.master or not self._overwritten:
                self._put(flat, slot, value)
        self._changed()

    @torch.no_grad()
    def updated(self) -> None:
        """Round `master` into `compute` after an optimizer step. This overwrites in-place gradients."""
        if self.master is not self.compute:
            self.compute.copy_(self.master)
        if self._overwritten:
            self._overwritten = False
            self.has_gradient.clear()
        self._changed()

    @torch.no_grad()
    def follow(self) -> None:
        """Copy writes to `master`, or else to `compute`, since they last agreed into the other one.

        A master whose rounded value equals the written one keeps its value.
        """
        self.need_whole()
        if self._overwritten:  # until the step, only the master has the values
            return
        master, compute = self._seen
        if self.master._version != master:
            self.updated()
        elif self.compute._version != compute:
            same = self.master.to(self.dtype) == self.compute
            self.master.copy_(torch.where(same, self.master, self.compute.to(torch.float32)))
            self._changed()

    def need_whole(self) -> None:
        """Raise an ArgumentError if the chunk was stepped in backward, ahead of the loop's step."""
        if self.is_stepped:
            raise ArgumentError(
                f"{self.spec.slots[0].name} and its chunk were stepped in backward (chunk's step_in_backward), and "
                "before optim.step() something used them. That is a second pass, clipping, zero_grad, or a read of "
                "p.grad or of a parameter. The step cannot be undone: leave out step_in_backward"
            )

    def prepare(self) -> None:
        """Prepare `compute` for a pass that reads it; raises ArgumentError if gradients in it wait for a step."""
        self.need_whole()
        if self._overwritten and self.has_gradient:
            raise ArgumentError(
                f"gradients of chunk {self.spec.index} take the place of its parameters, and another pass began "
                "before they were stepped on or cleared. Call optim.step() or optim.zero_grad() after every backward, "
                "or keep gradients in separate memory"
            )
        if self._overwritten:
            self.updated()
        self.follow()

    @torch.no_grad()
    def accumulate(self, slot: ChunkSlot, gradient: Tensor, keep: Keep = put) -> None:
        """Store the full gradient of the slot's parameter, or add it to the stored one.

        Args:
            keep: copies or adds; the stored gradient may not be read until this is done.

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
        """Store or add the part of the gradient that lies in this share, as `gradient_of` returns it."""
        stored = self.part(self._gradient([slot.name]), slot)
        if stored is None or stored.shape != part.shape:
            raise ArgumentError(f"{slot.name} was given a gradient of shape {tuple(part.shape)}, which is not its own")
        put(stored, part, slot.name in self.has_gradient)
        self.has_gradient.add(slot.name)

    @torch.no_grad()
    def accumulate_share(self, share: Tensor, names: Iterable[str], keep: Keep = put) -> None:
        """Store or add this process's share of the chunk's gradient; only `names` have gradients in it."""
        fresh = set(names)
        stored = self._gradient(fresh)
        for slot in self.spec.slots:
            part, new = self.part(stored, slot), self.part(share, slot)
            if slot.name in fresh and part is not None and new is not None:
                keep(part, new, slot.name in self.has_gradient)
        self.has_gradient |= fresh

    def gradient_of(self, slot: ChunkSlot) -> Tensor | None:
        """The part of the slot's gradient on this process; None if there is none."""
        if self.gradient is None or slot.name not in self.has_gradient:
            return None
        return self.part(self.gradient, slot)

    def _put(self, flat: Tensor, slot: ChunkSlot, value: Tensor, add: bool = False, keep: Keep = put) -> None:
        part, local = self.part(flat, slot), self.within(slot)
        if part is None:
            return
        if local.stop - local.start < slot.numel:
            value = self.forms[slot.name].flat(value)[local]
        keep(part, value, add)

    def _gradient(self, names: Iterable[str]) -> Tensor:
        if self.gradient is None:
            self.gradient = self.compute if self._in_place else self._empty(self.dtype)
        if self._in_place:
            if again := self.has_gradient.intersection(names):
                raise ArgumentError(
                    f"{min(again)} has a second gradient, and the first one takes the place of the parameter: step "
                    "after every backward, or keep gradients in separate memory"
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

    They take the values of one parameter after another, which then releases its own memory. So the peak is the model
    and one chunk. A parameter keeps a `placeholder`, which takes no memory.

    Args:
        layout: the chunk of each parameter.
        parameters: by name, all that the layout has.
        dtype: of floating-point compute copies; None for each parameter's own.
        values: the parameters' values before rounding to 16 bits; values that are used are removed.
        in_place: let gradients overwrite 16-bit compute copies that have masters.
        group: the processes that share every chunk; None for a single process.
        device: the compute device.
        on_device: indices of the chunks that are pinned on it.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        parameters: Mapping[str, nn.Parameter],
        *,
        dtype: torch.dtype | None = None,
        values: MutableMapping[Tensor, Tensor] | None = None,
        in_place: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        on_device: Collection[int] = (),
    ) -> None:
        self.layout, self.group, self.device = layout, group, torch.device(device)
        self.on_device = frozenset(on_device)
        self.host, self.device_tier = MemoryLedger("host memory"), MemoryLedger("device memory")
        self.reduced: set[str] = set()
        """Parameters whose gradients all sharing processes have reduced since the last step."""
        self._places: dict[Tensor, tuple[ChunkMemory, ChunkSlot]] = {}
        chunks = []
        for spec in layout.chunks:
            chunk_parameters = {slot.name: parameters[slot.name] for slot in spec.slots}
            memory = self._memory(spec, chunk_parameters, dtype, in_place)
            for slot in spec.slots:
                self._take(chunk_parameters[slot.name], memory, slot, {} if values is None else values)
            chunks.append(memory)
        self.chunks = tuple(chunks)

    @property
    def num_shares(self) -> int:
        return 1 if self.group is None else self.group.size()

    def place(self, parameter: Tensor) -> tuple[ChunkMemory, ChunkSlot] | None:
        """The chunk and slot of a parameter; None if it is not managed."""
        return self._places.get(parameter)

    def need_whole(self) -> None:
        """Raise ArgumentError if some chunks were already stepped in backward."""
        for memory in self.chunks:
            memory.need_whole()

    def parameters(self) -> Iterator[tuple[Tensor, ChunkSlot]]:
        """The managed parameters with their slots."""
        return ((parameter, slot) for parameter, (_, slot) in self._places.items())

    def _memory(
        self, spec: ChunkSpec, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype | None, in_place: bool
    ) -> ChunkMemory:
        on_device = spec.index in self.on_device
        parameter_dtype = next(iter(parameters.values())).dtype
        compute = parameter_dtype if dtype is None or not parameter_dtype.is_floating_point else dtype
        return ChunkMemory(
            spec,
            {name: ChunkForm.of(parameter) for name, parameter in parameters.items()},
            compute,
            self.device if on_device else torch.device("cpu"),
            wide=spec.trainable and compute in HALVES,
            shard=(0 if self.group is None else self.group.rank(), self.num_shares),
            in_place=in_place,
            pinned=self.device.type == "cuda" and not on_device,
            tier=self.device_tier if on_device else self.host,
        )

    def _take(
        self, parameter: nn.Parameter, memory: ChunkMemory, slot: ChunkSlot, values: MutableMapping[Tensor, Tensor]
    ) -> None:
        if parameter.is_meta:
            raise ArgumentError(f"{slot.name} is on the meta device and has no value; materialise the model first")
        value = values.pop(parameter, None)
        if value is None or not torch.equal(value.to(parameter.device, parameter.dtype), parameter.detach()):
            value = parameter.detach()  # there was no wider value, or it changed since rounding
        memory.write(slot, value)
        parameter.data = placeholder(parameter.shape, memory.dtype, self.device)
        self._places[parameter] = memory, slot


def placeholder(shape: Collection[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of that shape with one element in memory: NaN, so that results computed from it are visibly wrong."""
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(tuple(shape))
