"""The forms of configurations that the documentation names, and the knobs that they mean."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.strategy import METHODS, Strategy
from atorch.compat.fsdp1_arguments import ROWS
from atorch.errors import StrategyError
from tests.runtime.sharing import Block

SLICES = [("tensor", 2), ("pipe", 2), ("data", 2)]
MESH = {"slices": (("tensor", 2), ("pipeline", 2), ("data", 2))}
FP8 = {
    "include": None, "exclude": None, "margin": 0, "interval": 1, "fp8_format": "HYBRID", "amax_history_len": 1024,
    "amax_compute_algo": "max", "reduce_amax": True,
}  # fmt: skip
COMPILED = {"wrap_class": nn.Linear, "mode": "reduce-overhead", "dynamic": False, "fullgraph": True}

CONFIGURATIONS: Mapping[str, list[tuple[Any, dict[str, Any]]]] = {
    "parallel_mode": [
        *((config, MESH) for config in ((SLICES, None, False), (SLICES, None, False, True), (SLICES, None))),
        *((config, MESH) for config in ((SLICES,), SLICES, {"slices": SLICES})),
    ],
    "amp_native": [
        (None, {"dtype": "fp16"}),
        ("fp16", {"dtype": "fp16"}),
        ("bf16", {"dtype": "bf16"}),
        (torch.bfloat16, {"dtype": "bf16"}),
        ({"dtype": torch.float16}, {"dtype": "fp16"}),
        ({"dtype": "bfloat16"}, {"dtype": "bf16"}),
        ({"dtype": torch.bfloat16, "skip_if_nonfinite": True}, {"dtype": "bf16", "skip_if_nonfinite": True}),
    ],
    "half": [
        ("fp16", {"dtype": "fp16"}),
        ("bf16", {"dtype": "bf16"}),
        (torch.bfloat16, {"dtype": "bf16"}),
        ({"dtype": "bf16"}, {"dtype": "bf16"}),
    ],
    "fp8": [
        (FP8, {}),
        ({"include": "lm_head"}, {"include": ("lm_head",)}),  # a plain string is one name
        ({"exclude": ["lm_head"], "verbose": True}, {"exclude": ("lm_head",), "verbose": True}),
    ],
    "compile": [(COMPILED, {**COMPILED, "wrap_class": ("Linear",)})],
    "micro_batch": [(knobs, knobs) for knobs in ({"size": 4}, {"count": 2}, {"size": "auto"}, {"loss_weight": "x"})],
    "module_replace": [
        ({"verbose": True}, {"verbose": True}),
        ({"attention_sdpa": None, "verbose": True}, {"pairs": {"attention_sdpa": None}, "verbose": True}),
    ],
    "zero1": [
        (None, {"backend": "torch"}),
        ({"use_ds_zero": True}, {"backend": "deepspeed"}),
        ({"use_ds_zero": False}, {"backend": "torch"}),
        ({"backend": "fairscale"}, {"backend": "fairscale"}),
    ],
    "zero2": [
        (None, {"backend": "fsdp", "reshard_after_forward": False}),
        ({"use_ds_zero": True}, {"backend": "deepspeed"}),
        ({"not_use_fsdp": True}, {"backend": "fairscale"}),
        ({"not_use_fsdp": False, "forward_prefetch": True}, {"backend": "fsdp", "forward_prefetch": True}),
        ({"sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP}, {"sharding_strategy": "SHARD_GRAD_OP"}),
    ],
    "fsdp": [
        ({"sharding_strategy": fsdp.ShardingStrategy.FULL_SHARD}, {"sharding_strategy": "FULL_SHARD"}),
        ({"sharding_strategy": fsdp.ShardingStrategy.NO_SHARD}, {"sharding_strategy": "NO_SHARD"}),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ({"cpu_offload": fsdp.CPUOffload(offload_params=True)}, {"cpu_offload": True}),
        ({"cpu_offload": None}, {}),
        ({"cpu_offload": "False"}, {"cpu_offload": False}),
        ({"auto_wrap_policy": wrap.ModuleWrapPolicy({nn.Linear, Block})}, {"atorch_wrap_cls": ("Block", "Linear")}),
        (
            {"auto_wrap_policy": functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})},
            {"atorch_wrap_cls": ("Block",)},
        ),
        (
            {"auto_wrap_policy": functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=100)},
            {"atorch_size_based_min_num_params": 100},
        ),
        ({"backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_PRE}, {}),
        ({"backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_POST, "limit_all_gathers": False}, {}),
        ({"backward_prefetch": None}, {}),
        ({"ignored_modules": [nn.Linear]}, {"atorch_ignored_cls": ("Linear",)}),
        ({"ignored_states": "a.weight"}, {"atorch_ignored_cls": ("a.weight",)}),
        ({"device_id": 3, "limit_all_gathers": True, "use_orig_params": False}, {}),
        ({"param_init_fn": None, "process_group": None, "device_mesh": None, "atorch_wrap_cls": None}, {}),
        *((knobs, knobs) for knobs in ({"sync_module_states": True, "forward_prefetch": True},)),
        ({"fsdp_wrap_params_outmost": True}, {"wrap_trainable_outmost": True}),
    ],
}
"""Method → configurations, each with the knobs that it sets."""


@pytest.mark.parametrize(
    ("name", "config", "knobs"), [(name, *row) for name, rows in CONFIGURATIONS.items() for row in rows]
)
def test_documented_configurations_become_knobs(name: str, config: Any, knobs: dict[str, Any]) -> None:
    method = METHODS[name].of(config)
    assert method == METHODS[name](**knobs)
    assert METHODS[name].of(method.model_dump(mode="json", exclude_unset=True)) == method


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"param_dtype": "bfloat16", "reduce_dtype": torch.float32}, ("bf16", "fp32", None, True)),
        (fsdp.MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16), ("fp16", None, "fp16", False)),
        (fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16), ("bf16", None, None, True)),
    ],
)
def test_mixed_precision_takes_torchs_objects(given: Any, expected: Any) -> None:
    precision = Fsdp.of({"mixed_precision": given}).mixed_precision
    assert precision is not None
    got = (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype, precision.cast_forward_inputs)
    assert got == expected


def test_the_table_has_every_argument_of_fsdp1() -> None:
    arguments = list(inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters)
    assert set(ROWS) == set(arguments) - {"self", "module"}


def test_triples() -> None:
    given = [("parallel_mode", None, False), ("amp_native", {"dtype": "bf16"}, False), ["checkpoint", None, True]]
    assert Strategy.of(given) == Strategy.of(["parallel_mode", ("amp_native", {"dtype": "bf16"}), "checkpoint"])
    with pytest.raises(StrategyError, match="is not a method"):
        Strategy.of([("checkpoint", None, "yes")])
    with pytest.raises(StrategyError, match=r"For one method and its configuration, give \[\('amp_native'"):
        Strategy.of(("amp_native", {"dtype": "bf16"}, False))


def on(*slices: tuple[str, int], **beside: object) -> tuple[str, ...]:
    return Strategy.of([("parallel_mode", (list(slices), None)), "mixed_parallel", *beside.items()]).names()


def test_recipes_stand_for_the_methods_of_the_mesh():
    assert on(("tensor", 2), ("data", 4)) == ("parallel_mode", "tensor_parallel")
    assert on(("context", 2), ("pipeline", 1)) == ("parallel_mode", "context_parallel")
    assert on(("sequence", 2)) == ("parallel_mode", "sequence_parallel")
    mesh = ("parallel_mode", ([("tensor", 2), ("pipeline", 2)], None))
    strategy = Strategy.of([mesh, ("pipeline_parallel", {"schedule": "interleaved"}), "mixed_parallel"])
    assert strategy.names() == ("parallel_mode", "tensor_parallel", "pipeline_parallel")
    assert "interleaved" in str(strategy)

    mesh = ("parallel_mode", ([("tensor", 2), ("data", 2), ("pipeline", 2)], None))
    strategy = Strategy.of([mesh, ("ds_3d_parallel", {"ds_config": {"wall_clock_breakdown": False}})])
    assert strategy.names() == ("parallel_mode", "tensor_parallel", "pipeline_parallel", "zero1")
    assert "deepspeed" in str(strategy)
    without = Strategy.of([("parallel_mode", ([("data", 2), ("pipeline", 2)], None)), "ds_3d_parallel"])
    assert without.names() == ("parallel_mode", "pipeline_parallel", "zero1")
