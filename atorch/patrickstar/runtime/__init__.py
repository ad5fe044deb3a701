"""`initialize_engine`: a model and its optimizer in chunked memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from atorch.distributed.collectives import call_on_all_ranks
from atorch.distributed.fingerprints import described
from atorch.distributed.world import init
from atorch.errors import ArgumentError, shown
from atorch.patrickstar.building import built
from atorch.patrickstar.config import EngineConfig
from atorch.patrickstar.core import PatrickStarClient
from atorch.patrickstar.ops import FP16Adam
from atorch.patrickstar.runtime.engine import PatrickStarEngine

__all__ = ["PatrickStarEngine", "initialize_engine"]


def initialize_engine(
    model_func: Callable[[], nn.Module] | nn.Module,
    local_rank: int,
    config: Mapping[str, Any] | None = None,
    client: PatrickStarClient | None = None,
) -> tuple[PatrickStarEngine, FP16Adam]:
    """Create the model of `model_func` as an engine that trains it in fp16 from chunks, and its optimizer.

    Args:
        model_func: a function without arguments that creates the model; with a `client`, it may be the model itself.
        local_rank: this process's number on its machine.
        config: as in docs/patrickstar.md; None for the defaults.
        client: for a model that cannot be created in a `model_func`.

    Raises:
        ArgumentError: the configuration is invalid, or `model_func` is or returns a model that was created before.
    """
    init()

    def made() -> tuple[nn.Module, PatrickStarClient, EngineConfig]:
        read = EngineConfig.of(config)
        if client is None:
            default = PatrickStarClient(local_rank, read.chunk_size, read.client)
            return built(model_func), default, read
        if not isinstance(client, PatrickStarClient):
            raise ArgumentError(f"client is {shown(client)}; give a PatrickStarClient, or leave it out")
        return model_func if isinstance(model_func, nn.Module) else built(model_func), client, read

    facts = {"model_func": described("model_func", model_func), "client": described("client", client)}
    engine = PatrickStarEngine(*call_on_all_ranks("initialize_engine", lambda: facts, made))
    return engine, engine.optimizer
