"""Each stage of a pipeline is simulated as it runs: bytes and messages against two real processes.

The same counters watch both; messages must be equal, live bytes within 3 %.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from atorch.auto.context import Context
from atorch.auto.job import make_context
from atorch.auto.opt_lib.shared.defaults import complete
from atorch.auto.planner.simulate.depth_extrapolation import Observed
from atorch.auto.planner.simulate.simulation import observe, simulate
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.distributed.world import World, init
from tests.contract.reality import assert_as_simulated
from tests.pool import Pool
from tests.runtime.pipeline.job import ROWS, Samples, loss_func, make_model
from tests.runtime.pipeline.test_pipeline import stages

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
GPIPE, ZERO_BUBBLE = stages(schedule="gpipe", micro_batches=4), stages(schedule="zero_bubble", micro_batches=4)
INTERLEAVED = stages(schedule="interleaved", micro_batches=4)


def job(name: str, world: World) -> Context:
    return make_context(
        make_model(name).train(), torch.optim.AdamW, loss_func=loss_func, model_input_format="unpack_dict",
        optim_args={"lr": 1e-3}, world=world, cluster=ClusterSpec.detect(world, measure=False),
    )  # fmt: skip


def batch_of(name: str, rows: int) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in Samples(name, rows, even=True).data.items()}


def real(rank: int, size: int, name: str, strategy: list[Any], rows: int) -> Observed:
    """What a real rank holds and sends."""
    batch = batch_of(name, rows)
    return observe(replace(job(name, init()), sample_batch=batch), complete(Strategy.of(strategy), size), batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    [
        pytest.param("llama", stages(micro_batches=4), 2, marks=pytest.mark.nightly, id="llama"),
        pytest.param("gpt2", INTERLEAVED, 2, id="gpt2 interleaved"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("llama", GPIPE, 2),
                ("llama", ZERO_BUBBLE, 2),
                ("llama", [*stages(micro_batches=4), "checkpoint"], 2),
                ("llama", [*stages(micro_batches=4), "amp_native"], 2),
                ("llama", [*stages(micro_batches=4), "half"], 2),
                ("llama", [*stages(data=2, micro_batches=2), "fsdp", "amp_native"], 4),
                ("llama", [*stages(data=2, micro_batches=2), "ddp"], 4),
                ("llama", [*stages(data=2, micro_batches=2), "zero1"], 4),
                ("llama", [*stages(4, micro_batches=8)], 4),
                ("t5", stages(micro_batches=4), 2),
                ("bert", stages(micro_batches=4), 2),
                ("vit", stages(micro_batches=4), 2),
                ("frozen", stages(micro_batches=4), 2),
                ("twice", stages(micro_batches=4), 2),
                ("functional", stages(micro_batches=4), 2),
            )
        ),
    ],
)
def test_every_stage_is_simulated_as_it_runs(pool: Pool, name: str, strategy: list[Any], ranks: int) -> None:
    rows = ROWS * (2 if ranks == 4 and len(strategy) > 2 else 1)
    batch = batch_of(name, rows)
    expected = [
        simulate(job(name, ALONE), Strategy.of(strategy), batch, world_size=ranks, rank=rank) for rank in range(ranks)
    ]
    assert_as_simulated(expected, lambda: pool.run(real, name, strategy, ROWS, ranks=ranks))
