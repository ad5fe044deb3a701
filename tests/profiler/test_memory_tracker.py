"""Bytes are counted where tensors live: made, freed, viewed, resized, in backward, on fakes."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from atorch.profiler.memory_tracker import (
    ACTIVATIONS,
    COMMUNICATION,
    HOST,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    LiveBytes,
    PeakMemory,
)

MiB = 2**20


def test_the_peak_is_what_was_taken_at_most():
    memory = PeakMemory(torch.device("cpu"))
    with memory.watching():
        taken = torch.ones(64 * MiB // 4)
        del taken
        torch.ones(2 * MiB // 4)
        kept = torch.ones(32 * MiB // 4)
    assert memory.kind == "resident set growth"
    # The first 64 MiB may be gone before they are sampled; what is there at the end is always seen.
    assert 31 * MiB < memory.peak_bytes < 110 * MiB
    assert kept[0] == 1


KIB = 256  # floats in 1,024 bytes


def total(live: LiveBytes) -> float:
    return sum(live.now.values())


def test_what_lives_is_counted_once_and_most_between_marks() -> None:
    with LiveBytes() as live:
        kept = torch.ones(KIB)
        view = kept[: KIB // 2]
        assert total(live) == 1024
        freed = torch.ones(2 * KIB)
        assert total(live) == 3072
        del freed
        assert total(live) == 1024
        del kept
        assert total(live) == 1024, "the view keeps the storage"
        del view
    assert total(live) == 0

    with LiveBytes() as live:
        kept = torch.ones(KIB)
        (kept * 2 + 1).sum()
        live.mark("first")
        live.mark("nothing")
        torch.ones(8 * KIB)
        live.mark("second", 5)
    assert [(m.name, m.index, m.total_bytes) for m in live.moments] == [
        ("first", None, 3072),
        ("nothing", None, 1024),
        ("second", 5, 9216),
    ]

    weight = torch.ones(KIB, requires_grad=True)
    with LiveBytes() as live:
        out = checkpoint(lambda value: value.exp().exp().exp(), weight, use_reentrant=False)
        before = live.now[ACTIVATIONS]
        live.forget()
        out.sum().backward()
        live.mark("backward")
    assert live.moments[0].memory[ACTIVATIONS] >= before + 2 * 1024


def test_categories_follow_from_when_a_tensor_was_made() -> None:
    weight = torch.ones(KIB, requires_grad=True)
    with LiveBytes() as live:
        live.label([weight], PARAMETERS)
        hidden = weight.exp()
        assert live.now == {PARAMETERS: 1024, ACTIVATIONS: 1024}
        seen: dict[str, float] = {}
        hidden.register_hook(lambda gradient: seen.update(live.now))
        (hidden * hidden).sum().backward()
        assert seen[OTHER] >= 1024, "the gradient of the product"
        with live.default_category(OTHER):
            temporary = torch.ones(KIB)
        assert live.now[OTHER] == 2 * 1024, "the gradient and what was made now"
        live.label([weight.grad], PARAMETERS)
        del temporary
        assert live.now[OTHER] == 0
        assert live.now[PARAMETERS] == 2048


def test_storages_resized_in_place_are_followed() -> None:
    gathered = torch.ones(KIB)
    with LiveBytes() as live:
        live.label([gathered], OTHER)
        gathered.untyped_storage().resize_(0)
        live.forget()  # finds it
        assert live.now[COMMUNICATION] == 0
        gathered.untyped_storage().resize_(4096)
        torch.ones(1)
        assert live.now[COMMUNICATION] == 4096
        live.mark("gathered")
        gathered.untyped_storage().resize_(0)
        live.mark("freed")
        live.mark("without")
    assert [moment.total_bytes for moment in live.moments] == [4100, 4096, 0]


def test_fakes_and_sparse_tensors_are_counted() -> None:
    with FakeTensorMode(), LiveBytes() as live:
        large = torch.empty(2**30, 2**10)
        assert total(live) == 4 * 2**40
        del large
        assert total(live) == 0

    with LiveBytes() as live:
        sparse = torch.sparse_coo_tensor(
            torch.zeros(1, 2, dtype=torch.long), torch.ones(2, KIB), (4, KIB), check_invariants=False
        )
        assert total(live) >= 2 * 1024 + 16
    assert sparse.is_sparse


def test_what_is_on_the_host_is_told_apart_with_what_is_computed_of_it() -> None:
    there, here = torch.zeros(100), torch.zeros(50)
    with LiveBytes() as live:
        live.label([there], HOST)
        live.label([here], PARAMETERS)
        states = torch.zeros_like(there) + 1.0
        there.copy_(here.repeat(2))
        live.label([states], OPTIMIZER)  # it stays where it is
        live.mark("first")
        del states
        live.mark("second")
    first, second = live.moments
    assert first.memory[HOST] == 400 + 2 * 400, "of two results one after the other both are there for a moment"
    assert first.total_bytes == 200 + 400
    assert (second.memory[HOST], second.total_bytes) == (400 + 400, 200)
