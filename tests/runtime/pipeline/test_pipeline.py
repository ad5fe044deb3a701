"""Models of many kinds, cut into stages, train as they do on one process, or are refused on every rank."""

import copy
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from atorch.distributed.mesh import parallel_rank
from atorch.errors import ArgumentError, StrategyError
from atorch.runtime.pipeline import engine
from atorch.runtime.pipeline.placeholders import Placeholder, need_values
from atorch.runtime.pipeline.schedules import make_schedule
from tests.auto.training import refusal, run_each
from tests.pool import Pool, RankFailure, on_ranks
from tests.runtime.pipeline.job import ROWS, SEQ, WIDTH, Samples, TwiceUsed, accelerated, loss_func, make_model, train

KINDS = ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "twice", "frozen", "inplace", "rooted")


def stages(number: int = 2, data: int = 1, **knobs: Any) -> list[Any]:
    axes = [("pipeline", number)] + [("data", data)] * (data > 1)
    return [("parallel_mode", (axes, None)), ("pipeline_parallel", knobs)]


def as_plain(rank: int, size: int, name: str, strategy: list[Any], more: dict[str, Any]) -> dict[str, Any]:
    return train(name, strategy, **more)


def check(pool: Pool, name: str, strategy: list[Any], ranks: int = 2, band: float = 1e-4, **more: Any) -> list[Any]:
    found = pool.run(as_plain, name, strategy, more, ranks=ranks)
    for each in found:
        assert each["update"] <= band
        assert each["loss"] <= max(1e-5, band / 10)
        assert each["norm"] <= band
    assert sorted({key for each in found for key in each["names"]}) == found[0]["all"], "every parameter is somewhere"
    return found


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("gpt2", "1f1b"), ("bert", "gpipe"), ("t5", "zero_bubble"), ("mixtral", "interleaved"), ("inplace", "1f1b"),
     ("rooted", "1f1b"), ("dropping", "gpipe"),
     ("repeating", "1f1b")],
)  # fmt: skip
def test_trains_as_on_one_process(pool: Pool, name: str, schedule: str) -> None:
    knobs = {"interleave": 2} if schedule == "interleaved" else {}
    found = check(pool, name, stages(schedule=schedule, micro_batches=4, **knobs), steps=2, accumulate=2)
    assert all(len(each["names"]) < len(each["all"]) for each in found), "a stage has its own parameters alone"
    if name == "mixtral":
        first = next(each for each in found if "model.embed_tokens.weight" in each["names"])
        assert "model.layers.0.input_layernorm.weight" in first["names"]


THREE = ("parallel_mode", ([("tensor", 2), ("pipeline", 2), ("data", 2)], None))
BESIDE: list[list[Any]] = [["fsdp"], ["zero1"], ["zero2"], ["fsdp", "checkpoint"]]
BESIDE.append(["ddp", ("compile", {"backend": "aot_eager"})])
MATRIX = [
    *((stages(schedule=each, micro_batches=4), 2) for each in ("1f1b", "gpipe", "interleaved", "zero_bubble")),
    *(([*stages(data=2, micro_batches=2), *beside], 4) for beside in BESIDE),
    *(([*stages(data=2, micro_batches=2, schedule="interleaved"), *beside], 4) for beside in BESIDE),
    ([THREE, "tensor_parallel", ("pipeline_parallel", {"micro_batches": 2}), "ddp"], 8),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "ranks"), MATRIX, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind(pool: Pool, name: str, strategy: list[Any], ranks: int) -> None:
    # FSDP2 alone cannot train what writes to its inputs either; under checkpoint autograd says so in backward.
    is_refused = name == "inplace" and not {"fsdp", "zero2"}.isdisjoint(map(str, strategy))
    with pytest.raises(RankFailure, match="modified (by an )?inplace") if is_refused else nullcontext():
        check(pool, name, strategy, ranks=ranks, steps=2, even=ranks > 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "beside"),
    [("llama", "zero_bubble", ["ddp"]), ("vit", "1f1b", ["fsdp", "checkpoint"]), ("twice", "1f1b", ["zero1"])],
)
def test_beside_data_parallelism(pool: Pool, name: str, schedule: str, beside: list[Any]) -> None:
    strategy = [*stages(data=2, micro_batches=2, schedule=schedule), *beside]
    check(pool, name, strategy, ranks=4, steps=2, accumulate=2, even=True)


@pytest.mark.slow
@on_ranks()
def test_evaluation_other_shapes_and_misuse(rank: int, size: int) -> None:
    model = make_model("t5").eval()
    with torch.no_grad():
        plain = {seq: model(**Samples("t5", ROWS, seq).data) for seq in (WIDTH, SEQ)}  # as long as it is wide
    result = accelerated(model, stages(micro_batches=4), Samples("t5", 2 * ROWS))
    for seq, expected in plain.items():
        with torch.no_grad():
            output = result.model(**Samples("t5", ROWS, seq).data)
        assert type(output) is type(expected)
        assert (output.logits - expected.logits).abs().max() <= 1e-5
        assert abs(float(output.loss) - float(expected.loss)) <= 1e-5
    for rows, seq in ((ROWS, WIDTH), (ROWS, SEQ), (6, SEQ), (1, SEQ)):
        batch = Samples("t5", rows, seq).data
        trained = result.loss_func(batch, result.model(**batch)).item()
        assert abs(trained - float(make_model("t5").eval()(**batch).loss)) <= 1e-5
    deferred = result.model(**Samples("t5", ROWS).data)
    for use in (lambda: deferred.logits, lambda: deferred[0], lambda: deferred + 1):
        with pytest.raises((TypeError, AttributeError)):
            use()
    loss = result.loss_func(Samples("t5", ROWS).data, deferred)
    loss.backward()
    with pytest.raises(RuntimeError):
        loss.backward()
    state = {name: tuple(value.shape) for name, value in result.model.state_dict().items()}
    whole = {name: tuple(value.shape) for name, value in make_model("t5").state_dict().items()}
    assert state.items() <= whole.items()
    result.model.load_state_dict(make_model("t5").state_dict())
    result.model.temperature = 2.0  # as forward of the model's stages would read it
    assert result.model.module.temperature == 2.0
    with pytest.raises(ArgumentError, match="those of a pipelined model are on its stages"):
        result.model.lm_head = nn.Linear(2, 2)


def contrastive(batch: Any, output: Any) -> torch.Tensor:
    """A loss that compares samples with one another."""
    pooled = output["logits"].mean(1)
    return nn.functional.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


@pytest.mark.parametrize(
    "knobs",
    [{"micro_batches": 4}, pytest.param({"schedule": "interleaved", "micro_batches": 2}, marks=pytest.mark.nightly)],
    ids=str,
)
@on_ranks()
def test_a_loss_of_the_whole_batch_is_taken_once_of_all_outputs(rank: int, size: int, knobs: dict[str, Any]) -> None:
    each = train("frozen", stages(**knobs), steps=2, loss_of=contrastive)
    assert each["update"] <= 1e-4
    assert each["loss"] <= 1e-5


@pytest.mark.parametrize(
    ("schedule", "verify"), [("1f1b", True), pytest.param("zero_bubble", False, marks=pytest.mark.nightly)]
)
def test_a_loss_that_reads_all_parameters(pool: Pool, schedule: str, verify: bool) -> None:
    strategy = stages(micro_batches=4, schedule=schedule)
    first, last = check(pool, "gpt2", strategy, steps=2, penalty=0.02, verify=verify)
    assert len(first["names"]) < len(last["names"]), "the last stage takes the loss"


@pytest.mark.nightly
@pytest.mark.parametrize("beside", [["ddp"], ["zero1"], ["ddp", "checkpoint"]], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "twice"])
def test_a_loss_that_reads_all_parameters_beside(pool: Pool, name: str, beside: list[Any]) -> None:
    strategy = [*stages(data=2, micro_batches=2), *beside]
    check(pool, name, strategy, ranks=4, steps=2, even=True, penalty=0.02, verify=False)


@on_ranks()
def test_weights_of_losses_are_found_out_on_the_sample_or_else_in_the_first_step(rank: int, size: int) -> None:
    """Counts of losses that the last stage takes while all is built, and in each of two steps."""
    for rows, expected in (
        (ROWS, [1 + 3, 4, 4]),  # watched; two micro-batches, and both together
        (1, [1, 3 + 4, 4]),  # one row makes no two micro-batches
    ):
        counts = [0]

        def counted(batch: Any, output: Any, counts: list[int] = counts) -> torch.Tensor:
            counts[-1] += 1
            return loss_func(batch, output)

        strategy = stages(micro_batches=4, split_points=["transformer.h.2"])
        result = accelerated(make_model("gpt2"), strategy, loss=counted, sample_batch=Samples("gpt2", rows).data)
        for _ in range(2):
            counts.append(0)
            batch = Samples("gpt2", ROWS).data
            result.loss_func(batch, result.model(**batch)).backward()
        assert counts == (expected if rank else [1, 0, 0])


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("this backward breaks")


def faulty(batch: Any, output: Any) -> torch.Tensor:
    raise KeyError("no such entry")


def breaking(batch: Any, output: Any) -> torch.Tensor:
    return _Breaks.apply(loss_func(batch, output))  # type: ignore[no-any-return,no-untyped-call]


def train_with(rank: int, size: int, loss: Any, name: str = "frozen") -> None:
    train(name, stages(split_points=["layers.2"]), loss_of=loss, verify=loss is not breaking)


def test_a_fault_of_the_loss_is_everybodys_before_the_first_step(pool: Pool) -> None:
    assert pool.run(refusal, train_with, faulty) == [
        "ArgumentError: rank 1 failed: KeyError: 'no such entry'",
        "KeyError: 'no such entry'",
    ]


def test_micro_batches_of_other_shapes_are_refused_on_every_process(pool: Pool) -> None:
    first, second = pool.run(refusal, train_with, loss_func, "dropping by value")
    assert first.startswith("StrategyError: layers.1 returns")
    assert second.startswith("StrategyError: rank 0 failed: layers.1 returns")


def test_what_backward_raises_keeps_nobody_waiting(pool: Pool) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match="this backward breaks"):
        pool.run(train_with, breaking)
    assert time.monotonic() - began < 100  # a process that waits is given up after 120 s


LENGTHS = [((4, 8), (4, 8)), ((4, 8), (4, 12)), ((4, 12), (4, 8)), ((4, 12), (4, 10))]
ROWS_OF_REPLICAS = [((4, 8), (4, 8)), ((4, 8), (1, 8)), ((1, 8), (4, 8)), ((2, 8), (4, 8))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "beside", "sizes"),
    [
        ("interleaved", "fsdp", LENGTHS),
        ("1f1b", "ddp", ROWS_OF_REPLICAS),
        pytest.param("1f1b", "ddp", LENGTHS, marks=pytest.mark.nightly),
        pytest.param("1f1b", "fsdp", LENGTHS, marks=pytest.mark.nightly),
        pytest.param("zero_bubble", "ddp", LENGTHS, marks=pytest.mark.nightly),
        pytest.param("interleaved", "ddp", ROWS_OF_REPLICAS, marks=pytest.mark.nightly),
    ],
)
@on_ranks(4, timeout=30)
def test_batches_of_replicas_may_differ(rank: int, size: int, schedule: str, beside: str, sizes: list[Any]) -> None:
    made = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args[0])
        return make_schedule(*args, **kwargs)

    more = {"optim_args": {"lr": 0.0}, "sample_batch": Samples("gpt2", 4, 8, even=True).data}
    result = accelerated(make_model("gpt2"), [*stages(data=2, micro_batches=2, schedule=schedule), beside], **more)
    errors = []
    with mock.patch.object(engine, "make_schedule", counted):
        for replicas in sizes:
            batch = Samples("gpt2", *replicas[parallel_rank("data")], even=True).data
            loss = result.loss_func(batch, result.model(**batch))
            loss.backward()
            errors.append(abs(loss.item() - float(make_model("gpt2")(**batch).loss)))
    assert max(errors) <= 1e-5
    if sizes == LENGTHS:
        assert len(made) == 1, "the order of passes does not depend on shapes"


class Opaque(nn.Module):
    """Returns an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> Any:
        return nn.Module() if hidden.shape[-1] else hidden


class Returning(TwiceUsed):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Opaque() for _ in range(2))


OWN = {"returning": Returning}


def refused(rank: int, size: int, name: str, strategy: list[Any]) -> tuple[str, str]:
    model = OWN[name]() if name in OWN else make_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    try:
        accelerated(model, strategy, Samples("twice", 2 * ROWS))
    except Exception as error:
        assert [type(module) for module in model.modules()] == classes
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(value.equal(before[key]) for key, value in after.items())
        return type(error).__name__, str(error)
    return "", "nothing was refused"


REFUSED = [  # a model, a strategy, and what is told; the contract has more
    ("gpt2", stages(micro_batches=3), "3 micro-batches do not divide the 8 rows"),
    ("gpt2", [*stages(), ("micro_batch", {"size": 3})], "micro-batches of 3 rows do not divide the 8 rows"),
    ("gpt2", stages(split_points=["transformer.h.9"]), "'transformer.h.9', where no stage can begin"),
    ("gpt2", stages(split_points=["transformer.h.1.attn"]), "lies inside of transformer.h.1"),
    ("gpt2", stages(split_points=["transformer.wte"]), "nothing before the first"),
    ("gpt2", [*stages(), ("micro_batch", {"size": 2, "reduce": "each"})], "reduce"),
    ("gpt2", [*stages(schedule="zero_bubble"), ("checkpoint", {"selective": True})], "leave selective"),
    ("returning", stages(), "layers.0 returns a Module"),
]


def test_is_refused_before_anything_is_changed(pool: Pool) -> None:
    found = run_each(pool, refused, [(name, strategy) for name, strategy, _ in REFUSED])
    for of_ranks, (*_, message) in zip(found, REFUSED, strict=True):
        assert all(kind == StrategyError.__name__ and message in told for kind, told in of_ranks), of_ranks


@on_ranks()
def test_a_loss_that_reads_parameters_where_it_sees_one_piece_is_refused(rank: int, size: int) -> None:
    with pytest.raises(StrategyError, match=r"(?s)the loss function reads transformer\..*weight_decay"):
        train("gpt2", stages(schedule="interleaved", micro_batches=4), penalty=0.02, verify=False)


CPU = torch.device("cpu")


def away() -> Placeholder:
    return Placeholder.of("blocks.0.fc.weight", nn.Parameter(torch.ones(4, 3)), CPU)


def test_it_is_described_as_where_the_stage_computes() -> None:
    for each in (away(), copy.deepcopy(away())):
        assert (each.shape, each.dtype, each.device) == ((4, 3), torch.float32, CPU)
    assert torch.ones(2).to(away().device).sum() == 2
    assert away().new_zeros(2).sum() == 0
    assert torch.ones(3).expand_as(away()).sum() == 12


def test_what_a_stage_does_not_need_may_be_computed_of_it_and_who_asks_for_values_is_told_whose() -> None:
    assert (away().norm() * 2).square().shape == ()
    by = Placeholder.of("blocks.0.fc.weight", nn.Parameter(torch.ones(4, 3)), CPU, lambda: True)
    assert isinstance(torch.cat([torch.ones(2, 3), by]), Placeholder)
    for ask in (lambda: torch.ones(2, 3) @ away().t(), lambda: float(1.0 + 0.1 * away().norm())):
        with pytest.raises(ArgumentError, match="blocks.0.fc.weight is of another stage of the pipeline"):
            ask()


def test_code_between_units_may_compute_of_it_and_others() -> None:
    passing = [True]
    weight = Placeholder.of("pos", torch.ones(4, 3), CPU, lambda: passing[0])
    made = torch.ones(2, 3) @ weight.t() + 1
    assert (made.shape, made.device) == ((2, 4), CPU)
    with pytest.raises(ArgumentError, match="pos is of another stage"):
        float(made.sum())
    with pytest.raises(ArgumentError, match="pos is of another stage"):
        need_values({"logits": [made]})
    passing[0] = False
    with pytest.raises(ArgumentError, match="pos is of another stage"):
        torch.ones(2, 3) + weight
