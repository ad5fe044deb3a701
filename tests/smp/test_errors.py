"""Refusals of the interface on one process: the class of the error, and the facts that its message must name."""

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atorch.smp as smp
from atorch.errors import ArgumentError
from atorch.smp.optimizers import FusedLamb, FusedNovoGrad
from atorch.smp.patches.checkpoint import checkpoint, checkpoint_sequential
from atorch.smp.ranks import ranks_of
from tests.smp.job import begun
from tests.smp.nn.test_distributed_modules import language_model
from tests.smp.test_step import Blocks, rows, train

Call = Callable[[Any], Any]
PARAMETERS = [nn.Parameter(torch.ones(2))]
IDS = torch.zeros(1, 3).long()


class Own(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def sgd(parameters: Any = PARAMETERS) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def entered(context: Any) -> Any:
    return context.__enter__()


# A call that is given the model, or without one a folder, and what the error says.
WITHOUT_A_MODEL: list[tuple[Call, str]] = [
    (lambda _: smp.init(), "smp.init has been called before"),
    (lambda _: smp.DistributedModel(3), "torch.nn.Module"),  # type: ignore[arg-type]
    (lambda _: smp.DistributedOptimizer(sgd()), "make the smp.DistributedModel first"),
    (lambda _: train(None, rows()), "make a smp.DistributedModel"),
    (lambda _: smp.DistributedModel(Blocks(), trace_device="tpu"), "should be 'cpu' or 'gpu'"),  # type: ignore[arg-type]
    (lambda _: smp.DistributedModel(Blocks(), "cpu", trace_execution_times=True), "must be False"),
    (lambda _: smp.DistributedModel(Blocks(), backward_passes_per_step=0), "was given 0: Input should be greater"),
    (lambda _: smp.DistributedModel(Blocks(), bucket_cap_mb=0), "bucket_cap_mb was given 0"),
    (lambda _: smp.step(3), "give a function"),  # type: ignore[call-overload]
    (lambda _: smp.step(non_split_inputs=["y"])(lambda model, x: None), "no such argument"),
    (lambda _: entered(smp.partition(1)), "smp.partition was given 1, and there are 1 partitions"),
    (lambda _: smp.send("x", 1, smp.RankType.PP_RANK), "dest_rank is 1; ranks of RankType.PP_RANK are 0 to 0"),
    (lambda _: smp.recv_from(0, "pp"), "rank_type is 'pp'; give one of smp.RankType"),  # type: ignore[arg-type]
    (lambda _: smp.recv_from(0, smp.RankType.WORLD_RANK), "this process has sent itself no object"),
    (lambda _: smp.barrier("dp"), "a group was given as 'dp'"),  # type: ignore[arg-type]
    (lambda _: ranks_of("world"), "a group was given as 'world'; give one of smp.CommGroup"),  # type: ignore[arg-type]
    (lambda _: entered(smp.model_creation(dtype=torch.int64)), "as dtype; give a floating-point one"),
    (lambda _: entered(smp.model_creation(dtype="float16")), "'float16' as dtype"),  # type: ignore[arg-type]
    (lambda _: smp.set_tensor_parallelism([nn.Linear(2, 2)]), "give a module of the model"),  # type: ignore[arg-type]
    (lambda _: smp.tp_register(len)(Own), "dist_module <built-in function len>; give a subclass"),  # type: ignore[arg-type]
    (lambda _: smp.tp_register_with_module("Linear", nn.Linear), "module_cls 'Linear'; give a subclass"),  # type: ignore[arg-type]
    (lambda _: smp.tp_register_with_module(Own, nn.Linear, init_hook=4), "init_hook 4; give a function"),  # type: ignore[arg-type]
    # Activation checkpointing.
    (lambda _: smp.set_activation_checkpointing(nn.Linear(2, 2), strategy="each "), "strategy 'each ' for a Linear"),
    (lambda _: smp.set_activation_checkpointing(Own(), pack_args_as_tuple=True), "pack_args_as_tuple=True for a Own"),
    (lambda _: smp.set_activation_checkpointing(torch.tanh), "give a module, not a function"),  # type: ignore[arg-type]
    (lambda _: smp.set_activation_checkpointing(nn.ModuleList()), "ModuleList, which has no forward"),
    (lambda _: checkpoint(torch.tanh, IDS), "give a module, not a function"),  # type: ignore[arg-type]
    (lambda _: checkpoint_sequential(nn.Linear(2, 2), IDS), "give an nn.Sequential"),  # type: ignore[arg-type]
    (lambda _: checkpoint_sequential(Own(), IDS), "give an nn.Sequential"),
    *((lambda _, given=given: checkpoint_sequential(nn.Sequential(), IDS, strategy=given), f"no strategy {given!r}; ")
      for given in ("all", "group_0", "group_x", "Each", 2, "group_2 ")),
    # Modules of smp.nn.
    (lambda _: smp.nn.DistributedTransformerLayer(post_layernorm=False), "at least one of them"),
    (lambda _: smp.nn.DistributedTransformerOutputLayer(activation="swish"), "known: gelu, gelu_new, relu"),
    (lambda _: smp.nn.DistributedTransformerLayer(use_alibi=True), "use_alibi True, which atorch.smp has not"),
    (lambda _: smp.nn.DistributedTransformer(1, alibi_bias_max=4), "alibi_bias_max 4"),
    (lambda _: smp.nn.DistributedEmbedding(4, 2, _skip_allgather=True), "_skip_allgather True"),
    (lambda _: language_model()((IDS,)), "a tuple of 5: input_ids"),
    (lambda _: language_model()((IDS, None, IDS, None, None)), "make it with num_token_types"),
    (lambda _: language_model(causal_mask_size=2)((IDS, None, None, None, None)), "and causal_mask_size is 2"),
    # Fused optimizers.
    *((lambda _, kind=kind, given=given: kind(PARAMETERS, **given), told)
      for kind in (FusedLamb, FusedNovoGrad)
      for given, told in (
          ({"amsgrad": True}, "no AMSGrad variant"), ({"lr": -1.0}, "-1.0 as lr"), ({"betas": (0.9, 1.0)}, "as betas"),
          ({"eps": -1e-8}, "as eps"), ({"weight_decay": -1}, "as weight_decay"),
      )),
    (lambda _: FusedNovoGrad(PARAMETERS, norm_type=1), "norm_type"),
    (lambda _: FusedLamb(PARAMETERS, max_grad_norm=0), "math.inf"),
    # Files.
    (lambda folder: smp.save({}, folder / "f"), "smp.save was given PosixPath"),
    (lambda folder: smp.load(folder / "f"), "it takes a file's name, a string: give str"),
    (lambda _: smp.save({}, ""), "for f, which names no file; give the path of a file"),
    (lambda folder: smp.save({}, f"{folder}/"), "for f, which names no file"),
    (lambda _: smp.save({}, "f", pickle_module=types.ModuleType("dill")), "smp.save was given pickle_module dill; it"),
    (lambda _: smp.load("f", pickle_module=types.ModuleType("dill")), "smp.load was given pickle_module dill"),
    (lambda _: smp.save({}, "f", pickle_protocol=4), "pickle_protocol is 4; smp.load, which never runs code, reads 2"),
    (lambda _: smp.load("f", weights_only=False), "never runs code out of a file"),
    (lambda _: smp.load("f", encoding="bytes", errors="strict"), "encoding, errors; files are read as weights alone"),
]  # fmt: skip
OF_A_MODEL: list[tuple[Call, str]] = [
    (lambda _: smp.DistributedModel(Blocks()), "a second smp.DistributedModel"),
    (lambda model: model(rows()), "outside of smp.step"),
    (lambda model: model.backward(rows().mean()), "outside of smp.step"),
    (lambda _: smp.DistributedOptimizer(sgd()), "not the DistributedModel's"),
    (lambda model: model.register_post_partition_hook(3), "give a function"),
    (lambda model: model.register_post_step_hook(3), "give a function"),
    (lambda model: model.load_state_dict(3), "was given 3 as a state"),
    (lambda model: model.clip_grad_norm_(1.0), "clip_grad_norm_ was called before the first smp.step"),
    *((lambda model, given=given: smp.DistributedOptimizer(sgd(model.parameters()), **given), told) for given, told in (
        ({"scale_windw": 3}, "did you mean 'scale_window'"),
        ({"dynamic_loss_args": {"init_scal": 3}}, "did you mean 'init_scale'"),
        ({"init_scale": 0}, "init_scale was given 0: Input should be greater than 0"),
        ({"scale_window": 1.5}, "scale_window was given 1.5"),
        ({"scale_factor": 1}, "scale_factor was given 1: Input should be greater than 1"),
        ({"static_loss_scale": -1.0}, "static_loss_scale; give a number above 0"),
        ({"dynamic_loss_scale": 2}, "2 as dynamic_loss_scale; it is True or False"),
    )),
]  # fmt: skip
ONCE_STEPPED: list[tuple[Call, str]] = [
    (lambda model: model.clip_grad_norm_(1.0, 0), "clip_grad_norm_ was given 0 as norm_type"),
    *((lambda model, given=given: model.clip_grad_norm_(given), "as max_norm; give a number above 0")
      for given in (0, -1.0, True, "1")),
]  # fmt: skip


@pytest.fixture
def _session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with begun({}):
        yield


@pytest.mark.usefixtures("_session")
@pytest.mark.parametrize(("call", "told"), WITHOUT_A_MODEL, ids=lambda given: given if isinstance(given, str) else "")
def test_calls_without_a_model(call: Call, told: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as error:
        call(tmp_path)
    assert told in str(error.value)


@pytest.mark.usefixtures("_session")
def test_calls_of_a_model() -> None:
    model = smp.DistributedModel(Blocks())
    for calls in (OF_A_MODEL, ONCE_STEPPED):
        for call, told in calls:
            with pytest.raises(ArgumentError) as error:
                call(model)
            assert told in str(error.value)
        optimizer = smp.DistributedOptimizer(sgd(model.parameters())) if calls is OF_A_MODEL else None
        if optimizer is not None:
            with pytest.raises(ArgumentError, match=r"clip_master_grads was called before the first smp\.step"):
                optimizer.clip_master_grads(1.0)
            train(model, rows())


def test_everything_needs_a_session() -> None:
    for call in (smp.rank, lambda: smp.DistributedModel(Blocks()), lambda: smp.state.cfg):
        with pytest.raises(ArgumentError, match=r"smp\.init"):
            call()
