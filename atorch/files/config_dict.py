"""Configurations that a document of another system describes: dicts, checked key by key, without a silent loss.

A key that the other system needed and this one does not is read, checked, and said to have no effect where it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from atorch.errors import ArgumentError, near_miss, shown
from atorch.logs import logger

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class NoEffect:
    """Marks a key that changes nothing here, and says why."""

    why: str


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        for key in given if isinstance(given, Mapping) else ():
            if key not in cls.model_fields:
                raise ValueError(f"there is no key {shown(key)} here; {near_miss(str(key), cls.model_fields)}")
        return given

    @classmethod
    def of(cls, config: Mapping[str, Any] | Section | None) -> Self:
        """The configuration from the document's dict; None for the defaults. Says which keys have no effect.

        Raises:
            ArgumentError: an unknown key (the nearest is named), one that is missing, or a value that does not hold.
        """
        if isinstance(config, cls):
            return config
        if config is not None and not isinstance(config, Mapping):
            raise ArgumentError(f"config is {shown(config)}; it is a dict of the documented keys, or None")
        made = cls.checked(config or {})
        for key, why in made.without_effect():
            logger.info("config: %s has no effect here: %s", key, why)
        return made

    @classmethod
    def checked(cls, config: Mapping[str, Any]) -> Self:
        """The configuration from the document's dict, without a word about keys that have no effect.

        Raises:
            ArgumentError: as `of`.
        """
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            raise _explained(error) from None

    def without_effect(self, place: str = "") -> Iterator[tuple[str, str]]:
        """(key, why) of the keys that were given and change nothing."""
        for name in sorted(self.model_fields_set):
            value = getattr(self, name)
            if isinstance(value, Section):
                yield from value.without_effect(f"{place}{name}.")
            for mark in type(self).model_fields[name].metadata:
                if isinstance(mark, NoEffect):
                    yield f"{place}{name}", mark.why


def _explained(error: ValidationError) -> ArgumentError:
    told = []
    for fault in error.errors():
        place = ".".join(["config", *map(str, fault["loc"])])
        if fault["type"] == "missing":
            told.append(f"{place} is missing; it must be given")
        elif fault["msg"].startswith("Value error, "):
            told.append(f"{place}: {fault['msg'].removeprefix('Value error, ')}")
        else:
            told.append(f"{place} was given {shown(fault['input'])}: {fault['msg']}")
    return ArgumentError("; ".join(told))
