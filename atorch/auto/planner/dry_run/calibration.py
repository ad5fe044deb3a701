"""Dry runs' measurements on this machine, kept for its next searches: a small JSON file in the user's cache directory.

A file belongs to one machine: a device, its count, and the versions that computed on it. It holds single measurements
and nothing derived from them, the newest last and at most `KEPT`; what they say of other compositions and of other
models is the guide's to judge. Losing the file costs dry runs and nothing else, so whatever is wrong with it is told
and then written over.
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
from atorch.files.access import read_bytes, write
from atorch.files.strict_json import Format, parse
from atorch.logs import logger

FORMAT = Format("calibration", ArgumentError)
KEPT = 128
CalibrationPath = bool | str | os.PathLike[str]  # True: the file of this machine; False: none


class Observation(BaseModel):
    """One measured composition of one job."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    job: str  # see `job_of`
    search: str  # those of one search were measured within minutes of each other
    methods: frozenset[str]  # each in its settings
    estimate_s: PositiveFloat  # what arithmetic said then
    step_s: PositiveFloat
    start_kind: str = ""  # see `starts`
    start_ratio: PositiveFloat | None = None  # seconds of its start over what the table of starts says


@dataclass(frozen=True)
class Past:
    """Measurements of earlier searches on the machine, and whose search this is."""

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
        """The calibration that `source` means on this machine: True its file in the cache directory, False none."""
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
        """The measurements on this machine, the oldest first; nothing where there is no file that tells."""
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
        """Keep these too; what was known of the same compositions of the same jobs makes way for them."""
        if not observations:
            return
        known = {(each.job, each.methods): each for each in self.read()}
        for each in observations:
            known.pop((each.job, each.methods), None)  # the newest come last
            known[each.job, each.methods] = each
        file = _File(machine=self.machine, observations=list(known.values())[-KEPT:])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write(self.path, file.model_dump_json(indent=1) + "\n", FORMAT)  # other jobs may be reading it
        except (ArgumentError, OSError) as error:
            logger.warning("no calibration is kept, so that the next search has to measure as much: %s", error)


def job_of(start: Cost) -> str:
    """A digest of plain training as traced: equal for equal models, shapes and batches."""
    return hashlib.sha256(repr((start.batch_size, start.segments)).encode()).hexdigest()[:16]


def _machine(cluster: ClusterSpec, versions: Mapping[str, str]) -> dict[str, str | int]:
    """Facts that make this a machine of its own: where one of these differs, times are expected to."""
    return {
        **versions,
        "device": cluster.device.name,
        "num_nodes": cluster.num_nodes,
        "devices_per_node": cluster.devices_per_node,
        "cpus": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }
