"""Makes `patrickstar` a name of `atorch.patrickstar`, for scripts that import it; import this module first.

    import atorch.patrickstar.alias
    from patrickstar.runtime import initialize_engine

It has the submodules that scripts import: runtime, core, ops, fp16, profiler and utils.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import psutil
import torch

from atorch import patrickstar
from atorch.distributed import world
from atorch.errors import ArgumentError
from atorch.logs import OF_THIS_RANK, logger
from atorch.patrickstar import core, ops, profiler, runtime

NAME = "patrickstar"


def get_rank() -> int:
    return world.init().rank


def get_world_size() -> int:
    return world.init().size


def get_local_world_size() -> int:
    return world.local_world_size()


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the listed processes; on all for [-1] and on none for None, as PatrickStar does."""
    if get_world_size() == 1 or (ranks and (ranks[0] == -1 or get_rank() in ranks)):
        logger.log(level, message, extra=OF_THIS_RANK)


def print_rank(message: str, rank: int = 0, debug: bool = False, force: bool = False) -> None:
    if get_rank() == rank and (debug or force):
        logger.info(message, extra=OF_THIS_RANK)


def see_memory_usage(message: str, force: bool = False, scale_name: str = "MB") -> None:
    if force:
        device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        host = psutil.Process().memory_info().rss
        logger.info("%s: device %d bytes, host %d bytes", message, device, host, extra=OF_THIS_RANK)


def getsizeof(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(f"{NAME}.{name}")
    vars(module).update(members)
    return module


def _submodules() -> dict[str, ModuleType]:
    tools = (get_rank, get_world_size, get_local_world_size, log_dist, print_rank, see_memory_usage, getsizeof)
    return {
        "runtime": runtime, "runtime.engine": runtime.engine, "core": core, "ops": ops, "profiler": profiler,
        "fp16": _module("fp16", LossScaler=ops.LossScaler, DynamicLossScaler=ops.LossScaler),
        "utils": _module("utils", logger=logger, **{tool.__name__: tool for tool in tools}),
    }  # fmt: skip


def _install() -> None:
    imported = sys.modules.get(NAME)
    if imported is not None and not hasattr(imported, "__atorch__"):
        raise ArgumentError(
            "another patrickstar has been imported; import atorch.patrickstar.alias before everything that imports it"
        )
    package = ModuleType(NAME, patrickstar.__doc__)
    members = {"initialize_engine": runtime.initialize_engine, "PatrickStarClient": core.PatrickStarClient}
    vars(package).update(
        __atorch__=True, __path__=[], FP16Adam=ops.FP16Adam, see_memory_usage=see_memory_usage, **members
    )
    sys.modules[NAME] = package
    for name, module in _submodules().items():
        sys.modules[f"{NAME}.{name}"] = module
        if "." not in name:
            vars(package)[name] = module


_install()
