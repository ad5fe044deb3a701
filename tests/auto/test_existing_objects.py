"""An optimizer and a DataLoader that exist already: made again exactly, or refused by name."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import data as loading

from atorch import auto_accelerate
from atorch.auto.existing_objects import settings_of_objects
from atorch.errors import ArgumentError
from tests.auto.training import accelerate, accelerated_steps, steps
from tests.pool import Pool
from tests.zoo import Labelled

PAIRS = loading.TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16.0))
DATA2 = [("parallel_mode", ([("data", 2)], None))]
STAGES2 = [("parallel_mode", ([("pipeline", 2)], None)), ("pipeline_parallel", {"micro_batches": 2})]


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    return Labelled(OrderedDict(blocks=blocks, head=nn.Linear(4, 1)))


def loss_func(batch: Any, output: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output[:, 0], batch[1])


def two_groups(model: nn.Module, kind: Any = torch.optim.AdamW, **settings: Any) -> Any:
    """An optimizer of weights, and of biases but for the head's, without decay."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias") and "head" not in name]
    return kind([{"params": weights}, {"params": biases, "weight_decay": 0.0}], **{"lr": 0.05, **settings})


def trained(strategy: list[Any]) -> list[float]:
    """The losses of four global batches by an accelerated model."""
    model = model_of()
    groups, loader = two_groups(model, weight_decay=0.5), loading.DataLoader(PAIRS, batch_size=8)
    given = {"optim_func": groups, "optim_args": None, "model_input_format": "unpack_sequence"}
    result = accelerate(model, strategy, loader, loss_func, **given)
    return [loss for _ in range(2) for loss in accelerated_steps(result)[0]]


def plain() -> list[float]:
    model = model_of()
    return steps(model, two_groups(model, weight_decay=0.5), loss_func, [*loading.DataLoader(PAIRS, batch_size=8)] * 2)[
        0
    ]


def on_rank(rank: int, size: int, strategies: list[list[Any]]) -> list[list[float]]:
    return [trained(strategy) for strategy in strategies]


def test_groups_survive_and_train_as_without(pool: Pool) -> None:
    assert trained([]) == pytest.approx(plain(), rel=1e-5)

    strategies = [[*DATA2, name] for name in ("ddp", "zero1", "fsdp")] + [STAGES2]
    first, second = pool.run(on_rank, strategies)
    for strategy, losses, others in zip(strategies, first, second, strict=True):
        mean = [(one + other) / 2 for one, other in zip(losses, others, strict=True)]
        assert mean == pytest.approx(plain(), rel=1e-4), strategy


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad", "RMSprop", "Adafactor", "LBFGS"])
def test_torchs_optimizers_can_be_made_again(kind: str) -> None:
    model = model_of()
    optim = getattr(torch.optim, kind)(model.parameters(), lr=0.03)
    job = settings_of_objects({"model": model, "optim_func": optim})
    again = job["optim_func"](job["optim_param_func"](model), **job["optim_args"])
    assert again.defaults == optim.defaults
    assert [p.shape for p in again.param_groups[0]["params"]] == [p.shape for p in model.parameters()]


def test_optimizers_are_made_again_with_names_and_groups() -> None:
    model = model_of()
    job = settings_of_objects({"model": model, "optim_func": torch.optim.SGD(model.named_parameters(), lr=0.1)})
    assert [name for name, _ in job["optim_param_func"](model)[0]["params"]] == list(dict(model.named_parameters()))

    model = model_of()
    assert settings_of_objects({"model": model, "optim_func": Counted(model.parameters())})["optim_func"] is Counted

    model = model_of()
    job = settings_of_objects({"model": model, "optim_func": torch.optim.SGD(model.parameters(), lr=0.1)})
    model.added = nn.Linear(1, 1)
    with pytest.raises(ArgumentError, match=r"new parameters, such as added\.weight"):
        job["optim_param_func"](model)

    model = model_of()
    optim = two_groups(model, betas=(0.8, 0.9))
    job = settings_of_objects({"model": model, "optim_func": optim})
    assert job["optim_func"] is torch.optim.AdamW
    assert (job["optim_args"]["lr"], job["optim_args"]["betas"]) == (0.05, (0.8, 0.9))
    other = model_of(1)
    groups = job["optim_param_func"](other)
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(p) for p in group["params"]] for group in two_groups(other).param_groups
    ]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    wrapped = nn.Module()
    wrapped.module = other
    assert job["optim_param_func"](wrapped) == groups


class Counted(torch.optim.SGD):
    def __init__(self, params: Any, lr: float = 0.1, count: int = 1) -> None:
        super().__init__(params, lr=lr)
        self.count = count


def stepped(model: nn.Module) -> Any:
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optim.step()
    return optim


def scheduled(model: nn.Module) -> Any:
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optim, 1)
    return optim


def hooked(model: nn.Module) -> Any:
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.register_step_pre_hook(lambda *_: None)
    return optim


REFUSED: list[tuple[Any, str]] = [
    (stepped, "it has stepped, and its (step|exp_avg) would be lost; give a new one"),
    (scheduled, "it has a learning-rate scheduler; make that of result.optim afterwards"),
    (hooked, "_optimizer_step_pre_hooks would be"),
    (
        lambda model: Counted(model.parameters(), count=3),
        r"an optimizer \(Counted\) that was made already .* count would be 1",
    ),
    (lambda model: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "that the model does not have"),
]


@pytest.mark.parametrize(("make", "told"), REFUSED)
def test_an_optimizer_that_would_differ_is_refused(make: Any, told: str) -> None:
    model = model_of()
    with pytest.raises(ArgumentError, match=told):
        auto_accelerate(model, make(model), load_strategy=[])


def seeded(worker: int) -> None:
    torch.manual_seed(worker)


def pairs(samples: list[Any]) -> list[Any]:
    return samples


class Stream(loading.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


def arguments(loader: loading.DataLoader[Any]) -> dict[str, Any]:
    return settings_of_objects({"dataset": loader})["dataloader_args"]


def test_a_loader_is_its_settings_and_samplers() -> None:
    made = loading.DataLoader(
        PAIRS, batch_size=4, shuffle=True, num_workers=2, collate_fn=pairs, drop_last=True, timeout=3,
        worker_init_fn=seeded, prefetch_factor=3, persistent_workers=True, multiprocessing_context="spawn",
    )  # fmt: skip
    found = arguments(made)
    assert found["shuffle"] is True
    assert "pin_memory" not in found
    again = loading.DataLoader(PAIRS, **found)
    kept = ("batch_size", "num_workers", "collate_fn", "drop_last", "timeout", "worker_init_fn", "prefetch_factor")
    for name in (*kept, "persistent_workers", "multiprocessing_context"):
        assert getattr(again, name) == getattr(made, name), name

    subset, chunks = (
        loading.SubsetRandomSampler(range(4)),
        loading.BatchSampler(loading.SequentialSampler(PAIRS), 3, drop_last=False),
    )
    assert arguments(loading.DataLoader(PAIRS, sampler=subset))["sampler"] is subset
    found = arguments(loading.DataLoader(PAIRS, batch_sampler=chunks))
    assert found["batch_sampler"] is chunks
    assert not {"batch_size", "shuffle", "sampler", "drop_last"} & found.keys()
    part = loading.RandomSampler(PAIRS, num_samples=4)
    assert arguments(loading.DataLoader(PAIRS, sampler=part))["sampler"] is part


@pytest.mark.parametrize(
    "settings", [{}, {"batch_size": 5}, {"batch_size": 5, "drop_last": True}, {"batch_size": None}]
)
@pytest.mark.parametrize("data", [range(13), Stream()])
def test_batches_are_the_same(settings: dict[str, Any], data: Any) -> None:
    loader: loading.DataLoader[Any] = loading.DataLoader(data, **settings)
    result = auto_accelerate(model_of(), None, loader, load_strategy=[])[1]
    assert [batch.tolist() for batch in map(torch.as_tensor, result.dataloader)] == [
        batch.tolist() for batch in map(torch.as_tensor, loader)
    ]


class MyLoader(loading.DataLoader[Any]):
    pass


def iterated() -> loading.DataLoader[Any]:
    loader: loading.DataLoader[Any] = loading.DataLoader(PAIRS)
    loader._iterator = iter(loader)  # as with workers that stay
    return loader


SHARED = loading.DistributedSampler(PAIRS, num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: MyLoader(PAIRS), "dataset is a MyLoader, which may do more"),
        (iterated, "that was iterated and whose workers still run"),
        (lambda: loading.DataLoader(PAIRS, sampler=SHARED), "a sampler that already divides samples"),
        (
            lambda: loading.DataLoader(PAIRS, batch_sampler=loading.BatchSampler(SHARED, 2, False)),
            "already divides samples",
        ),
        (
            lambda: loading.DataLoader(PAIRS, shuffle=True, generator=torch.Generator()),
            "shuffles by a generator of its own",
        ),
    ],
)
def test_a_loader_that_would_differ_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        auto_accelerate(model_of(), None, make(), load_strategy=[])
