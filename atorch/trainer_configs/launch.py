"""Files that start a command on every node: a shell script, Slurm, Kubernetes and SkyPilot.

Each sets NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and GPUS, which `Target.command` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from atorch.errors import ArgumentError, near_miss
from atorch.trainer_configs.setup import TrainingSetup

PORT = 29500


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
