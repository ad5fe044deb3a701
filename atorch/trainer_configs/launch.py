"""A plan as files of a trainer, and the file that starts it on every node: sh, Slurm, Kubernetes or SkyPilot.

Each sets NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and GPUS, which `Target.command` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from atorch.errors import ArgumentError, StrategyError, near_miss
from atorch.files import check_target, write
from atorch.trainer_configs import target
from atorch.trainer_configs.setup import TrainingSetup

if TYPE_CHECKING:
    from atorch.auto.planner.plan import ClusterPlan

PORT = 29500


def check_folder(name: str, folder: Path, launcher: str, force: bool) -> None:
    """Make the folder of an export, before anything is computed for it.

    Raises:
        ArgumentError: it cannot be made or written to, or has files of this name and `force` is false.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"the folder {folder} cannot be made: {error.strerror}") from None
    trainer = target(name)
    names = [*trainer.write(trainer.sample()), launch_file(launcher, trainer.sample(), "")[0]]
    for filename in names:
        check_target(folder / filename)
    there = [filename for filename in names if (folder / filename).exists()]
    if there and not force:
        raise ArgumentError(
            f"{folder} has {', '.join(there)} already; give another folder, or --force (force=True) to replace them"
        )


def export(plan: ClusterPlan, name: str, folder: Path, launcher: str, force: bool) -> list[Path]:
    """Write the files of a trainer for a plan, the last of which starts it; see `ClusterPlan.export`."""
    check_folder(name, folder, launcher, force)
    trainer, cluster = target(name), plan.cluster
    reasons = trainer.lacks(plan.strategy)
    if reasons:
        raise StrategyError(
            f"{trainer.title} cannot express {plan.strategy}: {'; '.join(reasons)}. Plan within what it can, with "
            f"--for {name} (target={name!r})"
        )
    setup = TrainingSetup.of_strategy(
        plan.strategy, name, cluster.num_nodes, cluster.devices_per_node, plan.global_batch,
        model=plan.model, seq=plan.seq, knobs=plan.recipe,
    )  # fmt: skip
    files = dict(trainer.write(setup))
    first, text = launch_file(launcher, setup, trainer.command(setup), cluster.device.name)
    for filename, content in {**files, first: text}.items():
        write(folder / filename, content)
    return [folder / filename for filename in (*files, first)]


def launch_file(kind: str, setup: TrainingSetup, command: str, device: str = "") -> tuple[str, str]:
    """The name and text of a file that starts `command`.

    Args:
        device: the name of the devices, which SkyPilot asks for.

    Raises:
        ArgumentError: there is no such kind.
    """
    if kind not in LAUNCHERS:
        raise ArgumentError(f"there is no launcher {kind!r}; {near_miss(kind, LAUNCHERS)}")
    return LAUNCHERS[kind](setup.num_nodes or 1, setup.devices_per_node or 1, command, device)


def _shell(nodes: int, gpus: int, command: str, device: str) -> tuple[str, str]:
    first = "${MASTER_ADDR:?set it to the address of the first node}" if nodes > 1 else "${MASTER_ADDR:-127.0.0.1}"
    return "launch.sh", (
        "#!/bin/sh\n"
        f"# Start it on each of {nodes} nodes, with NODE_RANK from 0 to {nodes - 1} and one MASTER_ADDR.\n"
        f"export NNODES={nodes} GPUS={gpus} NODE_RANK=${{NODE_RANK:-0}}\n"
        f"export MASTER_ADDR={first} MASTER_PORT=${{MASTER_PORT:-{PORT}}}\n"
        f"{command}\n"
    )


def _slurm(nodes: int, gpus: int, command: str, device: str) -> tuple[str, str]:
    return "launch.slurm", (
        "#!/bin/bash\n"
        "#SBATCH --job-name=train\n"
        f"#SBATCH --nodes={nodes}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"#SBATCH --gpus-per-node={gpus}\n"
        "#SBATCH --exclusive\n"
        f"export NNODES={nodes} GPUS={gpus} MASTER_PORT={PORT}\n"
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        f"srun bash -c 'export NODE_RANK=$SLURM_NODEID; {_in_quotes(command)}'\n"
    )


def _kubernetes(nodes: int, gpus: int, command: str, device: str) -> tuple[str, str]:
    """A PyTorchJob of Kubeflow's training operator, which sets the address and the rank of a node."""
    script = f"export NNODES={nodes} GPUS={gpus} NODE_RANK=$RANK; {command}"
    container = (
        "            - name: pytorch\n"
        "              image: IMAGE\n"
        f'              command: ["bash", "-c", {json.dumps(script)}]\n'
        "              resources:\n"
        f"                limits: {{nvidia.com/gpu: {gpus}}}\n"
        "              volumeMounts: [{name: shm, mountPath: /dev/shm}]\n"
        "          volumes: [{name: shm, emptyDir: {medium: Memory}}]\n"
    )

    def role(name: str, replicas: int) -> str:
        head = f"    {name}:\n      replicas: {replicas}\n      restartPolicy: OnFailure\n"
        return f"{head}      template:\n        spec:\n          containers:\n{container}"

    workers = role("Worker", nodes - 1) if nodes > 1 else ""
    return "launch.yaml", (
        "# Put your image in the place of IMAGE.\n"
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: train}\nspec:\n  pytorchReplicaSpecs:\n"
        f"{role('Master', 1)}{workers}"
    )


def _skypilot(nodes: int, gpus: int, command: str, device: str) -> tuple[str, str]:
    lines = (
        f"export NNODES={nodes} GPUS={gpus} MASTER_PORT={PORT}",
        "export NODE_RANK=$SKYPILOT_NODE_RANK",
        'export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        command,
    )
    run = "\n".join(f"  {line}" for line in lines)
    return "launch.sky.yaml", (
        "# `sky show-gpus` lists the names of accelerators.\n"
        f"resources:\n  accelerators: {json.dumps(f'{_short(device)}:{gpus}')}\n"
        f"num_nodes: {nodes}\nworkdir: .\nrun: |\n{run}\n"
    )


def _short(device: str) -> str:
    """`A100-80GB` of NVIDIA A100-SXM4-80GB, `RTX3090` of NVIDIA GeForce RTX 3090."""
    words = re.sub(r"NVIDIA |GeForce |-SXM\d", "", device).split()
    return "".join(words[:2] if words[:1] == ["RTX"] else words[:1])


def _in_quotes(command: str) -> str:
    return command.replace("'", "'\\''")


LAUNCHERS: Mapping[str, Callable[[int, int, str, str], tuple[str, str]]] = {
    "sh": _shell,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
}
