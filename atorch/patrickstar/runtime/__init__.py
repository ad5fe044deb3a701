"""`initialize_engine`: a model and its optimizer in chunked memory.

A `model_func` must return a model that it creates itself. Torch is not patched to observe the creation. A module that
exists before the call was not created by it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from atorch.distributed.collectives import call_on_all_ranks
from atorch.distributed.fingerprints import facts_of
from atorch.distributed.world import init
from atorch.errors import ArgumentError, shown
from atorch.patrickstar.core import EngineConfig, PatrickStarClient
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

    facts = {"model_func": facts_of("model_func", model_func), "client": facts_of("client", client)}
    engine = PatrickStarEngine(*call_on_all_ranks("initialize_engine", lambda: facts, made))
    return engine, engine.optimizer


def built(model_func: Callable[[], Any]) -> nn.Module:
    """Call `model_func`; returns its model.

    Raises:
        ArgumentError: it is not a function without arguments that returns a module, or a module with parameters in the
            result existed before.
    """
    if isinstance(model_func, nn.Module):
        raise ArgumentError(
            f"model_func is a module, {type(model_func).__name__}; give the function that makes it, such as "
            "`lambda: Model(...)`, or a client with the module"
        )
    if not callable(model_func):
        raise ArgumentError(
            f"model_func is {shown(model_func)}; give a function without arguments that makes the model"
        )
    # References keep old modules alive during the call, so that no new module reuses an id.
    before, num_frozen = _live_modules(), gc.get_freeze_count()
    model = model_func()
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model_func returned {shown(model)}; return the model, a torch.nn.Module")
    old = set(map(id, before))
    if 0 < gc.get_freeze_count() <= num_frozen:  # gc.get_objects omits objects that were frozen before the call
        old |= set(map(id, model.modules())) - set(map(id, _live_modules()))
    for name, module in model.named_modules():
        if id(module) in old and any(True for _ in module.parameters(recurse=False)):
            part = f"its part {name!r}" if name else "it"
            raise ArgumentError(
                f"model_func returned a {type(model).__name__}, and {part} was made before model_func was called; "
                "make all of the model inside of model_func"
            )
    return model


def _live_modules() -> list[nn.Module]:
    """All existing modules that are not frozen (`gc.freeze`)."""
    return [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
