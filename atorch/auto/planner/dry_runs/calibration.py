"""Calibration: measurements of dry runs on this machine, kept for later searches in a JSON file in the user's cache.

A file belongs to one machine: a device, its count, and the versions of the software. It contains at most `KEPT` single
measurements, the newest last, and nothing derived from them; the surrogate model applies them to other compositions and
models. Losing the file only costs further dry runs, so an invalid file gives a warning and is overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError

from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost
from atorch.errors import ArgumentError
from atorch.files import read_bytes, write
from atorch.files.strict_json import Format, parse
from atorch.logs import logger

FORMAT = Format("calibration", ArgumentError)
KEPT = 128
CalibrationPath = bool | str | os.PathLike[str]  # True: the file of this machine; False: none


class Observation(BaseModel):
    """One measured composition of one job."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    job: str  # see `job_of`
    search: str  # an id; observations of one search were made within minutes of each other
    methods: frozenset[str]  # texts of methods with their settings
    estimate_s: PositiveFloat  # the estimate at that time
    step_s: PositiveFloat
    start_kind: str = ""  # see `time_budget.Starts`
    start_ratio: PositiveFloat | None = None  # seconds of its start over those of `time_budget.COSTS`


@dataclass(frozen=True)
class Past:
    """Measurements of earlier searches on the machine, and the digest of the present job."""

    job: str = ""
    observations: tuple[Observation, ...] = ()


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1] = 1
    machine: Mapping[str, str | int]
    observations: list[Observation]


@dataclass(frozen=True)
class Calibration:
    """The file of one machine."""

    path: Path
    machine: Mapping[str, str | int]

    @classmethod
    def of(cls, source: CalibrationPath, cluster: ClusterSpec, versions: Mapping[str, str]) -> Calibration | None:
        """The calibration of `source` on this machine: a path, True for the user's cache directory, False for None."""
        if source is False:
            return None
        machine = _machine(cluster, versions)
        if source is not True:
            return cls(Path(source), machine)
        import platformdirs

        name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:12]
        folder = platformdirs.user_cache_path("atorch", appauthor=False)
        return cls(folder / "calibration" / f"{name}.json", machine)

    def read(self) -> tuple[Observation, ...]:
        """The measurements on this machine, the oldest first; none without a valid file."""
        try:
            if not self.path.exists():
                return ()
            data = read_bytes(self.path, FORMAT)
            parse(data, FORMAT)
            file = _File.model_validate_json(data)
        except (ArgumentError, OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            logger.warning("the calibration %s is ignored and begun anew, it cannot be read: %s", self.path, reason)
            return ()
        if file.machine != self.machine:
            logger.warning("the calibration %s is ignored and begun anew, it is of another machine", self.path)
            return ()
        return tuple(file.observations)

    def add(self, observations: Sequence[Observation]) -> None:
        """Add observations to the file; they replace earlier ones of the same compositions and jobs."""
        if not observations:
            return
        kept = {(observation.job, observation.methods): observation for observation in self.read()}
        for observation in observations:
            kept.pop((observation.job, observation.methods), None)  # the newest come last
            kept[observation.job, observation.methods] = observation
        file = _File(machine=self.machine, observations=list(kept.values())[-KEPT:])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write(self.path, file.model_dump_json(indent=1) + "\n", FORMAT)  # other jobs may be reading it
        except (ArgumentError, OSError) as error:
            logger.warning("no calibration is kept, so that the next search has to measure as much: %s", error)


def job_of(start: Cost) -> str:
    """A digest of the traced plain training: equal for equal models, shapes and batches."""
    return hashlib.sha256(repr((start.batch_size, start.segments)).encode()).hexdigest()[:16]


def _machine(cluster: ClusterSpec, versions: Mapping[str, str]) -> dict[str, str | int]:
    """Facts that identify this machine: if one differs, times may differ."""
    return {
        **versions,
        "device": cluster.device.name,
        "num_nodes": cluster.num_nodes,
        "devices_per_node": cluster.devices_per_node,
        "cpus": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }
