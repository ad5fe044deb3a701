"""Names of Transformers' arguments and of their values."""

from __future__ import annotations

from collections.abc import Mapping

OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw8bit"),
    **{"paged_adamw_32bit": "adamw", "paged_adamw": "adamw", "adafactor": "adafactor", "sgd": "sgd"},
    **dict.fromkeys(("lion", "lion_32bit", "paged_lion_32bit"), "lion"),
}
EXACT = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_bnb_8bit", "adamw_8bit",
         "adamw_torch_8bit", "adafactor", "lion", "lion_32bit")  # fmt: skip
WRITTEN: Mapping[str, str] = {"adamw8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "lion": "lion_32bit"}
ATTENTION: Mapping[str, str] = {
    **{"sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash_attention_2"},
    **{"flash_attention_3": "flash_attention_2", "kernels-community/flash-attn2": "flash_attention_2"},
}
KNOWN = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "gradient_checkpointing", "optim"),
    *("fsdp", "fsdp_config", "deepspeed", "torch_compile", "max_length", "model_name_or_path", "use_liger_kernel"),
    *("use_peft", "lora_r", "load_in_4bit", "attn_implementation", "parallelism_config"),
)
ADAPTERS = ("use_peft", "lora_r", "lora_rank", "lora_target_modules", "lora_target")
NO_EFFECT = """
    adam_beta1 adam_beta2 adam_epsilon assistant_only_loss auto_find_batch_size average_tokens_across_devices
    batch_eval_metrics beta bf16_full_eval bnb_4bit_quant_storage bnb_4bit_quant_type cache_dir chat_template
    chat_template_path completion_only_loss config_name data_seed dataloader_drop_last dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor dataset_config dataset_config_name dataset_configs
    dataset_kwargs dataset_mixer dataset_mixture dataset_name dataset_num_proc dataset_splits dataset_streaming
    dataset_test_split dataset_text_field dataset_train_split ddp_backend ddp_timeout debug disable_tqdm do_eval
    do_predict do_train enable_jit_checkpoint eos_token eval_accumulation_steps eval_delay
    eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object evaluation_strategy
    fp16_full_eval fp16_opt_level full_determinism greater_is_better group_by_length half_precision_backend
    hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
    include_for_metrics include_num_input_tokens_seen jit_mode_eval label_names label_smoothing_factor
    learning_rate length_column_name load_best_model_at_end local_rank log_level log_level_replica
    log_on_each_node logging_dir logging_first_step logging_nan_inf_filter logging_steps logging_strategy
    lora_bias lora_dropout loss_type low_cpu_mem_usage lr_scheduler_kwargs lr_scheduler_type
    max_completion_length max_eval_samples max_grad_norm max_prompt_length max_steps max_train_samples
    metric_for_best_model model_revision neftune_noise_alpha no_cuda num_train_epochs optim_args
    optim_target_modules output_dir overwrite_cache overwrite_output_dir pad_token past_index
    per_device_eval_batch_size prediction_loss_only preprocessing_num_workers preprocessing_only project
    push_to_hub push_to_hub_model_id ray_scope remove_unused_columns report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model
    save_safetensors save_steps save_strategy save_total_limit seed skip_memory_metrics streaming system_prompt
    tf32 tokenizer_name tokenizer_name_or_path torch_empty_cache_steps torchdynamo trackio_bucket_id
    trackio_space_id trackio_static_space_id train_file train_sampling_strategy trust_remote_code
    use_bnb_nested_quant use_cache use_cpu use_fast_tokenizer use_ipex use_mps_device validation_file
    wandb_entity wandb_project warmup_ratio warmup_steps weight_decay
"""
"""Names of arguments, apart by spaces, on which neither memory nor time depends."""
