"""Every method refuses what cannot be meant or does not fit, and names the value, what holds, and the remedy."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from atorch.auto.strategy import Strategy
from atorch.errors import StrategyError
from tests.auto.opt_lib.splitting import BLOCK, on_mesh
from tests.runtime.sharing import Block

SLICES = [("tensor", 2), ("pipe", 2), ("data", 2)]
MESH = ("parallel_mode", ([("tensor", 2), ("data", 2), ("pipeline", 2)], None))

CONFIGURATIONS: Mapping[str, list[tuple[Any, str]]] = {
    "ddp": [({"bucket_cap_mb": 0}, "bucket_cap_mb")],
    "amp_native": [
        ("fp64", "'fp64'"),
        ({"dtype": torch.float32}, "dtype"),
        ({"skip_if_nonfinite", True}, "write the dict"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"loss_scale": -1.0}, "loss_scale"),
    ],
    "checkpoint": [
        ({"wrap_class": (3,)}, "wrap_class has 3"),
        ({"max_checkpoint_module_num": 0}, "max_checkpoint_module_num"),
        ({"selective": True, "no_reentrant": False}, "selective needs a forward that is not reentrant"),
        ({"selective": True, "offload_to_cpu": True}, "give one of them"),
        (3, "give module classes or names"),
    ],
    "chunk": [
        ({"budget_bytes": 1, "budget_fraction": 0.5}, "both given"),
        ({"budget_fraction": 0.0}, "greater than 0"),
        ({"prefetch": -1}, "prefetch"),
    ],
    "half": [("fp8", "'fp8'"), ({"skip_if_nonfinite": True}, "no knob 'skip_if_nonfinite'"), (16, "takes a dict")],
    "fp8": [
        ({"fp8_format": "E5M2"}, r"fp8\.fp8_format was given 'E5M2'"),
        ({"amax_compute_algo": "mean"}, r"fp8\.amax_compute_algo"),
        ({"margin": -1}, r"fp8\.margin"),
    ],
    "fsdp": [
        ({"auto_wrap_policy": Block}, "for classes and names give atorch_wrap_cls"),
        ({"auto_wrap_policy": lambda *_: True, "atorch_wrap_cls": "A"}, "not both"),
        ({"backward_prefetch": "BACKWARD"}, "it is BACKWARD_PRE, BACKWARD_POST or None"),
        ({"limit_all_gathers": 3}, "it is a bool"),
        ({"process_group": object()}, "parallel_mode"),
        ({"device_mesh": object()}, "parallel_mode"),
        ({"param_init_fn": "print"}, "it is a function"),
        ({"ignored_modules": [3]}, "or their names or classes"),
        ({"mixed_precision": MixedPrecision(keep_low_precision_grads=True)}, "keep_low_precision_grads"),
        ({"mixed_precision": {"param_dtype": "int8"}}, "mixed_precision.param_dtype"),
        ({"mixed_precision": {"param_type": "bf16"}}, "param_type"),
        ({"atorch_wrap_cls": "A", "atorch_size_based_min_num_params": 10}, "not both"),
        ({"atorch_wrap_cls": "A", "auto_wrap_policy": ModuleWrapPolicy({Block})}, "give one of the two"),
        ({"atorch_wrap_cls": [3]}, "atorch_wrap_cls has 3"),
        ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, "leave reshard_after_forward out"),
        ({"fsdp_wrap_params_outmost": True, "wrap_trainable_outmost": False}, "differ"),
    ],
    "module_replace": [
        ({"attention_spda": None}, "did you mean 'attention_sdpa'"),
        ({"pairs": {"attention_spda": None}}, "did you mean 'attention_sdpa'"),
        ({"attention_sdpa": {"x": 1}}, "has no configuration"),
    ],
    "micro_batch": [
        ({"size": 2, "count": 2}, "both given"),
        ({"size": 0}, "size"),
        ({"count": -1}, "count"),
        ({"size": "automatic"}, "size"),
    ],
    "offload": [
        ({"parameters": 1.0, "optimizer": 0.5}, "parameters is 1 and optimizer 0.5"),
        ({"optimizer": 0.0}, "all shares are 0"),
        ({"activations": 1.5}, "less than or equal to 1"),
    ],
    "parallel_mode": [
        ([("dta", 2)], "did you mean 'data'"),
        ([("data", 2), ("data", 4)], "given twice"),
        ([("tensor", 0)], "at least 1"),
        ([("tensor", "2")], r"takes \(\[\(name, size\)"),
        ([("tensor", True)], r"takes \(\[\(name, size\)"),
        ("data", "takes a dict"),
        ((SLICES, None, True), "start a job for each"),
        ((SLICES, None, 3), "True, False or None may follow"),
        (([("pipe", 2), ("pipeline", 2)], None), "is given twice"),
        ((SLICES, None, False, True, 1), "it takes"),
    ],
    "pipeline_parallel": [
        ({"interleave": 2}, "interleave is for the schedule interleaved"),
        ({"schedule": "interleaved", "interleave": 1}, "greater than or equal to 2"),
        ({"schedule": "zero_bubble", "backend": "deepspeed"}, "deepspeed backend has only the schedule 1f1b"),
        ({"split_points": ["a", "a"]}, "names a module twice"),
        ({"schedule": "2f2b"}, "schedule"),
        ({"micro_batches": 0}, "micro_batches"),
    ],
    "tensor_parallel": [({"plan": {"q_proj": "diagonal"}}, "tensor_parallel.plan.q_proj was given 'diagonal'")],
    "zero1": [
        ({"use_ds_zero", True}, "write the dict {'use_ds_zero': True}"),
        ({"use_ds_zero": True, "backend": "fairscale"}, "give one"),
        ({"backend": "apex"}, "backend"),
        ({"atorch_wrap_cls": "Block"}, "no knob 'atorch_wrap_cls'"),
    ],
    "zero2": [
        ({"not_use_fsdp", True}, "write the dict {'not_use_fsdp': True}"),
        ({"not_use_fsdp": True, "use_ds_zero": True}, "give one"),
        ({"not_use_fsdp": True, "atorch_wrap_cls": "Block"}, "atorch_wrap_cls are fsdp's"),
        ({"sharding_strategy": "FULL_SHARD"}, "use fsdp"),
        ({"reshard_after_forward": True}, "use fsdp"),
    ],
}
"""Method → configurations of it, each with the facts that its refusal names."""

STRATEGIES: list[tuple[Any, str]] = [
    (["ds_3d_parallel"], "runs a pipeline; give it a mesh with one"),
    ([("parallel_mode", ([("tensor", 2)], None)), "ds_3d_parallel"], "runs a pipeline; give it a mesh with one"),
    ([MESH, ("ds_3d_parallel", {"tpinfo": object()})], "needs no tpinfo: tensor_parallel derives"),
    ([MESH, ("ds_3d_parallel", {"ds_confg": {}})], "did you mean 'ds_config'"),
    ([MESH, ("pipeline_parallel", {"ds_config": {}})], "ds_config is for the deepspeed backend"),
    ([("parallel_mode", ([("data", 8)], None)), "mixed_parallel"], "no axis for mixed_parallel to split over"),
    ([("mixed_parallel", {"tensor": 2})], r"strategy\[0\]\[1\].*it has no knobs: degrees belong in parallel_mode"),
    (["amp_native", "half"], "exclude each other"),
]


@pytest.mark.parametrize(
    ("items", "message"),
    [*(([(name, config)], told) for name, cases in CONFIGURATIONS.items() for config, told in cases), *STRATEGIES],
)
def test_what_cannot_be_meant_is_refused(items: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Strategy.of(items)


def blocks(**changes: Any) -> dict[str, Any]:
    return {"segments": (replace(BLOCK, **changes),)}


def interleaved(**knobs: Any) -> tuple[str, dict[str, Any]]:
    return "pipeline_parallel", {"schedule": "interleaved", **knobs}


IN_ROUNDS = {"stages": 4, "schedule": "interleaved"}
MEGATRON = ("sequence_parallel", {"mode": "megatron"})
WRITTEN = {"attention": "written"}
UNFIT: list[tuple[Any, Mapping[str, int], dict[str, Any], str | None]] = [
    ("pipeline_parallel", {"pipeline": 8}, {}, None),
    ("pipeline_parallel", {"pipeline": 16}, {}, "of 16 pieces needs as many repeated blocks; the model has 8"),
    (interleaved(interleave=2), {"pipeline": 4}, {}, None),
    (interleaved(), {"pipeline": 8}, {}, "of 16 pieces"),
    (interleaved(interleave=2), {"pipeline": 4}, {"batch_size": 34}, "4 at a time, which does not divide 34"),
    (interleaved(interleave=2), {"pipeline": 4}, {"batch_size": 36}, None),
    (interleaved(interleave=2, micro_batches=8), {"pipeline": 4}, {}, None),
    (interleaved(interleave=2, micro_batches=2), {"pipeline": 4}, {}, "4 at a time, which does not divide 2"),
    (("pipeline_parallel", {"split_points": ("a", "b", "c")}), {"pipeline": 4}, {}, None),
    (("pipeline_parallel", {"split_points": ("a", "b")}), {"pipeline": 4}, {}, "has 2 modules; 4 pieces begin at 3"),
    (("pipeline_parallel", {"micro_batches": 5}), {"pipeline": 4}, {}, "5 micro-batches do not divide the 16 samples"),
    ("tensor_parallel", {"tensor": 8}, {}, None),
    ("tensor_parallel", {"tensor": 3}, {}, "tensor 3 does not divide the 8 attention heads of blocks.0"),
    ("tensor_parallel", {"tensor": 8}, blocks(num_kv_heads=6), "neither divides nor is a multiple of the 6 key heads"),
    ("tensor_parallel", {"tensor": 4}, blocks(num_experts=6), "does not divide the 6 experts"),
    ("tensor_parallel", {"tensor": 2}, blocks(matmuls=()), "no matmul"),
    ("sequence_parallel", {"sequence": 8}, {}, None),
    ("sequence_parallel", {"tensor": 2, "sequence": 4}, {}, None),
    ("sequence_parallel", {"tensor": 4, "sequence": 4}, {}, "tensor × sequence 16 does not divide the 8 attention"),
    ("sequence_parallel", {"sequence": 4}, blocks(sequence_length=1026), "into 4 pieces"),
    ("sequence_parallel", {"sequence": 4}, WRITTEN, "scaled_dot_product_attention"),
    ("sequence_parallel", {"sequence": 4}, {"attention": "replaceable"}, "add module_replace"),
    (MEGATRON, {"tensor": 4}, WRITTEN, None),  # attention has all tokens
    (MEGATRON, {"tensor": 4}, blocks(sequence_length=1026), "does not divide their 1026 tokens"),
    ("context_parallel", {"context": 4}, WRITTEN, "scaled_dot_product_attention"),
    ("context_parallel", {"context": 4}, blocks(sequence_length=4), "cuts sequences into 8 pieces"),
    (("context_parallel", {"load_balance": False}), {"context": 4}, blocks(sequence_length=4), None),
    (
        ("context_parallel", {"load_balance": False}),
        {"context": 4, "sequence": 2},
        blocks(sequence_length=4),
        "cuts sequences into 8 pieces",
    ),
    ("micro_batch", {}, {}, None),
    (("micro_batch", {"size": 2}), {}, {}, None),
    (("micro_batch", {"size": 16}), {}, {}, "makes no parts of the 16 samples"),
    (("micro_batch", {"size": 3}), {}, {}, "does not divide"),
    (("micro_batch", {"count": 4}), {}, {}, None),
    (("micro_batch", {"count": 1}), {}, {}, "makes no parts"),
    (("micro_batch", {"count": 5}), {}, {}, "does not divide"),
    (("micro_batch", {"count": 32}), {}, {}, "makes no parts"),
    (("micro_batch", {"size": 2}), {}, IN_ROUNDS, None),
    (("micro_batch", {"size": 8}), {}, IN_ROUNDS, "takes micro-batches 4 at a time, which does not divide 2"),
    (("micro_batch", {"size": 8}), {}, {"stages": 4}, None),
    (("micro_batch", {"size": 2, "reduce": "each"}), {"data": 4}, {}, "no sharded gradients"),
    ("chunk", {}, {}, None),
    ("chunk", {}, {"stages": 2}, "pipeline_parallel"),
    ("chunk", {}, {"fp8": "tensorwise"}, "fp8"),
    (("offload", {"activations": 0.1}), {}, {}, "less than one block of 8"),
    (("offload", {"activations": 0.125}), {}, {}, None),
    ("offload", {}, {"budget_bytes": 1e9}, "chunk decides"),
    (("offload", {"optimizer": 0.0, "activations": 1.0}), {}, {"budget_bytes": 1e9}, None),
    ("cross_entropy", {}, {"tensor": 2}, "tensor_parallel"),
    ("parallel_mode", {}, {}, None),
    (("parallel_mode", [("tensor", 2), ("data", 8)]), {}, {"batch_size": 12}, "12 samples are not shared out evenly"),
]
"""(method, mesh, changes of the cost that it finds, the reason why it does not fit or None)"""


@pytest.mark.parametrize(("item", "axes", "changes", "reason"), UNFIT)
def test_what_does_not_fit_is_told(
    item: Any, axes: Mapping[str, int], changes: dict[str, Any], reason: str | None
) -> None:
    (method,) = Strategy.of([item])
    found = method.unfit(on_mesh(axes, **changes))
    assert (found is None) if reason is None else (found is not None and reason in found)
