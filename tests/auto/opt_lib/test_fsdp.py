"""fsdp through the front door: its knobs, every argument of FSDP1, hybrid sharding, LoRA."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.errors import StrategyError
from atorch.runtime.fsdp1_arguments import ROWS
from tests.auto.opt_lib.sharing_job import accelerated, deviation
from tests.pool import Pool, RankFailure
from tests.runtime.sharing import Block, make

RECOMMENDED = {
    "forward_prefetch": True,
    "limit_all_gathers": True,
    "sync_module_states": True,
    "use_orig_params": True,
    "atorch_wrap_cls": (Block,),
}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("awkward", None),
        ("awkward", RECOMMENDED),
        ("awkward", {"atorch_ignored_cls": ("mixer", "blocks.0.down.weight")}),
        ("llama", {"atorch_wrap_cls": "LlamaMLP"}),
        ("llama", {"atorch_size_based_min_num_params": 500}),
        ("llama", {"cpu_offload": True}),
        ("llama", {"reshard_after_forward": True}),
        ("llama", {"reshard_after_forward": False}),
        ("lora", None),
        ("lora", {"fsdp_wrap_params_outmost": True}),
    ],
)
def test_trains_and_clips_as_one_process_does(pool: Pool, name: str, config: Any) -> None:
    assert max(pool.run(deviation, [("fsdp", config)], name, True)) <= 1e-4


@pytest.mark.parametrize("config", [None, {"sharding_strategy": "HYBRID_SHARD"}])
def test_shards_over_zero_and_replicates_over_data(pool: Pool, config: Any) -> None:
    mesh = ("parallel_mode", ([("zero", 2), ("data", 2)], None))
    assert max(pool.run(deviation, [mesh, ("fsdp", config)], "awkward", True, ranks=4)) <= 1e-4


def test_gathered_parameters_may_stay_over_some_of_the_processes(pool: Pool) -> None:
    assert max(pool.run(deviation, [("fsdp", {"reshard_after_forward": 2})], "llama", ranks=4)) <= 1e-4


def test_one_process_trains(pool: Pool) -> None:
    assert pool.run(deviation, ["fsdp"], "awkward", ranks=1)[0] <= 1e-4


def sharded(rank: int, size: int, name: str, config: Any, strategy: list[Any]) -> dict[str, Any]:
    model = accelerated([*strategy, ("fsdp", config)], name).model
    return {
        "gathered": [path for path, module in model.named_modules() if isinstance(module, FSDPModule)],
        "whole": [path for path, p in model.named_parameters() if not isinstance(p, DTensor)],
        "placements": str(next(p for p in model.parameters() if isinstance(p, DTensor)).placements),
        "bytes": sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor)),
        "all_bytes": sum(p.nbytes for p in model.parameters()),
    }


def test_nothing_named_gathers_blocks_and_tied_embeddings(pool: Pool) -> None:
    first, second = pool.run(sharded, "llama", None, [])
    layers = ["llama.model.layers.0", "llama.model.layers.1"]
    assert first["gathered"] == ["", "llama.model.embed_tokens", *layers, "llama.lm_head"]
    assert first["bytes"] + second["bytes"] == first["all_bytes"]


def test_what_is_named_is_gathered_and_nothing_else(pool: Pool) -> None:
    found = pool.run(sharded, "llama", {"atorch_wrap_cls": ("LlamaMLP",)}, [])[0]
    assert found["gathered"] == ["", "llama.model.layers.0.mlp", "llama.model.layers.1.mlp"]


def test_ignored_modules_stay_whole(pool: Pool) -> None:
    config = {"ignored_modules": ["mixer"], "ignored_states": "blocks.1.down.bias"}
    found = pool.run(sharded, "awkward", config, [])[0]
    assert sorted(found["whole"]) == ["blocks.1.down.bias", "mixer.bias", "mixer.weight", "scale"]


def test_hybrid_shards_over_zero(pool: Pool) -> None:
    mesh = [("parallel_mode", ([("zero", 2), ("data", 2)], None))]
    assert pool.run(sharded, "llama", None, mesh, ranks=4)[0]["placements"] == "(Replicate(), Shard(dim=0))"


def dtypes(rank: int, size: int, config: Any, strategy: list[Any]) -> tuple[str, str, str]:
    result = accelerated([*strategy, ("fsdp", config)], "llama")
    seen: list[str] = []
    block = result.model.llama.model.layers[0]
    block.mlp.register_forward_hook(lambda module, args, output: seen.append(str(module.up_proj.weight.dtype)))
    batch = next(iter(result.dataloader))
    result.loss_func(batch, result.model(batch)).backward()
    weight = block.mlp.up_proj.weight
    return seen[0], str(weight.dtype), str(weight.grad.dtype)


FP32, BF16 = "torch.float32", "torch.bfloat16"


@pytest.mark.parametrize(
    ("config", "strategy", "expected"),
    [
        (None, [], (FP32, FP32, FP32)),
        ({"mixed_precision": {"param_dtype": torch.bfloat16}}, [], (BF16, FP32, FP32)),
        (None, [("amp_native", "bf16")], (BF16, FP32, FP32)),
        ({"mixed_precision": {}}, [("amp_native", "bf16")], (FP32, FP32, FP32)),
        (None, [("half", "bf16")], (BF16, BF16, BF16)),
    ],
)
def test_precision_is_the_users_else_the_precision_methods(
    pool: Pool, config: Any, strategy: list[Any], expected: tuple[str, str, str]
) -> None:
    assert pool.run(dtypes, config, strategy)[0] == expected


def test_the_table_has_every_argument_of_fsdp1() -> None:
    arguments = list(inspect.signature(FullyShardedDataParallel.__init__).parameters)
    assert set(ROWS) == set(arguments) - {"self", "module"}
    assert all(row.under_fsdp2.endswith(".") for row in ROWS.values())


@pytest.mark.parametrize(
    ("config", "knobs"),
    [
        ({"sharding_strategy": ShardingStrategy.FULL_SHARD}, {"sharding_strategy": "FULL_SHARD"}),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ({"cpu_offload": CPUOffload(offload_params=True)}, {"cpu_offload": True}),
        ({"cpu_offload": None}, {}),
        ({"auto_wrap_policy": ModuleWrapPolicy({nn.Linear, Block})}, {"atorch_wrap_cls": ("Block", "Linear")}),
        (
            {"auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})},
            {"atorch_wrap_cls": ("Block",)},
        ),
        (
            {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=100)},
            {"atorch_size_based_min_num_params": 100},
        ),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, {}),
        ({"ignored_modules": [nn.Linear]}, {"atorch_ignored_cls": ("Linear",)}),
        ({"ignored_states": "a.weight"}, {"atorch_ignored_cls": ("a.weight",)}),
        ({"device_id": 3, "limit_all_gathers": True, "use_orig_params": False}, {}),
        ({"param_init_fn": None, "process_group": None, "device_mesh": None}, {}),
        (
            {"sync_module_states": True, "forward_prefetch": True},
            {"sync_module_states": True, "forward_prefetch": True},
        ),
        ({"fsdp_wrap_params_outmost": True}, {"wrap_trainable_outmost": True}),
        ({"atorch_wrap_cls": None}, {}),
    ],
)
def test_fsdp1_arguments_become_knobs(config: Any, knobs: dict[str, Any]) -> None:
    method = Fsdp.of(config)
    assert method == Fsdp(**knobs)
    assert Fsdp.of(method.model_dump(mode="json", exclude_unset=True)) == method


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"param_dtype": "bfloat16", "reduce_dtype": torch.float32}, ("bf16", "fp32", None, True)),
        (MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16), ("fp16", None, "fp16", False)),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), ("bf16", None, None, True)),
    ],
)
def test_mixed_precision_takes_torchs_objects(given: Any, expected: Any) -> None:
    precision = Fsdp.of({"mixed_precision": given}).mixed_precision
    assert precision is not None
    got = (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype, precision.cast_forward_inputs)
    assert got == expected


REFUSALS: list[tuple[Any, str]] = [
    ({"sharding_strategy": ShardingStrategy.NO_SHARD}, "use the method ddp"),
    ({"auto_wrap_policy": lambda *_: True}, "cannot be kept in a strategy"),
    ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, "always prefetches"),
    ({"limit_all_gathers": False}, "always bounds"),
    ({"process_group": object()}, "parallel_mode"),
    ({"device_mesh": object()}, "parallel_mode"),
    ({"param_init_fn": print}, "reset_parameters"),
    ({"ignored_modules": [nn.Linear(1, 1)]}, "give their names or classes"),
    ({"mixed_precision": MixedPrecision(keep_low_precision_grads=True)}, "keep_low_precision_grads"),
    ({"mixed_precision": {"param_dtype": "int8"}}, "mixed_precision.param_dtype"),
    ({"mixed_precision": {"param_type": "bf16"}}, "param_type"),
    ({"atorch_wrap_cls": "A", "atorch_size_based_min_num_params": 10}, "not both"),
    ({"atorch_wrap_cls": "A", "auto_wrap_policy": ModuleWrapPolicy({Block})}, "give one of the two"),
    ({"atorch_wrap_cls": [3]}, "atorch_wrap_cls has 3"),
    ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, "leave reshard_after_forward out"),
    ({"fsdp_wrap_params_outmost": True, "wrap_trainable_outmost": False}, "differ"),
    ({"forward_prefech": True}, "did you mean 'forward_prefetch'"),
]


@pytest.mark.parametrize(("config", "message"), REFUSALS)
def test_what_cannot_be_meant_is_refused(config: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Fsdp.of(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sharding_strategy": "HYBRID_SHARD"}, "no two axes"),
        ({"reshard_after_forward": 2}, "divisor"),
        ({"atorch_wrap_cls": "Blok"}, "did you mean 'Block'"),
        ({"atorch_ignored_cls": "mixr"}, "atorch_ignored_cls names 'mixr'"),
    ],
)
def test_what_cannot_be_meant_here_is_refused(pool: Pool, config: Any, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        pool.run(sharded, "awkward", config, [])


def buffers(rank: int, size: int) -> str:
    return str(accelerated([("fsdp", {"mixed_precision": {"buffer_dtype": "bf16"}})], "awkward").model.shift.dtype)


def test_buffers_are_cast_where_asked(pool: Pool) -> None:
    assert pool.run(buffers)[0] == BF16


def seeded_apart(rank: int, size: int, config: Any) -> float:
    model = accelerated([("fsdp", config)], "awkward", seed=rank).model
    return float((model.mixer.weight.full_tensor() - make("awkward").mixer.weight).abs().max())


@pytest.mark.parametrize("config", [None, {"sync_module_states": True}])
def test_processes_seeded_apart_start_from_rank_zero(pool: Pool, config: Any) -> None:
    assert pool.run(seeded_apart, config) == [0.0, 0.0]


def trainable_in_root(rank: int, size: int) -> list[bool]:
    seen = []
    for outmost in (False, True):
        model = accelerated([("fsdp", {"wrap_trainable_outmost": outmost})], "lora").model
        groups = {id(m._get_fsdp_state()): m for m in model.modules() if isinstance(m, FSDPModule)}
        root = model._get_fsdp_state()._fsdp_param_group
        trainable = {p for p in model.parameters() if p.requires_grad}
        seen.append({fsdp_param.sharded_param for fsdp_param in root.fsdp_params} >= trainable and len(groups) > 2)
    return seen


def test_what_trains_may_be_gathered_as_one(pool: Pool) -> None:
    assert pool.run(trainable_in_root)[0] == [False, True]
