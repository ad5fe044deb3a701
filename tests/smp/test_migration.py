"""A configuration of smp as a strategy, in which what has no counterpart is named."""

from typing import Any

import pytest

import atorch.smp as smp
from atorch.errors import ArgumentError

STRATEGIES: list[tuple[dict[str, Any], list[Any]]] = [
    ({}, [("parallel_mode", [("data", 1)])]),
    ({"ddp": True}, [("parallel_mode", [("data", 1)]), "ddp"]),
    (
        {"partitions": 2, "microbatches": 4, "ddp": True},
        [
            ("parallel_mode", [("pipeline", 2), ("data", 1)]),
            ("pipeline_parallel", {"schedule": "1f1b", "micro_batches": 4}),
            "ddp",
        ],
    ),
    (
        {"partitions": 4, "microbatches": 2, "pipeline": "simple", "placement_strategy": "spread"},
        [
            ("parallel_mode", [("data", 1), ("pipeline", 4)]),
            ("pipeline_parallel", {"schedule": "gpipe", "micro_batches": 2}),
        ],
    ),
    (
        {"tensor_parallel_degree": 2, "ddp": True, "bf16": True, "shard_optimizer_state": True,
         "prescaled_batch": True},
        [("parallel_mode", [("tensor", 2), ("data", 1)]), "tensor_parallel", "zero1", ("half", "bf16")],
    ),
    (
        {"sharded_data_parallel_degree": 4, "ddp": True, "fp16": True, "sdp_gradient_clipping": 0},
        [("parallel_mode", [("zero", 4), ("data", 1)]), "fsdp", ("half", "fp16")],
    ),
    (
        {"microbatches": 4, "offload_activations": True},
        [("parallel_mode", [("data", 1)]), ("micro_batch", {"count": 4}), ("checkpoint", {"offload_to_cpu": True})],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "methods"), STRATEGIES)
def test_keys_become_methods(config: dict[str, Any], methods: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    from atorch import Strategy

    assert smp.strategy_of(config) == Strategy.of(methods)
    told = caplog.text.partition("no counterpart")[2]
    assert not told or config.get("tensor_parallel_degree")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"optimize": "speed"}, ["optimize"]),
        ({"memory_weight": 0.5, "skip_tracing": True}, ["memory_weight", "skip_tracing"]),
        ({"auto_partition": False, "partitions": 2, "default_partition": 1}, ["auto_partition", "default_partition"]),
        ({"partitions": 2, "active_microbatches": 9}, ["active_microbatches"]),
        ({"sharded_data_parallel_degree": 2, "ddp": True}, ["sdp_gradient_clipping"]),
        ({"offload_activations": True, "activation_loading_horizon": 2}, ["activation_loading_horizon"]),
        ({"activation_loading_horizon": 2}, []),
        ({"tensor_parallel_degree": 2, "ddp": True}, ["prescaled_batch"]),
        ({"delayed_parameter_initialization": True}, ["delayed_parameter_initialization"]),
    ],
)
def test_what_has_no_counterpart_is_named(
    config: dict[str, Any], named: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    smp.strategy_of(config)
    told = [record.getMessage() for record in caplog.records if "no counterpart" in record.getMessage()]
    assert len(told) == bool(named)
    assert all(f"{name} (" in told[0] for name in named)


def test_what_init_refuses_is_refused() -> None:
    with pytest.raises(ArgumentError, match="pipeline_parallel_degree"):
        smp.strategy_of({"pipeline_parallel_degre": 2})
