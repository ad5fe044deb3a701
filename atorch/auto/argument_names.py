"""Names of the entry points' arguments: those given by position, and the remedy for an unknown one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from atorch.auto.strategy import METHODS, RECIPES
from atorch.errors import ArgumentError, near_miss

INSTEAD: Mapping[str, str] = {
    r"lr|learning_rate|weight_decay|betas|eps|momentum": "give it to the optimizer, as optim_args={'lr': 1e-3}",
    r"optim|optimizer|optim(izer)?_(cls|class|fn|type)": (
        "give optim_func, such as torch.optim.AdamW, and its optim_args"
    ),
    r"optim(izer)?_(kwargs|params|config)|optimizer_args": "give optim_args, as {'lr': 1e-3}",
    r"(train_?)?(data_?)?loader|train_data(set)?|data|trainset": "give dataset, and dataloader_args={'batch_size': 32}",
    r"batch_size|num_workers|shuffle|collate_fn|drop_last|pin_memory|(data)?loader_(args|kwargs)|dataloader_kwargs": (
        "give dataloader_args, as {'batch_size': 32}, in which batch_size is that of all processes together"
    ),
    r"loss|loss_fn|criterion|loss_function": "give loss_func, a function (input, output) -> loss",
    r"(lr_?)?scheduler(_cls|_class|_fn)?": "give lr_scheduler_cls, such as torch.optim.lr_scheduler.StepLR",
    r"(lr_?)?scheduler_(args|kwargs|params)|lr_scheduler_kwargs": "give lr_scheduler_args, as {'step_size': 10}",
    r"methods": "give load_strategy",
    r"save_path|save_strategy": "give save_strategy_to_file",
    r"unpack": "give model_input_format",
    r"(distributed_)?sampler(_cls|_class)?|distributed_sampler_(args|kwargs)": (
        "give distributed_sampler_cls, a class or a functools.partial of one and its arguments; or any sampler as "
        "dataloader_args={'sampler': sampler}"
    ),
    r"strategy_(file|path)": "give load_strategy to read one, or save_strategy_to_file to write it",
    r"input_func(tion)?|batch_func(tion)?": "give prepare_input, a function (data, device) -> input",
    r"amp|autocast|dtype|fp16|bf16|float16|bfloat16|mixed_precision": (
        "give it as a method, load_strategy=[('amp_native', 'bf16')], or to a search as precision='autocast'"
    ),
    r"(grad(ient)?_)?accumulat(e|ion)(_grad_batches|_steps)?|micro_batch_size": (
        "give it as a method, load_strategy=[('micro_batch', {'count': 4})], or accumulate in the loop"
    ),
    r"cluster|global_batch": "give it to atorch.plan(model, sample_batch, cluster='8xH100-80GB')",
    r"(random_)?seed": "give sampler_seed for the order of samples, and call torch.manual_seed(0) for the rest",
    r"dry_?run": "give ignore_dryrun_on_load_strategy=False",
    r"search_time|max_time|(time|search)_budget": "give time_limit, in seconds",
    r"(eval|test|val(id(ation)?)?)_(data_?)?(set|loader)": "what is not trained on is yours to load",
    r"(num_|max_)?(train_)?(epochs|steps)": "the loop over result.dataloader is yours",
    r"device|(local_)?rank|world_size|num_processes|gpus": "torchrun tells each process its rank and device",
    r"(max_)?grad(ient)?_(norm|clip(ping)?)(_val)?|clip(_grad)?(_norm)?": (
        "call atorch.clip_grad_norm(result.model, 1.0) before result.optim.step()"
    ),
}
"""Patterns of unknown argument names → the remedy."""


def name_positional(positional: Sequence[Any], names: Sequence[str], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Positional arguments of `plan` under their names; raises ArgumentError for one too many or given twice."""
    if len(positional) > len(names):
        raise ArgumentError(
            f"plan was given {1 + len(positional)} arguments by position; these are model, {', '.join(names)}"
        )
    placed = dict(zip(names, positional, strict=False))
    for name in placed:
        if name in keywords:
            raise ArgumentError(f"plan was given {name} twice, by position and by name; leave one out")
    return placed


def argument_remedy(name: str, arguments: Collection[str]) -> str:
    """The end of an error about an unknown argument: the remedy."""
    for wrong, instead in INSTEAD.items():
        if re.fullmatch(wrong, name.lower()):
            return instead
    if name in METHODS or name in RECIPES:
        return f"it is a method: give load_strategy=[{name!r}], or to a search included=[{name!r}]"
    return near_miss(name, arguments)
