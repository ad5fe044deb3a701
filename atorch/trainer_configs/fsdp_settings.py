"""Accelerate's settings of FSDP and of the mesh, which Transformers takes as well."""

from __future__ import annotations

from atorch.trainer_configs.setup import NO_EFFECT, Draft
from atorch.trainer_configs.source import Fields

PARALLEL = "parallelism_config_"
NO_FSDP2 = "FSDP2 has no such setting"
PREFETCH = "gathers overlap with blocks before them in the estimate"
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
FOR_FILES = (
    *("fsdp_state_dict_type", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading"),
    *("fsdp_limit_all_gathers", "fsdp_xla", "fsdp_xla_fsdp_grad_ckpt", "fsdp_xla_fsdp_v2"),
)


def read_fsdp(fields: Fields, draft: Draft) -> None:
    """Add what FSDP's settings mean; the prefix fsdp_ may be left out, and is added as the launcher does."""
    fields.prefix_keys("fsdp_")
    version = fields.size("fsdp_version")
    if version > 2:
        raise fields.invalid("fsdp_version", "it is 1 or 2")
    fields.tell_setting("fsdp_version", f"{version}{'' if 'fsdp_version' in fields else ', the default'}")
    name = _fsdp1(fields, draft) if version == 1 else _fsdp2(fields)
    policy = fields.data.get("fsdp_auto_wrap_policy")
    policy = policy.upper() if isinstance(policy, str) else policy
    if policy not in (None, "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"):
        raise fields.invalid("fsdp_auto_wrap_policy", "it is TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP")
    if policy in (None, "NO_WRAP") and name == "fsdp":
        name = "zero2"
        default = "NO_WRAP, the default: " if policy is None else ""
        note = f"{default}zero2: the model is one unit, whose parameters stay gathered until backward ends"
        fields.tell_setting("fsdp_auto_wrap_policy", note)
    fields.tell("fsdp_auto_wrap_policy", "used", "the model is gathered block by block")
    fields.tell_used("the blocks, which atorch finds by itself", "fsdp_transformer_layer_cls_to_wrap")
    fields.tell_given("not expressed", "the model is gathered block by block in the estimate", "fsdp_min_num_params")
    fields.tell_given("not expressed", "all of the model is sharded in the estimate", "fsdp_ignored_modules")
    if version == 2:
        fields.tell_given("no effect", NO_FSDP2, "fsdp_forward_prefetch", "fsdp_backward_prefetch")
    elif not fields.flag("fsdp_forward_prefetch"):
        fields.tell_given("no effect", "off", "fsdp_forward_prefetch")
    fields.tell_given("not expressed", PREFETCH, "fsdp_forward_prefetch", "fsdp_backward_prefetch")
    draft.add(name)
    note = "nothing is offloaded"
    if fields.flag("fsdp_offload_params"):
        draft.add("offload", parameters=1.0)
        note = "offload: shards of parameters, gradients and optimizer states in host memory, stepped there"
    fields.tell_used(note, "fsdp_offload_params")
    _read_recompute(fields, draft, version)
    fields.tell_given("no effect", "for starting, loading and saving alone", *FOR_FILES)


def _fsdp1(fields: Fields, draft: Draft) -> str:
    """The method of FSDP1's sharding strategy, a name or a number."""
    key = "fsdp_sharding_strategy"
    word = str(fields.data.get(key, "FULL_SHARD")).upper()
    if word.isdecimal() and 1 <= int(word) <= len(SHARDING):
        word = SHARDING[int(word) - 1]
    if word not in SHARDING:
        raise fields.invalid(key, f"it is one of {', '.join(SHARDING)}, or a number from 1 to 5")
    keeps = word in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    name, shards = "ddp" if word == "NO_SHARD" else "zero2" if keeps else "fsdp", ""
    if word.startswith("HYBRID"):
        per_node = draft.fields.get("devices_per_node")
        if per_node is None:
            raise fields.invalid(key, "it shards within a node: say how many processes one has")
        if (draft.fields.get("num_nodes") or 1) > 1:
            draft.axes["zero"] = per_node
        shards = ", within a node, with copies between nodes"
    fields.tell_setting(key, f"{word}: {name}{shards}")
    fields.tell_given("no effect", f"FSDP1 reads {key}, which is {word}", "fsdp_reshard_after_forward")
    return name


def _fsdp2(fields: Fields) -> str:
    frees = fields.flag("fsdp_reshard_after_forward") if "fsdp_reshard_after_forward" in fields else True
    note = "fsdp: gathered parameters are freed after forward" if frees else "zero2: they are kept for backward"
    fields.tell_setting("fsdp_reshard_after_forward", note)
    fields.tell_given("no effect", "FSDP2 reads fsdp_reshard_after_forward", "fsdp_sharding_strategy")
    return "fsdp" if frees else "zero2"


def _read_recompute(fields: Fields, draft: Draft, version: int) -> None:
    key, inputs = "fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload"
    is_on, offloads = fields.flag(key), fields.flag(inputs)
    if offloads and (not is_on or version != 2):
        raise fields.invalid(inputs, f"Accelerate has it with {key} and FSDP2")
    if is_on:
        draft.add("checkpoint", **({"offload_to_cpu": True} if offloads else {}))
    blocks = "checkpoint: blocks are recomputed" if is_on else "activations are kept, unless the script says more"
    fields.tell_used(blocks, key)
    fields.tell_used("checkpoint: inputs of blocks in host memory" if offloads else "off", inputs)


def read_parallelism(fields: Fields, draft: Draft, prefix: str = PARALLEL) -> None:
    """Add the mesh of a parallelism_config."""
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    replicas, shards, tensor, context, sequence = (fields.size(prefix + name) for name in names)
    if context > 1 and sequence > 1:
        raise fields.invalid(f"{prefix}cp_size", "Accelerate has context or sequence parallelism, not both")
    if (tensor > 1 or context > 1) and replicas > 1 and shards == 1:
        why = "Accelerate has no replicas alone beside tensors or context; give dp_shard_size"
        raise fields.invalid(f"{prefix}dp_replicate_size", why)
    fields.tell_used(draft.split("tensor", tensor, "tensor_parallel"), f"{prefix}tp_size")
    fields.tell_used(draft.split("context", context, "context_parallel"), f"{prefix}cp_size")
    fields.tell_used(draft.split("sequence", sequence, "sequence_parallel"), f"{prefix}sp_size")
    total = replicas * shards * tensor * context * sequence
    if replicas > 1 and shards > 1:
        draft.axes |= {"zero": shards, "data": replicas}
    elif total > 1 and sequence == 1:
        draft.axes["data"] = replicas * shards
    if shards == 1 and context == 1 and total > 1 and draft.has("fsdp", "zero2"):
        raise fields.invalid(f"{prefix}dp_shard_size", "FSDP has nothing to shard over: give dp_shard_size or cp_size")
    fields.tell_used("copies that see different samples (data)", f"{prefix}dp_replicate_size")
    fields.tell_used("processes that shard (zero, or data without copies)", f"{prefix}dp_shard_size")
    note = "keys and values pass around a ring in the estimate"
    fields.tell_given("not expressed", note, f"{prefix}cp_comm_strategy")
    others = ("cp_backend", "sp_backend", "sp_attn_implementation", "sp_seq_length", "sp_seq_length_is_variable")
    fields.tell_given(*NO_EFFECT, *(prefix + name for name in others))
