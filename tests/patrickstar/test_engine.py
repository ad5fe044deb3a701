"""The engine: the guide's snippets, fp16 from chunks against fp16 without, saving, and what it refuses."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch.errors import ArgumentError, OutOfBudgetError
from atorch.patrickstar.core import PatrickStarClient
from atorch.patrickstar.merge import merge_checkpoints
from atorch.patrickstar.ops import FP16Adam
from atorch.patrickstar.profiler import profiler
from atorch.patrickstar.runtime import PatrickStarEngine, initialize_engine
from tests.pool import Pool, on_ranks

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="these bits and bytes are a CPU's; tests/gpu has the engine on a GPU"
)

SMOOTH = {"params": {"lr": 1.0, "eps": 1.0}}
SCALED = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8}
BUDGET = 16_000  # activations of a batch, and half of the model
Batches = list[tuple[Tensor, Tensor]]


class Net(nn.Module):
    """A block that is used twice, tied weights, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.more = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.more[1].bias.requires_grad_(False)
        self.register_buffer("offset", torch.full((16,), 0.1))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(tokens) + self.offset
        x = x + self.block(x)
        for layer in self.more:
            x = x + layer(x).relu()
        logits = self.head(x + self.block(x))
        return logits if labels is None else loss_of(logits, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(number: int) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 50, (2, 3), generator=generator), torch.randint(0, 50, (2, 3), generator=generator))
        for _ in range(number)
    ]


def config(**sections: Any) -> dict[str, Any]:
    """Adam at a rate that shows; a device that holds a part of the model."""
    given = {"optimizer": {"params": {"lr": 1e-2}}, "client": small()}
    return {**given, **sections}


def small(num_bytes: int = BUDGET, **keys: Any) -> dict[str, Any]:
    return {"mem_tracer": {"gpu_memory_bytes": num_bytes, "overall_gpu_mem_ratio": 1.0}, **keys}


def train(model: PatrickStarEngine, optimizer: FP16Adam, data: Batches) -> list[float]:
    losses = []
    for tokens, labels in data:
        optimizer.zero_grad()
        loss = model(tokens, labels=labels)
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def plainly(
    model: nn.Module,
    data: Batches,
    scale: float = 1.0,
    limit: float = math.inf,
    kind: Any = torch.optim.Adam,
    **settings: Any,
) -> list[float]:
    """The same on one fp16 copy and its fp32 masters, which `model` is."""
    half = copy.deepcopy(model).half()
    pairs = [pair for pair in zip(model.parameters(), half.parameters(), strict=True) if pair[0].requires_grad]
    optimizer = kind([master for master, _ in pairs], **{"lr": 1e-2, **settings}, fused=True)
    losses = []
    for tokens, labels in data:
        loss = half(tokens, labels=labels)
        (loss.float() * scale).backward()
        gradients = [rounded.grad.float().flatten() for _, rounded in pairs if rounded.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.cat(gradients)))
        excess = max(1.0, (norm / scale + 1e-6) / limit)
        for master, rounded in pairs:
            master.grad = None if rounded.grad is None else rounded.grad.float() / (scale * excess)
            rounded.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, rounded in pairs:
                rounded.copy_(master)
        losses.append(loss.item())
    return losses


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.isfinite(value).all()
        torch.testing.assert_close(value.float(), other[name].float(), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(("kind", "fp16"), [("Adam", {"fp16": SCALED}), ("AdamW", {})])
def test_training_from_chunks_is_training(kind: str, fp16: dict[str, Any]) -> None:
    whole = make()
    expected = plainly(whole, batches(3), 2.0**8 if fp16 else 1.0, kind=getattr(torch.optim, kind))
    optimizer = {"type": kind, "params": {"lr": 1e-2, "weight_decay": 0.01 if kind == "AdamW" else 0.0}}
    model, adam = initialize_engine(make, 0, config(optimizer=optimizer, **fp16))
    assert train(model, adam, batches(3)) == expected
    assert (model.loss_scaler is None) == (not fp16)
    state = model.state_dict()
    half = {name for name, value in state.items() if value.dtype == torch.float16}
    assert half == {"offset", "more.1.bias"}  # a buffer, and what is frozen
    make().load_state_dict(state)
    whole.offset = whole.offset.half()
    whole.more[1].bias.data = whole.more[1].bias.data.half()
    assert_equal(state, whole.state_dict())
    residency = model.residency
    assert residency is not None
    assert residency.peak_bytes <= BUDGET
    assert residency.fetched_bytes > 2 * sum(each.numel() * 2 for each in model.parameters())


def test_the_guides_snippet_trains_a_pretrained_model(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(3)
    BertForSequenceClassification(BertConfig(vocab_size=40, **shape)).save_pretrained(tmp_path)

    def model_func() -> nn.Module:
        return BertForSequenceClassification.from_pretrained(tmp_path)

    given = config(fp16={**SCALED, "hysteresis": 2}, default_chunk_size=2048, client=small(56_000))
    model, optimizer = initialize_engine(model_func=model_func, local_rank=0, config=given)
    tokens, labels = torch.randint(0, 40, (4, 7)), torch.tensor([0, 1, 1, 0])
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=labels).loss
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05

    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    again, second = initialize_engine(model_func=model_func, local_rank=0, config=given)
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert all(memory.spec.numel <= 2048 for memory in model.residency.chunks.chunks)
    model.eval(), again.eval()
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        torch.testing.assert_close(again(input_ids=tokens).logits, expected, rtol=0, atol=0)


def test_a_loaded_state_goes_on_as_if_nothing_had_been() -> None:
    data = batches(6)
    model, optimizer = initialize_engine(make, 0, config(fp16=SCALED))
    train(model, optimizer, data[:3])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, data[3:])
    for settled in (False, True):  # before and after a first batch
        other, second = initialize_engine(make, 0, config(fp16=SCALED))
        if settled:
            train(other, second, batches(1))
        other.load_state_dict(saved[0])
        second.load_state_dict(copy.deepcopy(saved[1]))
        assert train(other, second, data[3:]) == expected
        assert_equal(other.state_dict(), model.state_dict())


def overflow(model: PatrickStarEngine, optimizer: FP16Adam) -> None:
    tokens, labels = batches(1)[0]
    optimizer.zero_grad()
    model.backward(model(tokens, labels=labels) * 1e30)
    optimizer.step()


def test_overflows_are_skipped_and_counted() -> None:
    model, optimizer = initialize_engine(make, 0, config(fp16={**SCALED, "hysteresis": 2, "min_loss_scale": 64}))
    train(model, optimizer, batches(1))
    before = copy.deepcopy(model.state_dict())
    scales = []
    for _ in range(4):
        overflow(model, optimizer)
        assert optimizer.step_was_skipped
        scales.append(model.loss_scaler())
    assert scales == [256, 128, 64, 64]
    assert_equal(model.state_dict(), before)
    train(model, optimizer, batches(1))
    assert not optimizer.step_was_skipped


def test_a_static_scale_never_looks() -> None:
    model, optimizer = initialize_engine(make, 0, config(fp16={"enabled": True, "loss_scale": 128}))
    train(model, optimizer, batches(1))
    overflow(model, optimizer)
    assert not optimizer.step_was_skipped
    assert model.loss_scaler() == 128
    assert model.state_dict()["embed.weight"].isnan().any()


def test_the_norm_of_all_gradients_is_limited() -> None:
    whole = make()
    expected = plainly(whole, batches(3), 2.0**8, limit=0.05)
    model, optimizer = initialize_engine(make, 0, config(fp16=SCALED, gradient_clipping=0.05))
    assert train(model, optimizer, batches(3)) == pytest.approx(expected, abs=1e-3)
    free = make()
    assert plainly(free, batches(3), 2.0**8) != expected


def test_schedulers_change_the_rate_of_what_steps() -> None:
    model, optimizer = initialize_engine(make, 0, config())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 0))
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, batches(1))
    before |= {name: before[name].half() for name in ("offset", "more.1.bias")}
    assert_equal(model.state_dict(), before)  # at a rate of 0
    scheduler.step()
    train(model, optimizer, batches(1))
    assert not torch.equal(model.state_dict()["block.1.weight"], before["block.1.weight"])


def test_gradients_add_up_until_they_are_cleared() -> None:
    model, _ = initialize_engine(make, 0, config())
    tokens, labels = batches(1)[0]
    model.backward(model(tokens, labels=labels))
    once = model.module.block[1].weight.grad.clone()
    model.backward(model(tokens, labels=labels))
    torch.testing.assert_close(model.module.block[1].weight.grad, 2 * once)


def test_a_model_can_be_given_beside_a_client() -> None:
    expected = train(*initialize_engine(make, 0, config()), batches(2))
    client = PatrickStarClient(0, config=small())
    model, optimizer = initialize_engine(make(), 0, config(), client)
    assert train(model, optimizer, batches(2)) == expected
    engine = PatrickStarEngine(make(), client, {"optimizer": {"params": {"lr": 1e-2}}})
    assert isinstance(engine, nn.Module)
    assert train(engine, engine.optimizer, batches(2)) == expected


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        ({"gpu_memory_bytes": 2000, "overall_gpu_mem_ratio": 1.0}, r"misses [\d,]+ bytes"),
        ({**small()["mem_tracer"], "overall_cpu_mem_ratio": 1e-9}, "host memory"),
    ],
)
def test_too_small_a_budget_is_told_before_anything_moves(memory: dict[str, Any], told: str) -> None:
    model, optimizer = initialize_engine(make, 0, config(client={"mem_tracer": memory}))
    with pytest.raises(OutOfBudgetError, match=told):
        train(model, optimizer, batches(1))
    assert type(model.module.block[1].weight) is nn.Parameter


def test_what_is_no_loss_a_closure_and_bad_models_and_configurations_are_told() -> None:
    model, optimizer = initialize_engine(make, 0, config())
    for loss in (None, torch.ones(()), model(batches(1)[0][0])):
        with pytest.raises(ArgumentError, match="give the loss"):
            model.backward(loss)
    with pytest.raises(ArgumentError, match="closure"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(ArgumentError, match="or a client with the module"):
        initialize_engine(make(), 0)
    old = make()
    with pytest.raises(ArgumentError, match="made before model_func was called"):
        initialize_engine(lambda: old, 0)
    with pytest.raises(ArgumentError, match="did you mean 'default_chunk_size'"):
        initialize_engine(make, 0, {"default_chunk": 1})


def test_the_profiler_sees_what_the_engine_does() -> None:
    profiler.start()
    on_host = {"params": {"use_hybrid_adam": False}}
    model, optimizer = initialize_engine(make, 0, config(fp16=SCALED, optimizer=on_host))
    train(model, optimizer, batches(2))
    profiler.end()
    profile = profiler.recorded()
    assert [each.name for each in profile.phases] == ["forward", "backward", "other", "optimizer", "other"] * 2
    assert set(profile.kinds()) == {"PARAM_FP16", "PARAM_FP32", "MOMENTUM", "VARIANCE"}
    assert profile.budget_bytes == BUDGET
    device = [each for each in profile.memory if each.tier == "GPU"]
    assert 0 < max(each.chunk_bytes for each in device) <= max(each.total_bytes for each in device) <= BUDGET
    fetched = sum(each.num_bytes for each in profile.chunks if each.tier == "GPU" and each.moment)
    assert fetched == model.residency.fetched_bytes
    # 16 bytes for each parameter that is trained, 2 for the others.
    host = max(each.chunk_bytes for each in profile.memory if each.tier == "CPU")
    assert host == sum(each.numel() * (16 if each.requires_grad else 2) for each in make().parameters())


def test_chunks_stay_on_a_device_that_has_room() -> None:
    expected = train(*initialize_engine(make, 0, config()), batches(3))
    profiler.start()
    model, optimizer = initialize_engine(make, 0, config(client=small(10**6)))
    assert train(model, optimizer, batches(3)) == expected
    profiler.end()
    assert model.residency.fetched_bytes == 0
    profile = profiler.recorded().from_first_phase()
    assert {stay.tier for kind in profile.kinds() for stay in profile.stays(kind)} == {"GPU"}


class Untied(Net):
    """A table of its own, larger than the budget, and one that the forward pass takes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 16)
        self.places = nn.Embedding(3, 16)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.table(tokens) + self.places(torch.arange(3, device=tokens.device))
        logits = self.head(x + self.block(x)) + self.places.weight.sum()
        return logits if labels is None else loss_of(logits, labels)


def make_untied() -> Untied:
    torch.manual_seed(0)
    return Untied()


def test_embeddings_stay_on_the_host() -> None:
    whole, before = make_untied(), make_untied()
    given = config(optimizer=SMOOTH, fp16=SCALED)
    model, optimizer = initialize_engine(make_untied, 0, given)
    losses = train(model, optimizer, batches(3))
    assert losses == pytest.approx(plainly(whole, batches(3), 2.0**8, lr=1.0, eps=1.0), rel=1e-3)
    assert type(model.module.table.weight) is nn.Parameter
    assert model.module.table.weight.dtype == torch.float32
    chunked = set(model.residency.chunks.layout.chunk_of)
    assert "table.weight" not in chunked
    assert "places.weight" in chunked
    update, expected = (each.table.weight.detach() - before.table.weight for each in (model.module, whole))
    assert expected.norm() > 1e-3
    assert (update - expected).norm() <= 1e-2 * expected.norm()
    given["use_cpu_embedding"] = False
    with pytest.raises(OutOfBudgetError):  # 32,000 bytes of a table
        train(*initialize_engine(make_untied, 0, given), batches(1))


# Several processes. At an epsilon of 1 a step of Adam is nearly one along the gradient, and does not enlarge rounding.

SHARED = 20_000  # gradients are put together on the device


def of_rank(rank: int, data: Batches) -> Batches:
    return [(tokens[rank : rank + 1], labels[rank : rank + 1]) for tokens, labels in data]


def two_train(rank: int, size: int, folder: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Train, save as the guide does, load into another engine, go on: the losses after that, and this rank's state."""
    given = config(optimizer=SMOOTH, fp16=SCALED, client=small(SHARED))
    model, optimizer = initialize_engine(make, 0, given)
    train(model, optimizer, of_rank(rank, batches(3)))
    part = model.state_dict()
    torch.save(part, f"{folder}/checkpoint-{rank}.pt")
    torch.save(optimizer.state_dict(), f"{folder}/optimizer-{rank}.pt")
    losses = train(model, optimizer, of_rank(rank, batches(2)))

    again, second = initialize_engine(make, 0, given)
    found = again.load_state_dict(torch.load(f"{folder}/checkpoint-{rank}.pt", weights_only=True))
    assert not found.missing_keys
    second.load_state_dict(torch.load(f"{folder}/optimizer-{rank}.pt", weights_only=True))
    assert train(again, second, of_rank(rank, batches(2))) == losses
    again.load_state_dict(torch.load(f"{folder}/checkpoint-{rank}.pt", weights_only=True))
    assert_equal(again.state_dict(), part)
    return losses, part, model.residency.peak_bytes


def test_two_processes_train_as_one_and_save_their_parts(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(two_train, str(tmp_path))
    model, optimizer = initialize_engine(make, 0, config(optimizer=SMOOTH, fp16=SCALED))
    before = make().state_dict()
    train(model, optimizer, batches(3))
    expected = model.state_dict()
    merged = torch.load(merge_checkpoints(str(tmp_path / "checkpoint-*.pt"), 2), weights_only=True)
    assert set(merged) == set(expected)
    assert all(len(part) < len(merged) for _, part, _ in results)
    make().load_state_dict(merged)
    trained = [name for name, parameter in make().named_parameters() if parameter.requires_grad]
    update, other = (
        torch.cat([(state[name] - before[name]).flatten() for name in trained]) for state in (expected, merged)
    )
    assert update.norm() > 0.1
    assert (update - other).norm() <= 1e-2 * update.norm()
    losses = [sum(pair) / 2 for pair in zip(*(losses for losses, _, _ in results), strict=True)]
    assert losses == pytest.approx(train(model, optimizer, batches(2)), rel=1e-2)
    assert all(peak <= SHARED for _, _, peak in results)


def two_unseeded(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Models that begin differently; a table that nobody's chunks have."""
    torch.manual_seed(rank)
    model, optimizer = initialize_engine(lambda: Untied(), 0, config(optimizer=SMOOTH, client=small(SHARED)))
    train(model, optimizer, of_rank(rank, batches(2)))
    return model.module.table.weight.detach().clone(), model.state_dict()["table.weight"]


def test_processes_begin_alike_and_average_what_is_in_no_chunk(pool: Pool) -> None:
    (one, saved), (other, _) = pool.run(two_unseeded)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(one, saved, rtol=0, atol=0)
    torch.manual_seed(0)
    model, optimizer = initialize_engine(lambda: Untied(), 0, config(optimizer=SMOOTH))
    before = model.module.table.weight.detach().clone()
    train(model, optimizer, batches(2))
    expected, update = model.module.table.weight.detach() - before, one - before
    assert expected.norm() > 1e-3
    assert (update - expected).norm() <= 1e-2 * expected.norm()


@on_ranks(2)
def test_processes_fail_and_skip_together(rank: int, size: int) -> None:
    """One has an overflow; one has larger batches; one state lacks a key; the budget is too small for one."""
    model, optimizer = initialize_engine(make, 0, config(fp16=SCALED, client=small(SHARED)))
    for step, (tokens, labels) in enumerate(batches(3)):
        optimizer.zero_grad()
        loss = model(tokens[: 1 + (rank == step)], labels=labels[: 1 + (rank == step)])
        model.backward(loss * (1e30 if rank == step == 1 else 1.0))
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 1)
    part = model.state_dict()
    with pytest.raises(RuntimeError, match=r"no process has \['more\.0\.weight'\]"):
        model.load_state_dict({name: value for name, value in part.items() if name != "more.0.weight"})
    small_one, optimizer = initialize_engine(make, 0, config(client=small(2000 if rank else 10**6)))
    with pytest.raises(OutOfBudgetError):
        train(small_one, optimizer, batches(1))
