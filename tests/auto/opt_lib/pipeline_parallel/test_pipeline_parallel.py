"""pipeline_parallel: stages, schedules, micro-batches and cuts, worked by hand, and what does not go together."""

from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atorch.auto.job import make_context
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel, even_cut, stages, tied_calls
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import peak_memory
from atorch.distributed import world as worlds
from atorch.distributed.local_collectives import fake_world
from atorch.errors import StrategyError
from tests.auto.opt_lib.splitting import PROFILE, cluster, cost_of
from tests.auto.planner import jobs
from tests.runtime.pipeline.unmodular import Functional, Layers, Leaving
from tests.zoo import Residual

AXES = {"pipeline": 4}


def interleaved(pieces=None, **knobs):
    return PipelineParallel(schedule="interleaved", interleave=pieces, **knobs)


def test_a_stage_holds_its_blocks_and_the_micro_batches_under_way():
    cost = cost_of(AXES, ("pipeline_parallel", {"micro_batches": 16}), batch_size=64)
    assert (cost.stages, cost.schedule, cost.interleave, cost.num_micro_batches) == (4, "1f1b", 1, 16)
    memory = peak_memory(cost)  # the first stage: embedding and two blocks, four micro-batches of four samples
    assert memory.parameters == 4 * (4000 + 2 * 1200)
    assert memory.activations == 4 * (800 + 2 * 5000) * 4 / 2

    cost = cost_of(AXES, interleaved(2, micro_batches=16), batch_size=64)
    assert (cost.schedule, cost.interleave) == ("interleaved", 2)
    held = (2 * 3 + 4 + 1) / 2  # pieces of half a stage
    assert peak_memory(cost).activations == held * (800 + 2 * 5000) * 4 / 2

    cost = cost_of({"data": 2, "pipeline": 4}, "pipeline_parallel", "fsdp")
    assert (cost.param_shards, cost.grad_shards) == (2, 1)
    assert [comm.per_micro_batch for comm in cost.comm] == [True, False]

    schedules = [(each.schedule, each.pieces) for each in PipelineParallel.choices(PROFILE, cluster())]
    assert schedules == [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1)]
    assert not list(PipelineParallel.choices(PROFILE, cluster(devices=1)))


@pytest.mark.parametrize(("batch_size", "parts"), [(16, 16), (64, 16), (24, 12), (7, 7), (34, 2)])
def test_micro_batches_are_as_many_as_divide_the_batch_up_to_four_a_stage(batch_size, parts):
    assert cost_of(AXES, "pipeline_parallel", batch_size=batch_size).num_micro_batches == parts


def test_interleaving_takes_them_in_rounds_and_micro_batch_has_the_last_word():
    assert cost_of(AXES, interleaved(2), batch_size=36).num_micro_batches == 12  # not 9, and not above 16
    assert cost_of(AXES, "pipeline_parallel", ("micro_batch", {"size": 2})).num_micro_batches == 8
    assert cost_of(AXES, "pipeline_parallel", "micro_batch").num_micro_batches == 16
    assert cost_of({"data": 4}, "pipeline_parallel", "ddp").num_micro_batches == 1  # no stages, no parts


def watchable(kind, size=2):
    """A job of a model, with a batch to watch it on, as a search of `size` processes has it."""
    batch = {"input_ids": torch.arange(32).reshape(4, 8)}
    ctx = make_context(
        kind(), torch.optim.SGD, [batch], lambda batch, output: output["logits"].square().mean(),
        model_input_format="unpack_dict", world=worlds.init("cpu"), cluster=jobs.cluster(size),
    )  # fmt: skip
    return replace(ctx, sample_batch=batch, world=replace(ctx.world, size=size))


def refusal(ctx, *methods):
    """Why methods cannot be beside a pipeline of all processes, as far as that is known before a model is cut."""
    mode = ("parallel_mode", [("pipeline", ctx.world.size)])
    try:
        Strategy.of([mode, *methods]).check_at_work(ctx)
    except StrategyError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", [Functional, Leaving])
@pytest.mark.parametrize("beside", ["amp_native", "checkpoint", "fsdp", "compile"])
def test_what_goes_with_no_graph_is_refused_before_a_model_is_cut_by_one(kind, beside):
    told = refusal(watchable(kind), "pipeline_parallel", beside)
    assert "does not return it" in told or "as many calls of modules" in told
    assert "Nor can the model be cut by its graph: " in told
    assert f"{beside} acts where modules are called" in told


def test_a_model_is_watched_once_and_only_where_it_matters(monkeypatch):
    runs, route_of = [], stages.route_of
    monkeypatch.setattr(stages, "route_of", lambda *given: runs.append(1) or route_of(*given))
    ctx = watchable(Leaving)
    for beside in ("ddp", "zero1", "half"):
        assert refusal(ctx, "pipeline_parallel", beside) is None
    assert runs == []
    for beside in ("amp_native", "checkpoint", "fsdp"):
        assert refusal(ctx, ("pipeline_parallel", {"schedule": "gpipe"}), beside) is not None
    assert runs == [1]
    assert refusal(watchable(Layers), "pipeline_parallel", "amp_native", "checkpoint") is None
    assert refusal(watchable(Layers, 16), "pipeline_parallel", "amp_native") is not None


def test_rows_where_a_batch_sampler_does_not_say_them() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    loader = torch.utils.data.DataLoader(data, batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7]])  # type: ignore[arg-type]
    mesh = SimpleNamespace(rank=lambda *axes: 0, size=lambda *axes: 1)
    ctx: Any = SimpleNamespace(
        need_mesh=lambda: mesh, make_loader=lambda rank, size: loader, sample_batch=next(iter(loader))
    )
    assert stages.rows_of_a_process(ctx) == 4


WIDTH = 64


def chain(*hidden: int) -> nn.Module:
    """Blocks of the given widths."""
    blocks = (Residual(nn.Linear(WIDTH, each), nn.ReLU(), nn.Linear(each, WIDTH)) for each in hidden)
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks)))


def cut(model: nn.Module, cluster: str = "2x1xA100-80GB", memory_bytes: float | None = None) -> tuple[int, ...]:
    """The first block of each of two stages, on a GPU with so much memory."""
    with fake_world(2, 0) as world:
        spec = ClusterSpec.load(cluster)
        if memory_bytes is not None:
            spec = replace(spec, device=replace(spec.device, memory_bytes=memory_bytes))
        ctx = make_context(
            model, torch.optim.AdamW, loss_func=lambda batch, output: output.mean(), world=world, cluster=spec
        )
        mode, method = ParallelMode(slices=(("pipeline", 2),)), PipelineParallel(micro_batches=2)
        ctx = replace(mode.apply(ctx), strategy=Strategy((mode, method)))
        ctx = replace(ctx, world=replace(world, device=torch.device("cuda")))  # which is looked at, and nothing more
        called = [f"blocks.{index}" for index in range(len(model.blocks))]
        return even_cut(ctx, method, model, called, torch.randn(1 << 16, WIDTH), 2)


def test_cuts_are_for_time_and_within_memory():
    assert cut(chain(4096, 256, 256, 256)) == (0, 1)
    assert cut(chain(256, 256, 256, 4096)) == (0, 3)

    # The first stage holds activations of two micro-batches, the second of one: by time alone each has two blocks.
    model = chain(4096, 4096, 4096, 4096)
    assert cut(model) == (0, 2)
    assert cut(model, memory_bytes=2e9) == (0, 1)

    model = chain(16, 16, 16)
    model.blocks[2].branch[2].bias = model.blocks[0].branch[2].bias
    assert list(tied_calls(model, ["blocks.0", "blocks.1", "blocks.2", "blocks.1"])) == [(0, 2), (1, 3)]


def test_what_fits_nowhere_is_cut_for_time(caplog):
    assert cut(chain(4096, 256, 256, 256), memory_bytes=1e6) == (0, 1)
    assert "cut only for time" in caplog.text
