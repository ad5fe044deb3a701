"""The front door: what it returns, what it refuses, what it leaves alone."""

import copy
import functools
import logging
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import RandomSampler

from atorch import Strategy, auto_accelerate
from atorch.auto.job import make_context
from atorch.cluster.spec import ClusterSpec
from atorch.distributed import init
from atorch.errors import ArgumentError, StrategyError
from tests.auto.planner.jobs import cluster
from tests.auto.training import refusal, run_each
from tests.pool import Pool

PAIRS = [(torch.randn(4), torch.tensor(float(i % 2))) for i in range(16)]


def loss_func(batch: Any, output: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output[:, 0], batch[1])


class Net(nn.Module):
    """Takes the sample and its label, as `unpack_sequence` gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x)


def job(**more: Any) -> dict[str, Any]:
    return {
        "optim_func": torch.optim.SGD,
        "dataset": PAIRS,
        "loss_func": loss_func,
        "optim_args": {"lr": 0.1},
        "dataloader_args": {"batch_size": 4},
        "model_input_format": "unpack_sequence",
        "load_strategy": [],
        **more,
    }


def test_the_result_unpacks_as_documented() -> None:
    model, optim_args, loader_args = Net(), {"lr": 0.1}, {"batch_size": 4, "shuffle": True}
    status, result, strategy = auto_accelerate(model, **job(optim_args=optim_args, dataloader_args=loader_args))
    assert status is True
    new_model, optim, dataloader, new_loss_func, prepare_input, args = result
    assert new_model is model
    assert isinstance(optim, torch.optim.SGD)
    assert len(dataloader) == 4
    assert args == {"use_optim_backward": False, "requires_set_gradient_accumulation_boundary": False}
    assert result.lr_scheduler is None
    assert strategy == Strategy()
    batch = prepare_input(next(iter(dataloader)), torch.device("cpu"))
    assert new_loss_func(batch, new_model(*batch)).dim() == 0
    assert (optim_args, loader_args) == ({"lr": 0.1}, {"batch_size": 4, "shuffle": True}), "the user's own"
    _, bare, _ = auto_accelerate(Net(), load_strategy=[])
    assert (bare.optim, bare.dataloader, bare.loss_func) == (None, None, None)


def test_a_strategy_is_saved_and_reused(tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    _, _, first = auto_accelerate(Net(), **job(load_strategy=[("amp_native", "bf16")], save_strategy_to_file=str(path)))
    _, _, second = auto_accelerate(Net(), **job(load_strategy=str(path)))
    assert first == second
    assert second.metadata["world_size"] == 1
    assert second.metadata["model"]["class"] == "Net"
    assert second.metadata["versions"]["torch"] == torch.__version__


NO_GRAD = nn.Linear(4, 1).requires_grad_(False)


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"verbos": True}, "did you mean 'verbose'"),
    ({"time_limit": -1}, "time_limit is -1"),
    ({"model": "net"}, "takes a torch.nn.Module"),
    ({"model": NO_GRAD}, "no trainable parameter"),
    ({"model": nn.Module()}, "no trainable parameter"),
    ({"optim_func": 3}, "optim_func is 3"),
    ({"optim_func": lambda parameters, lr: None}, "optim_func returned None"),
    ({"model_input_format": ["x"]}, "'unpack_sequence' or 'unpack_dict'"),
    ({"optim_args": [("lr", 1)]}, "give a dict"),
    ({"optimizer_args": {"lr": 1}}, "give optim_args, as "),
    ({"optim_func": torch.optim.SGD(Net().parameters(), lr=0.2)}, "leave optim_args out"),
    ({"dataset": torch.utils.data.DataLoader(PAIRS, 4)}, "leave dataloader_args out"),
    ({"model_input_format": "unpack"}, "'unpack_sequence' or 'unpack_dict'"),
    ({"dataloader_args": {"batchsize": 2}}, "did you mean 'batch_size'"),
    ({"load_strategy": None, "loss_func": None}, "need loss_func"),
    ({"ignore_dryrun_on_load_strategy": False, "loss_func": None}, "need loss_func"),
    ({"time_limit": "60"}, "time_limit is '60'"),
    ({"calibration": 3}, "calibration is 3; it is True for this machine's file"),
    ({"calibration": "."}, "calibration is '.'; .* the path of a file"),
    ({"save_strategy_to_file": 3}, "save_strategy_to_file is 3"),
    ({"save_strategy_to_file": "/no/such/folder/strategy.json"}, "no file can be written"),
    ({"model": nn.LazyLinear(1)}, "run one batch through it"),
    ({"model": nn.Linear(4, 1, device="meta"), "load_strategy": None}, "on the meta device"),
    ({"dataset": 3}, "dataset is a int"),
    ({"optim_param_func": lambda model: nn.Linear(2, 2).parameters()}, r"shape \(2, 2\)"),
    ({"optim_args": {"lrr": 0.1}}, "optim_args has 'lrr', .* did you mean 'lr'"),
    ({"optim_args": {"lr": "0.1"}}, "SGD cannot be made with optim_args {'lr': '0.1'}"),
    ({"optim_args": {"lr": -1}}, "optim_args .*Invalid learning rate"),
    ({"optim_func": nn.Linear}, "which makes no optimizer"),
    ({"optim_func": PAIRS}, r"optim_func is a list; the order is \(model, optim_func, dataset"),
    ({"optim_func": lambda parameters, rate: None, "optim_args": None}, "in optim_args, as {'rate': …"),
    ({"optim_param_func": lambda model: None}, "returned None; it returns an iterable of the model's"),
    ({"optim_param_func": lambda model: []}, "gave no parameters"),
    ({"optim_param_func": lambda model: [{"params": []}]}, "gave no parameters"),
    ({"optim_param_func": lambda model: [{"lr": 1}]}, "gave {'lr': 1}"),
    ({"optim_param_func": lambda model: {"params": [1]}}, "a list of groups"),
    ({"optim_param_func": lambda model: ["linear.weight"]}, "gave 'linear.weight'"),
    ({"optim_param_func": lambda model: model}, "returned Net"),
    ({"optim_param_func": lambda: []}, r"called with \(model\): too many"),
    ({"optim_param_func": lambda model: [{"params": model.linear.weight}] * 2}, r"shape \(1, 4\) in two groups"),
    ({"lr_scheduler_cls": StepLR}, "give it in lr_scheduler_args, as {'step_size': …"),
    ({"lr_scheduler_cls": "StepLR"}, "the class itself, torch.optim.lr_scheduler.StepLR"),
    ({"lr_scheduler_cls": torch.optim.SGD}, "give a class of torch.optim.lr_scheduler"),
    ({"lr_scheduler_cls": lambda optim: None}, "returned None, which has no step"),
    ({"lr_scheduler_cls": StepLR, "lr_scheduler_args": {"stepsize": 1}}, "'stepsize', .*; did you mean 'step_size'"),
    ({"lr_scheduler_cls": OneCycleLR, "lr_scheduler_args": {"max_lr": 1}}, "{'max_lr': 1}: You must define"),
    ({"lr_scheduler_cls": LinearLR, "lr_scheduler_args": {"total_iters": "3"}}, "{'total_iters': '3'} cannot step: "),
    ({"lr_scheduler_args": {"step_size": 1}}, "of no scheduler; give its class too"),
    ({"dataset": lambda: PAIRS}, "dataset is a function; .* give what it returns"),
    ({"dataset": iter(PAIRS)}, r"give list\(dataset\)"),
    ({"dataset": (torch.zeros(4, 4), torch.zeros(4))}, r"TensorDataset\(\*dataset\)"),
    ({"distributed_sampler_cls": RandomSampler}, "does not take num_replicas; .*'sampler': sampler"),
    ({"distributed_sampler_cls": RandomSampler(PAIRS)}, "made already; give its class"),
    ({"distributed_sampler_cls": lambda data, **kwargs: None}, "returned None; it returns a sampler"),
    ({"distributed_sampler_args": {}}, "give distributed_sampler_cls, .* functools.partial"),
    ({"eval_dataset": PAIRS}, "yours to load"),
    ({"num_epochs": 3}, "the loop over result.dataloader is yours"),
    ({"max_grad_norm": 1.0}, "call atorch.clip_grad_norm"),
    ({"bf16": True}, r"load_strategy=\[\('amp_native', 'bf16'\)"),
    ({"fsdp": True}, r"it is a method: give load_strategy=\['fsdp'\]"),
    ({"loss_func": lambda output: output}, r"called with \(input, output\): too many"),
    ({"loss_func": lambda batch, output, model: output}, "missing a required argument: 'model'"),
    ({"loss_func": nn.functional.cross_entropy}, r"cross_entropy\(output, batch\[1\]\)"),
    ({"prepare_input": lambda batch: batch}, r"called with \(data, device\): too many"),
    ({"finetune_strategy": "no"}, "finetune_strategy is 'no'; it is True or False"),
    ({"ignore_dryrun_on_load_strategy": "no"}, "'no'; it is True or False"),
    ({"sampler_seed": "1"}, "sampler_seed is '1'"),
    *(({"loss_weight": wrong}, "loss_weight") for wrong in (None, 3, "")),
    ({"dataloader_args": {"num_workers": "2"}}, "with these dataloader_args: "),
    ({"dataloader_args": {"shuffle": "no"}}, "shuffle 'no'; it is True or False"),
    ({"dataloader_args": {"collate_fn": "x"}}, "collate_fn 'x', which cannot be called"),
]
STRATEGIES: list[tuple[dict[str, Any], str]] = [
    ({"load_strategy": ["paralle_mode"]}, "did you mean 'parallel_mode'"),
    ({"load_strategy": ["ddp", "fsdp"]}, "exclude each other"),
    ({"load_strategy": [("checkpoint", "NoSuchBlock")]}, "NoSuchBlock"),
    ({"load_strategy": 3}, "cannot be made of int"),
    ({"load_strategy": "/no/such/file"}, "/no/such/file"),
    ({"load_strategy": {"checkpoint": {}}}, r"give a list: \[\('checkpoint', {}\)\]"),
    ({"load_strategy": {"methods": []}}, "give its path, or json.dumps of it"),
    ({"load_strategy": ("checkpoint", {})}, r"give \[\('checkpoint', {}\)\]"),
    ({"load_strategy": ("amp_native", "bf16")}, r"give \[\('amp_native', 'bf16'\)\]"),
    ({"load_strategy": "zero3"}, "no strategy file 'zero3', and no method, .*: write 'fsdp'"),
    ({"load_strategy": "auto"}, "leave load_strategy out to search"),
    ({"load_strategy": ["FSDP"]}, "write 'fsdp'"),
    ({"load_strategy": ["gradient_checkpointing"]}, "write 'checkpoint'"),
    ({"load_strategy": [["fsdp", "checkpoint"]]}, r"in one list: \['fsdp', 'checkpoint'\]"),
    ({"load_strategy": [("fsdp", False)]}, "leave fsdp out"),
    ({"excluded": ["fsdpp"]}, "did you mean 'fsdp'"),
    ({"excluded": 3}, "excluded is 3; give a list"),
    ({"included": [("amp_native", "bf16")]}, "it takes only names of methods"),
]


@pytest.mark.parametrize(
    ("error", "more", "message"),
    [*((ArgumentError, *row) for row in ARGUMENTS), *((StrategyError, *row) for row in STRATEGIES)],
)
def test_what_does_not_hold_is_refused(error: type[Exception], more: dict[str, Any], message: str) -> None:
    arguments = {"model": Net(), **job(), **more}
    with pytest.raises(error, match=message):
        auto_accelerate(arguments.pop("model"), **arguments)


@pytest.mark.parametrize(
    ("more", "batch", "message"),
    [
        ({"model_input_format": "unpack_dict"}, [torch.zeros(1, 4)], "a list of 1 .* give 'unpack_sequence'"),
        ({}, {"x": torch.zeros(1, 4)}, r"a dict of \['x'\].* give 'unpack_dict'"),
        (
            {"model_input_format": None, "load_strategy": [("micro_batch", {"size": 1})], "verify": False},
            None,
            r"model_input_format is None.* give 'unpack_sequence' for",
        ),
        ({"loss_func": lambda batch, output: output}, None, r"a tensor of shape \(4, 1\)"),
        ({"loss_func": None}, None, "optim_func and loss_func"),
        ({"lr_scheduler_cls": ReduceLROnPlateau}, None, "asks for a metric"),
    ],
)
def test_what_a_step_cannot_take_is_told(more: dict[str, Any], batch: Any, message: str) -> None:
    _, result, _ = auto_accelerate(Net(), **job(**more))
    with pytest.raises(ArgumentError, match=message):
        result.step(next(iter(result.dataloader)) if batch is None else batch)


class OfOne(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.linear(x)


@pytest.mark.parametrize(
    ("form", "cls", "batch", "signs"),
    [
        (None, Net, [torch.zeros(1, 4), torch.zeros(1)], ["a list of 2 (Tensor, Tensor)", "give 'unpack_sequence'"]),
        (None, Net, {"x": torch.zeros(1, 4)}, ["a dict of ['x']", "give 'unpack_dict' for model(**batch)", "Tensor"]),
        (None, OfOne, [torch.zeros(1, 4), torch.zeros(1)], ["forward takes (x)", "targets too", "not list"]),
        ("unpack_sequence", OfOne, [torch.zeros(1, 4), torch.zeros(1)], ["forward takes (x)", "2 positional"]),
        ("unpack_sequence", Net, torch.zeros(4, 4), ["the batch is a Tensor", "give None for model(batch)"]),
        ("unpack_sequence", Net, 3, ["the batch is a int", "give None for model(batch)"]),
        ("unpack_dict", Net, {"z": torch.zeros(1, 4)}, ["forward takes (x, label)", "unexpected keyword argument 'z'"]),
    ],
)
def test_a_batch_that_the_model_cannot_take_names_the_input_format(
    form: Any, cls: type[nn.Module], batch: Any, signs: list[str]
) -> None:
    ctx = make_context(cls(), model_input_format=form, world=init(), cluster=cluster())
    with pytest.raises(ArgumentError) as caught:
        ctx.call_model(ctx.root, batch)
    told = str(caught.value)
    assert f"model_input_format is {form!r}" in told
    assert all(sign in told for sign in signs), told
    assert (caught.value.__cause__ is None) == isinstance(batch, int), "what torch said is the cause"


@pytest.mark.parametrize("strategy", [["chunk"], None], ids=["chunk", "search"])
def test_methods_that_run_the_model_name_the_input_format(strategy: Any) -> None:
    more = {"model_input_format": None, "load_strategy": strategy, "time_limit": 5, "calibration": False}
    with pytest.raises(ArgumentError, match=r"model_input_format is None.* give 'unpack_sequence' for"):
        auto_accelerate(Net(), **job(**more))


def test_an_error_of_the_users_own_is_left_as_it_is() -> None:
    class Faulty(Net):
        def forward(self, x: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
            return self.linear(x).nothing

    ctx = make_context(Faulty(), model_input_format="unpack_sequence", world=init(), cluster=cluster())
    with pytest.raises(AttributeError, match="'nothing'"):
        ctx.call_model(ctx.root, PAIRS[0])


def test_what_is_odd_and_holds_is_taken() -> None:
    def injecting(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(function)(lambda *given: function(*given, 1.0))

    @injecting
    def loss(batch: Any, output: torch.Tensor, factor: float) -> torch.Tensor:
        return loss_func(batch, output) * factor

    rate, groups = torch.tensor(0.1), (lambda model: [(name, each) for name, each in model.named_parameters()])
    more = {"optim_func": functools.partial(torch.optim.Adam, foreach=False), "optim_args": {"lr": rate}}
    scheduler = {"lr_scheduler_cls": LinearLR, "lr_scheduler_args": {"start_factor": 0.5}}
    _, result, _ = auto_accelerate(
        Net(), **job(loss_func=loss, optim_param_func=groups, **more, **scheduler, verbose=1)
    )
    assert (rate, float(result.optim.param_groups[0]["lr"])) == (torch.tensor(0.1), pytest.approx(0.05))

    given: list[dict[str, Any]] = []

    def groups(model: Net) -> list[dict[str, Any]]:
        given[:] = [{"params": iter([model.linear.weight]), "lr": 0.5}, {"params": [model.linear.bias]}]
        return given

    _, result, _ = auto_accelerate(Net(), **job(optim_param_func=groups))
    assert [(len(group["params"]), group["lr"]) for group in result.optim.param_groups] == [(1, 0.5), (1, 0.1)]
    assert [set(group) for group in given] == [{"params", "lr"}, {"params"}]


def test_what_is_refused_leaves_the_model_as_it_was_and_an_accelerated_one_is() -> None:
    model = Net()
    with pytest.raises(ArgumentError, match="did you mean 'batch_size'"):
        auto_accelerate(model, **job(load_strategy=["amp_native"], dataloader_args={"batchsize": 4}))
    assert type(model) is Net
    assert auto_accelerate(model, **job())[0]

    model = Net()
    auto_accelerate(model, **job())
    with pytest.raises(ArgumentError, match="accelerated before"):
        auto_accelerate(model, **job())


def test_what_is_of_the_search_alone_is_said_to_be_unused(caplog: pytest.LogCaptureFixture) -> None:
    auto_accelerate(Net(), **job(excluded=["fsdp"]))
    assert "are the search's" in caplog.text


def test_16_bit_parameters_without_masters_are_told(caplog: pytest.LogCaptureFixture) -> None:
    auto_accelerate(Net().bfloat16(), **job(load_strategy=[], loss_func=lambda batch, output: output.float().mean(),
                                            prepare_input=lambda batch, device: batch.bfloat16()))  # fmt: skip
    assert "trainable parameters are in bfloat16" in caplog.text
    caplog.clear()
    auto_accelerate(Net(), **job(load_strategy=["amp_native"]))
    assert "trainable parameters are in" not in caplog.text


def test_verbose_says_more(caplog: pytest.LogCaptureFixture) -> None:
    more = {"load_strategy": [("amp_native", "bf16")]}
    auto_accelerate(Net(), **job(**more))
    assert "the strategy is" not in caplog.text
    auto_accelerate(Net(), **job(**more, verbose=True))
    assert "the strategy is amp_native(bf16)" in caplog.text
    assert logging.getLogger("atorch").level == logging.NOTSET


def test_a_search_that_finds_nothing_returns_false(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ClusterSpec.detect(init(), measure=False)
    tiny = replace(tiny, device=replace(tiny.device, memory_bytes=1.0))
    monkeypatch.setattr(ClusterSpec, "detect", lambda *args, **kwargs: tiny)
    assert auto_accelerate(Net(), **job(load_strategy=None)) == (False, None, None)
    assert auto_accelerate(Net(), **job(load_strategy=["checkpoint"], finetune_strategy=True)) == (False, None, None)


def accelerate_with(rank: int, size: int, more: dict[str, Any]) -> Any:
    _, _, strategy = auto_accelerate(Net(), **job(**more))
    return strategy


def accelerate_differently(rank: int, size: int, strategies: list[Any]) -> Any:
    return accelerate_with(rank, size, {"load_strategy": strategies[rank]})


def fail_to_build(rank: int, size: int) -> None:
    def optim_func(parameters: Any, lr: float) -> Any:
        if rank == 1:
            raise KeyError("momentum")
        return torch.optim.SGD(parameters, lr)

    auto_accelerate(Net(), **job(load_strategy=["ddp"], optim_func=optim_func))


def test_all_ranks_start_alike(pool: Pool) -> None:
    expected = Strategy.of([("parallel_mode", ([("data", 2)], None)), "ddp"])
    assert pool.run(accelerate_with, {}, ranks=2) == [expected, expected]

    first, second = pool.run(differently_initialised, ranks=2)
    assert first == second


def test_all_ranks_fail_together(pool: Pool) -> None:
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((accelerate_differently, [["ddp"], ["fsdp"]]), "load_strategy is .* on rank 0 and .* on rank 1"),
        ((accelerate_differently, [["ddp"], ["dpp"]]), "'dpp'"),
        ((accelerate_with, {"load_strategy": [("parallel_mode", [("tensor", 3)])]}), "does not divide 2 processes"),
        ((accelerate_with, {"dataloader_args": {"batch_size": 3}}), "does not divide over 2"),
        ((fail_to_build,), "KeyError.*momentum"),
        ((accelerate_again,), "accelerated before"),
    ]
    by_case = run_each(pool, refusal, [case for case, _ in cases])
    for (_, message), by_rank in zip(cases, by_case, strict=True):
        assert all(re.search(message, told) for told in by_rank), by_rank


def differently_initialised(rank: int, size: int) -> float:
    torch.manual_seed(rank)
    _, result, _ = auto_accelerate(Net(), **job(load_strategy=["zero1"]))
    return float(sum(p.detach().sum() for p in result.model.parameters()))


def accelerate_again(rank: int, size: int) -> None:
    model = Net()
    auto_accelerate(model, **job(load_strategy=["ddp"]))
    auto_accelerate(model, **job(load_strategy=["ddp"]))


def test_an_accelerated_model_can_be_copied_and_pickled() -> None:
    model = Net()
    auto_accelerate(model, **job(load_strategy=[("amp_native", "fp16")]))
    batch = next(iter(torch.utils.data.DataLoader(PAIRS, batch_size=4)))  # type: ignore[arg-type]
    expected = model(*batch)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        torch.testing.assert_close(other(*batch), expected)
