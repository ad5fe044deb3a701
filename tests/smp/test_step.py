"""What a step's function sees, what it returns, and what it may not do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from atorch.errors import AtorchError
from tests.contract.test_steps import num_tensors, num_tensors_soon
from tests.pool import Pool, on_ranks
from tests.smp.job import batch_of, begun, made, several, sgd, train_step

WIDTH = 8


class Blocks(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def model_of(**options: Any) -> Any:
    torch.manual_seed(0)
    return smp.DistributedModel(Blocks(), **options)


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def said(work: Callable[[], Any]) -> str:
    try:
        work()
    except (AtorchError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@smp.step
def train(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


@on_ranks(2)
def test_results_are_put_together_in_every_nesting_and_on_every_process(rank: int, size: int) -> None:
    torch.manual_seed(0)
    right = pytest.approx(float(Blocks()(rows()).mean().detach()), rel=1e-5)
    with begun({"microbatches": 4, "partitions": size}):

        @smp.step
        def look(model: Any, batch: dict[str, Any]) -> Any:
            out = model(batch["x"])
            model.backward(out.sum())
            return {"mean": out.mean(), "rows": [out, batch["x"]], "count": len(out), "nothing": None, "name": "a"}

        found = look(model_of(), {"x": rows(), "other": "text"})
        whole, given = found["rows"]
        assert [found["mean"].reduce_mean().item(), whole.concat().mean().item()] == [right, right]
        assert torch.equal(given.concat(), rows())
        assert (tuple(whole.stack().shape), found["count"].reduce_sum()) == ((4, 2, WIDTH), 8)
        assert (found["nothing"], found["name"].outputs) == (None, ["a"] * 4)
        assert not found["mean"].outputs[0].requires_grad


class Sliced:
    """Cuts itself."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def smp_slice(self, count: int, number: int, axis: int) -> list[float]:
        return self.values[number::count]


@on_ranks(2)
def test_arguments_are_cut_as_they_are_told(rank: int, size: int) -> None:
    seen: list[Any] = []
    with begun({"microbatches": 2, "partitions": size}):

        @smp.step(non_split_inputs=["whole"], input_split_axes={"turned": 1})
        def look(model: Any, x: Tensor, whole: Tensor, turned: Tensor, own: Any, *, both: Any) -> Tensor:
            seen.append((len(x), len(whole), tuple(turned.shape), own, len(both["a"][0]), both["b"].dim()))
            return model(x).sum()

        with torch.no_grad():
            both = {"a": (rows(4),), "b": torch.tensor(1.0)}
            look(model_of(), rows(4), rows(3), rows(4).T, Sliced([0.0, 1.0]), both=both)
    assert seen[-2:] == [(2, 3, (WIDTH, 2), [0.0], 2, 0), (2, 3, (WIDTH, 2), [1.0], 2, 0)]


@on_ranks(2)
def test_batches_of_tensor_ranks_that_do_not_fit_are_told(rank: int, size: int) -> None:
    with begun({"microbatches": 2, "tensor_parallel_degree": size, "ddp": True}):
        model = model_of()
        told = said(lambda: smp.step(lambda x: model(x).sum())(rows(8 - 2 * rank)))
    assert "x is (8, 8) and (6, 8) on processes of one tensor group" in told


@on_ranks(2)
def test_steps_without_backward_leave_no_gradients(rank: int, size: int) -> None:
    torch.manual_seed(0)
    right = float(Blocks()(rows()).mean().detach())
    with begun({"microbatches": 2, "partitions": size}):
        model = model_of().eval()
        look = smp.step(lambda model, x: model(x).mean())
        with torch.no_grad():
            assert look(model, rows()).reduce_mean().item() == pytest.approx(right, rel=1e-5)
        look(model, rows())  # with gradients enabled, and none wanted
        assert not model.training
        assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("size", [1, 2])
@on_ranks(None)
def test_losses_of_every_kind_give_plain_gradients(rank: int, size: int) -> None:
    for how in ("two calls", "a list", "gradients", "a penalty"):
        torch.manual_seed(0)
        plain = Blocks()
        out = plain(rows())
        penalty = sum(each.square().sum() for each in plain.layers[-1].parameters()) if how == "a penalty" else 0.0
        (out.mean() + out.square().mean() + penalty).backward()
        with begun({"microbatches": 2, "partitions": size}):
            model = model_of()

            @smp.step
            def train(model: Any, x: Tensor, how: str) -> Tensor:
                out = model(x)
                if how == "two calls":
                    model.backward(out.mean())
                    model.backward(out.square().mean())
                elif how == "a list":
                    model.backward([out.mean(), out.square().mean()])
                elif how == "gradients":
                    model.backward(out, torch.full_like(out, 1 / out.numel()) + 2 * out.detach() / out.numel())
                else:
                    penalty = sum(each.square().sum() for each in model.module.layers[-1].parameters())
                    model.backward(out.mean() + out.square().mean() + penalty)
                return out.mean()

            train(model, rows(), how)
            for name, parameter in model.local_named_parameters():
                torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def drawn_before(rank: int, size: int) -> list[float]:
    torch.manual_seed(rank)  # what processes draw by themselves differs
    seen: list[float] = []
    with begun({"microbatches": 2, "partitions": size}):
        model = model_of()
        torch.manual_seed(rank)

        @smp.step
        def look(model: Any, x: Tensor) -> Tensor:
            noise = torch.rand(())
            seen.append(float(noise))
            return model(x + noise).mean()

        with torch.no_grad():
            look(model, rows())
        after = torch.rand(())
        torch.manual_seed(rank)
        assert float(after) == float(torch.rand(())), "a session's own stream of random numbers goes on as it was"
    return seen[-2:]


def test_what_is_drawn_before_the_model_is_the_same_along_a_pipeline(pool: Pool) -> None:
    first, second = pool.run(drawn_before)
    assert first == second
    assert first[0] != first[1]


FAULTS = {
    "raises early": "mine",
    "raises late": "mine",
    "two models": "second time",
    "own backward": "model.backward(loss)",
    "another's output": "micro-batch 0's output",
    "no scalar": "grad_tensors",
    "retain_graph": "retain_graph=True",
    "indivisible": "7 entries",
}


def faults(rank: int, size: int, how: str) -> None:
    kept: list[Tensor] = []
    started = []
    with begun({"microbatches": 2, "partitions": size}):
        model = model_of()

        @smp.step
        def train(model: Any, x: Tensor) -> Tensor:
            if how == "raises early" and started and rank == size - 1:
                raise KeyError("mine")
            out = model(x)
            if how == "raises late" and started:
                raise KeyError("mine")
            if how == "two models":
                out = model(out)
            loss = out.mean()
            if how == "own backward":
                loss.backward()
            elif how == "another's output":
                model.backward(loss + sum(kept))
                kept.append(loss)
            elif how == "no scalar":
                model.backward(out)
            elif how == "retain_graph":
                model.backward(loss, retain_graph=True)
            else:
                model.backward(loss)
            return loss

        goes_on = how.startswith("raises") or how == "indivisible"
        if goes_on:
            train(model, rows())
            started.append(True)
        assert FAULTS[how] in said(lambda: train(model, rows(7 if how == "indivisible" and rank == 0 else 8)))
        started.clear()
        assert not goes_on or not said(lambda: train(model, rows()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_faults_are_told_on_all_processes_soon(pool: Pool, ranks: int) -> None:
    pool.run(several, [(faults, how) for how in FAULTS], ranks=ranks, timeout=60)


ALONE = {
    "saves": "the call is smp.save_checkpoint on rank 0 and a function with @smp.step on rank 1",
    "clips": "the call is a function with @smp.step on rank 0 and clip_master_grads on rank 1",
    "evaluates": "in training on rank 0 and ",
    "another partition": "layers.1 on partition 1 on rank 0 and layers.1 on partition 0 on rank 1",
}


@on_ranks(2, timeout=60)
def test_what_one_process_does_alone_is_told_on_all(rank: int, size: int, tmp_path: Path) -> None:
    for how, told in ALONE.items():
        by_hand = how == "another partition"
        with begun({"microbatches": 2, "partitions": size, "auto_partition": not by_hand}):
            torch.manual_seed(0)
            blocks = Blocks()
            for number, layer in enumerate(blocks.layers if by_hand else ()):
                smp.set_partition(layer, int(number > rank))
            model: Any = smp.DistributedModel(blocks)
            optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

            def go_on(how: str = how, model: Any = model, optimizer: Any = optimizer) -> None:
                train(model, rows())
                if rank == 0 and how == "saves":
                    smp.save_checkpoint(str(tmp_path), "tag", model=model)
                if rank == 1 and how == "clips":
                    optimizer.clip_master_grads(1.0)
                if rank == 1 and how == "evaluates":
                    model.eval()
                train(model, rows())

            assert told in said(go_on)


@on_ranks(2)
def test_steps_leave_nothing_behind(rank: int, size: int) -> None:
    for partitions in (1, 2):
        with begun({"microbatches": 2, "ddp": True, "partitions": partitions}):
            model = smp.DistributedModel(made("cnn"))
            optimizer = smp.DistributedOptimizer(sgd(model))
            early = 0
            for step in range(6):
                optimizer.zero_grad()
                train_step(model, "cnn", *batch_of("cnn", step % 3, 0), "mean")
                optimizer.step()
                early = num_tensors() if step == 2 else early
            assert num_tensors_soon(early) <= early


@on_ranks(2)
def test_stages_without_data_work_on_the_firsts(rank: int, size: int) -> None:
    """As the original's scripts for GPT read it."""
    with begun({"partitions": 2, "microbatches": 2}):
        model = model_of()

        @smp.step
        def train(model: Any, batch: dict[str, Tensor], scale: float) -> Tensor:
            loss = model(batch["x"]).square().mean() * scale
            model.backward(loss)
            return loss

        empty = torch.zeros(len(rows()), 0)
        first = train(model, {"x": empty if smp.pp_rank() else rows()}, 2.0).reduce_mean()
        assert float(first) == float(train(model, {"x": rows()}, 2.0).reduce_mean()) > 0
