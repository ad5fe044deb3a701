"""chunk: a budget that holds, worked by hand, and what does not hold."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch import auto_accelerate
from atorch.auto.opt_lib.chunk import Chunk, kept_by_products
from atorch.cost import peak_memory, plain_cost
from atorch.errors import OutOfBudgetError, StrategyError
from tests.auto.opt_lib.sharing_job import TOKENS, accelerated, deviation
from tests.auto.opt_lib.splitting import PROFILE, cluster, cost_of
from tests.auto.training import assert_trains_like_plain
from tests.contract.job import BATCH, arguments, make_model
from tests.pool import Pool
from tests.zoo import Residual

WHOLE = peak_memory(cost_of({"data": 2}, ("chunk", {"budget_bytes": 10**9})))
STEPPED = WHOLE.optimizer + WHOLE.gradients


def under(budget, **knobs):
    return peak_memory(cost_of({"data": 2}, ("chunk", {"budget_bytes": int(budget), **knobs})))


def test_states_make_way_and_then_parameters():
    memory = under(2 * WHOLE.total)
    assert memory.on_host == 0
    assert (memory.parameters, memory.optimizer) == (WHOLE.parameters, WHOLE.optimizer)

    memory = under(WHOLE.total - STEPPED / 2)
    assert (memory.optimizer, memory.gradients) == (
        pytest.approx(WHOLE.optimizer / 2),
        pytest.approx(WHOLE.gradients / 2),
    )
    assert memory.parameters == WHOLE.parameters
    assert memory.on_host == pytest.approx((STEPPED + WHOLE.parameters) / 2)
    memory = under(WHOLE.total - STEPPED - WHOLE.parameters / 4)
    assert memory.optimizer == memory.gradients == pytest.approx(0)
    assert memory.parameters == pytest.approx(WHOLE.parameters * 3 / 4)
    assert memory.total == pytest.approx(WHOLE.total - STEPPED - WHOLE.parameters / 4)
    assert memory.on_host == pytest.approx(STEPPED + WHOLE.parameters)

    memory = under(1)
    assert memory.activations == WHOLE.activations
    assert memory.total > 1

    memory = under(2 * WHOLE.total, hybrid=False)
    assert (memory.optimizer, memory.parameters) == (0, WHOLE.parameters)


def test_what_products_keep_is_taken_off_a_share_of_the_device(monkeypatch):
    """A stand-in for cuBLAS, which keeps a workspace for each thread that multiplies, until it is told to let go."""
    kept, real = {"another thread": 2**20}, torch.ones

    def ones(*sizes, device, **how):
        weight = real(*sizes, **how)
        kept["forward"] = 2**23
        weight.register_hook(lambda gradient: kept.update(backward=2**23))
        return weight

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", kept.clear, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**30 + sum(kept.values()))
    monkeypatch.setattr(torch, "ones", ones)
    device = torch.device("cuda", 0)
    assert kept_by_products(device) == 2**24
    assert kept_by_products(torch.device("cpu")) == 0
    ctx = SimpleNamespace(device=device, cluster=cluster(), root=None)
    memory = ctx.cluster.device.memory_bytes
    assert Chunk(budget_fraction=0.5)._budget(ctx) == int(0.5 * memory) - 2**24
    assert Chunk(budget_bytes=1000)._budget(ctx) == 1000


@pytest.mark.parametrize(("knobs", "fraction"), [({}, 0.9), ({"budget_fraction": 0.5}, 0.5)])
def test_a_fraction_is_of_the_device(knobs, fraction):
    start = replace(plain_cost(PROFILE), device_bytes=1000.0)
    assert Chunk(**knobs).cost(start).budget_bytes == fraction * 1000
    assert peak_memory(Chunk(**knobs).cost(plain_cost(PROFILE))).on_host == 0, "the device is not known"


def test_what_it_communicates() -> None:
    cost = cost_of({"data": 2}, "chunk", ("micro_batch", {"size": 1}))
    assert cost.grad_shards == 2
    assert {comm.per_micro_batch for comm in cost.comm if comm.kind in ("all_gather", "reduce_scatter")} == {True}

    ahead, late = (cost_of({"data": 2}, ("chunk", {"prefetch": chunks})) for chunks in (1, 0))
    assert {comm.overlap for comm in ahead.comm} == {0.8}
    assert {comm.overlap for comm in late.comm} == {0.0}

    cost = cost_of({"zero": 2, "data": 2}, "chunk")
    assert cost.param_shards == 2
    assert {(comm.kind, comm.axis) for comm in cost.comm} >= {
        ("reduce_scatter", ("zero", "sequence", "context")),
        ("all_reduce", ("data",)),
    }

    assert list(Chunk.choices(PROFILE, cluster(devices=1))) == [Chunk(), Chunk(hybrid=False)]
    assert not list(Chunk.choices(PROFILE, cluster(kind="cpu")))


def test_a_batch_of_another_shape_is_foreseen_when_it_comes():
    job = arguments(dataloader_args={"batch_size": BATCH // 2})
    _, result, strategy = auto_accelerate(make_model(), load_strategy=[("chunk", {"budget_bytes": 400_000})], **job)
    _, plain, _ = auto_accelerate(make_model(), load_strategy=["micro_batch"], **job)
    few = next(iter(result.dataloader))
    for batch in (few, {key: value[:1] for key, value in few.items()}):
        losses = []
        for each in (result, plain):
            given = each.prepare_input(batch, "cpu")
            loss = each.loss_func(given, each.model(**given))
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    many = {key: value.repeat(2, 1) for key, value in few.items()}
    with pytest.raises(OutOfBudgetError, match=r"misses [\d,]+ bytes"):
        result.model(**result.prepare_input(many, "cpu"))
    figures = strategy.metadata["chunk"]
    assert figures["peak_bytes"] <= 400_000
    assert figures["fetched_bytes"] > figures["parameter_bytes"]


TWO_BY_TWO = [("parallel_mode", ([("zero", 2), ("data", 2)], None)), ("chunk", {"budget_bytes": 10**6})]


@pytest.mark.slow
def test_it_shares_over_zero_and_replicates_over_data(pool: Pool) -> None:
    assert_trains_like_plain(pool, deviation, [(TWO_BY_TWO, name, True) for name in ("llama", "awkward")], ranks=4)
    for shares, mine, whole in pool.run(kept, ranks=4):
        assert shares == 2
        assert 2 * mine == whole, "a process keeps what its part of zero leaves"


def on_device(rank: int, size: int, budget: int) -> tuple[int, int, int]:
    """Bytes of chunks on the device for good, and on the host; and of all parameters."""
    model = accelerated([("chunk", {"budget_bytes": budget})], "llama").model
    operations = next(model.parameters()).home.operations
    model(TOKENS[:4]).sum().backward()
    assert operations.residency.pass_schedule.on_schedule
    chunks = operations.chunks
    return chunks.device_tier.used_bytes, chunks.host.used_bytes, sum(each.nbytes for each in model.parameters())


def test_shares_for_which_there_is_room_are_stepped_on_the_device(pool: Pool) -> None:
    for device, host, whole in pool.run(on_device, 10**8, ranks=2):
        assert host == 0
        assert device >= whole, "half of the parameters, and their gradients"
    for device, host, _ in pool.run(on_device, 110_000, ranks=2):
        assert device > 0
        assert host > 0
    assert max(pool.run(deviation, [("chunk", {"budget_bytes": 110_000})], "llama", True, ranks=2)) <= 1e-4


def kept(rank: int, size: int) -> tuple[int, int, int]:
    """Processes that share a chunk, elements that this one keeps, and all."""
    model = accelerated(TWO_BY_TWO, "llama").model
    chunks = next(model.parameters()).home.operations.chunks
    mine = sum(len(memory.compute) for memory in chunks.chunks)
    return chunks.num_shares, mine, sum(memory.spec.numel for memory in chunks.chunks)


def test_activations_in_host_memory_are_none_of_the_budget() -> None:
    def job(*beside: Any) -> tuple[Any, torch.Tensor]:
        torch.manual_seed(0)
        batch = torch.randn(256, 8)
        _, result, _ = auto_accelerate(
            nn.Sequential(*(Residual(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(6))),
            partial(torch.optim.SGD, lr=0.1),
            loss_func=lambda batch, output: output.square().mean(),
            sample_batch=batch,
            load_strategy=[*beside],
        )
        return result, batch

    tight = ("chunk", {"budget_bytes": 450_000})
    with pytest.raises(OutOfBudgetError, match=r"misses [\d,]+ bytes"):
        job(tight)
    plain, batch = job()
    within, _ = job(tight, ("offload", {"optimizer": 0.0, "activations": 1.0}))
    for _ in range(3):
        losses = []
        for each in (plain, within):
            losses.append(float(each.step(batch)))
        assert losses[0] == losses[1]
    residency = next(within.model.parameters()).home.operations.residency
    assert residency.pass_schedule.on_schedule
    assert residency.peak_bytes <= 450_000


@pytest.mark.parametrize(
    "other",
    [("micro_batch", {"count": 2}), ("half", "fp16"), ("amp_native", {"dtype": "bf16", "skip_if_nonfinite": True})],
)
def test_steps_in_backward_go_with_nothing_that_changes_gradients_afterwards(other):
    stepping = ("chunk", {"budget_bytes": 10**6, "step_in_backward": True})
    with pytest.raises(StrategyError, match="step_in_backward steps as gradients come, and"):
        auto_accelerate(make_model(), load_strategy=[other, stepping], **arguments())


def test_a_job_that_steps_in_backward_is_the_same_job():
    ends = []
    for early in (False, True):
        settings = {"budget_bytes": 10**6, "hybrid": False, "step_in_backward": early}
        _, result, _ = auto_accelerate(
            make_model(), load_strategy=[("half", "bf16"), ("chunk", settings)], **arguments()
        )
        losses = [float(result.step(batch)) for batch, _ in zip(result.dataloader, range(3), strict=False)]
        ends.append((losses, result.model.state_dict()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][name], value) for name, value in ends[1][1].items())


WORDS, PAD = 20, 0
BUDGET = 130_000
MASKS = (
    "mask",
    "mask and padding",
    pytest.param("is_causal", marks=pytest.mark.nightly),  # these two run on fake tensors, too
    pytest.param("src_key_padding_mask", marks=pytest.mark.nightly),
)


class Masked(nn.Module):
    """An encoder; which masks it is given."""

    def __init__(self, masks: str, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.masks, self.embed = masks, nn.Embedding(WORDS, 16)
        self.encoder, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        given: dict[str, Any] = {}
        causal = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        if self.masks != "src_key_padding_mask":
            given["mask"] = causal
        if self.masks == "is_causal":
            given["is_causal"] = True
        if "padding" in self.masks:
            padding = torch.zeros(words.shape).masked_fill(words == PAD, -torch.inf)
            given["src_key_padding_mask"] = padding if "mask" in given else words == PAD
        return self.head(self.encoder(self.embed(words), **given))


def sample(index: int) -> Tensor:
    """Words with padding, later ones longer, so that passes are foreseen in the middle of training, too."""
    length = 6 + index // 8
    words = torch.randint(1, WORDS, (length,), generator=torch.Generator().manual_seed(index))
    words[length - index % 3 :] = PAD
    return words


def loss_of(words: Tensor, output: Tensor) -> Tensor:
    """Not of padding, for which torch's fast path gives zeros, and its slow one numbers."""
    return F.cross_entropy(output.flatten(0, 1), words.flatten(), ignore_index=PAD, reduction="sum")


def losses(rank: int, size: int, masks: str, strategy: Any) -> list[float]:
    """In training, and in evaluation after each step, where torch has a fast path."""
    _, result, _ = auto_accelerate(
        Masked(masks), torch.optim.SGD, [sample(index) for index in range(24)], loss_of,
        optim_args={"lr": 2e-3}, dataloader_args={"batch_size": 4}, load_strategy=strategy,
    )  # fmt: skip
    found = []
    for batch in result.dataloader:
        words = result.prepare_input(batch, "cpu")
        loss = result.loss_func(words, result.model(words))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        result.model.eval()
        with torch.no_grad():
            found += [loss.item(), result.loss_func(words, result.model(words)).item()]
        result.model.train()
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("masks", MASKS)
def test_masks_that_torch_looks_at(pool: Pool, masks: str) -> None:
    chunked = ("chunk", {"budget_bytes": BUDGET, "hybrid": False})
    plain = losses(0, 1, masks, [])
    assert losses(0, 1, masks, [chunked]) == pytest.approx(plain, rel=1e-6)
    by_rank = pool.run(losses, masks, [chunked])
    together = [sum(each) for each in zip(*by_rank, strict=True)]
    assert together == pytest.approx(plain, rel=1e-6)
