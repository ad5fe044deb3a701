"""The same training in the workers of Ray Train, which starts them again after a failure.

python examples/launch/ray_train.py --folder /shared/run --workers 2
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from train import train


def work(config: dict[str, Any]) -> None:
    """The function of each worker: it runs in a thread, where Python handles no signals."""
    train(config["folder"], config["steps"], signals=())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", required=True, help="a path that all workers see")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    has_gpus = torch.cuda.is_available()
    TorchTrainer(
        work,
        train_loop_config={"folder": given.folder, "steps": given.steps},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if has_gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=has_gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
