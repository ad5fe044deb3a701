"""Configuration dicts in another system's documented format, checked key by key.

A key that only the other system needs is read, checked, and reported to have no effect if it is given.
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
    """Marks a key that has no effect here, with the reason."""

    why: str


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, config: Any) -> Any:
        for key in config if isinstance(config, Mapping) else ():
            if key not in cls.model_fields:
                raise ValueError(f"there is no key {shown(key)} here; {near_miss(str(key), cls.model_fields)}")
        return config

    @classmethod
    def of(cls, config: Mapping[str, Any] | Section | None) -> Self:
        """Read a configuration dict; None for the defaults. Keys without effect are logged.

        Raises:
            ArgumentError: a key is unknown (the error suggests the nearest) or missing, or a value is invalid.
        """
        if isinstance(config, cls):
            return config
        if config is not None and not isinstance(config, Mapping):
            raise ArgumentError(f"config is {shown(config)}; it is a dict of the documented keys, or None")
        section = cls.checked(config or {})
        for key, why in section.without_effect():
            logger.info("config: %s has no effect here: %s", key, why)
        return section

    @classmethod
    def checked(cls, config: Mapping[str, Any], name: str = "config") -> Self:
        """Read a configuration dict without logging keys that have no effect; `name` is for errors.

        Raises:
            ArgumentError: as `of`.
        """
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            raise _explained(error, name) from None

    def without_effect(self, place: str = "") -> Iterator[tuple[str, str]]:
        """(key, reason) of the given keys that have no effect."""
        for name in sorted(self.model_fields_set):
            value = getattr(self, name)
            if isinstance(value, Section):
                yield from value.without_effect(f"{place}{name}.")
            for mark in type(self).model_fields[name].metadata:
                if isinstance(mark, NoEffect):
                    yield f"{place}{name}", mark.why


def _explained(error: ValidationError, name: str) -> ArgumentError:
    messages = []
    for fault in error.errors():
        place = ".".join([name, *map(str, fault["loc"])])
        if fault["type"] == "missing":
            messages.append(f"{place} is missing; it must be given")
        elif fault["msg"].startswith("Value error, "):
            messages.append(f"{place}: {fault['msg'].removeprefix('Value error, ')}")
        else:
            messages.append(f"{place} was given {shown(fault['input'])}: {fault['msg']}")
    return ArgumentError("; ".join(messages))
