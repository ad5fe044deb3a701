"""Key/value caches of forward, which serve generation only."""

from __future__ import annotations

from torch import nn

from atorch.logs import logger


def turn_off_caches(model: nn.Module) -> None:
    """Stop forward from filling a key/value cache (`config.use_cache` of transformers' models).

    A recompute would append to it a second time, and a pipeline stage has only its own blocks' part of it.
    Generation has a separate setting, which stays.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        if getattr(config, "use_cache", None):
            config.use_cache = False
            logger.info("%s.use_cache is turned off", type(config).__name__)
