"""What is refused leaves everything as it was: the model, its classes and hooks, random numbers and process groups."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch import auto_accelerate
from atorch.errors import ArgumentError, CapabilityError, StrategyError
from tests.auto.training import run_each
from tests.contract.job import arguments, make_model
from tests.contract.test_parity import REFUSED, SETTINGS, attention_of, ranks_of, strategy_of
from tests.pool import Pool


class Embedded(nn.Module):
    """The tests' language model with one more table, of the kind that `case` names."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.inner = make_model("sdpa")
        if case == "sparse":
            self.table = nn.Embedding(64, 4, sparse=True)
        elif case == "sparse bag":
            self.table = nn.EmbeddingBag(64, 4, sparse=True)  # type: ignore[assignment]
        elif case == "integer":
            self.counts = nn.Parameter(torch.arange(4), requires_grad=False)
        elif case == "complex":
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


class Together(torch.optim.Optimizer):
    """Steps every parameter by the norm of all gradients together."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.norm() for each in gradients]).norm()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad / norm * group["lr"])


class Closed(Together):
    """Cannot do without a closure."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()


def state_of(model: nn.Module) -> dict[str, Any]:
    """All of a model that a strategy might change, in values that can be compared."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "bytes": {name: (id(each), each.dtype, each.requires_grad, each.tolist()) for name, each in tensors},
        "classes": {name: (id(each), type(each)) for name, each in model.named_modules()},
        "attributes": {
            name: {key: (dict(value) if key.endswith("_hooks") else id(value)) for key, value in vars(module).items()}
            for name, module in model.named_modules()
        },
        "config": str(getattr(model, "config", None)),
        "random": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
        "groups": len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0,
    }


def refused(
    rank: int, size: int, strategy: list[Any], attention: str, more: dict[str, Any] | None = None
) -> tuple[str, list[str]]:
    """The message, and what the refusal changed."""
    given = dict(more or {})
    case = given.pop("case", "")
    model = Embedded(case) if case else make_model(attention)
    given, before = arguments(**given), state_of(model)
    try:
        auto_accelerate(model, load_strategy=strategy, **given)
    except (StrategyError, ArgumentError, CapabilityError) as error:
        after = state_of(model)
        return f"{type(error).__name__}: {error}", [key for key in before if before[key] != after[key]]
    return "accepted", []


PAIRS = sorted(tuple(sorted(pair)) for pair in REFUSED)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_refused_pair_leaves_everything_as_it_was(pool: Pool, ranks: int) -> None:
    pairs = [pair for pair in PAIRS if ranks_of(*pair) == ranks]
    by_pair = run_each(pool, refused, [(strategy_of(*pair), attention_of(*pair)) for pair in pairs], ranks=ranks)
    for pair, by_rank in zip(pairs, by_pair, strict=True):
        for told, changed in by_rank:
            assert told.startswith("StrategyError"), pair
            assert not changed, pair


FIRST = [("fp8", SETTINGS["fp8"]), ("half", "bf16"), "checkpoint"]
"""What changes the model before the method that is refused would be asked."""
EARLY = [("half", "bf16"), "checkpoint"]
DEEPSPEED = ("zero1", {"backend": "deepspeed"})
TENSOR = ("parallel_mode", ([("tensor", 2)], None))


def piped(**knobs: Any) -> list[Any]:
    return [("parallel_mode", ([("pipeline", 2)], None)), *EARLY, ("pipeline_parallel", knobs)]


WITHOUT_OPTIMIZER: dict[str, Any] = {"optim_func": None, "optim_args": None}
ALONE: list[tuple[list[Any], str, dict[str, Any]]] = [
    ([*FIRST, ("micro_batch", {"size": 2})], "needs|inside loss_func", {"loss_func": None}),
    ([*FIRST, ("micro_batch", {"size": 2, "reduce": "each"})], "or add fsdp", {}),
    (["checkpoint", DEEPSPEED, ("micro_batch", {"size": 2})], "has a backward of its own|is not installed", {}),
    ([*EARLY, DEEPSPEED], "leave out half|is not installed", {}),
    (["checkpoint", DEEPSPEED], "give optim_func|is not installed", WITHOUT_OPTIMIZER),
    (["checkpoint", ("zero2", {"backend": "fairscale"})], "give optim_func", WITHOUT_OPTIMIZER),
    ([("half", "bf16"), ("checkpoint", "NoSuchBlock")], "NoSuchBlock", {}),
    ([*EARLY, ("compile", {"wrap_class": ["NoSuchBlock"]})], "NoSuchBlock", {}),
    ([*EARLY, ("fsdp", {"atorch_wrap_cls": ["NoSuchBlock"]})], "NoSuchBlock", {}),
    ([*EARLY, ("fsdp", {"atorch_ignored_cls": ["NoSuch"]})], "NoSuch", {}),
    ([*EARLY, ("fsdp", {"sharding_strategy": "HYBRID_SHARD"})], "no two axes", {}),
    ([*EARLY, ("fsdp", {"reshard_after_forward": 3})], "must be a divisor", {}),
    ([("fp8", {**SETTINGS["fp8"], "include": ["q_proj"], "exclude": ["q_proj"]})], "converts nothing", {}),
    ([*EARLY, "zero1"], "zero1 gives each .* optimizer of some .* Together does not bear", {"optim_func": Together}),
    ([*EARLY, "zero1"], "half works on gradients", {"optim_func": Closed}),
    ([*EARLY, "offload"], "give optim_func", {**WITHOUT_OPTIMIZER, "loss_func": None}),
    ([*EARLY, ("offload", {"optimizer": 0.0, "activations": 0.1})], "which is no whole block", {}),
    ([*EARLY, ("compile", {"mode": "max-autotune"}), "chunk"], "records where parameters are", {}),
    (piped(schedule="interleaved", interleave=2), "repeated blocks", {}),
    (piped(split_points=["model.layers.0", "model.layers.1"]), "begin at 1", {}),
    (piped(), "inside loss_func", {"loss_func": None}),
    ([*piped(schedule="zero_bubble"), "compile"], "zero_bubble", {}),
    ([*EARLY, ("sequence_parallel", "megatron")], "add tensor_parallel|takes a dict", {}),
    ([TENSOR, *EARLY, "tensor_parallel", ("zero1", {"backend": "fairscale"})], "leave backend out", {}),
    ([*EARLY, "fsdp"], "fsdp .* gradient of table, .* sparse=False", {"case": "sparse"}),
    ([*EARLY, "zero2"], "zero2 .* gradient of table, .* sparse=False", {"case": "sparse"}),
    ([*EARLY, "chunk"], "chunk .* gradient of table, .* sparse=False", {"case": "sparse bag"}),
    ([*EARLY, "chunk"], "chunk keeps .*, and counts is of torch.int64.*register_buffer", {"case": "integer"}),
    (EARLY, "half cannot compute with phase, a parameter of torch.complex64", {"case": "complex"}),
    (["module_replace", ("amp_native", "bf16")], "amp_native cannot .* phase", {"case": "complex"}),
]
"""Refusals of a method, behind others that would have changed the model: strategy, message, model and arguments."""


def test_what_one_method_refuses_leaves_everything_as_it_was(pool: Pool) -> None:
    by_case = run_each(pool, refused, [(strategy, "sdpa", more) for strategy, _, more in ALONE])
    for (strategy, message, more), by_rank in zip(ALONE, by_case, strict=True):
        for told, changed in by_rank:
            assert re.search(message, told), (strategy, more)
            assert not changed, (strategy, more)


def test_the_measure_notices_what_a_strategy_changes() -> None:
    model = make_model()
    before = state_of(model)
    auto_accelerate(model, load_strategy=["checkpoint"], **arguments())
    assert state_of(model)["attributes"] != before["attributes"]
