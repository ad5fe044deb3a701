"""Every optimizer of torch.optim under every method that spreads parameters: trained beside plain ones, or refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atorch import auto_accelerate
from atorch.errors import StrategyError
from tests.contract.job import BATCH, Tokens, arguments, distance, first_names, loss_func, make_model, snapshot, updates

METHODS: dict[str, list[Any]] = {
    "ddp": ["ddp"],
    "zero1": ["zero1"],
    "zero2": ["zero2"],
    "fsdp": ["fsdp"],
    "chunk": [("chunk", {"budget_bytes": 2**30})],
    "tensor_parallel": [("parallel_mode", ([("tensor", 2)], None)), "tensor_parallel"],
    "pipeline_parallel": [("parallel_mode", ([("pipeline", 2)], None)), "pipeline_parallel"],
}
KINDS: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
ARGUMENTS: dict[str, dict[str, Any]] = {"LBFGS": {"lr": 0.5, "max_iter": 3}, "SparseAdam": {"lr": 0.01}}
TOLERANCE = 1e-3
OWN_TOLERANCE: dict[str, float] = {"Muon": 5e-2}  # it computes in bf16, in which a sum of parts rounds otherwise


class Bag(nn.Module):
    """Embeddings with sparse gradients, and a head that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(64, 8, sparse=True) for _ in range(2))
        self.head = nn.Linear(16, 64).requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(torch.cat([table(input_ids) for table in self.tables], dim=-1))}


def concerns(kind: str, method: str) -> bool:
    """Whether there is a model for the pair: embeddings alone, with sparse gradients, have nothing to split."""
    return kind != "SparseAdam" or method not in ("tensor_parallel", "pipeline_parallel")


def model_for(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return Bag() if kind == "SparseAdam" else make_model()


def parameters_for(kind: str, model: nn.Module) -> list[Any]:
    """What trains, in two groups where the optimizer can have two."""
    trainable = [each for each in model.parameters() if each.requires_grad]
    matrices = [each for each in trainable if each.dim() > 1]
    if kind == "LBFGS":
        return trainable
    if kind in ("Muon", "SparseAdam"):
        return matrices
    return [{"params": matrices}, {"params": [each for each in trainable if each.dim() < 2]}]


def loop(batches: Any, model: Any, optim: Any, loss_of: Any, prepare: Any = lambda batch: batch) -> None:
    for batch in batches:
        given = prepare(batch)

        def closure(given: Any = given) -> Tensor:
            optim.zero_grad()
            loss: Tensor = loss_of(given, model(**given))
            loss.backward()
            return loss

        if isinstance(optim, torch.optim.LBFGS):
            optim.step(closure)
        else:
            closure()
            optim.step()
        optim.zero_grad()


def plainly(kind: str) -> dict[str, Tensor]:
    model = model_for(kind)
    before = snapshot(model)
    optim = KINDS[kind](parameters_for(kind, model), **ARGUMENTS.get(kind, {}))
    tokens = [Tokens().tokens[start : start + BATCH] for start in range(0, len(Tokens()), BATCH)]
    loop([{"input_ids": each, "labels": each} for each in tokens], model, optim, loss_func)
    return updates(before, snapshot(model))


def answer(rank: int, size: int, kind: str, method: str) -> tuple[str, float]:
    """How training comes out: `equal`, or the reason of a refusal that left the model as it was; and the distance."""
    model = model_for(kind)
    before, names, modules = snapshot(model), first_names(model), [type(each) for each in model.modules()]
    try:
        _, result, _ = auto_accelerate(
            model,
            load_strategy=METHODS[method],
            **arguments(
                optim_func=KINDS[kind],
                optim_args=ARGUMENTS.get(kind, {}),
                optim_param_func=lambda each: parameters_for(kind, each),
            ),
        )
    except StrategyError as error:
        assert [type(each) for each in model.modules()] == modules
        assert all(torch.equal(value, before[name]) for name, value in snapshot(model).items())
        return str(error), 0.0
    loop(
        result.dataloader, result.model, result.optim, result.loss_func, lambda each: result.prepare_input(each, "cpu")
    )
    after = {names[name]: value for name, value in snapshot(result.model).items()}
    got = updates({name: before[name] for name in after}, after)
    expected = plainly(kind)
    error = distance(got, {name: expected[name] for name in got})
    return ("equal" if error <= OWN_TOLERANCE.get(kind, TOLERANCE) else f"wrong by {error:.1e}"), error
