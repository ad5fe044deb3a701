"""What a process keeps of chunks, and the ledger of the memory that it takes."""

import gc
import itertools
import mmap

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.errors import ArgumentError, CapabilityError, OutOfBudgetError
from atorch.profiler.memory_tracker import LiveBytes
from atorch.runtime.chunk.layout import Item, pack
from atorch.runtime.chunk.memory import ChunkForm, ChunkMemory
from atorch.runtime.chunk.transfer import MemoryLedger
from tests.runtime.chunk.stand_in import chunks_of

CPU, SPARSE = torch.device("cpu"), torch.ones(4, 2).to_sparse(1)


def make_net():
    torch.manual_seed(5)
    conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(conv, nn.Linear(7, 3), nn.Linear(3, 3))


def shares(size, capacity=1000):
    """Every process's memory of one chunk, and what its parameters were."""
    before = {name: parameter.detach().clone() for name, parameter in make_net().named_parameters()}
    items = [Item(name, value.numel(), "float32", True) for name, value in before.items()]
    (spec,) = pack(items, capacity, size).chunks
    forms = {name: ChunkForm.of(value) for name, value in before.items()}
    return [ChunkMemory(spec, forms, torch.float32, CPU, shard=(rank, size)) for rank in range(size)], before


def test_a_tier_keeps_its_budget():
    tier = MemoryLedger("host", 100)
    tier.take(60, "a")
    with pytest.raises(OutOfBudgetError, match=r"b takes 50 B of the host, where 60 B of 100 B are in use: 10 bytes"):
        tier.take(50, "b")
    tier.give(20)
    tier.take(10, "b")
    assert (tier.used_bytes, tier.peak_bytes) == (50, 60)
    with pytest.raises(ValueError, match="51 bytes were given back to the host, which lent 50"):
        tier.give(51)


def test_values_keep_their_shape_and_strides():
    net, before = make_net(), make_net()
    chunks = chunks_of(net, 60)
    for name, parameter in net.named_parameters():
        memory, slot = chunks.place(parameter)
        value = memory.part(memory.master, slot)
        assert memory.master is memory.compute
        assert torch.equal(value, before.get_parameter(name))
        assert value.stride() == before.get_parameter(name).stride()
        assert parameter.isnan().all()
        assert parameter.untyped_storage().nbytes() == 4


def test_masters_start_from_what_was_rounded():
    net, before = make_net().bfloat16(), make_net()
    values = WeakTensorKeyDictionary()
    for name, parameter in net.named_parameters():
        values[parameter] = before.get_parameter(name).detach()
    with torch.no_grad():
        net[1].bias.fill_(3.0)  # changed since
    chunks = chunks_of(net, 60, values=values)
    assert not values
    for name, parameter in net.named_parameters():
        memory, slot = chunks.place(parameter)
        expected = torch.full((3,), 3.0) if name == "1.bias" else before.get_parameter(name)
        assert torch.equal(memory.part(memory.master, slot), expected)


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_shares_make_the_whole(size):
    memories, before = shares(size)
    slots = memories[0].spec.slots
    for memory, slot in itertools.product(memories, slots):
        memory.write(slot, before[slot.name])
        memory.accumulate(slot, before[slot.name])
        memory.accumulate(slot, before[slot.name])
    flat = torch.cat([memory.compute for memory in memories])
    doubled = torch.cat([memory.gradient for memory in memories])
    for slot in slots:
        assert torch.equal(memories[0].whole(flat, slot), before[slot.name])
        assert torch.equal(memories[0].whole(doubled, slot), 2 * before[slot.name])
        held = [memory.within(slot) for memory in memories]
        assert sum(each.stop - each.start for each in held) == slot.numel
        for memory, each in zip(memories, held, strict=True):
            part = memory.part(memory.compute, slot)
            if each.start == each.stop:
                assert part is memory.gradient_of(slot) is None
            elif each == slice(0, slot.numel):
                assert part.shape == before[slot.name].shape
            else:
                assert torch.equal(part, memory.forms[slot.name].flat(before[slot.name])[each])


def test_what_cannot_be_in_chunks_is_refused_and_whole_numbers_stay():
    spec = pack([Item("a", 5, "float32", True)], 9).chunks[0]
    with pytest.raises(ArgumentError, match="chunk 0 has 5 elements: pad it to a multiple of 2 shares"):
        ChunkMemory(spec, {}, torch.float32, CPU, shard=(0, 2))
    with pytest.raises(ArgumentError, match="weight is on the meta device"):
        chunks_of(nn.Linear(2, 2, device="meta"))
    for frozen, gradient, told in ((True, torch.ones(4, 2), "was frozen when"), (False, SPARSE, "sparse=False")):
        net = nn.Embedding(4, 2)
        net.weight.requires_grad = not frozen
        memory, slot = chunks_of(net).place(net.weight)
        with pytest.raises(ArgumentError, match=told):
            memory.accumulate(slot, gradient)
    net = nn.Module()
    net.table = nn.Parameter(torch.arange(3), requires_grad=False)
    assert torch.equal(chunks_of(net, dtype=torch.bfloat16).chunks[0].compute, torch.arange(3))
    assert net.table.tolist() == [0, 0, 0]


def test_copies_follow_each_other():
    net = make_net()
    memory, slot = chunks_of(net, dtype=torch.bfloat16).place(net[1].bias)
    master, compute = memory.part(memory.master, slot), memory.part(memory.compute, slot)
    untouched, writes = master[1:].clone(), memory.writes
    memory.follow()
    assert memory.writes == writes
    compute[0] = 7.0
    memory.follow()
    assert master[0] == 7.0
    assert torch.equal(master[1:], untouched)
    assert memory.writes == writes + 1
    master[2] = 1.001
    memory.follow()
    assert compute[2] == torch.tensor(1.001).bfloat16()
    assert master[2] == torch.tensor(1.001)


def test_gradients_in_place_of_parameters():
    net, before = make_net(), make_net()
    chunks = chunks_of(net, 1000, dtype=torch.bfloat16, in_place=True)
    (memory,) = chunks.chunks
    assert memory.num_bytes == 6 * len(memory.master)
    bias, weight = (chunks.place(parameter)[1] for parameter in (net[1].bias, net[1].weight))
    memory.accumulate(bias, torch.full((3,), 9.0))
    assert memory.gradient is memory.compute
    assert torch.equal(memory.gradient_of(bias), torch.full((3,), 9.0, dtype=torch.bfloat16))
    assert torch.equal(memory.part(memory.compute, weight), before[1].weight.bfloat16())
    with pytest.raises(ArgumentError, match=r"1.bias has a second gradient"):
        memory.accumulate(bias, torch.ones(3))
    with pytest.raises(ArgumentError, match=r"another pass began before they were stepped on"):
        memory.prepare()
    memory.write(weight, torch.ones(3, 7))
    memory.has_gradient.clear()
    memory.prepare()
    assert torch.equal(memory.part(memory.compute, bias), before[1].bias.bfloat16())
    assert torch.equal(memory.part(memory.compute, weight), torch.ones(3, 7, dtype=torch.bfloat16))
    memory.accumulate(bias, torch.full((3,), 9.0))
    memory.part(memory.master, bias).fill_(2.0)
    memory.updated()
    assert not memory.has_gradient
    assert torch.equal(memory.part(memory.compute, bias), torch.full((3,), 2.0, dtype=torch.bfloat16))


def test_chunks_take_no_more_than_the_model_and_one_chunk():
    with LiveBytes() as live:
        net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
        live.forget()
        chunks = chunks_of(net, 32 * 32, dtype=torch.bfloat16)
        live.mark("taken")
        compute_and_master = 6 * 32 * 32
        assert live.moments[0].total_bytes <= 8 * compute_and_master + 4 * 32 * 32 + 8 * 64
        assert len(chunks.chunks) == 8


class Runtime:
    """What CUDA knows of locked memory; it refuses pages that are locked already, and too many."""

    def __init__(self, most=10**9):
        self.locked, self.most = {}, most

    def cudaHostRegister(self, address, num_bytes, flags):
        assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == flags == 0
        if sum(self.locked.values()) + num_bytes > self.most:
            return 2
        if any(address < start + size and start < address + num_bytes for start, size in self.locked.items()):
            return 712
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]

    def holds(self, tensor):
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(start <= first and last <= start + size for start, size in self.locked.items())


def pinned(monkeypatch, runtime):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    spec = pack([Item("a", 5, "bfloat16", True)], 9).chunks[0]
    forms = {"a": ChunkForm((5,), (1,))}
    return [ChunkMemory(spec, forms, torch.bfloat16, CPU, wide=True, pinned=True) for _ in range(3)]


def test_memory_that_travels_is_locked_page_by_page_or_an_error(monkeypatch):
    runtime = Runtime()
    memories = pinned(monkeypatch, runtime)
    for memory in memories:
        memory.write(memory.spec.slots[0], torch.arange(5.0))
        memory.accumulate(memory.spec.slots[0], torch.ones(5))
        assert runtime.holds(memory.compute)
        assert runtime.holds(memory.gradient)
        assert not runtime.holds(memory.master)
        assert memory.part(memory.compute, memory.spec.slots[0]).tolist() == [0, 1, 2, 3, 4]
    assert len(runtime.locked) == 6
    del memory, memories
    gc.collect()
    assert not runtime.locked
    with pytest.raises(CapabilityError, match=r"refused to lock 4 KiB of host memory \(error 2\); raise the limit"):
        pinned(monkeypatch, Runtime(most=mmap.PAGESIZE))


def test_the_ledgers_know_where_chunks_lie_and_others_are_not_managed():
    net = make_net()
    chunks = chunks_of(net, 60, dtype=torch.bfloat16, on_device=[1])
    host, device = chunks.host, chunks.device_tier
    assert device.used_bytes == chunks.chunks[1].num_bytes == 8 * len(chunks.chunks[1].master)
    assert host.used_bytes == sum(chunk.num_bytes for chunk in chunks.chunks) - device.used_bytes
    net = make_net()
    chunks = chunks_of(net, but=["1.bias"])
    assert chunks.place(net[1].bias) is None
    assert net[1].bias.isfinite().all()
    memory, slot = chunks.place(net[1].weight)
    memory.accumulate(slot, torch.ones(3, 7))
    memory.has_gradient.clear()
    assert memory.gradient_of(slot) is None


@pytest.mark.gpu
def test_cuda_copies_from_locked_memory():
    chunks = chunks_of(make_net(), 60, dtype=torch.bfloat16, device="cuda")
    for memory in chunks.chunks:
        assert memory.compute.is_pinned()
        assert torch.equal(memory.compute.to("cuda", non_blocking=True).cpu(), memory.compute)
    compute = memory.compute
    del memory, chunks
    gc.collect()
    assert not compute.is_pinned()
