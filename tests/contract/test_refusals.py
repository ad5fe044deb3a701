"""What is refused leaves everything as it was: the model, its classes and hooks, random numbers and process groups."""

import random
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch import auto_accelerate
from atorch.errors import ArgumentError, CapabilityError, StrategyError
from tests.auto.training import run_each
from tests.contract.job import Tokens, arguments, make_model
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
    model = given.pop("model", lambda: make_model(attention))()
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
FAIRSCALE = ("zero1", {"backend": "fairscale"})
SKIPPING = ("amp_native", {"dtype": "bf16", "skip_if_nonfinite": True})
TENSOR, SEQUENCE, CONTEXT = (("parallel_mode", ([(axis, 2)], None)) for axis in ("tensor", "sequence", "context"))
MEGATRON = ("sequence_parallel", {"mode": "megatron"})
OUT_OF_ORDER = ("parallel_mode", ([("context", 2), ("sequence", 2)], None))


def piped(**knobs: Any) -> list[Any]:
    return [("parallel_mode", ([("pipeline", 2)], None)), *EARLY, ("pipeline_parallel", knobs)]


class OddTokens(Tokens):
    """Sequences that two processes cannot share out."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: each[:-1] for name, each in super().__getitem__(index).items()}


def indivisible() -> nn.Module:
    """Two blocks whose inner width of 15 two processes do not divide."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 15), nn.ReLU(), nn.Linear(15, 3)) for _ in range(2)))


def with_table(kind: str) -> dict[str, Any]:
    return {"model": partial(Embedded, kind)}


EAGER: dict[str, Any] = {"model": make_model}
WITHOUT_OPTIMIZER: dict[str, Any] = {"optim_func": None, "optim_args": None}
OF_ROWS: dict[str, Any] = {"dataset": None, "sample_batch": torch.ones(4, 3), "model_input_format": None}
COMPILED: dict[str, Any] = {"loss_func": torch.compile(lambda batch, output: output, backend="eager")}
NO_DATA, NO_FORMAT = {"dataset": None}, {"model_input_format": None}
NARROW: dict[str, Any] = {"model": lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), **OF_ROWS}
ALONE: list[tuple[list[Any], str, dict[str, Any]]] = [
    ([*FIRST, ("micro_batch", {"size": 2})], "needs|inside loss_func", {"loss_func": None}),
    ([*FIRST, ("micro_batch", {"size": 2, "reduce": "each"})], "or add fsdp", {}),
    (["checkpoint", DEEPSPEED, ("micro_batch", {"size": 2})], "has a backward of its own|is not installed", {}),
    ([*EARLY, DEEPSPEED], "leave out half|is not installed", {}),
    (["amp_native", DEEPSPEED], "keeps the fp32 weights itself|is not installed", {}),
    ([SKIPPING, DEEPSPEED], "must have the optimizer itself|is not installed", {}),
    ([TENSOR, DEEPSPEED], "shares over all 2 processes|is not installed", {}),
    (["checkpoint", DEEPSPEED], "give optim_func|is not installed", WITHOUT_OPTIMIZER),
    (["checkpoint", ("zero2", {"backend": "fairscale"})], "give optim_func", WITHOUT_OPTIMIZER),
    ([("half", "bf16"), ("checkpoint", "LlamaDecoderLayr")], "did you mean 'LlamaDecoderLayer'", {}),
    ([*EARLY, ("compile", {"wrap_class": ["LlamaDecoderLayr"]})], "did you mean 'LlamaDecoderLayer'", {}),
    ([*EARLY, ("fsdp", {"atorch_wrap_cls": ["LlamaDecoderLayr"]})], "did you mean 'LlamaDecoderLayer'", {}),
    ([*EARLY, ("fsdp", {"atorch_ignored_cls": ["NoSuch"]})], "atorch_ignored_cls names 'NoSuch'", {}),
    ([*EARLY, ("fsdp", {"sharding_strategy": "HYBRID_SHARD"})], "no two axes", {}),
    ([*EARLY, ("fsdp", {"reshard_after_forward": 3})], "must be a divisor", {}),
    ([("fp8", {**SETTINGS["fp8"], "include": ["q_proj"], "exclude": ["q_proj"]})], "converts nothing", {}),
    ([*EARLY, "zero1"], "zero1 gives each .* optimizer of some .* Together does not support", {"optim_func": Together}),
    ([*EARLY, "zero1"], "half works on gradients", {"optim_func": Closed}),
    ([*EARLY, "offload"], "give optim_func", {**WITHOUT_OPTIMIZER, "loss_func": None}),
    ([*EARLY, ("offload", {"optimizer": 0.0, "activations": 0.1})], "which is less than one block", {}),
    ([*EARLY, ("offload", {"parameters": 1.0})], "add fsdp, or take chunk", {}),
    ([*EARLY, "zero2", ("offload", {"parameters": 1.0})], "add fsdp, or take chunk", {}),
    ([*EARLY, "chunk", "offload"], "give it only activations", {}),
    ([*EARLY, FAIRSCALE, "offload"], "leave the backend of zero1 out", {}),
    ([("offload", {"optimizer": 0.0, "activations": 1.0})], "0 repeated blocks .* give a model that repeats", NARROW),
    ([*EARLY, ("compile", {"mode": "max-autotune"}), "chunk"], "records where parameters are", {}),
    ([*EARLY, ("chunk", {"step_in_backward": True})], "for one process, and 2 share the chunks", {}),
    (
        [*EARLY, "cross_entropy", ("fsdp", {"reshard_after_forward": True})],
        "reshard_after_forward=True, which frees",
        {},
    ),
    (["cross_entropy", ("compile", {"wrap_class": ["LlamaForCausalLM"]})], "compile has it in a graph", {}),
    ([*EARLY, "cross_entropy"], "compiled loss_func", COMPILED),
    ([*EARLY, ("cross_entropy", {"head": "no_such"})], "finds no linear layer", {}),
    (["cross_entropy"], "finds no linear layer", NARROW),
    (piped(schedule="interleaved", interleave=2), "repeated blocks", {}),
    (piped(split_points=["model.layers.0", "model.layers.1"]), "begin at 1", {}),
    (piped(), "inside loss_func", {"loss_func": None}),
    ([*piped(schedule="zero_bubble"), "compile"], "zero_bubble", {}),
    ([*EARLY, MEGATRON], "completes tensor_parallel, which is not in the strategy", {}),
    ([TENSOR, "tensor_parallel", MEGATRON], "give sequences of a multiple of 2 tokens", {"dataset": OddTokens()}),
    ([SEQUENCE, "sequence_parallel"], "layers.0 calls no scaled_dot_product.*attn_implementation='sdpa'", EAGER),
    ([SEQUENCE, "sequence_parallel"], "sequence_parallel runs the model on a sample.*sample_batch", NO_DATA),
    ([CONTEXT, "context_parallel"], "StrategyError.*model.layers.0.*sdpa.*module_replace", EAGER),
    ([CONTEXT, "context_parallel"], "layers.0.*15 tokens.*4 equal pieces.*multiple of 4", {"dataset": OddTokens()}),
    ([TENSOR, *EARLY, "tensor_parallel", FAIRSCALE], "leave backend out", {}),
    ([TENSOR, ("tensor_parallel", {"plan": {"mlp.upproj": "column"}})], "'mlp.upproj'.*up_proj", {}),
    ([TENSOR, "tensor_parallel"], "ArgumentError.*dataset.*sample_batch", NO_DATA),
    ([TENSOR, "tensor_parallel"], r"is None.*the batch is a dict of \[.*give 'unpack_dict'", NO_FORMAT),
    (
        [TENSOR, "tensor_parallel"],
        "nothing of Sequential can be split.*2 ranks do not divide its 15 columns.*leave tensor_parallel out",
        {"model": indivisible, **OF_ROWS},
    ),
    ([*EARLY, "fsdp"], "fsdp .* gradient of table, .* sparse=False", with_table("sparse")),
    ([*EARLY, "zero2"], "zero2 .* gradient of table, .* sparse=False", with_table("sparse")),
    ([*EARLY, "chunk"], "chunk .* gradient of table, .* sparse=False", with_table("sparse bag")),
    ([*EARLY, "chunk"], "chunk keeps .*, and counts is of torch.int64.*register_buffer", with_table("integer")),
    (EARLY, "half cannot compute with phase, a parameter of torch.complex64", with_table("complex")),
    (["module_replace", ("amp_native", "bf16")], "amp_native cannot .* phase", with_table("complex")),
    (["checkpoint", "fsdp"], "fsdp cannot compute with phase, a parameter of torch.complex64", with_table("complex")),
]
"""Refusals of a method, most behind others that would have changed the model: strategy, message, arguments."""


def assert_refused(pool: Pool, cases: list[tuple[Any, ...]], told: Iterable[str]) -> None:
    """Hold each case of `refused` to what all ranks say, and to leaving everything as it was."""
    for by_rank, message in zip(run_each(pool, refused, cases), told, strict=True):
        assert all(re.search(message, said, re.DOTALL) and not changed for said, changed in by_rank), by_rank


def refused_row(rank: int, size: int, row: int) -> tuple[str, list[str]]:
    strategy, _, more = ALONE[row]
    return refused(rank, size, strategy, "sdpa", more)


def test_what_one_method_refuses_leaves_everything_as_it_was(pool: Pool) -> None:
    by_row = run_each(pool, refused_row, [(row,) for row in range(len(ALONE))])
    found = [(*row, *seen) for row, by_rank in zip(ALONE, by_row, strict=True) for seen in by_rank]
    assert not [(strategy, told) for strategy, message, _, told, _ in found if not re.search(message, told, re.DOTALL)]
    assert not [(strategy, changed) for strategy, *_, changed in found if changed]

    for told, changed in pool.run(refused, [OUT_OF_ORDER, "context_parallel", "sequence_parallel"], "sdpa", ranks=4):
        assert "give sequence before context" in told
        assert not changed


def test_the_measure_notices_what_a_strategy_changes() -> None:
    model = make_model()
    before = state_of(model)
    auto_accelerate(model, load_strategy=["checkpoint"], **arguments())
    assert state_of(model)["attributes"] != before["attributes"]
