"""Every documented name is there, with the documented arguments, and a test shows what it does."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from atorch.errors import ArgumentError
from atorch.smp.options import ModelOptions
from tests.pool import Pool
from tests.smp.job import begun

KINDS = ("MP", "DP", "PP", "TP", "RDP")
TESTS = Path(__file__).parent

# The name, with the documented arguments after it; the test that shows what it does.
NAMES: Mapping[str, str] = {
    "init(config)": "test_session::test_under_torchrun",
    "is_initialized()": "test_session::test_one_process_without_a_launcher",
    "is_tracing()": "test_model::test_buffers_begin_a_step_as_the_first_replicas",
    "step(non_split_inputs, input_split_axes, detach_outputs)": "test_step::test_arguments_are_cut_as_they_are_told",
    "StepOutput.outputs": "test_step::test_results_are_put_together_in_every_nesting_and_on_every_process",
    "StepOutput.reduce_mean()": "test_step::test_results_are_put_together_in_every_nesting_and_on_every_process",
    "StepOutput.reduce_sum()": "test_step::test_results_are_put_together_in_every_nesting_and_on_every_process",
    "StepOutput.concat()": "test_step::test_results_are_put_together_in_every_nesting_and_on_every_process",
    "StepOutput.stack()": "test_step::test_results_are_put_together_in_every_nesting_and_on_every_process",
    "DistributedModel(module, trace_device, trace_execution_times, overlapping_allreduce, backward_passes_per_step, "
    "average_grads_across_microbatches, bucket_cap_mb, trace_memory_usage, broadcast_buffers, "
    "gradient_as_bucket_view)": "test_model::test_options_of_averaging",
    "DistributedModel.partitioned": "test_model::test_the_first_step_partitions_loads_and_calls_hooks_in_this_order",
    "DistributedModel.backward(tensors, grad_tensors)": "test_step::test_losses_of_every_kind_give_plain_gradients",
    **dict.fromkeys(
        (
            "DistributedModel.local_parameters()",
            "DistributedModel.local_named_parameters()",
            "DistributedModel.local_buffers()",
            "DistributedModel.local_named_buffers()",
            "DistributedModel.local_modules()",
            "DistributedModel.local_named_modules()",
        ),
        "test_model::test_what_is_local_is_of_one_partition",
    ),
    "DistributedModel.local_state_dict()": "test_document::test_training_goes_on_from_what_was_saved",
    "DistributedModel.state_dict()": "test_document::test_a_full_checkpoint_goes_on_in_plain_training",
    "DistributedModel.load_state_dict(state_dict, strict)": "test_document::test_training_goes_on_from_what_was_saved",
    "DistributedModel.register_post_partition_hook(hook)": (
        "test_model::test_the_first_step_partitions_loads_and_calls_hooks_in_this_order"
    ),
    "DistributedModel.cpu()": "test_model::test_the_whole_model_comes_to_the_host",
    "DistributedModel.join()": "test_model::test_replicas_join_with_uneven_numbers_of_batches",
    "DistributedModel.register_comm_hook(state, hook)": "test_model::test_a_communication_hook_made_for_torch_reduces",
    **dict.fromkeys(
        (
            "DistributedModel.distributed_modules()",
            "DistributedModel.is_distributed_parameter(parameter)",
            "DistributedModel.is_distributed_buffer(buffer)",
            "DistributedModel.is_scaled_batch_parameter(parameter)",
            "DistributedModel.is_scaled_batch_buffer(buffer)",
            "DistributedModel.default_reducer_named_parameters()",
            "DistributedModel.scaled_batch_reducer_named_parameters()",
        ),
        "test_names::test_a_split_model_says_what_is_averaged_where",
    ),
    "DistributedModel.get_module()": "test_state::test_modules_that_exist_are_put_on_partitions",
    "DistributedOptimizer(optimizer, static_loss_scale, dynamic_loss_scale, dynamic_loss_args)": (
        "training/test_precision::test_a_dynamic_scale_does_what_its_settings_say"
    ),
    "DistributedOptimizer.clip_master_grads(max_norm)": "test_norms::test_clipping_is_plain_trainings",
    "DistributedOptimizer.state_dict()": "test_document::test_a_full_checkpoint_goes_on_in_plain_training",
    "DistributedOptimizer.local_state_dict()": "test_document::test_training_goes_on_from_what_was_saved",
    "DistributedOptimizer.load_state_dict(state_dict)": "test_document::test_training_goes_on_from_what_was_saved",
    "partition(index)": "test_document::test_nested_partitions_are_where_the_comments_say",
    "set_partition(module, index)": "test_state::test_modules_that_exist_are_put_on_partitions",
    "model_creation(tensor_parallelism, dtype)": "test_model_creation::test_model_creation_sets_the_dtype_inside",
    "delay_param_initialization(enabled)": (
        "test_model_creation::test_the_innermost_context_wins_and_others_threads_have_none"
    ),
    "tensor_parallelism(enabled)": "tensor/test_marks::test_what_is_created_inside_is_marked_and_the_innermost_wins",
    "set_tensor_parallelism(module)": "tensor/test_marks::test_what_exists_is_marked_with_all_below_and_the_last_wins",
    "tp_register(dist_module, init_hook, forward_hook, return_hook)": (
        "tensor/test_replacement::test_what_is_created_inside_is_replaced_in_place"
    ),
    "tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)": (
        "tensor/test_replacement::test_in_steps_of_a_distributed_model"
    ),
    "nn.DistributedLinear": "tensor/test_split::test_trains_as_the_whole_model",
    "nn.DistributedEmbedding": "tensor/test_split::test_trains_as_the_whole_model",
    "nn.DistributedTransformer": "nn/test_distributed_modules::test_states_pass_through_layers_with_cross_attention",
    "nn.DistributedTransformerLayer": "nn/test_distributed_modules::test_one_layer_is_torchs_encoder_layer",
    "nn.DistributedAttentionLayer": "nn/test_distributed_modules::test_self_attention",
    "nn.DistributedTransformerOutputLayer": "nn/test_distributed_modules::test_documented_defaults",
    "nn.DistributedTransformerLMHead": "nn/test_distributed_modules::test_language_model_masks_ties_and_scores",
    "nn.FusedLayerNorm(normalized_shape, eps, elementwise_affine)": (
        "nn/test_layer_norm::test_values_gradients_and_state_are_torchs"
    ),
    "optimizers.FusedNovoGrad": "test_optimizers::test_a_step_is_that_of_the_formulas",
    "optimizers.FusedLamb": "test_optimizers::test_a_step_is_that_of_the_formulas",
    "amp.GradScaler": "test_amp::test_all_skip_where_one_must",
    "set_activation_checkpointing(module, preserve_rng_state, pack_args_as_tuple, strategy)": (
        "test_activation_checkpointing::test_strategies_keep_the_inputs_of_their_runs"
    ),
    "patches.checkpoint.checkpoint(module)": "test_activation_checkpointing::test_a_module_and_keywords",
    "patches.checkpoint.checkpoint_sequential(sequential_module, strategy)": (
        "test_activation_checkpointing::test_strategies_keep_the_inputs_of_their_runs"
    ),
    **dict.fromkeys(
        (
            *(f"{name}()" for name in ("rank", "size", "local_rank", "local_size")),
            *(f"{kind}_{what}()" for kind in ("mp", "dp", "pp", "tp", "rdp") for what in ("rank", "size")),
            *(f"get_{kind}_process_group()" for kind in ("world", "mp", "dp", "pp", "tp", "rdp")),
            *(f"get_{kind}_group()" for kind in ("mp", "dp")),
            *(f"CommGroup.{kind}_GROUP" for kind in KINDS),
        ),
        "test_ranks::test_on_eight_processes",
    ),
    **dict.fromkeys(
        (
            "CommGroup.WORLD",
            "broadcast(obj, group)",
            "send(obj, dest_rank, rank_type)",
            "recv_from(src_rank, rank_type)",
            "allgather(obj, group)",
        ),
        "test_communication::test_objects_arrive",
    ),
    "RankType.WORLD_RANK": "test_communication::test_objects_arrive",
    "barrier(group)": "test_communication::test_who_is_waited_for_in_vain_is_named",
    "dp_barrier()": "test_communication::test_who_is_waited_for_in_vain_is_named",
    "mp_barrier()": "test_communication::test_who_is_waited_for_in_vain_is_named",
    "save(obj, f, partial, pickle_module, pickle_protocol)": (
        "checkpointing/test_files::test_each_stage_reads_what_it_wrote"
    ),
    # What public scripts give, and no document names.
    "save(v3)": "test_shared_states::test_training_goes_on_from_a_file_as_hugging_faces_trainer_has_it",
    "DistributedOptimizer.local_state_dict(gather_if_shard)": (
        "test_shared_states::test_training_goes_on_from_a_saved_state"
    ),
    "state.module_manager": "test_state::test_the_session_is_read_by_name",
    "load(f, map_location, pickle_module, partial, pickle_load_args)": (
        "checkpointing/test_files::test_map_location_in_its_four_forms"
    ),
    "save_checkpoint(path, tag, partial, model, optimizer, user_content, translate_if_full, "
    "num_kept_partial_checkpoints)": "checkpointing/test_folder::test_the_newest_partial_ones_are_kept",
    "resume_from_checkpoint(path, tag, partial, strict, load_optimizer, load_sharded_optimizer_state, "
    "translate_function)": "checkpointing/test_folder::test_what_was_saved_comes_back",
    "state.cfg": "test_state::test_the_session_is_read_by_name",
}


def found(name: str) -> Any:
    """What stands at a name; an attribute that instances alone have is a word of the class's source."""
    held: Any = smp
    for part in name.split("."):
        if isinstance(held, type) and not hasattr(held, part):
            assert re.search(rf"self\.{part} = ", inspect.getsource(held)), f"{name} is not there"
            return None
        if part in ("cfg", "module_manager"):
            return None  # of a session
        held = getattr(held, part)
    return held


def arguments_of(held: Any) -> set[str]:
    return set(inspect.signature(held).parameters)


@functools.cache
def written_in(path: Path) -> Mapping[str, str]:
    """The names of a file's tests; with each the text of the file."""
    text = path.read_text()
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {name: text for name in names if name.startswith("test_")}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.partition("(")[0])
def test_a_documented_name_does_what_a_test_shows(name: str) -> None:
    path, _, arguments = name.removesuffix(")").partition("(")
    held = found(path)
    expected = {each for each in arguments.split(", ") if each}
    if expected:
        missing = expected - arguments_of(held)
        assert not missing, f"{path} takes {sorted(arguments_of(held))}"
    file, _, test = NAMES[name].partition("::")
    tests = written_in(TESTS / f"{file}.py")
    assert test in tests, f"{file}.py has no {test}, which would show what {path} does"
    enum, _, word = path.rpartition(".")
    word = enum if enum in ("CommGroup", "RankType") else word
    pieces = {part for part in re.split(r"(?<=_)|(?=_)", word) if part != "_"}
    spelled = [rf"\b{word}\b", *(rf"{{\w+}}_{part}\b" for part in pieces)]  # or by its kind
    assert any(re.search(each, tests[test]) for each in spelled), f"{file}.py does not use {word}"


def test_every_public_name_is_documented() -> None:
    """What `atorch.smp` gives is in the document, or a page here says what it is for."""
    known = {re.split(r"[.(]", name)[0] for name in NAMES} | {f"{kind}_GROUP" for kind in KINDS}
    known |= {
        f"get_{kind.lower()}_group" for kind in ("WORLD", *KINDS)
    }  # for the groups that have no documented one, too
    page = (TESTS.parents[1] / "docs" / "smp.md").read_text()
    unknown = [name for name in smp.__all__ if name not in known and not re.search(rf"\b{name}\b", page)]
    assert not unknown


def flags(holder: Any, name: str) -> list[str]:
    """The arguments of what `holder` gives by this name that are True or False by default."""
    try:
        arguments = inspect.signature(getattr(holder, name)).parameters.values()
    except (TypeError, ValueError):  # no callable, or one that does not say
        return []
    return [each.name for each in arguments if isinstance(each.default, bool)]


def test_a_flag_is_true_or_false(tmp_path: Path) -> None:
    """Else "no" counts as yes. Backward's flags are refused whatever they are."""
    path = str(tmp_path / "file")
    smp.init({"ddp": True})
    try:
        model = smp.DistributedModel(nn.Linear(2, 2))
        doors: Mapping[str, Any] = {
            "save": functools.partial(smp.save, {}, path),
            "load": functools.partial(smp.load, path),
            "save_checkpoint": functools.partial(smp.save_checkpoint, path, "tag", model=model),
            "resume_from_checkpoint": functools.partial(smp.resume_from_checkpoint, path),
            "step": functools.partial(smp.step, lambda model: None),
            "tensor_parallelism": lambda **flag: smp.tensor_parallelism(**flag).__enter__(),
            "model_creation": lambda **flag: smp.model_creation(**flag).__enter__(),
            "delay_param_initialization": lambda **flag: smp.delay_param_initialization(**flag).__enter__(),
            "set_tensor_parallelism": functools.partial(smp.set_tensor_parallelism, model.module),
            "set_activation_checkpointing": functools.partial(smp.set_activation_checkpointing, model.module),
            "DistributedOptimizer": functools.partial(smp.DistributedOptimizer, torch.optim.SGD(model.parameters())),
            "DistributedModel.join": lambda **flag: model.join(**flag).__enter__(),
            "DistributedModel.state_dict": model.state_dict,
            "DistributedModel.load_state_dict": functools.partial(model.load_state_dict, model.state_dict()),
            "DistributedModel": lambda **flag: ModelOptions(**flag).checked(),  # one model is made already
            "DistributedOptimizer.local_state_dict": lambda **flag: optimizer.local_state_dict(**flag),
        }
        public = {name: (smp, name) for name in smp.__all__}
        for kind in (smp.DistributedModel, smp.DistributedOptimizer):
            public |= {f"{kind.__name__}.{name}": (kind, name) for name in vars(kind) if not name.startswith("_")}
        having = {name: found for name, of in public.items() if (found := flags(*of))}
        having.pop("DistributedModel.backward")
        assert having.keys() == doors.keys()
        optimizer: Any = smp.DistributedOptimizer.__new__(smp.DistributedOptimizer)
        for name, names in having.items():
            for flag in names:
                with pytest.raises(ArgumentError, match=f"'no' as {flag}; it is True or False"):
                    doors[name](**{flag: "no"})
    finally:
        smp.shutdown()
    assert not list(tmp_path.iterdir())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with smp.tensor_parallelism():
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 2)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x + self.down(torch.relu(self.up(x))) + self.shift))


def asked(rank: int, size: int, degree: int) -> dict[str, Any]:
    with begun({"tensor_parallel_degree": degree, "ddp": True}):
        model = smp.DistributedModel(Layers())

        @smp.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        train(model, torch.randn(4, 8))
        named = dict(model.local_named_parameters())
        return {
            "modules": len(list(model.distributed_modules())),
            "split": sorted(name for name, each in named.items() if model.is_distributed_parameter(each)),
            "buffers": [model.is_distributed_buffer(each) for each in model.local_buffers()],
            "scaled": {model.is_scaled_batch_parameter(each) for each in named.values()},
            "scaled buffers": {model.is_scaled_batch_buffer(each) for each in model.local_buffers()},
            "over dp": len(list(model.default_reducer_named_parameters())),
            "over rdp": len(list(model.scaled_batch_reducer_named_parameters())),
            "all": len(named),
        }


def test_a_split_model_says_what_is_averaged_where(pool: Pool) -> None:
    for found in pool.run(asked, 2):
        assert found["split"] == ["down.weight", "up.bias", "up.weight"]
        assert found["modules"] >= 2
        assert (found["buffers"], found["scaled"], found["scaled buffers"]) == ([False], {True}, {True})
        assert (found["over dp"], found["over rdp"]) == (0, found["all"])
    for found in pool.run(asked, 1):
        assert (found["modules"], found["split"], found["scaled"]) == (0, [], {False})
        assert (found["over dp"], found["over rdp"]) == (found["all"], 0)
