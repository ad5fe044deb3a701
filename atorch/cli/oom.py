"""`atorch explain-oom`: the reason why a job ran out of memory, from its log or a snapshot, beside its plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from atorch.cli.clusters import CLUSTER_HELP, GPU_HELP
from atorch.cli.trainers import Given, explained
from atorch.errors import ArgumentError
from atorch.files import check_target, read_bytes, write
from atorch.files.out_of_memory import LOG, read_log, read_snapshot
from atorch.units import format_bytes

VERSION = 1  # of the form of --json
CONFIGURATION = "The job's configuration or command, as for atorch plan; its plan is then printed, too."
NOTABLE = 0.02  # share of a device's memory

_HAPPENED: Mapping[str, str] = {
    "device": "the device's memory ran out",
    "nccl": "NCCL found no memory on the device, outside torch's allocator",
    "bitsandbytes": "bitsandbytes found no memory on the device, outside torch's allocator",
    "library": "a CUDA library found no memory on the device, outside torch's allocator",
    "host": "the host's memory ran out",
    "killed": "the host's memory ran out: the kernel killed a process",
    "signal": "a process got signal 9, mostly from the kernel when the host's memory runs out; see `dmesg`",
    "snapshot": "a snapshot of the allocator",
}
_OUTSIDE = "leave torch's allocator less: torch.cuda.set_per_process_memory_fraction, or a smaller micro-batch"
_ADVICE: Mapping[str | None, str] = {
    "model load": "not even the parameters fit: 16 bits, fsdp from the meta device, or more devices",
    "checkpoint load": "memory has the file's tensors and the model's: torch.load with map_location='cpu', mmap=True",
    "all-gather": "a whole unit of shards is gathered at once: wrap smaller units, or prefetch fewer",
    "optimizer step": "the first step makes the optimizer's states: zero1 or fsdp, 8-bit states, or offload",
    "backward pass": "gradients join the activations here: checkpoint, a smaller micro-batch, or zero2 and fsdp",
    "loss": "logits take tokens × vocabulary, in fp32 often twice: a chunked cross-entropy, or a smaller micro-batch",
    "forward pass": "activations grow here: checkpoint, or a smaller micro-batch or sequence",
    "nccl": _OUTSIDE,
    "bitsandbytes": _OUTSIDE,
    "library": _OUTSIDE,
    "host": "fewer workers of loaders, less offload, or load the weights once per node and by mmap",
}


def explain_oom(
    source: Annotated[str, typer.Argument(metavar="LOG|SNAPSHOT", help="A log, - for standard input, or a snapshot.")],
    named: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model, as for atorch plan.")] = None,
    explain: Annotated[str | None, typer.Option(metavar="FILE|COMMAND", help=CONFIGURATION)] = None,
    cluster: Annotated[list[str] | None, typer.Option(metavar="TEXT", help=CLUSTER_HELP)] = None,
    gpu: Annotated[list[str] | None, typer.Option(metavar="NAME", help=GPU_HELP)] = None,
    batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples of a step on all devices.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples of one pass.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of a sample.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of each table.")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the answer as JSON.")] = None,
) -> None:
    """Explain why a job ran out of memory: the moment, the line, what uses the memory, and what to change.

    SNAPSHOT is a file of torch.cuda.memory._dump_snapshot, which is not run. With --explain, the job's plan is printed,
    too, with the smallest change that makes it fit.
    """
    from rich.console import Console

    from atorch.report.answer import explanation_report

    if explain is None and (named or cluster or gpu or batch or micro_batch or seq):
        raise ArgumentError("give --explain, the configuration or the command of the job, to see its plan, too")
    if json_file is not None:
        check_target(json_file)
    found = _found(source)
    data: dict[str, Any] = {"version": VERSION, "source": source, "out_of_memory": found}
    console = Console(highlight=False)
    console.print(_report(found, top))
    if explain is not None:
        given = Given(explain, named, None, {}, cluster, gpu, micro_batch, seq, {"global_batch": batch})
        data["plan"], title = _planned(given, found[0])
        console.print("", explanation_report(data["plan"], title, max_rows=top))
        console.print(_least(data["plan"]), markup=False)
    if json_file is not None:
        write(json_file, json.dumps(data, allow_nan=False) + "\n")
        typer.echo(f"Wrote {json_file}: the answer as data")


def _found(source: str) -> Sequence[Mapping[str, Any]]:
    from atorch.report.text import status_line

    data = sys.stdin.buffer.read(LOG.max_bytes) if source == "-" else read_bytes(source, LOG)
    with status_line(f"reading {source}"):
        if data[:1] == b"\x80":  # no character of UTF-8 begins so, and every pickle of torch's does
            return [read_snapshot(data)]
        found = read_log(data.decode(errors="replace"))
    if not found:
        raise ArgumentError(
            f"{source} has no message about exhausted memory of CUDA, HIP, NCCL, bitsandbytes or the kernel; give the "
            "log of the process that failed first"
        )
    return found


def _planned(given: Given, found: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The explanation of the job's configuration; if it should fit, with the changes that save what was missing."""
    data, title = explained(given)
    if data["fits"]:
        lack = max(1, found.get("asked", 0) - found.get("free", 0))
        reserve = 1 - (data["estimate"]["peak_bytes"] - lack) / data["memory_bytes"]
        less = replace(given, wanted={**given.wanted, "reserve": min(max(reserve, 0), 0.99)})
        data["changes"] = explained(less)[0]["changes"]
    return data, title


def _least(plan: Mapping[str, Any]) -> str:
    if not plan["changes"]:
        return "No single change makes room; see the best plan above."
    change = plan["changes"][0]
    return f"Least change: {change['change']}, which saves {format_bytes(change['saves_bytes'])} a device."


def _report(found: Sequence[Mapping[str, Any]], top: int) -> Any:
    from rich.console import Group
    from rich.text import Text

    from atorch.report.text import named, table

    parts: list[Any] = [named(_words(found), bold=("what", "do"))]
    for when, key in (("At the end", "at_end"), ("At the peak of the recorded events", "at_peak")):
        held = found[0].get(key)
        if held and not (key == "at_peak" and held == found[0]["at_end"]):
            shares = ", ".join(f"{name} {format_bytes(size)}" for name, size in held["moments"].items())
            parts.append(Text(f"{when}: {format_bytes(held['bytes'])}. Allocated in: {shares or 'nothing'}."))
            most = held["largest"][:top]
            rows = [(item["moment"], item["place"], format_bytes(item["bytes"]), str(item["count"])) for item in most]
            parts.append(table("Largest by line", ("moment", "line", ">bytes", ">tensors"), rows))
    return Group(*parts)


def _words(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(name, words) about the first message or the snapshot."""
    first = found[0]
    size = {name: format_bytes(value) for name, value in first.items() if isinstance(value, int)}
    who = [f"{name} {first[key]}" for name, key in (("rank", "rank"), ("GPU", "device")) if first.get(key) is not None]
    what = _HAPPENED["device" if first["kind"] == "snapshot" and "asked" in first else first["kind"]]
    when = f", in the {first['moment']}" if first.get("moment") in _ADVICE else ""
    yield "what", f"{', '.join(who)}{': ' if who else ''}{what}{when}"
    if first.get("place"):
        yield "line", first["place"]
    if "asked" in first:
        yield "asked", size["asked"] + (f", and {size['free']} were free" if "free" in size else "")
    if "total" in first:
        yield "device", size["total"] + (f", {size['process']} in this process" if "process" in size else "")
    if "allocated" in first:
        yield "torch", f"{size['allocated']} in tensors, {size.get('unallocated', 'nothing')} reserved but unallocated"
    if len(found) > 1:
        ranks = sorted({item["rank"] for item in found if item["rank"] is not None})
        named = f", in all of ranks {', '.join(map(str, ranks))}" if ranks else ""
        yield "more", f"{len(found) - 1:,} more in this log{named}; the first in time counts"
    for words in _advice(first, size):
        yield "do", words


def _advice(first: Mapping[str, Any], size: Mapping[str, str]) -> Iterator[str]:
    if "asked" in first and first.get("unallocated", 0) >= first["asked"]:
        yield (
            f"{size['unallocated']} are reserved in pieces, enough for what was asked: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    others = first.get("elsewhere", 0)
    if others > NOTABLE * first.get("total", 0):
        named = ", ".join(f"{format_bytes(held)} by process {pid}" for pid, held in first["processes"].items())
        whose = "others" if "process" in first else "others, the driver and what is not torch's"
        yield f"{size['elsewhere']} are held by {whose}{f' ({named})' if named else ''}: see nvidia-smi, and end them"
    if "allowed" in first:
        yield f"set_per_process_memory_fraction allows {size['allowed']} only: raise it"
    if first.get("asked", 0) > first.get("total", float("inf")):
        yield "one tensor is larger than the device: look at the line's shapes"
    kind = first["kind"]
    advice = _ADVICE.get("host" if kind in ("killed", "signal") else kind) or _ADVICE.get(first.get("moment"))
    if advice:
        yield advice
