"""The interface that scripts import, on one process in plain PyTorch: what `atorch.smp` is compared with.

A step runs the function once on the whole batch, a model's backward is autograd's, files are torch's.
"""

import functools
import os
from collections.abc import Mapping
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from atorch.smp import StepOutput
from atorch.smp.optimizers import FusedLamb
from atorch.smp.steps.slicing import outputs_of


class Model(nn.Module):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self._hooks: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, tensors: torch.Tensor) -> None:
        tensors.backward()

    def get_module(self) -> nn.Module:
        return self.module

    def local_parameters(self) -> Any:
        return self.parameters()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    local_state_dict = state_dict

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return self.module.load_state_dict(state_dict, strict=strict)

    def register_post_partition_hook(self, hook: Any) -> None:
        """Nothing is partitioned."""


def plain_packages() -> Mapping[str, ModuleType]:
    smp = ModuleType("smdistributed.modelparallel.torch")
    made: dict[str, Any] = {}

    def step(function: Any = None, **options: Any) -> Any:
        if function is None:
            return step

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return outputs_of([function(*args, **kwargs)])

        return run

    def model(module: nn.Module, **options: Any) -> Model:
        made["model"] = Model(module)
        return made["model"]

    def optimizer(inner: Any, **options: Any) -> Any:
        inner.local_state_dict = inner.state_dict
        made["optimizer"] = inner
        return inner

    def save_checkpoint(path: str, tag: str, **content: Any) -> None:
        states = {"model": made["model"].state_dict(), "optimizer": made["optimizer"].state_dict()}
        os.makedirs(path, exist_ok=True)
        torch.save({**states, "user_content": content["user_content"]}, os.path.join(path, "newest"))

    def resume_from_checkpoint(path: str, **options: Any) -> Any:
        found = torch.load(os.path.join(path, "newest"))
        made["model"].load_state_dict(found["model"])
        made["optimizer"].load_state_dict(found["optimizer"])
        return found["user_content"]

    zero = dict.fromkeys(("rank", "local_rank", "mp_rank", "dp_rank", "pp_rank", "tp_rank", "rdp_rank"), 0)
    one = dict.fromkeys(("size", "local_size", "mp_size", "dp_size", "pp_size", "tp_size", "rdp_size"), 1)
    vars(smp).update({name: lambda value=value: value for name, value in {**zero, **one}.items()})
    nothing = dict.fromkeys(("init", "barrier", "set_partition", "set_activation_checkpointing"), _nothing)
    vars(smp).update(
        nothing,
        step=step,
        StepOutput=StepOutput,
        DistributedModel=model,
        DistributedOptimizer=optimizer,
        save=lambda obj, f, partial=True: torch.save(obj, f"{f}_0" if partial else f),
        load=lambda f, partial=True: torch.load(f"{f}_0" if partial else f),
        save_checkpoint=save_checkpoint,
        resume_from_checkpoint=resume_from_checkpoint,
        model_creation=lambda **options: nullcontext(),
        amp=SimpleNamespace(GradScaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0)),
        get_dp_process_group=lambda: torch.distributed.group.WORLD,
        get_world_process_group=lambda: torch.distributed.group.WORLD,
    )
    packages = {name: ModuleType(name) for name in ("smdistributed", "smdistributed.modelparallel")}
    nn_module, optimizers = ModuleType(f"{smp.__name__}.nn"), ModuleType(f"{smp.__name__}.optimizers")
    vars(nn_module)["FusedLayerNorm"], vars(optimizers)["FusedLamb"] = nn.LayerNorm, FusedLamb
    vars(packages["smdistributed"])["modelparallel"] = packages["smdistributed.modelparallel"]
    vars(packages["smdistributed.modelparallel"]).update(torch=smp, __version__="plain")
    return {**packages, smp.__name__: smp, nn_module.__name__: nn_module, optimizers.__name__: optimizers}


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What one process need not do."""
