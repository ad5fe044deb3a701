"""A strategy that computes something else than plain training is refused; one that computes the same never is."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atorch import auto_accelerate
from atorch.auto import reference_step
from atorch.auto.context import Context
from atorch.auto.job import make_context
from atorch.auto.opt_lib.shared.defaults import complete
from atorch.auto.planner.dry_runs.trial import BatchCache
from atorch.auto.planner.planner import dry_run
from atorch.auto.strategy import METHODS, Method, Phase, Strategy, method
from atorch.distributed import world as worlds
from atorch.errors import ArgumentError, StrategyError
from atorch.model.state import children_in_eval, preserved_state, restored_state
from atorch.runtime.gradients.backward import expects_none
from tests.auto.planner.jobs import cluster
from tests.auto.training import messages, refusal, run_each
from tests.pool import Pool, on_ranks
from tests.zoo import Labelled, Residual

ROWS, FEATURES = 8, 6
CHECKPOINT = ("checkpoint", (nn.Linear,))


class Net(nn.Module):
    """Leaves behind what a pass can: running statistics, random numbers drawn, a counter, the last activations."""

    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 3)
        self.calls, self.last = 0, None

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.inner(inputs).relu()))
        self.calls, self.last = self.calls + 1, hidden.detach()
        return self.head(hidden)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * ROWS, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (2 * ROWS,), generator=generator))


def loss_func(batch: Any, output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def accelerate(model: nn.Module, load_strategy: Any, **more: Any) -> Any:
    given = {
        "optim_func": torch.optim.SGD,
        "optim_args": {"lr": 0.1},
        "dataset": samples(),
        "loss_func": loss_func,
        "dataloader_args": {"batch_size": ROWS},
        "model_input_format": "unpack_sequence",
        **more,
    }
    return auto_accelerate(model, load_strategy=load_strategy, **given)[1]


@contextmanager
def registered(apply: Callable[[Context], Any], **settings: Any) -> Iterator[str]:
    """A method of the name "broken" that does `apply` to the context, which stays as it is otherwise."""

    @method("broken", phase=Phase.SHARD, **settings)
    class Broken(Method):
        def apply(self, ctx: Context) -> Context:
            apply(ctx)
            return ctx

    try:
        yield "broken"
    finally:
        METHODS.remove("broken")


DAMAGES: Mapping[str, Callable[[Context], Any]] = {
    "detached": lambda ctx: ctx.root.inner.register_forward_hook(lambda module, args, output: output.detach()),
    "scaled": lambda ctx: ctx.root.head.weight.register_hook(lambda gradient: gradient * 0.5),
    "lost": lambda ctx: ctx.root.inner.weight.data.fill_(float("nan")),
    "changed": lambda ctx: ctx.root.head.bias.data[0].add_(0.05),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("model", [{}, {"norm": True, "dropout": 0.3}], ids=["exact", "random"])
def test_what_computes_something_else_is_refused(model: dict[str, Any], damage: str) -> None:
    told = pytest.raises(StrategyError, match=r"broken does not compute .* plain")
    with registered(DAMAGES[damage]) as broken, told as error:
        accelerate(Net(**model), [broken])
    assert str(error.value).count("gradient norm") == 2, "both figures"
    assert "verify=False" in str(error.value)


class Twins(Net):
    """Two layers of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(16, 16)
        self.other = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.head(self.other(self.outer(self.inner(inputs).relu()).tanh()))


def exchange(ctx: Context) -> None:
    """Each of two parameters gets the other's gradient."""
    one, other = ctx.root.outer.weight, ctx.root.other.weight

    def swap(_: Any) -> None:
        one.grad, other.grad = other.grad, one.grad

    one.register_post_accumulate_grad_hook(expects_none(swap))  # comes last


def rescale(ctx: Context) -> None:
    """One gradient half as large, another larger by what keeps the norm of all."""
    one, other = ctx.root.outer.weight, ctx.root.other.weight

    def share_out(_: Any) -> None:
        lost, has = 0.75 * one.grad.square().sum(), other.grad.square().sum()
        one.grad.mul_(0.5)
        other.grad.mul_((1 + lost / has).sqrt())

    one.register_post_accumulate_grad_hook(expects_none(share_out))


def turned(ctx: Context, turn: Callable[[torch.Tensor], torch.Tensor], name: str = "outer") -> None:
    ctx.root.get_submodule(name).weight.register_hook(turn)


@pytest.mark.parametrize(
    "damage", [exchange, rescale, partial(turned, turn=torch.neg), partial(turned, turn=lambda grad: grad.roll(1, 0))]
)
def test_the_norm_of_all_gradients_does_not_hide_whose_they_are(damage: Callable[[Context], None]) -> None:
    with registered(damage) as broken, pytest.raises(StrategyError, match="gradient of (outer|other).weight is off"):
        accelerate(Twins(), [broken])


def deep() -> nn.Module:
    """110 layers, as in a ResNet."""

    def convolution() -> nn.Module:
        made = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
        return made

    def block() -> nn.Module:
        branch = (convolution(), nn.BatchNorm2d(8), nn.ReLU(), convolution(), nn.BatchNorm2d(8))
        return nn.Sequential(Residual(*branch), nn.ReLU())

    torch.manual_seed(0)
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return Labelled(nn.Conv2d(3, 8, 3, padding=1), *(block() for _ in range(55)), *ends)


def halve_all(ctx: Context) -> None:
    for each in ctx.root.parameters():
        each.register_hook(lambda gradient: gradient * 0.5)


FP16 = ("amp_native", {"dtype": "fp16", "init_scale": 256.0})  # the usual scale overflows at first


@pytest.mark.nightly
@pytest.mark.parametrize("precision", [("amp_native", "bf16"), ("half", "bf16"), FP16], ids=str)
def test_a_very_deep_model_may_round_and_lose_nothing(precision: Any) -> None:
    images = torch.randn(2 * ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    more = {"dataset": TensorDataset(images, torch.arange(2 * ROWS) % 10)}
    accelerate(deep(), [precision, "checkpoint"], **more)
    with registered(halve_all) as broken, pytest.raises(StrategyError, match="does not compute what plain"):
        accelerate(deep(), [precision, broken], **more)


def halve_in_training(ctx: Context) -> None:
    """As what draws random numbers anew in backward does: wrong in training mode alone."""
    norm, weight = ctx.root.dropout, ctx.root.inner.weight
    weight.register_hook(lambda gradient: gradient * 0.5 if norm.training else gradient)


def halve_from_the_second_on(ctx: Context) -> None:
    """As what a first pass leaves behind may do."""
    passes: list[None] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        passes.append(None)
        return gradient * 0.5 if len(passes) > 1 else gradient

    ctx.root.inner.weight.register_hook(hook)


def shared_out(rank: int, size: int, damage: Callable[[Context], None], load_strategy: list[str], **more: Any) -> bool:
    with registered(damage) as broken, pytest.raises(StrategyError, match="does not compute"):
        accelerate(Net(norm=True, dropout=0.3), [broken, *load_strategy], **more)
    return True


@pytest.mark.parametrize("damage", [halve_in_training, halve_from_the_second_on])
def test_training_mode_and_a_second_pass_are_looked_at(damage: Callable[[Context], None]) -> None:
    """Whatever depends on the share: of random numbers and statistics, too."""
    shared_out(0, 1, damage, [])


def compares(rank: int, size: int) -> bool:
    for damage in (halve_in_training, halve_from_the_second_on):
        shared_out(rank, size, damage, ["ddp"])
    return shared_out(rank, size, halve_in_training, ["ddp"], loss_func=contrast)


def contrast(batch: Any, output: torch.Tensor) -> torch.Tensor:
    return (output @ output.T).logsumexp(1).mean()


def test_so_they_are_on_several_processes_and_if_the_loss_compares_samples(pool: Pool) -> None:
    assert all(pool.run(compares))

    assert all(pool.run(many))


def test_it_can_be_turned_off() -> None:
    with registered(DAMAGES["scaled"]) as broken:
        accelerate(Net(), [broken], verify=False)
    with pytest.raises(ArgumentError, match="verify is 3"):
        accelerate(Net(), ["fsdp"], verify=3)


@pytest.mark.parametrize(
    "load_strategy", [[CHECKPOINT], [("micro_batch", {"size": 2})], [("compile", {"backend": "aot_eager"})], ["chunk"]]
)
def test_nothing_is_left_of_the_passes(load_strategy: Any) -> None:
    model = Net(norm=True, dropout=0.3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    result = accelerate(model, load_strategy)
    assert torch.equal(torch.rand(3), expected)
    for name, value in result.model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert all(parameter.grad is None for parameter in result.model.parameters())
    assert not result.optim.state_dict()["state"]
    assert model.training


def test_the_plain_pass_leaves_no_trace_on_the_model() -> None:
    model = Net(norm=True)
    model.head.bias.grad = torch.ones(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list[Any] = []

    def look(ctx: Context) -> None:
        seen.append((ctx.root.calls, ctx.root.last, ctx.root.head.bias.grad.clone()))
        assert all(torch.equal(value, before[name]) for name, value in ctx.root.state_dict().items())

    with registered(look) as looking:
        accelerate(model, [looking])
    assert seen[0][:2] == (0, None)
    assert torch.equal(seen[0][2], torch.ones(3))
    assert torch.equal(model.head.bias.grad, torch.ones(3))


def under(rank: int, size: int, load_strategy: Any, model: dict[str, Any], most_shares: int, **more: Any) -> bool:
    with mock.patch.object(reference_step, "MOST_SHARES", most_shares):
        accelerate(Net(**model), load_strategy, **more)
    return True


def test_right_strategies_are_taken(pool: Pool) -> None:
    """Also where statistics are of half a batch, and random numbers are other ones."""
    strategies: list[Any] = [["ddp"], ["fsdp"], [("micro_batch", {"size": 2}), "zero1"]]
    models: list[dict[str, Any]] = [{"norm": True}, {"dropout": 0.5}]
    cases: list[tuple[Any, ...]] = [(each, model, most) for each in strategies for model in models for most in (1, 8)]
    cases += [(each, {}, 8) for each in strategies]
    assert run_each(pool, under, cases) == [[True, True]] * len(cases)


def sum_loss(batch: Any, output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1], reduction="sum")


def many(rank: int, size: int) -> bool:
    """What more processes do whose batch no device runs as a whole; sums, and means over fewer shares, too."""
    under(rank, size, ["fsdp"], {"dropout": 0.5}, 1, loss_func=sum_loss)
    under(rank, size, [("ddp", {})], {}, 1, loss_func=lambda batch, output: (output @ output.T).logsumexp(1).mean())
    turn = partial(turned, turn=torch.neg, name="inner")
    with registered(turn) as broken, pytest.raises(StrategyError, match="does not compute"):
        under(rank, size, [broken, "ddp"], {}, 1, loss_func=sum_loss)
    return True


def reads(rank: int, size: int, strategies: list[Any]) -> list[str]:
    """What is said where plain training's gradient of one parameter had the other sign."""
    told = []
    sample_of = reference_step.sample_of
    for load_strategy in strategies:
        turned = mock.patch.object(reference_step, "sample_of", lambda model, like=None: {
            name: each * (-1 if name == "inner.weight" else 1) for name, each in sample_of(model, like).items()
        })  # fmt: skip
        with turned, pytest.raises(StrategyError) as error:
            under(rank, size, load_strategy, {}, 8)
        told.append(str(error.value))
    return told


def test_gradients_are_read_however_they_are_spread(pool: Pool) -> None:
    split = ("parallel_mode", [("tensor", 2)])
    strategies = [
        ["zero1"], ["fsdp", ("amp_native", {"dtype": "bf16"})], [("zero2", {}), ("micro_batch", {"size": 2})],
        [split, "tensor_parallel"], [split, "tensor_parallel", "fsdp"],
    ]  # fmt: skip
    for each in pool.run(reads, strategies):
        assert all("gradient of inner.weight is off by 200%" in told for told in each)


def without_reduction(rank: int, size: int, model: dict[str, Any], most_shares: int) -> None:
    with registered(lambda ctx: None, slot="data_parallel") as forgetful:
        under(rank, size, [forgetful], model, most_shares)


def reduces_one_twice(rank: int, size: int) -> None:
    """Rank 1's share of one gradient is lost."""

    def lose(ctx: Context) -> None:
        if rank == 1:
            ctx.root.inner.weight.register_hook(torch.zeros_like)

    with registered(lose) as broken:
        under(rank, size, [broken, "ddp"], {}, 8)


def test_gradients_that_are_not_reduced_or_that_one_rank_loses_are_noticed_on_all(pool: Pool) -> None:
    cases: list[tuple[Any, ...]] = [
        (without_reduction, {}, 8),
        (without_reduction, {"norm": True, "dropout": 0.3}, 8),
        (reduces_one_twice,),
    ]
    for told in chain(*run_each(pool, refusal, cases)):
        assert told.startswith("StrategyError: ")
        assert "does not compute what plain training does" in told


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"model_input_format": None}, "model_input_format is None"),
        ({"loss_func": lambda batch, output: output.sum() * float("nan")}, "first pass is nan"),
    ],
)
def test_where_plain_training_tells_nothing_that_is_said(
    more: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "atorch"):
        accelerate(Net(), [CHECKPOINT], **more)
    assert "cannot be compared with plain training's first pass" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss_func": lambda batch, output: output}, r"returned a tensor of shape \(8, 3\)"),
        (
            {"loss_func": lambda output, batch: nn.functional.cross_entropy(output, batch[1])},
            r"let it take \(batch, output\)",
        ),
        ({"model_input_format": "unpack_dict"}, "model_input_format is 'unpack_dict'"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(more: dict[str, Any], message: str) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ArgumentError, match=message):
        accelerate(model, [CHECKPOINT], **more)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_does_not_fit_plainly_is_not_run(caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.object(reference_step, "ROOM", 0.0), caplog.at_level(logging.WARNING, "atorch"):
        accelerate(Net(), [CHECKPOINT])
    assert "parameters and gradients take" in caplog.text


class Generating(Net):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids.float(), labels)

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        if self.training or getattr(self, "is_broken", False):
            raise RuntimeError("cannot generate")
        return input_ids


def break_generate(ctx: Context) -> None:
    ctx.root.is_broken = True


def generating() -> dict[str, Any]:
    """The arguments of a job of a model that generates."""
    return {
        "dataset": [{"input_ids": inputs, "labels": label} for inputs, label in samples()],
        "model_input_format": "unpack_dict",
        "loss_func": lambda batch, output: nn.functional.cross_entropy(output, batch["labels"]),
    }


def test_what_evaluation_loses_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "atorch"):
        accelerate(Generating(), [CHECKPOINT], **generating())
        assert not caplog.records
        with registered(break_generate) as broken:
            accelerate(Generating(), [broken], **generating())
    assert "model.generate() fails: RuntimeError: cannot generate" in caplog.text


@on_ranks()
def test_a_search_drops_what_cannot_generate(rank: int, size: int) -> None:
    given = {"optim_args": {"lr": 0.1}, "dataloader_args": {"batch_size": ROWS}, **generating()}
    ctx = make_context(Generating(), torch.optim.SGD, **given, world=worlds.init("cpu"), cluster=cluster(size))
    ctx = replace(ctx, plain_pass=reference_step.plain_pass(ctx, size, lambda: BatchCache(ctx).batches(0, 1)[0]))
    told = r"model.generate\(\) fails: RuntimeError: cannot generate \(on rank 1\)"
    with registered(break_generate if rank else lambda ctx: None) as broken, pytest.raises(StrategyError, match=told):
        dry_run(ctx, complete(Strategy.of([broken]), size))


def test_a_look_at_the_model_between_forward_and_backward_changes_nothing() -> None:
    model = Net(norm=True)
    inputs, labels = samples()[:ROWS]
    loss = model(inputs, labels).logsumexp(1).mean()
    (expected,) = torch.autograd.grad(loss, [next(model.parameters())], retain_graph=True)
    with preserved_state(model), children_in_eval(model), torch.no_grad():
        model(inputs, labels)
    loss.backward()
    assert torch.equal(next(model.parameters()).grad, expected)


def test_sparse_gradients_have_no_norm_to_compare() -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, FEATURES, sparse=True)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs + self.table(labels), labels)

    accelerate(Sparse(), [CHECKPOINT])
    with registered(DAMAGES["changed"]) as broken, pytest.raises(StrategyError, match="does not compute"):
        accelerate(Sparse(), [broken])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_keeps_no_gradient_of_the_plain_pass() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with restored_state(model, torch.device("cpu")):
        model(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("damage", ["scaled", "detached"])
def test_gradients_are_compared_below_the_loss_scale_that_overflows(damage: str) -> None:
    def loss(batch: Any, output: torch.Tensor) -> torch.Tensor:
        return 1e3 * loss_func(batch, output)

    fp16 = ("amp_native", "fp16")
    result = accelerate(Net(), [fp16], loss_func=loss)
    assert result.optim.state_dict()["loss_scale"]["scale"] == 2.0**16
    with registered(DAMAGES[damage]) as broken, pytest.raises(StrategyError, match="does not compute"):
        accelerate(Net(), [fp16, broken], loss_func=loss)


def criterion_after(rank: int, size: int, load_strategy: Any) -> tuple[list[str], bool]:
    """Warnings of a loss with weights of its own, and whether their gradients are as before."""
    criterion = nn.Linear(3, 3)
    criterion.weight.grad = torch.ones(3, 3)
    with messages() as logged:
        accelerate(Net(), load_strategy, loss_func=lambda batch, output: loss_func(batch, criterion(output)))
    assert criterion.bias.grad is None
    return [text for text in logged if "are not the model's" in text], bool((criterion.weight.grad == 1).all())


@pytest.mark.parametrize("load_strategy", [[], ["checkpoint"], [("micro_batch", {"size": 2})]], ids=str)
def test_gradients_of_weights_of_the_loss_are_as_before(load_strategy: Any) -> None:
    assert criterion_after(0, 1, load_strategy) == ([], True)


def test_weights_of_the_loss_are_told_on_several_processes(pool: Pool) -> None:
    for logged, is_as_before in pool.run(criterion_after, ["ddp"]):
        assert is_as_before
        assert all("the first is of shape (3, 3)" in text for text in logged)
    assert pool.run(criterion_after, ["ddp"])[0][0]


class Centered(nn.Module):
    """A loss that moves a buffer and counts its calls, as in self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.calls = 0

    def forward(self, batch: Any, output: torch.Tensor) -> torch.Tensor:
        loss = loss_func(batch, output - self.center)
        self.calls += 1
        with torch.no_grad():
            self.center.lerp_(output.mean(0), 0.5)
        return loss


CENTERED = Centered()


@pytest.mark.parametrize("load_strategy", [["checkpoint"], None], ids=str)
def test_a_loss_with_a_state_is_checked_from_its_first_and_keeps_it(load_strategy: Any) -> None:
    held = Centered()
    more = {"time_limit": 2, "calibration": False} if load_strategy is None else {}
    for criterion, function in (
        (held, lambda batch, output: held(batch, output)),
        (CENTERED, lambda batch, output: CENTERED(batch, output)),
        (held, held),
    ):
        accelerate(Net(), load_strategy, loss_func=function, **more)
        assert criterion.calls == 0
        assert not criterion.center.any()


class Teacher(nn.Module):
    """A loss with a teacher's layer, which is an average of what it saw, and a layer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.replaced = nn.Linear(3, 3), nn.Linear(3, 3)
        self.requires_grad_(False)

    def forward(self, batch: Any, output: torch.Tensor) -> torch.Tensor:
        mean = output.detach().mean(0)
        loss = loss_func(batch, output + self.average(mean) + self.replaced(mean))
        self.average.weight.lerp_(mean.expand(3, 3), 0.5)
        self.replaced.weight.data = self.replaced.weight.data * 0.5 + 0.1
        return loss


def teacher_after(rank: int, size: int, load_strategy: Any) -> None:
    """A teacher's parameters are as before the start, and are written once a step."""
    teacher, more = Teacher(), {"time_limit": 2, "calibration": False} if load_strategy is None else {}
    expected, seen = copy.deepcopy(teacher), list[Any]()

    def loss(batch: Any, output: torch.Tensor) -> torch.Tensor:
        value = teacher(batch, output)
        seen.append((batch, output.detach()))
        return value

    result = accelerate(Net(), load_strategy, loss_func=loss, **more)
    for name, parameter in teacher.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
    batch = next(iter(result.dataloader))
    seen.clear()
    result.step(batch)
    expected(*seen[0])
    for name, parameter in teacher.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name


@pytest.mark.parametrize("load_strategy", [[], ["checkpoint"], None], ids=str)
def test_parameters_that_a_loss_writes_are_as_before_the_start(load_strategy: Any) -> None:
    teacher_after(0, 1, load_strategy)


def test_parameters_that_a_loss_writes_are_left_alone_by_probes_of_its_weight(pool: Pool) -> None:
    pool.run(teacher_after, ["ddp"])


@pytest.mark.parametrize("make", [lambda: nn.LazyBatchNorm1d(), lambda: nn.BatchNorm1d(3, device="meta")])
def test_a_module_without_values_that_the_loss_could_use_is_left_alone(make: Callable[[], nn.Module]) -> None:
    unused = make()
    accelerate(Net(), [], loss_func=lambda batch, output: unused(output) if batch is None else loss_func(batch, output))
    assert unused.training
