"""Configurations of other trainers: read into atorch's methods, and written from a plan.

Each target is a module that makes one `Target`. `source_and_target` recognises the format of what is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from atorch.errors import ArgumentError, near_miss
from atorch.trainer_configs.setup import Entry, Kind, TrainingSetup
from atorch.trainer_configs.source import Fields, Source

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

__all__ = ["TARGETS", "Entry", "Fields", "Kind", "Source", "Target", "TrainingSetup", "recognised", "target"]


@dataclass(frozen=True)
class Target:
    """A trainer whose configuration can be read and written.

    Args:
        title: its name in sentences.
        recognises: True if the source has this format.
        read: the setup of a source. Raises ArgumentError for values that the trainer would not take either.
        lacks: reasons, each with the name of the method, setting or combination of the strategy (complete, or a part
            of one) that the trainer does not have; empty if it can express all. A part that lacks something is never
            made expressible by more methods.
        write: the files of a setup whose strategy `lacks` nothing, by name.
        command: the command that starts training on one node, for `sh`. The variables NNODES, NODE_RANK, MASTER_ADDR,
            MASTER_PORT and GPUS (of a node) are set; `train.py` stands for the user's script.
    """

    name: str
    title: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], TrainingSetup]
    lacks: Callable[[Strategy], tuple[str, ...]]
    write: Callable[[TrainingSetup], Mapping[str, str]]
    command: Callable[[TrainingSetup], str]


TARGETS = ("accelerate", "deepspeed")
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
