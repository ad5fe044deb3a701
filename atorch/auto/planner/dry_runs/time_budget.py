"""The time limit of a search, the expected seconds of a composition's start, and measurements of earlier searches.

The limit is by rank 0's clock. A start ends with the first step. It copies and splits the model and makes the
optimizer; where parameters are sharded, a process copies its part alone. A compiler compiles every operation of one
repeated block, since equal blocks compile once, or of a whole model without such blocks. Results of earlier
compilations for the same job on this machine are in the compiler's disk cache. Observed starts correct the expected
ones by kind of start.

Calibration: measurements of dry runs are kept for later searches in a JSON file in the user's cache. A file belongs to
one machine: a device, its count, and the versions of the software. It contains at most `KEPT` single measurements, the
newest last, and nothing derived from them; the surrogate model applies them to other compositions and models. Losing
the file only costs further dry runs, so an invalid file gives a warning and is overwritten.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError

from atorch.auto.planner.ranking import compiles
from atorch.auto.strategy import Strategy
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
            logger.warning(
                "the calibration %s is ignored, and a new one begun: it cannot be read: %s", self.path, reason
            )
            return ()
        if file.machine != self.machine:
            logger.warning("the calibration %s is ignored, and a new one begun: it is of another machine", self.path)
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


RESERVED = 0.05  # share of a limit for cleaning up at its end
DEFAULT_S = 90.0  # default limit
DEFAULT_STEPS, DEFAULT_STARTS = 30, 16  # steps of the choice, and starts without compiler, if these take longer


@dataclass
class TimeBudget:
    """Seconds since a search began, and those left of its limit; None: the default, which grows with the step time."""

    limit: float | None = None
    now: Callable[[], float] = time.monotonic
    began: float = field(default=math.nan)
    _default: float = DEFAULT_S

    def __post_init__(self) -> None:
        if math.isnan(self.began):
            self.began = self.now()

    @property
    def seconds(self) -> float:
        return self.now() - self.began

    @property
    def whole(self) -> float:
        return (self._default if self.limit is None else self.limit) * (1 - RESERVED)

    @property
    def left(self) -> float:
        """Seconds left of the limit, less the share for the end; negative if it is over."""
        return self.whole - self.seconds

    def expects(self, step_s: float, start_s: float) -> None:
        """Set the expected seconds of the choice's step, and of a start without compiler, for the default limit."""
        self._default = max(DEFAULT_S, DEFAULT_STEPS * step_s, DEFAULT_STARTS * start_s)


FIRST_STEPS: Mapping[str, float] = {"build": 3.0, "compile": 2.3, "warm": 2.3}
"""Kind of start → steps in it: evaluation, two passes of the verification or one if it compiles, and the first step."""
SPREAD, NOISE = 0.5, 0.3  # standard deviations of the logarithm: of a kind of start on a machine, and of one start


class StartCosts(NamedTuple):
    """Costs of starts on a kind of device."""

    build_s: float
    bytes_per_s: float  # speed of copying parameters
    compile_s: float  # includes the import of the compiler
    op_s: float  # for each compiled operation
    warm: float  # share of a compilation that remains if its results are in the cache


COSTS: Mapping[str, StartCosts] = {
    # An H200 (benchmarks/measured/h200.json): a Llama of 1.1B in fp32 starts in 5 to 8 s. With its blocks of 81
    # operations compiled, and without a copy, the first step ends after 8.6 s.
    "cuda": StartCosts(build_s=2.5, bytes_per_s=1.6e9, compile_s=5.0, op_s=0.045, warm=0.4),
    "cpu": StartCosts(build_s=0.1, bytes_per_s=1e9, compile_s=10.0, op_s=0.5, warm=0.4),
}


@dataclass
class Starts:
    """Expected seconds of the starts of one job."""

    device_type: str
    num_ops: float = 0.0  # operations that a compiler would see
    param_bytes: float = 0.0
    past: Past = Past()  # observations of earlier searches on the machine
    _ratios: dict[str, list[float]] = field(default_factory=dict)  # kind → logarithms of seen over expected

    def __post_init__(self) -> None:
        self._costs = COSTS.get(self.device_type, COSTS["cuda"])
        self._earlier = {observed.methods for observed in self.past.observations if observed.job == self.past.job}
        self._began: set[frozenset[str]] = set()
        for observation in self.past.observations:
            if observation.start_ratio is not None:
                self._ratios.setdefault(observation.start_kind, []).append(math.log(observation.start_ratio))

    def kind(self, strategy: Strategy) -> str:
        """The kind of the strategy's next start: "build"; "compile" if it also compiles; "warm" if from the cache."""
        if not compiles(strategy):
            return "build"
        methods = frozenset(map(repr, strategy))
        return "warm" if methods in self._earlier or methods in self._began else "compile"

    def of_kind(self, kind: str, num_shards: int = 1) -> float:
        """Seconds of a kind of start, without its steps, that copies one of `num_shards` parts of the parameters."""
        return sum(self._parts(kind, num_shards))

    def saw(self, strategy: Strategy, seconds: float, step_s: float) -> tuple[str, float]:
        """Learn from the seconds of a start; returns its kind, and the ratio to the seconds of `COSTS`."""
        kind = self.kind(strategy)
        build_s, compiled_s = self._parts(kind, strategy.num_parameter_shards)
        rest = seconds - FIRST_STEPS[kind] * step_s - (build_s if kind != "build" else 0.0)
        expected = (build_s if kind == "build" else compiled_s) / self._factor(kind)
        ratio = min(10.0, max(0.1, rest / expected))
        self._ratios.setdefault(kind, []).append(math.log(ratio))
        self._began.add(frozenset(map(repr, strategy)))
        return kind, ratio

    def _parts(self, kind: str, num_shards: int) -> tuple[float, float]:
        costs = self._costs
        build_s = (costs.build_s + self.param_bytes / num_shards / costs.bytes_per_s) * self._factor("build")
        if kind == "build":
            return build_s, 0.0
        compiled_s = (costs.compile_s + costs.op_s * self.num_ops) * self._factor(kind)
        return build_s, compiled_s * (costs.warm if kind == "warm" else 1.0)

    def _factor(self, kind: str) -> float:
        """The factor of a kind of start over the table's: the posterior mean of a normal logarithm."""
        ratios = self._ratios.get(kind, [])
        return math.exp(sum(ratios) / (len(ratios) + NOISE**2 / SPREAD**2))
