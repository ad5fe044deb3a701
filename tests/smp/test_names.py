"""Every documented name is there, with the documented arguments."""

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
from atorch.smp.config import ModelOptions
from tests.house.source import ROOT
from tests.pool import on_ranks
from tests.smp.job import begun

KINDS = ("MP", "DP", "PP", "TP", "RDP")
MODEL = (
    "module, trace_device, trace_execution_times, overlapping_allreduce, backward_passes_per_step, "
    "average_grads_across_microbatches, bucket_cap_mb, trace_memory_usage, broadcast_buffers, gradient_as_bucket_view"
)
CHECKPOINT = "path, tag, partial, model, optimizer, user_content, translate_if_full, num_kept_partial_checkpoints"
RESUME = "path, tag, partial, strict, load_optimizer, load_sharded_optimizer_state, translate_function"

# The names, with the documented arguments after them; at the end of a line also what public scripts give.
NAMES = (
    "init(config)", "is_initialized", "is_tracing", "state.cfg", "state.module_manager",
    "step(non_split_inputs, input_split_axes, detach_outputs)",
    *(f"StepOutput.{name}" for name in ("outputs", "reduce_mean", "reduce_sum", "concat", "stack")),
    f"DistributedModel({MODEL})",
    *(
        f"DistributedModel.{name}"
        for name in (
            "partitioned", "backward(tensors, grad_tensors)", "local_parameters", "local_named_parameters",
            "local_buffers", "local_named_buffers", "local_modules", "local_named_modules", "local_state_dict",
            "state_dict", "load_state_dict(state_dict, strict)", "register_post_partition_hook(hook)", "cpu", "join",
            "register_comm_hook(state, hook)", "distributed_modules", "is_distributed_parameter(parameter)",
            "is_distributed_buffer(buffer)", "is_scaled_batch_parameter(parameter)", "is_scaled_batch_buffer(buffer)",
            "default_reducer_named_parameters", "scaled_batch_reducer_named_parameters", "get_module",
        )
    ),
    "DistributedOptimizer(optimizer, static_loss_scale, dynamic_loss_scale, dynamic_loss_args)",
    *(
        f"DistributedOptimizer.{name}"
        for name in ("clip_master_grads(max_norm)", "state_dict", "load_state_dict(state_dict)",
                     "local_state_dict(gather_if_shard)")
    ),
    "partition(index)", "set_partition(module, index)",
    "model_creation(tensor_parallelism, dtype)", "delay_param_initialization(enabled)",
    "tensor_parallelism(enabled)", "set_tensor_parallelism(module)",
    "tp_register(dist_module, init_hook, forward_hook, return_hook)",
    "tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)",
    *(
        f"nn.Distributed{name}"
        for name in ("Linear", "Embedding", "Transformer", "TransformerLayer", "AttentionLayer",
                     "TransformerOutputLayer", "TransformerLMHead")
    ),
    "nn.FusedLayerNorm(normalized_shape, eps, elementwise_affine)",
    "optimizers.FusedNovoGrad", "optimizers.FusedLamb", "amp.GradScaler",
    "set_activation_checkpointing(module, preserve_rng_state, pack_args_as_tuple, strategy)",
    "patches.checkpoint.checkpoint(module)", "patches.checkpoint.checkpoint_sequential(sequential_module, strategy)",
    "rank", "size", "local_rank", "local_size",
    *(f"{kind.lower()}_{what}" for kind in KINDS for what in ("rank", "size")),
    *(f"get_{kind}_process_group" for kind in ("world", "mp", "dp", "pp", "tp", "rdp")),
    "get_mp_group", "get_dp_group", "CommGroup.WORLD", *(f"CommGroup.{kind}_GROUP" for kind in KINDS),
    "RankType.WORLD_RANK", *(f"RankType.{kind}_RANK" for kind in KINDS),
    "broadcast(obj, group)", "send(obj, dest_rank, rank_type)", "recv_from(src_rank, rank_type)",
    "allgather(obj, group)", "barrier(group)", "dp_barrier", "mp_barrier",
    "save(obj, f, partial, pickle_module, pickle_protocol, v3)",
    "load(f, map_location, pickle_module, partial, pickle_load_args)",
    f"save_checkpoint({CHECKPOINT})", f"resume_from_checkpoint({RESUME})",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.partition("(")[0])
def test_a_documented_name_takes_the_documented_arguments(name: str) -> None:
    path, _, arguments = name.removesuffix(")").partition("(")
    found: Any = smp
    for part in path.split("."):
        if isinstance(found, type) and not hasattr(found, part):  # of instances: a word of the class's source
            assert re.search(rf"self\.{part} = ", inspect.getsource(found))
            return
        if part in ("cfg", "module_manager"):  # of a session
            return
        found = getattr(found, part)
    if arguments:
        assert set(arguments.split(", ")) <= set(inspect.signature(found).parameters)


def test_every_public_name_is_documented() -> None:
    """What `atorch.smp` gives is in the document, or a page here says what it is for."""
    known = {re.split(r"[.(]", name)[0] for name in NAMES} | {f"{kind}_GROUP" for kind in KINDS}
    known |= {f"get_{kind.lower()}_group" for kind in ("WORLD", *KINDS)}  # for those without a documented one, too
    page = "".join((ROOT / "docs" / name).read_text() for name in ("smp.md", "reference/smp.md"))
    assert not [name for name in smp.__all__ if name not in known and not re.search(rf"\b{name}\b", page)]


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
            "DistributedModel": lambda **flag: ModelOptions.checked(flag),  # one model is made already
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
                with pytest.raises(ArgumentError, match=f"'no' as {flag}; it is True or False|{flag} was given 'no'"):
                    doors[name](**{flag: "no"})
    finally:
        smp.shutdown()
    assert not list(tmp_path.iterdir())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with smp.tensor_parallelism():
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.layer = smp.nn.DistributedTransformerOutputLayer(8, 16)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 2)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x + self.down(torch.relu(self.up(self.layer(x)))) + self.shift))


@pytest.mark.parametrize("degree", [1, 2])
@on_ranks(2)
def test_a_split_model_says_what_is_averaged_where(rank: int, size: int, degree: int) -> None:
    with begun({"tensor_parallel_degree": degree, "ddp": True}):
        model = smp.DistributedModel(Layers())

        @smp.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        train(model, torch.randn(4, 8))
        named = dict(model.local_named_parameters())
        modules = [type(module).__name__ for module in model.distributed_modules()]
        split = sorted(name for name, each in named.items() if model.is_distributed_parameter(each))
        inner = [f"layer.{name}" for name in ("dense1.bias", "dense1.weight", "dense2.weight")]
        is_split = degree == 2
        assert split == ["down.weight", *inner, "up.bias", "up.weight"] * is_split
        assert modules == ["Linear", "Linear", "DistributedTransformerOutputLayer", "Linear", "Linear"] * is_split
        assert {model.is_scaled_batch_parameter(each) for each in named.values()} == {is_split}
        assert [model.is_distributed_buffer(each) for each in model.local_buffers()] == [False]
        assert [model.is_scaled_batch_buffer(each) for each in model.local_buffers()] == [is_split]
        assert len(list(model.default_reducer_named_parameters())) == len(named) * (not is_split)
        assert len(list(model.scaled_batch_reducer_named_parameters())) == len(named) * is_split
