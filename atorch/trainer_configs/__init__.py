"""Configurations of other trainers: read into atorch's methods, and written from a plan.

Each target is a module that makes one `Target`. `recognised` tells the format of what is given.
"""

from __future__ import annotations

from importlib import import_module

from atorch.errors import ArgumentError, near_miss
from atorch.trainer_configs.setup import Entry, Kind, Target, TrainingSetup, Traits
from atorch.trainer_configs.source import Fields, Source

__all__ = ["TARGETS", "Entry", "Fields", "Kind", "Source", "Target", "TrainingSetup", "Traits", "recognised", "target"]


TARGETS = ("megatron", "torchtitan", "automodel", "axolotl", "accelerate", "deepspeed", "transformers")
"""Names of targets, each a module of this package with its `TARGET`, the most specific format first."""


def target(name: str) -> Target:
    """The target of this name.

    Raises:
        ArgumentError: there is none; the message names the nearest.
    """
    if name not in TARGETS:
        raise ArgumentError(f"there is no trainer {name!r} to read or write for; {near_miss(name, TARGETS)}")
    found: Target = import_module(f"{__name__}.{name}").TARGET
    return found


def recognised(source: Source) -> Target:
    """The first target that recognises a source.

    Raises:
        ArgumentError: none does.
    """
    for name in TARGETS:
        found = target(name)
        if found.recognises(source):
            return found
    titles = ", ".join(target(name).title for name in TARGETS)
    raise ArgumentError(f"{source.name} is no configuration of {titles}")
