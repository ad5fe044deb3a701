"""atorch: plans how to train a PyTorch model on your hardware, and applies the plan.

    status, result, strategy = auto_accelerate(model, torch.optim.AdamW, dataset, loss_func)

Public names are imported on first access, so the command line can respond without importing torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atorch.auto.accelerate import auto_accelerate, plan
    from atorch.auto.checkpointing import load_checkpoint, resume_or_start, save_checkpoint, wait_for_checkpoint
    from atorch.auto.planner.plan import Plan
    from atorch.auto.pretrained import export, load_pretrained, load_whole_state
    from atorch.auto.strategy import Strategy
    from atorch.auto.strategy.method import load_methods
    from atorch.checkpoint.reading import Checkpoint
    from atorch.cluster.spec import ClusterSpec
    from atorch.cost.transformer import TransformerShape
    from atorch.distributed.run_monitor import RunMonitor
    from atorch.runtime.gradients.clip import clip_grad_norm
    from atorch.runtime.memory.recompute import checkpoint_sequential, checkpoint_wrapper, is_recomputing
    from atorch.runtime.straggler_detector import StragglerDetector
    from atorch.runtime.tensor_parallel.state import whole_state

__version__ = "0.1.0"

_HOMES: Mapping[str, str] = {
    "Checkpoint": "atorch.checkpoint.reading",
    "ClusterSpec": "atorch.cluster.spec",
    "Plan": "atorch.auto.planner.plan",
    "RunMonitor": "atorch.distributed.run_monitor",
    "StragglerDetector": "atorch.runtime.straggler_detector",
    "Strategy": "atorch.auto.strategy",
    "TransformerShape": "atorch.cost.transformer",
    "auto_accelerate": "atorch.auto.accelerate",
    "checkpoint_sequential": "atorch.runtime.memory.recompute",
    "checkpoint_wrapper": "atorch.runtime.memory.recompute",
    "clip_grad_norm": "atorch.runtime.gradients.clip",
    "export": "atorch.auto.pretrained",
    "is_recomputing": "atorch.runtime.memory.recompute",
    "load_checkpoint": "atorch.auto.checkpointing",
    "load_methods": "atorch.auto.strategy.method",
    "load_pretrained": "atorch.auto.pretrained",
    "load_whole_state": "atorch.auto.pretrained",
    "plan": "atorch.auto.accelerate",
    "resume_or_start": "atorch.auto.checkpointing",
    "save_checkpoint": "atorch.auto.checkpointing",
    "wait_for_checkpoint": "atorch.auto.checkpointing",
    "whole_state": "atorch.runtime.tensor_parallel.state",
}

__all__ = [
    "Checkpoint",
    "ClusterSpec",
    "Plan",
    "RunMonitor",
    "StragglerDetector",
    "Strategy",
    "TransformerShape",
    "auto_accelerate",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "clip_grad_norm",
    "export",
    "is_recomputing",
    "load_checkpoint",
    "load_methods",
    "load_pretrained",
    "load_whole_state",
    "plan",
    "resume_or_start",
    "save_checkpoint",
    "wait_for_checkpoint",
    "whole_state",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'atorch' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
