"""The recipe stands for one method an axis; without a mesh the planner chooses the degrees."""

from __future__ import annotations

import pytest

from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.planner.mesh_inference import fastest_mesh, lacks_degrees, on_mesh
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import plain_cost
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.errors import StrategyError


def on(*slices: tuple[str, int], **beside: object) -> tuple[str, ...]:
    others = list(beside.items())
    return Strategy.of([("parallel_mode", (list(slices), None)), "mixed_parallel", *others]).names()


def test_stands_for_the_methods_of_the_mesh():
    assert on(("tensor", 2), ("data", 4)) == ("parallel_mode", "tensor_parallel")
    assert on(("tensor", 2), ("pipeline", 2)) == ("parallel_mode", "tensor_parallel", "pipeline_parallel")
    assert on(("context", 2), ("pipeline", 1)) == ("parallel_mode", "context_parallel")
    assert on(("sequence", 2)) == ("parallel_mode", "sequence_parallel")


def test_leaves_the_knobs_of_what_is_beside_it():
    strategy = Strategy.of(
        [
            ("parallel_mode", ([("tensor", 2), ("pipeline", 2)], None)),
            ("pipeline_parallel", {"schedule": "interleaved"}),
            "mixed_parallel",
        ]
    )
    assert strategy.names() == ("parallel_mode", "tensor_parallel", "pipeline_parallel")
    assert "interleaved" in str(strategy)


SHAPE = TransformerShape(
    layers=8, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, seq_len=2048, head_dim=128
)


class TestDegrees:
    profile = transformer_profile(SHAPE, 1, Implementation(itemsize=4.0))
    cluster = ClusterSpec.load("2x8xH100-80GB")

    def chosen(self, *names: str, batch: int = 64, cluster: ClusterSpec | None = None) -> tuple[ParallelMode, Strategy]:
        cluster = cluster or self.cluster
        strategy = Strategy.of(list(names))
        assert lacks_degrees(strategy)
        mode = fastest_mesh(strategy, self.profile, plain_cost(self.profile, batch), cluster)
        return mode, on_mesh(strategy, mode, cluster.world_size)

    def test_of_a_model_that_fits_only_when_split(self):
        # 2 billion parameters take 16 bytes each with Adam, in fp32 more than 24 GiB: one device cannot hold them.
        mode, strategy = self.chosen("mixed_parallel", cluster=ClusterSpec.load("1x8xL4-24GB"))
        assert mode.size("tensor", "pipeline") > 1
        assert set(strategy.names()) & {"tensor_parallel", "pipeline_parallel"}

    def test_leave_out_what_the_mesh_does_not_split(self):
        mode, strategy = self.chosen("mixed_parallel", "checkpoint")
        assert ("tensor_parallel" in strategy.names()) == (mode.size("tensor") > 1)
        assert ("pipeline_parallel" in strategy.names()) == (mode.size("pipeline") > 1)
        assert "checkpoint" in strategy.names()

    def test_split_what_was_asked_for(self):
        """Data parallelism alone is estimated faster here."""
        for name in ("tensor_parallel", "pipeline_parallel"):
            assert name in self.chosen(name, "fsdp")[1].names()

    def test_fit_nowhere(self):
        with pytest.raises(StrategyError, match=r"fits on no mesh of 2 processes; the nearest is parallel_mode\("):
            self.chosen("tensor_parallel", cluster=ClusterSpec.load("2xL4-24GB"))

    def test_a_batch_that_no_mesh_takes(self):
        with pytest.raises(StrategyError, match="is legal on no mesh of 16 processes: .*Give a parallel_mode"):
            self.chosen("tensor_parallel", batch=3)
