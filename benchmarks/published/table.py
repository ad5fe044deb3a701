"""A table of published runs: the description of each run and its measurements, as text until a caller reads them.

Columns up to `attn`, and from `framework` on, describe a run; measurements are kept apart. Of notes, only "LoRA=Yes",
"AsyncTP", "shard group=8" and "torchtitan version: 0.0.2" are read, where no columns give these. People write tables: a
number may be "8k" or "1,024", a column may be missing. An unreadable or implausible value is no number, and the error
says so.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atorch.errors import ArgumentError

GIVEN = (
    *("row_id", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "arch"),
    *("hardware", "gpu_mem_gb", "gpus_per_node", "n_gpus", "dp", "fsdp", "zero", "tp", "sp", "pp", "vpp", "cp", "ep"),
    *("micro_batch", "grad_accum", "global_batch", "precision", "ckpt", "compile", "attn", "framework", "adapters"),
    "tp_overlap",  # tensor ranks communicate during the products that use or produce the data
    "zero_group",  # neighbours that ZeRO shards over, or all
)
MEASURED = ("step_time_s", "tok_s_gpu", "peak_mem_gib", "mem_metric", "status")
_BESIDE = ("source", "source_file", "notes", "job")
_ADAPTERS = re.compile(r"\b(q?lora|dora)\s*[=:]\s*(?:yes|true|on|\d+)\b", re.IGNORECASE)
_ASYNCHRONOUS = re.compile(r"\basync(hronous)?[-_ ]?(tp\b|tensor parallel)", re.IGNORECASE)
_VERSION = re.compile(r"\btorchtitan version:? `?(\d[\d.]*)", re.IGNORECASE)  # below the last of some headings
_SHARD_GROUP = re.compile(r"\bshard group\s*=\s*(all|\d+)\b", re.IGNORECASE)

UNKNOWN = ("", "none", "n/a", "na", "nan", "null", "-", "–", "—", "?", "unknown", "not stated")
BLANK = (*UNKNOWN, "no", "false", "off", "0", "0.0", "notchosen")
"""Words for an unused or unknown feature."""

_NUMBER = re.compile(
    r"[~≈]?\s*(?P<value>[\d,]*\d\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*(?P<kilo>k)?\s*(?:b|gb|gib|tokens|layers|gpus)?", re.ASCII
)
_MOST: Mapping[str, float] = {
    # Limits of counts, far beyond any real run, to catch typing errors.
    "layers": 4096, "hidden": 2**18, "heads": 4096, "kv_heads": 4096, "ffn": 2**20, "vocab": 2**23, "seq_len": 2**26,
    "gpus_per_node": 1024, "n_gpus": 2**20, "dp": 2**20, "tp": 4096, "pp": 4096, "vpp": 4096, "cp": 4096, "ep": 4096,
}  # fmt: skip
_MOST_ELSE = 1e9


@dataclass(frozen=True)
class Row:
    """A run as published: texts, blank where nothing was published."""

    given: Mapping[str, str]
    measured: Mapping[str, str]
    publisher: str = ""  # source of the run
    source: str = ""
    name: str = ""  # of the job, if the run is a good answer to one
    knows_runs: bool = True  # traits of its framework that were read off published runs may be used

    @property
    def row_id(self) -> str:
        """The run's name."""
        return self.given["row_id"]

    def text(self, column: str) -> str:
        """The text of a column in lower case."""
        return self.given.get(column, "").strip().lower()

    def number(self, column: str) -> float | None:
        """The number in a column; None if it is blank.

        Raises:
            ArgumentError: it is no number, or an implausible one.
        """
        return _number(self.given.get(column, ""), column)

    def told(self, column: str) -> float | None:
        """`number`, but None in place of an error."""
        try:
            return self.number(column)
        except ArgumentError:
            return None

    def result(self, column: str) -> float | None:
        """A measured number; None unless it is a number above 0."""
        try:
            return _number(self.measured.get(column, ""), column) or None
        except ArgumentError:
            return None

    @property
    def status(self) -> str:
        """End of the run: "ok", "oom", "crash_or_oom", or the table's word; without one, a timed run is ok."""
        words = self.measured.get("status", "").strip().lower()
        if words in UNKNOWN:
            return "ok" if self.result("step_time_s") or self.result("tok_s_gpu") else ""
        if words in ("ok", "success", "succeeded", "done", "completed", "pass", "passed", "ran"):
            return "ok"
        return "oom" if words in ("oom", "out of memory", "out-of-memory", "cuda oom", "out_of_memory") else words


def read_rows(path: Path) -> list[Row]:
    """The rows of a table; unknown columns are ignored. A row without a name is named by its place.

    Raises:
        ArgumentError: the file cannot be read, or has none of the columns.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
            lines = [
                {name: (line.get(name) or "").strip() for name in (*GIVEN, *MEASURED, *_BESIDE)} for line in reader
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError(f"{path} is not read: {error}; give a table in CSV") from error
    if not set(reader.fieldnames) & set(GIVEN):
        raise ArgumentError(f"{path} has none of the columns {', '.join(GIVEN)}; its first line names its columns")
    for line in lines:
        found = _ADAPTERS.search(line["notes"])
        line["adapters"] = line["adapters"] or (found[1] if found else "")
        line["tp_overlap"] = line["tp_overlap"] or ("yes" if _ASYNCHRONOUS.search(line["notes"]) else "")
        found = _VERSION.search(line["notes"].rpartition("####")[2])
        line["framework"] += f" (torchtitan {found[1]})" if found else ""
        found = _SHARD_GROUP.search(line["notes"])
        line["zero_group"] = line["zero_group"] or (found[1] if found else "")
    return [
        Row(
            {name: line[name] for name in GIVEN} | {"row_id": line["row_id"] or f"{path.stem}-{place}"},
            {name: line[name] for name in MEASURED},
            publisher=_publisher(line) or path.stem,
            source=line["source"],
            name=line["job"],
        )
        for place, line in enumerate(lines, 1)
    ]


def _publisher(line: Mapping[str, str]) -> str:
    """The repository at the start of `source_file`, or the part of `source` before a comma."""
    repository, colon, _ = line["source_file"].partition(":")
    return repository if colon else line["source"].partition(",")[0]


def _number(text: str, column: str) -> float | None:
    words = text.strip().lower()
    if words in UNKNOWN:
        return None
    found = _NUMBER.fullmatch(words)
    if found is None:
        raise ArgumentError(f"{column} is {text!r}; it is a number of at least 0, or blank")
    value = float(found["value"].replace(",", "")) * (1024 if found["kilo"] else 1)
    if value > _MOST.get(column, _MOST_ELSE):
        raise ArgumentError(f"{column} is {text!r}; no more than {_MOST.get(column, _MOST_ELSE):g} is believed")
    if column in _MOST and value != int(value):
        raise ArgumentError(f"{column} is {text!r}; it is a whole number")
    return value
