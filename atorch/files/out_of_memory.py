"""Messages about exhausted memory in a log, and snapshots of torch's CUDA allocator, read as plain data.

A snapshot is a pickle. It is read opcode by opcode, into dicts, lists, tuples, strings and numbers alone: nothing here
can look up a name, so nothing in the file can run.
"""

from __future__ import annotations

import pickletools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from atorch.errors import ArgumentError
from atorch.files import FileKind

LOG = FileKind("log or snapshot", ArgumentError, 2**29)
NO_FRAMES = "no Python frames, mostly backward"
ELSEWHERE = "elsewhere"
Frame = tuple[str, int, str, str]  # file, line, function, code

_MAX_LINE, _MAX_FRAMES, _MAX_MESSAGES = 2000, 200, 1000
_MAX_ENTRIES, _MAX_DEVICES = 5_000_000, 64
_UNITS: Mapping[str, int] = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d{1,20}(?:\.\d{1,9})?) (bytes|[KMGT]iB)"
_FIGURES: Mapping[str, re.Pattern[str]] = {
    "asked": re.compile(f"Tried to allocate {_SIZE}"),
    "total": re.compile(f"total capaci?ty of {_SIZE}|{_SIZE} total capacity"),
    "free": re.compile(f"of which {_SIZE} is free|{_SIZE} free;"),
    "process": re.compile(f"this process has {_SIZE} memory in use"),
    "allowed": re.compile(f"{_SIZE} allowed"),
    "allocated": re.compile(f"{_SIZE} (?:is allocated by PyTorch|already allocated)"),
    "reserved": re.compile(f"{_SIZE} reserved in total by PyTorch"),
    "unallocated": re.compile(f"{_SIZE} (?:is reserved by PyTorch but unallocated|cached)"),
}
_DEVICE = re.compile(r"GPU (\d{1,6})")
_OTHER = re.compile(rf"Process (\d{{1,10}}) has {_SIZE} memory in use")
_KINDS: Sequence[tuple[str, re.Pattern[str]]] = (
    ("device", re.compile(r"(?:CUDA|HIP|XPU) out of memory")),
    ("nccl", re.compile(r"NCCL WARN .*(?:out of memory|Failed to CUDA \w+ (?P<bytes>\d{1,20}) bytes)")),
    ("bitsandbytes", re.compile(r"Error out of memory at line \d+ in file")),
    ("library", re.compile(r"CUDA (?:driver )?error: out of memory|cudaErrorMemoryAllocation|_STATUS_ALLOC_FAILED")),
    ("host", re.compile(r"DefaultCPUAllocator: .*you tried to allocate (?P<bytes>\d{1,20}) bytes")),
    ("killed", re.compile(r"[Oo]ut of memory: Killed process \d+|oom[-_]kill(?:er)?\b|OOMKilled|: Out Of Memory$")),
    (
        "signal",
        re.compile(r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\) received|Signals\.SIGKILL|exit code 137|signal: Killed"),
    ),
)
_RANK = re.compile(r"\[rank ?(\d{1,6})\]|^(\d{1,6}): |\b(?:local_)?rank\s*: (\d{1,6})", re.IGNORECASE)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?")
_FRAME = re.compile(r'File "([^"]{1,500})", line (\d{1,9}), in (\S{1,200})|(\S{1,200}\.py):(\d{1,9}) in (\w{1,200})')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|/torch/|^<|^\?|\.(?:c|cc|cpp|cu|h|so)$")

_LOGITS = re.compile(r"(?:lm_head|compute_logits)\(")

# Moments by file and function of a frame; of one frame, the first that matches.
_MOMENTS: Sequence[tuple[str, re.Pattern[str]]] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        (
            "model load",
            r":(?:from_pretrained|_load_state_dict_into\w*|reset_parameters|set_module_tensor_to_device):"
            r"|/nn/modules/module\.py:(?:_apply|convert|to|cuda|half|bfloat16):|/nn/modules/\w+\.py:__init__:",
        ),
        ("checkpoint load", r"torch/serialization\.py|safetensors|distributed/checkpoint/|:load_(?:state|checkpoint)"),
        ("all-gather", r":\w*(?:all_?gather|unshard)\w*:"),
        ("optimizer step", r"/optim(?:izers?)?/|:_maybe_opt_step:|runtime/zero/stage\w*\.py:step:"),
        ("backward pass", r":(?:_engine_run_)?backward:"),
        ("loss", r"cross_entropy|/loss\.py|:ForCausalLMLoss:"),
        ("forward pass", r":(?:forward|_call_impl|generate):|/nn/(?:modules|functional)"),
    )
)  # fmt: skip


def moment(frames: Sequence[Frame]) -> str:
    """The part of a step in which frames, the innermost first, allocate."""
    found = []
    for file, _, function, _ in frames:
        text = f"{file}:{function}:".replace("\\", "/")
        found += [name for name, pattern in _MOMENTS if pattern.search(text)][:1]
    if not found:
        return ELSEWHERE if frames else NO_FRAMES
    first, step = found[0], found.index("optimizer step") if "optimizer step" in found else len(found)
    if first == "checkpoint load" and "model load" in found:
        return "model load"
    if first in ("forward pass", "loss") and "backward pass" in found[:step]:  # what is computed again
        return "backward pass"
    return "loss" if first == "forward pass" and any(_LOGITS.search(frame[3]) for frame in frames) else first


def place(frames: Sequence[Frame]) -> str:
    """The innermost line outside libraries; "" if there is none."""
    own = (frame for frame in frames if not _LIBRARY.search(frame[0].replace("\\", "/")))
    return _shown(next(own, None))


def _shown(frame: Frame | None) -> str:
    """A frame in a line, without what a terminal would obey."""
    file, line, function, code = frame or ("", 0, "", "")
    text = f"{file}:{line} in {function}{f': {code}' if code else ''}" if file else ""
    return "".join(filter(str.isprintable, text))


def read_log(text: str) -> list[dict[str, Any]]:
    """Messages about exhausted memory in a log, the first in time first; empty if there are none.

    Each has its `kind`, `text`, `rank`, `moment` and `place`, and sizes in bytes, as far as the log says them.
    """
    lines = [line[:_MAX_LINE] for line in text.splitlines()]
    frames: dict[str | None, list[Frame]] = {}
    found: list[dict[str, Any]] = []
    rank: str | None
    for number, line in enumerate(lines):
        named = _RANK.search(line) or (_RANK.search(lines[number - 1]) if "exitcode" in line and number else None)
        rank = next(filter(None, named.groups())) if named else None
        if "Traceback (most recent call last)" in line:
            frames[rank] = []
        elif frame := _FRAME.search(line):
            file, at, function = (part for part in frame.groups() if part is not None)
            code = lines[number + 1] if number + 1 < len(lines) else ""
            code = "" if not frame[1] or _FRAME.search(code) else re.sub(r"^(?:\[rank\d+\]:|\d+:)", "", code).strip()
            frames.setdefault(rank, []).append((file, int(at), function, code[:120]))
        for kind, pattern in _KINDS if len(found) < _MAX_MESSAGES else ():
            if match := pattern.search(line):
                stack = frames.get(rank, [])[: -_MAX_FRAMES - 1 : -1]
                more = (
                    " ".join(_continued(lines[number + 1 : number + 8]))
                    if kind == "device" and "llocated" not in line
                    else ""
                )
                found.append(_message(kind, match, f"{line} {more}", rank, stack))
                break
    found = list({(item["rank"], item["kind"], item["text"]): item for item in reversed(found)}.values())[::-1]
    if all(item["time"] for item in found):
        found.sort(key=lambda item: item["time"])
    return sorted(found, key=lambda item: item["kind"] == "signal")  # signals last: they follow from another failure


def _continued(lines: Sequence[str]) -> Iterator[str]:
    """Lines that go on with a message, which a terminal has wrapped."""
    for line in lines:
        if _FRAME.search(line) or "Traceback" in line or "out of memory" in line or not line.strip():
            return
        yield line.strip()


def _message(kind: str, match: re.Match[str], text: str, rank: str | None, frames: Sequence[Frame]) -> dict[str, Any]:
    stamp, device = _TIME.search(text), _DEVICE.search(text)
    sizes = {name: _size(figure) for name, pattern in _FIGURES.items() if (figure := pattern.search(text))}
    if wanted := match.groupdict().get("bytes"):
        sizes["asked"] = int(wanted)
    total, allocated = sizes.get("total"), sizes.get("allocated", 0)
    if total and sizes.get("process", 0) > total:  # some drivers do not tell, and torch prints 2⁶⁴
        del sizes["process"]
    if "reserved" in sizes:
        sizes.setdefault("unallocated", max(0, sizes["reserved"] - allocated))
    if total and "free" in sizes and "allowed" not in sizes:
        mine = sizes.get("process", allocated + sizes.get("unallocated", 0))
        sizes["elsewhere"] = max(0, total - sizes["free"] - mine)
    return {
        "kind": kind,
        "text": text.strip()[:600],
        "time": stamp[0].replace("_", "T").replace(" ", "T") if stamp else None,
        "rank": None if rank is None else int(rank),
        "device": int(device[1]) if device else None,
        "moment": moment(frames) if frames and kind not in ("killed", "signal") else None,
        "place": place(frames) if kind not in ("killed", "signal") else "",
        "processes": {other[1]: _size(other, 2) for other in _OTHER.finditer(text)},
        **sizes,
    }


def _size(match: re.Match[str], start: int = 1) -> int:
    number, unit = (part for part in match.groups()[start - 1 :] if part is not None)
    return int(float(number) * _UNITS[unit])


_VALUES = re.compile(r"BININT[12]?|LONG[14]|BINFLOAT|(?:SHORT_)?BINUNICODE8?")
_CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: Mapping[str, Any] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
_GATHERED: Mapping[str, int] = {  # how many values an opcode takes; 0: all since the last mark
    **{"APPENDS": 0, "SETITEMS": 0, "TUPLE": 0, "APPEND": 1, "SETITEM": 2, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
}
_UNREADABLE = (ValueError, IndexError, KeyError, AttributeError, TypeError, OverflowError, MemoryError)


def plain_pickle(data: bytes) -> Any:
    """The value of a pickle of dicts with strings as keys, lists, tuples, strings, numbers, booleans and None.

    Raises:
        ArgumentError: it holds anything else, or is damaged.
    """
    stack, marks, memo = list[Any](), list[int](), dict[Any, Any]()
    try:
        for opcode, arg, _ in pickletools.genops(data):
            name = opcode.name
            if name in _CONSTANTS or name in _EMPTY:
                stack.append(_EMPTY[name]() if name in _EMPTY else _CONSTANTS[name])
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[arg])
            elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                memo[len(memo) if arg is None else arg] = stack[-1]
            elif name == "MARK":
                marks.append(len(stack))
            elif name in _GATHERED:
                count = _GATHERED[name]
                _gather(name, stack, len(stack) - count if count else marks.pop())
            elif name == "STOP":
                return stack.pop()
            elif _VALUES.fullmatch(name) and not (type(arg) is int and abs(arg) >= 2**64):
                stack.append(arg)
            elif name not in ("PROTO", "FRAME"):
                what = f"{name} {arg[:80]}" if type(arg) is str else name
                raise ArgumentError(
                    f"the snapshot holds what torch's allocator does not write ({what}), and nothing of it was run; "
                    "give a file of torch.cuda.memory._dump_snapshot"
                )
    except _UNREADABLE as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"the snapshot is damaged: {error}"[:200]) from None
    raise ArgumentError("the snapshot is damaged: it has no end")


def _gather(name: str, stack: list[Any], start: int) -> None:
    """Replace the values from `start` on by a tuple, or put them into the container before them."""
    if start < 0 or start > len(stack):
        raise ValueError("a value is missing")
    items = stack[start:]
    del stack[start:]
    if name.startswith("TUPLE"):
        stack.append(tuple(items))
    elif name.startswith("APPEND"):
        stack[-1].extend(items)
    elif type(stack[-1]) is dict and all(type(key) is str for key in items[::2]):
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    else:
        raise ValueError("a key is no string")


def read_snapshot(data: bytes) -> dict[str, Any]:
    """Live bytes of the device that ran out of memory, or else of the fullest, by moment, at the end and at the peak.

    Raises:
        ArgumentError: it is no snapshot.
    """
    snapshot = plain_pickle(data)
    try:
        segments, traces = snapshot["segments"], snapshot.get("device_traces", [])
        if sum(1 + len(segment["blocks"]) for segment in segments) + sum(map(len, traces)) > _MAX_ENTRIES:
            raise ArgumentError(f"the snapshot has more than {_MAX_ENTRIES:,} blocks and events; record fewer")
        devices = {int(segment.get("device", 0)) for segment in segments} | {
            number for number, trace in enumerate(traces) if trace
        }
        if len(devices) > _MAX_DEVICES:
            raise ArgumentError(f"the snapshot has {len(devices):,} devices; a node has fewer")
        found = [_of_device(snapshot, number, traces[number] if number < len(traces) else []) for number in devices]
        return max(found, key=lambda item: ("asked" in item, item["allocated"]))
    except _UNREADABLE as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("it is a pickle, and no snapshot of torch.cuda.memory._dump_snapshot") from None


def _of_device(snapshot: Any, device: int, trace: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    live: dict[int, tuple[int, Any]] = {}
    reserved = stuck = 0
    for segment in snapshot["segments"]:
        if int(segment.get("device", 0)) != device:
            continue
        address, active = int(segment["address"]), 0
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                live[int(block.get("address", address))] = (
                    int(block.get("requested_size", block["size"])),
                    _history(block),
                )
                active += int(block["size"])
            address += int(block["size"])
        reserved += int(segment["total_size"])
        stuck += int(segment["total_size"]) - active if active else 0
    seen: dict[int, tuple[str, str]] = {}
    failed: dict[str, Any] = {}
    if asked := next((entry for entry in trace if entry["action"] == "oom"), None):
        frames = _frames(asked.get("frames"))
        failed = {"asked": int(asked["size"]), "free": int(asked.get("device_free", 0))}
        failed |= {"moment": moment(frames), "place": place(frames)}
    return {
        "kind": "snapshot",
        "device": device,
        **failed,
        "allocated": sum(size for size, _ in live.values()),
        "unallocated": stuck,
        "reserved": reserved,
        "events": len(trace),
        "at_end": _summed(live, seen),
        "at_peak": _summed(_at_peak(live, trace), seen),
    }


def _at_peak(live: Mapping[int, tuple[int, Any]], trace: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, Any]]:
    """The allocations at the moment of the recorded events at which most bytes were live."""
    events = [entry for entry in trace if entry["action"] in ("alloc", "free_completed")]
    signed = [int(entry["size"]) * (1 if entry["action"] == "alloc" else -1) for entry in events]
    sums = list(accumulate(signed, initial=0))
    peak = max(range(len(sums)), key=lambda index: (sums[index], index))
    made: dict[int, Any] = {}
    for entry in events[:peak]:  # what a later event frees was allocated where it says here
        if entry["action"] == "alloc":
            made[int(entry["addr"])] = entry.get("frames")
        else:
            made.pop(int(entry["addr"]), None)
    there = dict(live)
    for entry in reversed(events[peak:]):
        address = int(entry["addr"])
        if entry["action"] == "alloc":
            there.pop(address, None)
        else:
            there[address] = int(entry["size"]), made.get(address)
    return there


def _history(block: Mapping[str, Any]) -> Any:
    past = block.get("history")
    return block["frames"] if "frames" in block else past[0].get("frames") if past else None


def _frames(frames: Any) -> list[Frame]:
    listed = [(item["filename"], int(item["line"]), item["name"], "") for item in (frames or ())[:_MAX_FRAMES]]
    if any(type(file) is not str or type(name) is not str for file, _, name, _ in listed):
        raise TypeError  # what is nested may be far longer as text than in the file
    return listed


def _summed(live: Mapping[int, tuple[int, Any]], seen: dict[int, tuple[str, str]]) -> dict[str, Any]:
    """Bytes in all, by moment, and by line; `seen` has the moment and the line of frames by their identity."""
    moments, sizes, counts = Counter[str](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for size, frames in live.values():
        if id(frames) not in seen:
            listed = _frames(frames)
            seen[id(frames)] = moment(listed), place(listed) or _shown(next(iter(listed), None))
        what = seen[id(frames)]
        moments[what[0]] += size
        sizes[what] += size
        counts[what] += 1
    largest = sizes.most_common(50)
    return {
        "bytes": moments.total(),
        "moments": dict(moments.most_common()),
        "largest": [
            {"moment": what[0], "place": what[1], "bytes": size, "count": counts[what]} for what, size in largest
        ],
    }
