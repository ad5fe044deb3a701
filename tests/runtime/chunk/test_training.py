"""Training in chunks, bit for bit as without, under budgets that an independent count of bytes holds it to."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.errors import OutOfBudgetError
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.operations import Operations
from atorch.runtime.chunk.pass_schedule import AccessTrace
from atorch.runtime.chunk.schedule_cache import ScheduleCache
from atorch.runtime.chunk.transfer import Transfer
from benchmarks.paced_link import Paced
from tests.runtime.sharing import SEQ, VOCAB, Awkward
from tests.runtime.tensor_parallel.models import bert, gpt2, llama, mixtral, t5, vit

CPU, STEPS = torch.device("cpu"), 3
FRACTIONS = (1.0, 0.25, 0.12)
nightly = pytest.mark.nightly


class Live(TorchDispatchMode):
    """The most bytes alive at once of all storages that operations make inside."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._now, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, Tensor):
                self._count(each.untyped_storage())
        self.most = max(self.most, self._now)
        return out

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """These were there before, or are the host's."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._now += size
            weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


Loss = Callable[[nn.Module, Tensor], Tensor]


def tokens(number: int, vocabulary: int = VOCAB, length: int = SEQ) -> Tensor:
    return torch.randint(3, vocabulary, (2, length), generator=torch.Generator().manual_seed(number))


def images(number: int) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number))


def of_logits(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def of_language(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=batch).logits.flatten(0, 1).float(), batch.flatten())


def of_pairs(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def of_images(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(pixel_values=batch).logits, torch.arange(len(batch)))


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


class Recurrent(nn.Module):
    """Operations that take many parameters at once, in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.memory = nn.LSTM(32, 32, 2, batch_first=True)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, batch: Tensor) -> Tensor:
        states, _ = self.memory(self.tokens(batch))
        attended, _ = self.attention(states, states, states, need_weights=False)
        return self.head(states + attended)


class Checkpointed(Awkward):
    """Blocks that are computed again in backward."""

    def forward(self, batch: Tensor) -> Tensor:
        x = self.tokens(batch) + self.places.weight[: batch.shape[1]] + self.shift
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: self.mixer(block(block(x))), x, use_reentrant=False)
        return F.linear(self.frozen(x), self.tokens.weight) * self.scale


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], Loss]] = {
    "awkward": (Awkward, tokens, of_logits),
    "checkpointed": (Checkpointed, tokens, of_logits),
    "recurrent": (Recurrent, tokens, of_logits),
    "gpt2": (partial(gpt2, dropout=0.1), tokens, of_language),  # whose random numbers must be the same
    "llama": (llama, tokens, of_language),
    "bert": (bert, tokens, of_language),
    "t5": (t5, tokens, of_pairs),
    "vit": (vit, images, of_images),
    "mixtral": (mixtral, tokens, of_language),
    "resnet": (resnet, images, of_images),
}


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


def adam(groups: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor], loss: Loss, passes: int = 1
) -> list[float]:
    """The losses of some steps, each of so many passes."""
    torch.manual_seed(1)
    losses = []
    for step in range(STEPS):
        for number in range(passes):
            value = loss(model, data(step * passes + number))
            value.backward()
            losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def needed(foreseen: AccessTrace, model: nn.Module) -> tuple[int, int]:
    """The most bytes beside parameters, and of parameters."""
    return max(each.other_bytes for each in foreseen.accesses), sum(each.nbytes for each in model.parameters())


def host_tensors(operations: Operations, optimizer: ChunkOptimizer) -> Iterable[Tensor]:
    for memory in operations.chunks.chunks:
        yield from (each for each in (memory.compute, memory.master, memory.gradient) if each is not None)
    for state in optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, Tensor))


COMMON = ("awkward", "checkpointed", "recurrent", "gpt2", "mixtral")


def plainly(family: str, passes: int = 1) -> tuple[nn.Module, list[float]]:
    """A model trained without chunks, and its losses."""
    make, data, loss = FAMILIES[family]
    model = fresh(make)
    return model, train(model, adam(model.parameters()), data, loss, passes)


def in_chunks(
    family: str | tuple[Callable[[], nn.Module], Callable[[int], Tensor], Loss],
    share: float,
    *,
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = adam,
    early: bool = False,
    dtype: torch.dtype | None = None,
    transfer: Transfer | None = None,
    compiled: Sequence[str] = (),
    **how: Any,
) -> tuple[nn.Module, ChunkOptimizer, Operations, int]:
    """A model in chunks, its optimizer, what moves them, and their budget: activations and a share of parameters."""
    make, data, loss = FAMILIES[family] if isinstance(family, str) else family
    model = fresh(make)
    seen = {"dtype": dtype, "lingering": isinstance(transfer, Paced), "compiled": compiled}
    accesses = trace_pass(model, data(0), loss, device_type="cpu", **seen)
    others, parameters = needed(accesses, model)
    budget = others + int(share * parameters)
    how |= {"dtype": dtype, "transfer": transfer, "compiled": compiled}
    operations = chunk(model, accesses, budget, device=CPU, **how)
    gradients = operations.gradients if early else None
    return model, ChunkOptimizer(optimizer, model.parameters(), operations.chunks, early=gradients), operations, budget


def assert_same_bits(model: nn.Module, other: nn.Module) -> None:
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in other.state_dict().items())


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in COMMON else nightly) for name in FAMILIES])
def test_losses_and_parameters_are_those_of_training_without_chunks_and_budgets_hold(family: str) -> None:
    reference, expected = plainly(family)
    fitting = 0
    for fraction in FRACTIONS:
        try:
            model, optimizer, operations, budget = in_chunks(family, fraction)
        except OutOfBudgetError:
            assert fraction < 0.5, "only an operation's own parameters may be too large"
            continue
        fitting += 1
        assert train(model, optimizer, *FAMILIES[family][1:]) == expected
        assert operations.residency.pass_schedule.on_schedule, "the pass was as it was foreseen"
        assert operations.residency.peak_bytes <= budget
        assert_same_bits(model, reference)
    assert fitting >= 1


@pytest.fixture(params=[None, 1e9], ids=["at once", "over a link"])
def transfer(request: pytest.FixtureRequest) -> Iterator[Transfer]:
    if request.param is None:
        yield Transfer()
    else:
        link = Paced(request.param)
        yield link
        link.close()


@pytest.mark.parametrize(
    "family", ["checkpointed", "gpt2", *(pytest.param(name, marks=nightly) for name in ("awkward", "mixtral"))]
)
def test_a_count_of_all_live_bytes_never_exceeds_the_budget(family: str, transfer: Transfer) -> None:
    _, data, loss = FAMILIES[family]
    model, optimizer, operations, budget = in_chunks(family, 0.5, transfer=transfer)
    loss(model, data(0)).backward()  # the first gradients make their memory on the host
    optimizer.step()
    optimizer.zero_grad()
    live = Live()
    live.ignore(host_tensors(operations, optimizer))
    before = [data(1), *model.buffers()]
    live.ignore(before)
    with live:
        loss(model, before[0]).backward()
    most = live.most + sum(each.nbytes for each in before)
    assert most <= budget
    assert most >= 0.9 * operations.residency.peak_bytes, "what was foreseen is what is used"


def test_chunks_for_which_there_is_room_stay_with_their_states_and_are_stepped_on_the_device() -> None:
    reference, expected = plainly("llama")
    model, optimizer, operations, budget = in_chunks("llama", 3.0, state_bytes=8.0)
    scheduled = operations.residency.pass_schedule
    assert scheduled.schedule is not None
    assert 0 < scheduled.schedule.num_fetches < 2 * len(operations.chunks.chunks), "some stay, and not all"
    assert train(model, optimizer, *FAMILIES["llama"][1:]) == expected
    assert operations.residency.pass_schedule.on_schedule
    assert operations.residency.fetched_bytes < STEPS * sum(each.nbytes for each in reference.parameters())
    assert operations.residency.peak_bytes <= budget
    assert_same_bits(model, reference)


def test_gradients_of_several_passes_are_added_up(transfer: Transfer) -> None:
    model, optimizer, _, _ = in_chunks("awkward", 0.25, transfer=transfer)
    assert train(model, optimizer, *FAMILIES["awkward"][1:], passes=2) == plainly("awkward", passes=2)[1]


def test_a_gradient_that_is_on_its_way_is_waited_for_where_somebody_looks_at_it() -> None:
    make, data, loss = FAMILIES["awkward"]
    reference, link, seen = fresh(make), Paced(1e6), {}
    loss(reference, data(0)).backward()
    model, *_ = in_chunks("awkward", 4.0, transfer=link)

    def look(parameter: Tensor, name: str) -> None:
        assert parameter.grad is not None
        seen[name] = parameter.grad.clone()

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(look, name=name))
    loss(model, data(0)).backward()
    link.close()
    wanted = {name: each.grad for name, each in reference.named_parameters() if each.grad is not None}
    assert seen.keys() == wanted.keys()
    assert all(torch.equal(seen[name], gradient) for name, gradient in wanted.items())


def test_a_budget_below_what_an_operation_needs_is_refused_before_anything_is_moved() -> None:
    make, data, loss = FAMILIES["gpt2"]
    model = fresh(make)
    accesses = trace_pass(model, data(0), loss, device_type="cpu")
    with pytest.raises(OutOfBudgetError, match=r"misses [\d,]+ bytes"):
        chunk(model, accesses, needed(accesses, model)[0], device=CPU)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    of_language(model, data(0)).backward()


class Branching(Awkward):
    early = False

    def forward(self, batch: Tensor) -> Tensor:
        if self.early:
            return F.linear(self.tokens(batch), self.tokens.weight) * self.scale
        return super().forward(batch)


def test_a_model_that_has_changed_is_foreseen_once_more() -> None:
    reference, model = fresh(Branching), fresh(Branching)
    plain = adam(reference.parameters())
    foreseen_batches = []

    def foresee(batch: Tensor, /, **how: Any) -> AccessTrace:
        foreseen_batches.append(batch)
        return trace_pass(model, batch, of_logits, device_type="cpu", **how)

    schedules = ScheduleCache(foresee, None)
    schedules.expect(tokens(0), [tokens(0)])
    first = schedules.first()
    others, parameters = needed(first, model)
    operations = chunk(model, first, others + parameters // 2, device=CPU)
    optimizer = ChunkOptimizer(adam, model.parameters(), operations.chunks)
    schedules.schedule_passes(operations)
    for early, seen in ((False, 1), (True, 2), (False, 2), (True, 2)):
        reference.early = model.early = early
        assert train(model, optimizer, tokens, of_logits) == train(reference, plain, tokens, of_logits)
        assert len(foreseen_batches) == seen, "what changes each time is not foreseen each time"
        assert operations.residency.pass_schedule.on_schedule == (early or seen == 1)


class Lingering(Transfer):
    """Copies, and a thread holds what it copied to a little longer."""

    def start(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        target.copy_(source)
        threading.Timer(0.01, lambda held: None, [target]).start()
        return lambda: None


def test_a_thread_that_lets_go_of_a_chunk_late_is_waited_for() -> None:
    model, optimizer, operations, _ = in_chunks("awkward", 0.25, transfer=Lingering())
    assert train(model, optimizer, *FAMILIES["awkward"][1:]) == plainly("awkward")[1]
    assert operations.residency.pass_schedule.on_schedule
