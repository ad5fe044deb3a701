"""Table-driven translation of state dicts between Hugging Face's names and those of `smp.nn`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.smp.checkpointing.states import MARKS, PARTIAL
from atorch.smp.session import is_initialized, session

StateDict = Mapping[str, Any]


@dataclass(frozen=True)
class Naming:
    """Names of a model's parameters in Hugging Face and in `smp.nn`.

    Args:
        model: the model's name in messages.
        layers: the prefix of a layer's number, in Hugging Face and in `smp.nn`.
        inside: Hugging Face's names of a layer's modules, each with the names of the `smp.nn` modules that it fuses.
        outside: parameters outside the layers; None if they keep their names.
        is_transposed: True if Hugging Face stores a layer's weights as (in, out).
        left_out: endings of names that are not translated, such as masks.
    """

    model: str
    layers: tuple[str, str]
    inside: Mapping[str, tuple[str, ...]]
    outside: Mapping[str, str] | None = None
    is_transposed: bool = False
    left_out: tuple[str, ...] = ()
    _part_of: dict[str, tuple[str, int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for theirs, ours in self.inside.items():
            self._part_of.update({name: (theirs, number) for number, name in enumerate(ours)})

    def to_smp(self, state_dict: StateDict) -> dict[str, Any]:
        """Translate to the names of `smp.nn`, unless the state has them or the script's DistributedModel lacks them.

        Raises:
            ArgumentError: the state is partial, is of another model, or has a name without a counterpart in `smp.nn`.
        """
        theirs = self._pattern(0)
        if not self._is_to_be_translated(state_dict, 0) or keeps_names(theirs):
            return dict(state_dict)
        state: dict[str, Any] = {}
        for name, value in state_dict.items():
            if name.endswith(self.left_out or ("\n",)):
                continue
            match = theirs.fullmatch(name)
            if match is None:
                state[self._outside(name, self.outside)] = value
                continue
            names = self.inside.get(match["inner"])
            if names is None:
                raise self._unknown(name)
            whole = value.t() if self.is_transposed else value
            for ours, part in zip(names, whole.chunk(len(names)), strict=True):
                state[f"{match['before']}{self.layers[1]}.{match['number']}.{ours}.{match['kind']}"] = part.contiguous()
        return state

    def to_hf(self, state_dict: StateDict) -> dict[str, Any]:
        """Translate to Hugging Face's names, unless the state has them already.

        Raises:
            ArgumentError: the state is partial, is of another model, or has a name without a counterpart in the model.
        """
        if not self._is_to_be_translated(state_dict, 1):
            return dict(state_dict)
        state: dict[str, Any] = {}
        back = None if self.outside is None else {ours: theirs for theirs, ours in self.outside.items()}
        for name, value in state_dict.items():
            match = self._pattern(1).fullmatch(name)
            if match is None:
                state[self._outside(name, back)] = value
                continue
            theirs, number = self._part_of.get(match["inner"], ("", 0))
            if not theirs:
                raise self._unknown(name)
            if number == 0:
                layer = f"{match['before']}{self.layers[1]}.{match['number']}"
                parts = [state_dict.get(f"{layer}.{ours}.{match['kind']}") for ours in self.inside[theirs]]
                joined = self._joined(name, parts)
                state[f"{match['before']}{self.layers[0]}.{match['number']}.{theirs}.{match['kind']}"] = joined
        return state

    def _joined(self, name: str, parts: list[Tensor | None]) -> Tensor:
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            raise ArgumentError(
                f"the state has {name}, and lacks what {self.model} keeps in one with it; give it whole"
            )
        whole = torch.cat(present) if len(present) > 1 else present[0]
        return whole.t().contiguous() if self.is_transposed else whole

    def _pattern(self, side: int) -> re.Pattern[str]:
        layers = re.escape(self.layers[side])
        return re.compile(rf"(?P<before>(?:.*\.)?){layers}\.(?P<number>\d+)\.(?P<inner>.+)\.(?P<kind>weight|bias)")

    def _is_to_be_translated(self, state: StateDict, side: int) -> bool:
        if state.get(PARTIAL):
            raise ArgumentError(f"a partial state of {self.model} was given; give a whole one, model.state_dict()")
        matches = [any(self._pattern(which).fullmatch(name) for name in state) for which in (side, 1 - side)]
        if not any(matches):
            raise ArgumentError(
                f"the state has no layer of {self.model}, {self.layers[0]}.0 by Hugging Face and {self.layers[1]}.0 by "
                "smp.nn; give the state of such a model"
            )
        return matches[0]

    def _outside(self, name: str, names: Mapping[str, str] | None) -> str:
        if names is None or name in MARKS:
            return name
        if name not in names:
            raise self._unknown(name)
        return names[name]

    def _unknown(self, name: str) -> ArgumentError:
        return ArgumentError(f"the state has {name}, for which {self.model} has no counterpart among smp.nn's modules")


def keeps_names(theirs: re.Pattern[str]) -> bool:
    """True if the script's DistributedModel has Hugging Face's names, so that no translation is needed."""
    names = getattr(session().model, "state_names", ()) if is_initialized() else ()
    keeps = any(theirs.fullmatch(name) for name in names)
    if keeps:
        logger.info("the state is not translated: the smp.DistributedModel has Hugging Face's own names")
    return keeps


def kept(model: str, state: StateDict) -> dict[str, Any]:
    """Return a state unchanged whose model has no module in `smp.nn`, for the script's DistributedModel.

    Raises:
        ArgumentError: the script's DistributedModel has other names, or there is none.
    """
    names = set(getattr(session().model, "state_names", ()) if is_initialized() else ())
    if not names >= state.keys() - MARKS:
        raise ArgumentError(
            f"no module of smp.nn computes {model}, so that there are no names to translate to; under "
            "smp.DistributedModel the model of Hugging Face keeps its own: load its state as it is"
        )
    return dict(state)
