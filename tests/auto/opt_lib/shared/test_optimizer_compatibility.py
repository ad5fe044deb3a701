"""Optimizers under methods: the table of the documentation, trained beside plain ones, and some that nobody listed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch import auto_accelerate
from atorch.auto.opt_lib.shared.optimizer_compatibility import need_same
from atorch.errors import StrategyError
from atorch.runtime.optimizer.user_optimizer import ShardKind, made_small, needs_closure, refusal
from tests.auto.training import run_each
from tests.contract.job import BATCH, Tokens, arguments, distance, first_names, loss_func, make_model, snapshot, updates
from tests.pool import Pool

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
    """True if there is a model for the pair: embeddings alone, with sparse gradients, have nothing to split."""
    return kind != "SparseAdam" or method not in ("tensor_parallel", "pipeline_parallel")


def model_for(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return Bag() if kind == "SparseAdam" else make_model()


def parameters_for(kind: str, model: nn.Module) -> list[Any]:
    """The parameters to train, in two groups where the optimizer can have two."""
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
    """The outcome of training: `equal`, or the reason of a refusal that left the model as it was; and the distance."""
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


PAGE = Path(__file__).parents[4] / "docs" / "optimizers.md"
QUICK = ("zero1", "fsdp")


def table() -> dict[tuple[str, str], str]:
    """The cells of the documentation's table, by optimizer and method."""
    part = PAGE.read_text().split("## Optimizers of your own")[0]
    rows = [line.split("|")[1:-1] for line in part.splitlines() if line.startswith("|")]
    header, *body = [[cell.strip().strip("`") for cell in row] for row in rows if "---" not in row[0]]
    return {(row[0], method): cell for row in body for method, cell in zip(header[1:], row[1:], strict=True)}


def check(pool: Pool, kinds: Iterable[str], methods: Iterable[str]) -> None:
    pairs = [(kind, method) for kind in kinds for method in methods if concerns(kind, method)]
    documented, wrong = table(), []
    for (kind, method), by_rank in zip(pairs, run_each(pool, answer, pairs, timeout=600), strict=True):
        for got in by_rank:
            text = "equal" if got[0] == "equal" else "refused" if kind in got[0] or "sparse=True" in got[0] else got[0]
            if text != documented[kind, method].split(" ")[0]:
                wrong.append(f"{kind} under {method}: {got[0]} ({got[1]:.1e}), documented: {documented[kind, method]}")
    assert not wrong, "\n".join(wrong)


def test_the_table_has_every_optimizer_and_method() -> None:
    assert set(table()) == {(kind, method) for kind in KINDS for method in METHODS}
    assert {cell for pair, cell in table().items() if not concerns(*pair)} == {"–"}


@pytest.mark.parametrize("method", QUICK)
def test_optimizers_do_as_documented(pool: Pool, method: str) -> None:
    check(pool, ["Adafactor", "LBFGS", "Muon", "Rprop", "AdamW", "SparseAdam"], [method])


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_every_optimizer_does_as_documented(pool: Pool, method: str) -> None:
    check(pool, KINDS, [method])


class Own(torch.optim.Optimizer):
    """Not one of torch's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("nothing steps it")


class Constructed(torch.optim.AdamW):
    """Has torch's step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)


class Changed(torch.optim.AdamW):
    """Has another step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("nothing steps it")


def stated(depends_on: str | None) -> torch.optim.Optimizer:
    optimizer = Own([nn.Parameter(torch.zeros(2, 2))])
    if depends_on is not None:
        optimizer.step_depends_on = depends_on  # type: ignore[attr-defined]
    return optimizer


SPLITS: tuple[ShardKind, ...] = ("apart", "rows", "columns", "flat", "sharded")
PARAMETERS = [nn.Parameter(torch.zeros(2, 2))]


@pytest.mark.parametrize(
    ("optimizer", "fits"),
    [
        (stated("element"), SPLITS),
        (stated("parameter"), ("apart", "sharded")),
        (stated("model"), ("sharded",)),
        (stated(None), ()),
        (Constructed(PARAMETERS), SPLITS),
        (Changed(PARAMETERS), ()),
        (torch.optim.Muon(PARAMETERS), ("apart", "sharded")),
        (torch.optim.Adafactor(PARAMETERS), ("apart",)),
        (torch.optim.LBFGS(PARAMETERS), ("sharded",)),
        (torch.optim.Rprop(PARAMETERS), SPLITS[:-1]),
    ],
)
def test_splits_that_an_optimizer_supports(optimizer: torch.optim.Optimizer, fits: tuple[ShardKind, ...]) -> None:
    assert tuple(split for split in SPLITS if refusal(optimizer, split) is None) == fits


def test_optimizers_that_nobody_listed() -> None:
    assert 'Set Own.step_depends_on = "element"' in str(refusal(stated(None), "apart"))
    assert "its step_depends_on is 'elements'; it is one of 'element'" in str(refusal(stated("elements"), "flat"))

    net = nn.Linear(4, 4)

    def picky(groups: Any) -> torch.optim.Optimizer:
        raise ValueError("not mine")

    assert made_small(picky, list(net.parameters())) is None

    weight = nn.Parameter(torch.ones(2))
    assert needs_closure(torch.optim.LBFGS([weight]))
    assert not needs_closure(torch.optim.SGD([weight]))

    class Bare:
        make_optimizer = None

    need_same(Bare(), "zero1", "apart")  # type: ignore[arg-type]


@pytest.mark.parametrize("said", [{}, {"fused": False}, {"foreach": True}], ids=str)
def test_the_fused_kernel_is_taken_and_told_unless_the_user_chose(
    said: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="atorch")
    given = arguments(optim_func=torch.optim.AdamW, optim_args={"lr": 1e-3, **said})
    _, result, _ = auto_accelerate(make_model(), load_strategy=["half"], **given)
    assert result.optim.param_groups[0]["fused"] is (said.get("fused") if said else True)
    assert result.optim.defaults["fused"] is said.get("fused")
    told = [each for each in caplog.messages if "steps by torch's fused kernel" in each]
    assert len(told) == (not said), "once"
