"""The origin of a strategy: metadata written beside it in its file, and fingerprints that compare models."""

from __future__ import annotations

import hashlib
import platform
from typing import Any

import torch
from torch import nn

from atorch.cluster import ClusterSpec


def fingerprint(model: nn.Module) -> str:
    """A digest of the names, shapes and dtypes of the model's parameters: equal for equal architectures."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}\n".encode())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    import atorch

    return {"atorch": atorch.__version__, "torch": torch.__version__, "python": platform.python_version()}


def provenance(model: nn.Module, cluster: ClusterSpec, world_size: int) -> dict[str, Any]:
    """Versions, world size, cluster and model fingerprint, as plain JSON data."""
    return {
        "versions": versions(),
        "world_size": world_size,
        "cluster": {
            "device": cluster.device.name,
            "num_nodes": cluster.num_nodes,
            "devices_per_node": cluster.devices_per_node,
        },
        "model": {"class": type(model).__name__, "fingerprint": fingerprint(model)},
    }
