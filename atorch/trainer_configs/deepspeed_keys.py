"""Keys of DeepSpeed's configuration, and what becomes of those that no method has."""

from __future__ import annotations

from collections.abc import Mapping

from atorch.trainer_configs.setup import Kind

BLOCKWISE = "atorch gathers and reduces block by block"
BY_SCRIPT: tuple[Kind, str] = ("no effect", "only a script that calls DeepSpeed's own functions for it reads this")
SCALING = (
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"),
    *("min_loss_scale", "auto_cast", "check_grad_overflow", "immediate_grad_update"),
)
AUTOCAST: Mapping[str, tuple[Kind, str]] = {
    "enabled": ("used", "off"),
    "dtype": ("used", "the type of products"),
    "opt_level": ("not expressed", "amp_native, which is apex's O1, in the estimate"),
    "lower_precision_safe_modules": ("not expressed", "autocast's own list in the estimate"),
}
BATCHES: Mapping[str, tuple[str, str]] = {
    "train_batch_size": ("global_batch", "samples of a step on all devices"),
    "train_micro_batch_size_per_gpu": ("micro_batch", "samples of a micro-batch"),
    "gradient_accumulation_steps": ("accumulation", "micro-batches of a step"),
}
CHECKPOINTING = (
    *("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints"),
    *("synchronize_checkpoint_boundary", "profile"),
)
OFFLOADING = (
    *("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline_read", "pipeline_write"),
    *("fast_init", "pipeline", "super_offload", "cpuadam_cores_perc"),
)
STAGES: Mapping[int, tuple[str, str]] = {
    0: ("ddp", "ddp: every process holds all"),
    1: ("zero1", "zero1: optimizer states are sharded"),
    2: ("zero2", "zero2: gradients and optimizer states are sharded"),
    3: ("fsdp", "fsdp: parameters, gradients and optimizer states are sharded"),
}
ZERO_NOTES: Mapping[str, tuple[Kind, str]] = {
    **dict.fromkeys(
        ("stage3_prefetch_bucket_size", "prefetch_bucket_size", "stage3_max_live_parameters", "max_live_parameters"),
        ("not expressed", f"{BLOCKWISE}, with one block ahead"),
    ),
    **dict.fromkeys(
        ("stage3_param_persistence_threshold", "param_persistence_threshold", "stage3_model_persistence_threshold",
         "model_persistence_threshold"),
        ("not expressed", "small parameters are sharded as well in the estimate"),
    ),
    **dict.fromkeys(
        ("stage3_max_reuse_distance", "max_reuse_distance", "stage3_module_granularity_threshold",
         "module_granularity_threshold", "stage3_allgather_sequential", "allgather_sequential", "leaf_module",
         "stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params"),
        ("not expressed", BLOCKWISE),
    ),
    **dict.fromkeys(
        ("allgather_bucket_size", "sub_group_size", "use_multi_rank_bucket_allreduce"),
        ("not expressed", "the estimate has buckets of atorch's size"),
    ),
    "reduce_scatter": ("not expressed", "gradients of sharded states are reduce-scattered in the estimate"),
    "allgather_partitions": ("not expressed", "parameters are all-gathered in the estimate"),
    "overlap_comm": ("not expressed", "communication overlaps with backward in the estimate, as far as it can"),
    "zero_quantized_weights": ("not expressed", "weights are sent in 16 bits in the estimate"),
    "zero_quantized_nontrainable_weights": ("not expressed", "weights are sent in 16 bits in the estimate"),
    "zero_quantized_gradients": ("not expressed", "gradients are sent in 16 or 32 bits in the estimate"),
    "zeropp_loco_param": ("not expressed", "gradients are sent in 16 or 32 bits in the estimate"),
    "zenflow": ("not expressed", "the host steps all of the offloaded share in the estimate"),
    "memory_efficient_linear": ("no effect", "a linear layer saves its inputs alone in any case"),
    "mics_hierarchical_params_gather": ("not expressed", "shards are gathered at once in the estimate"),
    **dict.fromkeys(
        ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
         "stage3_gather_fp16_weights_on_model_save", "elastic_checkpoint", "load_from_fp32_weights",
         "pipeline_loading_checkpoint"),
        ("no effect", "for saving and loading alone"),
    ),
    **dict.fromkeys(
        ("contiguous_gradients", "round_robin_gradients", "ignore_unused_parameters", "legacy_stage1",
         "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "grad_hooks",
         "save_muon_momentum_buffer_in_memory", "cpu_offload_use_pin_memory"),
        ("no effect", "neither the estimate of memory nor that of time depends on it"),
    ),
}  # fmt: skip
NOTES: Mapping[str, tuple[Kind, str]] = {
    **dict.fromkeys(
        ("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "tensorboard", "wandb",
         "csv_monitor", "comet", "monitor_config", "comms_logger", "flops_profiler", "log_level", "timers",
         "autotuning"),
        ("no effect", "for reports alone"),
    ),
    **dict.fromkeys(
        ("checkpoint", "nebula", "datastates_ckpt", "datastates", "checkpoint_engine"),
        ("no effect", "for saving and loading alone"),
    ),
    **dict.fromkeys(
        ("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "zero_allow_untested_optimizer",
         "zero_force_ds_cpu_optimizer", "vocabulary_size", "dataloader_drop_last", "scheduler", "gradient_clipping",
         "disable_allgather", "managed_gradient_accumulation", "use_data_before_expert_parallelism",
         "seq_parallel_communication_data_type", "allgather_size"),
        ("no effect", "neither the estimate of memory nor that of time depends on it"),
    ),
    "aio": ("no effect", "for NVMe alone"),
    "sparse_gradients": ("not expressed", "gradients of embeddings are dense in the estimate"),
    "sparse_attention": ("not expressed", "attention is over all tokens in the estimate"),
    "progressive_layer_drop": ("not expressed", "all layers run in every step of the estimate"),
    "curriculum_learning": ("not expressed", "every sample has its full length in the estimate"),
    "data_efficiency": ("not expressed", "every sample has its full length in the estimate"),
    "compression_training": ("not expressed", "weights keep their precision in the estimate"),
    "quantize_training": ("not expressed", "weights keep their precision in the estimate"),
    "weight_quantization": ("not expressed", "weights keep their precision in the estimate"),
    "eigenvalue": ("not expressed", "no eigenvalues are computed in the estimate"),
    "hybrid_engine": ("not expressed", "the estimate is of training, without generation"),
    "expert_parallel": ("not expressed", "every process holds all experts, or its shards of them, in the estimate"),
    "elasticity": ("not expressed", "give the batch with --batch"),
    "graph_harvesting": ("not expressed", "launches are not recorded in the estimate"),
    "compile": ("not expressed", "the estimate is without DeepCompile"),
}  # fmt: skip
