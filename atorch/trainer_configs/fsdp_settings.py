"""Accelerate's settings of FSDP and of the mesh, which Transformers takes as well."""

from __future__ import annotations

from collections.abc import Mapping

from atorch.trainer_configs.setup import IRRELEVANT, Draft, Kind
from atorch.trainer_configs.source import Fields

PARALLEL = "parallelism_config_"
NO_FSDP2 = "FSDP2 has no such setting"
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
FSDP_NOTES: Mapping[str, tuple[Kind, str]] = dict.fromkeys(
    ("fsdp_state_dict_type", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading",
     "fsdp_limit_all_gathers", "fsdp_xla", "fsdp_xla_fsdp_grad_ckpt", "fsdp_xla_fsdp_v2"),
    ("no effect", "for starting, loading and saving alone"),
)  # fmt: skip


def read_fsdp(fields: Fields, draft: Draft) -> None:
    """Add what FSDP's settings mean; the prefix fsdp_ may be left out, and is added as the launcher does."""
    fields.prefix_keys("fsdp_")
    version = fields.whole("fsdp_version", 1) or 1
    if version > 2:
        raise fields.invalid("fsdp_version", "it is 1 or 2")
    is_given = "fsdp_version" in fields
    fields.tell("fsdp_version", "used" if is_given else "assumed", f"{version}{'' if is_given else ', the default'}")
    name = _fsdp1(fields, draft) if version == 1 else _fsdp2(fields)
    policy = fields.data.get("fsdp_auto_wrap_policy")
    policy = policy.upper() if isinstance(policy, str) else policy
    if policy not in (None, "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"):
        raise fields.invalid("fsdp_auto_wrap_policy", "it is TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP")
    if policy in (None, "NO_WRAP") and name == "fsdp":
        name = "zero2"
        told: Kind = "assumed" if policy is None else "used"
        default = "NO_WRAP, the default: " if policy is None else ""
        note = f"{default}zero2: the model is one unit, whose parameters stay gathered until backward ends"
        fields.tell("fsdp_auto_wrap_policy", told, note)
    fields.tell("fsdp_auto_wrap_policy", "used", "the model is gathered block by block")
    fields.tell_all({
        "fsdp_transformer_layer_cls_to_wrap": ("used", "the blocks, which atorch finds by itself"),
        "fsdp_min_num_params": ("not expressed", "the model is gathered block by block in the estimate"),
        "fsdp_ignored_modules": ("not expressed", "all of the model is sharded in the estimate"),
    })  # fmt: skip
    if fields.flag("fsdp_forward_prefetch") and version == 1:
        fields.tell("fsdp_forward_prefetch", "not expressed", "gathers overlap with blocks before them in the estimate")
    fields.tell_all({"fsdp_forward_prefetch": ("no effect", NO_FSDP2 if version == 2 else "off")})
    prefetch = "gathers overlap with blocks before them in the estimate"
    note = NO_FSDP2 if version == 2 else prefetch
    fields.tell_all({"fsdp_backward_prefetch": ("no effect" if version == 2 else "not expressed", note)})
    draft.add(name)
    if fields.flag("fsdp_offload_params"):
        draft.add("offload", parameters=1.0)
    fields.tell_all({
        "fsdp_offload_params": (
            "used",
            "offload: shards of parameters, gradients and optimizer states in host memory, stepped there"
            if fields.flag("fsdp_offload_params")
            else "nothing is offloaded",
        )
    })  # fmt: skip
    _read_recompute(fields, draft, version)
    fields.tell_all(FSDP_NOTES)


def _fsdp1(fields: Fields, draft: Draft) -> str:
    """The method of FSDP1's sharding strategy, a name or a number."""
    given = fields.data.get("fsdp_sharding_strategy", "FULL_SHARD")
    word = str(given).upper()
    if word.isdecimal() and 1 <= int(word) <= len(SHARDING):
        word = SHARDING[int(word) - 1]
    if word not in SHARDING:
        raise fields.invalid("fsdp_sharding_strategy", f"it is one of {', '.join(SHARDING)}, or a number from 1 to 5")
    keeps = word in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    name = "ddp" if word == "NO_SHARD" else "zero2" if keeps else "fsdp"
    if word.startswith("HYBRID"):
        per_node = draft.fields.get("devices_per_node")
        if per_node is None:
            raise fields.invalid("fsdp_sharding_strategy", "it shards within a node: say how many processes one has")
        if (draft.fields.get("num_nodes") or 1) > 1:
            draft.fields["axes"]["zero"] = per_node
    shards = ", within a node, with copies between nodes" if word.startswith("HYBRID") else ""
    told: Kind = "used" if "fsdp_sharding_strategy" in fields else "assumed"
    fields.tell("fsdp_sharding_strategy", told, f"{word}: {name}{shards}")
    note = f"FSDP1 reads fsdp_sharding_strategy, which is {word}"
    fields.tell_all({"fsdp_reshard_after_forward": ("no effect", note)})
    return name


def _fsdp2(fields: Fields) -> str:
    frees = fields.flag("fsdp_reshard_after_forward") if "fsdp_reshard_after_forward" in fields else True
    told: Kind = "used" if "fsdp_reshard_after_forward" in fields else "assumed"
    note = "fsdp: gathered parameters are freed after forward" if frees else "zero2: they are kept for backward"
    fields.tell("fsdp_reshard_after_forward", told, note)
    fields.tell_all({"fsdp_sharding_strategy": ("no effect", "FSDP2 reads fsdp_reshard_after_forward")})
    return "fsdp" if frees else "zero2"


def _read_recompute(fields: Fields, draft: Draft, version: int) -> None:
    is_on, offloads = fields.flag("fsdp_activation_checkpointing"), fields.flag("fsdp_activation_checkpointing_offload")
    if offloads and (not is_on or version != 2):
        raise fields.invalid(
            "fsdp_activation_checkpointing_offload", "Accelerate has it with fsdp_activation_checkpointing and FSDP2"
        )
    if is_on:
        draft.add("checkpoint", **({"offload_to_cpu": True} if offloads else {}))
    note = "checkpoint: blocks are recomputed" if is_on else "activations are kept, unless the script says more"
    inputs = "checkpoint: inputs of blocks in host memory" if offloads else "off"
    fields.tell_all({
        "fsdp_activation_checkpointing": ("used", note),
        "fsdp_activation_checkpointing_offload": ("used", inputs),
    })  # fmt: skip


def read_parallelism(fields: Fields, draft: Draft, prefix: str = PARALLEL) -> None:
    """Add the mesh of a parallelism_config."""
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    replicas, shards, tensor, context, sequence = (fields.whole(prefix + name, 1) or 1 for name in names)
    if context > 1 and sequence > 1:
        raise fields.invalid(f"{prefix}cp_size", "Accelerate has context or sequence parallelism, not both")
    if (tensor > 1 or context > 1) and replicas > 1 and shards == 1:
        raise fields.invalid(
            f"{prefix}dp_replicate_size",
            "Accelerate has no replicas alone beside tensors or context; give dp_shard_size",
        )
    draft.split("tensor", tensor, "tensor_parallel")
    draft.split("context", context, "context_parallel")
    draft.split("sequence", sequence, "sequence_parallel")
    axes, total = draft.fields["axes"], replicas * shards * tensor * context * sequence
    if replicas > 1 and shards > 1:
        axes |= {"zero": shards, "data": replicas}
    elif total > 1 and sequence == 1:
        axes["data"] = replicas * shards
    if shards == 1 and context == 1 and total > 1 and draft.has("fsdp", "zero2"):
        raise fields.invalid(f"{prefix}dp_shard_size", "FSDP has nothing to shard over: give dp_shard_size or cp_size")
    told: dict[str, tuple[Kind, str]] = {
        "dp_replicate_size": ("used", "copies that see different samples (data)"),
        "dp_shard_size": ("used", "processes that shard (zero, or data without copies)"),
        "tp_size": ("used", "tensor_parallel" if tensor > 1 else "no tensor_parallel"),
        "cp_size": ("used", "context_parallel" if context > 1 else "no context_parallel"),
        "sp_size": ("used", "sequence_parallel (ulysses)" if sequence > 1 else "no sequence_parallel"),
        "cp_comm_strategy": ("not expressed", "keys and values pass around a ring in the estimate"),
        **dict.fromkeys(("cp_backend", "sp_backend", "sp_attn_implementation"), IRRELEVANT),
        **dict.fromkeys(("sp_seq_length", "sp_seq_length_is_variable"), IRRELEVANT),
    }
    fields.tell_all({prefix + name: entry for name, entry in told.items()})
