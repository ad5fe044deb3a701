"""What the returned model has: its whole state, and clipping, whatever it is spread over."""

from datetime import timedelta
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import atorch
from atorch.distributed import collectives
from atorch.errors import ArgumentError
from atorch.logs import logger
from tests.auto.loss_job import BATCH, Net, Samples, rows
from tests.auto.opt_lib.sharing_job import TOKENS, accelerated, loss_func
from tests.auto.training import accelerate, run_each
from tests.pool import Pool
from tests.runtime import sharing
from tests.runtime.sharing import make


def asked_alone(rank: int, size: int) -> str:
    result = accelerated(["fsdp"], "awkward")
    if rank:
        return ""
    with (
        mock.patch.object(collectives, "MEETING", timedelta(seconds=0.01)),
        mock.patch.object(collectives, "TIMEOUT", timedelta(seconds=0.05)),
        pytest.raises(ArgumentError) as error,
    ):
        atorch.whole_state(result.model)
    return str(error.value)


def test_the_state_is_asked_for_together(pool: Pool) -> None:
    assert pool.run(asked_alone)[0] == "whole_state is called on rank 0 but not on 1; call it on all together"


def made(model: nn.Module, strategy: list[Any]) -> tuple[Any, Any]:
    """The result for `model`, and its first batch."""
    result = accelerate(model, strategy, Samples(), rows, BATCH, model_input_format="unpack_dict")
    return result, result.prepare_input(next(iter(result.dataloader)), torch.device("cpu"))


class Clips(Net):
    """A model that clips by itself, with atorch's function."""

    def clip_grad_norm_(self, max_norm: float) -> tuple[str, Tensor]:
        return "its own", atorch.clip_grad_norm(self, max_norm)


def clipped(rank: int, size: int, kind: type[nn.Module], strategy: list[Any]) -> tuple[Any, float]:
    """What the model's method returns, and plain training's norm."""
    data = Samples()
    result, batch = made(kind(), strategy)
    result.loss_func(batch, result.model(**batch)).backward()
    plain = kind()
    whole = {key: torch.stack([data[i][key] for i in range(BATCH)]) for key in data[0]}
    rows(whole, plain(**whole)).backward()
    return result.model.clip_grad_norm_(0.1), float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1))


def test_clipping_adding_and_modes_are_of_the_model(pool: Pool) -> None:
    zero1, fsdp, own = run_each(pool, clipped, [(Net, ["zero1"]), (Net, ["fsdp"]), (Clips, ["zero1"])])
    assert {whose for (whose, _), _ in own} == {"its own"}
    for norm, expected in (*zero1, *fsdp, *((norm, expected) for (_, norm), expected in own)):
        assert float(norm) == pytest.approx(expected, rel=1e-5)

    for said in chain(*run_each(pool, added, [(["ddp"],), (["fsdp"],)])):
        assert said.startswith("optim.add_param_group was given a parameter of shape (3, 3) that the model does not")

    cases = [(strategy, path) for strategy in (["zero1"], ["fsdp", "checkpoint"]) for path in ("", "layers.1")]
    assert run_each(pool, modes, cases) == [[[], []]] * len(cases)


def added(rank: int, size: int, strategy: list[Any]) -> str:
    """What is said of a group of parameters that the model does not have."""
    result, _ = made(Net(), strategy)
    with pytest.raises(ArgumentError) as error:
        result.optim.add_param_group({"params": nn.Linear(3, 3).parameters()})
    return str(error.value)


def modes(rank: int, size: int, strategy: list[Any], path: str) -> list[tuple[str, bool, bool]]:
    """What trains or not, before and after a step, where the module at `path` is in eval mode from the start."""
    model = Net()
    model.get_submodule(path).eval()
    expected = {name: module.training for name, module in model.named_modules()}
    result, batch = made(model, strategy)
    seen = [(expected[""], result.model.training, path)]
    result.step(batch)
    seen.append((expected[""], result.model.training, path))
    got = {name: module.training for name, module in result.model.named_modules()}
    seen += [(mode, got[name], name) for name, mode in expected.items()]
    result.model.train()
    assert all(module.training for module in (result.model, *result.model.modules()))
    return [(name, now, then) for then, now, name in seen if then != now]


def clipped_by_torch(rank: int, size: int, strategy: list[Any]) -> str:
    """What torch's own clipping says; "" where it clips by plain training's norm."""
    result, plain = accelerated(strategy, "llama"), make("llama")
    batch = next(iter(result.dataloader))
    for num_steps in range(2):  # gradients may be put elsewhere from the second step on
        result.loss_func(batch, result.model(batch)).backward()
        loss_func(whole := TOKENS[: sharing.BATCH], plain(whole)).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        try:
            told, norm = "", nn.utils.clip_grad_norm_(result.model.parameters(), 0.1)
        except ArgumentError as error:
            told, norm = str(error), atorch.clip_grad_norm(result.model, 0.1)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        assert float(norm) == pytest.approx(float(expected), rel=1e-2 if "scale" in told else 1e-4), num_steps
        result.optim.zero_grad()
        plain.zero_grad()
    return told


PIPELINE = ("pipeline_parallel", {"micro_batches": 2})
FP16 = ("amp_native", "fp16")


def over(*axes: tuple[str, int]) -> tuple[str, Any]:
    return "parallel_mode", (axes, None)


ZERO_BUBBLE = ("pipeline_parallel", {"micro_batches": 2, "schedule": "zero_bubble"})
CLIPPED: dict[int, list[tuple[list[Any], str]]] = {
    1: [(["chunk"], ""), ([FP16], "loss scale"), ([FP16, "chunk"], "loss scale")],
    2: [
        (["ddp"], ""),
        (["zero2"], ""),
        (["fsdp", ("micro_batch", {"size": 1})], ""),
        (["chunk"], "is spread over 2 processes"),
        ([FP16, "ddp"], "loss scale"),
        ([("half", "fp16"), "fsdp"], "loss scale"),
        ([over(("tensor", 2)), "tensor_parallel"], "the axis tensor"),
        ([over(("sequence", 2)), "sequence_parallel"], ""),
        ([over(("context", 2)), ("context_parallel", {"load_balance": False})], ""),
        ([over(("pipeline", 2)), PIPELINE], "of one stage"),
        ([over(("pipeline", 2)), ZERO_BUBBLE], "of one stage"),
    ],
    4: [
        ([over(("tensor", 2), ("zero", 2)), "tensor_parallel", "fsdp"], "atorch.clip_grad_norm(model, max_norm)"),
        ([over(("pipeline", 2), ("data", 2)), PIPELINE, "ddp"], "of one stage"),
        ([over(("pipeline", 2), ("zero", 2)), PIPELINE, "fsdp"], "of one stage"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CLIPPED)
def test_torchs_clipping_is_plain_trainings_or_refused(pool: Pool, ranks: int) -> None:
    """It would clip by the norm of a process's own part, and training would be another one without a word."""
    by_case = run_each(pool, clipped_by_torch, [(strategy,) for strategy, _ in CLIPPED[ranks]], ranks=ranks)
    for (strategy, told), by_rank in zip(CLIPPED[ranks], by_case, strict=True):
        for said in by_rank:
            assert told in said, strategy
            assert bool(told) == bool(said), strategy


def told_of_state(rank: int, size: int, strategy: list[Any]) -> list[str]:
    """What is logged where the state is asked for twice, and the whole one before."""
    result = accelerated(strategy, "llama")
    with mock.patch.object(logger, "warning") as warning:
        atorch.whole_state(result.model)
        assert not warning.called
        for _ in range(2):
            result.model.state_dict()
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


def test_who_asks_for_a_part_of_the_state_is_told_once(pool: Pool) -> None:
    parts: list[tuple[list[Any], list[str]]] = [
        ([over(("tensor", 2)), "tensor_parallel"], ["this process's rows of split parameters"]),
        ([over(("pipeline", 2)), PIPELINE], ["the stages of this process"]),
        (["zero1"], []),
        (["fsdp"], []),
    ]
    by_case = run_each(pool, told_of_state, [(strategy,) for strategy, _ in parts])
    for (_, part), by_rank in zip(parts, by_case, strict=True):
        for said in by_rank:
            got = [each.split(" alone: ")[0] for each in said]
            assert got == [f"model.state_dict() has {each}" for each in part]
