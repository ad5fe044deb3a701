"""Messages about exhausted memory in logs, and snapshots of the allocator, which run nothing."""

import contextlib
import os
import pickle
import random
import time

import pytest

from atorch.errors import ArgumentError
from atorch.files.out_of_memory import NO_FRAMES, plain_pickle, read_log, read_snapshot

GiB, MiB = 2**30, 2**20
SITE = "/usr/lib/python3.10/site-packages"


def gib(number: float) -> int:
    return int(number * GiB)


# (where it was published, the message, what is read)
MESSAGES = [
    (
        "pytorch/pytorch#16417",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of "
        "23.65 GiB of which 11.06 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB memory in use. "
        "Of the allocated memory 22.90 GiB is allocated by PyTorch, and 194.87 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting …",
        {"kind": "device", "asked": 22 * MiB, "total": gib(23.65), "process": gib(23.6), "allocated": gib(22.9)},
    ),
    (
        "Synthintel0/MyGirlGPT#11",  # torch 2.1 wrote capacty
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total capacty of "
        "4.00 GiB of which 41.56 MiB is free. Including non-PyTorch memory, this process has 3.44 GiB memory in use. "
        "Of the allocated memory 2.58 GiB is allocated by PyTorch, and 1.90 MiB is reserved by PyTorch but unallocated",
        {"total": 4 * GiB, "elsewhere": 4 * GiB - int(41.56 * MiB) - gib(3.44), "unallocated": int(1.9 * MiB)},
    ),
    (
        "pp00704831/Stripformer-ECCV-2022-#21",
        "CUDA out of memory. Tried to allocate 1.65 GiB (GPU 1; 7.79 GiB total capacity; 3.53 GiB already "
        "allocated; 1.40 GiB free; 5.28 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory …",
        {"device": 1, "asked": gib(1.65), "free": gib(1.4), "unallocated": gib(5.28) - gib(3.53)},
    ),
    (
        "pytorch/pytorch#16417",
        "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB "
        "already allocated; 9.28 GiB free; 4.68 MiB cached)",
        {"allocated": int(8.57 * MiB), "unallocated": int(4.68 * MiB), "free": gib(9.28)},
    ),
    (
        "ROCm/TheRock#2118",
        "HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 "
        "GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by "
        "PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch "
        "but unallocated.",
        {"allowed": gib(1.05), "allocated": int(1017.01 * MiB), "unallocated": int(54.99 * MiB)},
    ),
    (
        "mindverse/Second-Me#209",  # a driver that does not tell
        "CUDA out of memory. Tried to allocate 28.00 MiB. GPU 1 has a total capacity of 8.00 GiB "
        "of which 0 bytes is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of "
        "the allocated memory 6.93 GiB is allocated by PyTorch",
        {"free": 0, "elsewhere": 8 * GiB - gib(6.93)},
    ),
    (
        "a terminal that wraps lines",
        "CUDA out of memory.\n  Tried to allocate 1.03 GiB. GPU 0 has a total capacity of 22.03 "
        "GiB of which 875.12 MiB is free.\n  Process 1 has 21.17 GiB memory in use. 20.89 GiB allocated by PyTorch",
        {"asked": gib(1.03), "total": gib(22.03), "processes": {"1": gib(21.17)}},
    ),
    ("bitsandbytes#464", "Error out of memory at line 351 in file /csrc/pythonInterface.c", {"kind": "bitsandbytes"}),
    ("TensorRT-LLM#1670", "VM:392:494 [2] enqueue.cc:43 NCCL WARN Cuda failure 'out of memory'", {"kind": "nccl"}),
    ("nccl#1235", "n:1:2 [3] alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes", {"asked": 6291456}),
    (
        "xxayt/MGSV#2",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 178) of binary",
        {"kind": "signal", "rank": 0},
    ),
    ("torchrun", "  rank      : 3 (local_rank: 1)\n  exitcode  : -9 (pid: 7)", {"kind": "signal", "rank": 3}),
    ("mmdetection#10101", "died with <Signals.SIGKILL: 9>.", {"kind": "signal"}),
    ("nextflow#5932", "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0.", {"kind": "killed"}),
    ("brain-score/vision#950", "srun: error: node107: task 0: Out Of Memory", {"kind": "killed"}),
    ("LDP-Net#4", "RuntimeError: DataLoader worker (pid 1562937) is killed by signal: Killed.", {"kind": "signal"}),
    ("Linux", "[1.2] Memory cgroup out of memory: Killed process 88 (python) anon-rss:9kB", {"kind": "killed"}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "expected"), [case[1:] for case in MESSAGES], ids=[case[0] for case in MESSAGES])
def test_a_published_message_is_read(message, expected):
    (found,) = read_log(f"step 1\n{message}\nthe end")
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("text", ["", "loss 2.3", "exit code 1", "the room is out of memory foam"])
def test_other_text_has_none(text):
    assert read_log(text) == []


# (the moment, frames as in public tracebacks, the outermost first)
TRACEBACKS = [
    ("optimizer step", [f"{SITE}/torch/optim/adamw.py:_multi_tensor_adamw"]),
    ("backward pass", [f"{SITE}/torch/_tensor.py:backward", f"{SITE}/torch/autograd/graph.py:_engine_run_backward"]),
    ("backward pass", [f"{SITE}/torch/_tensor.py:backward", f"{SITE}/torch/utils/checkpoint.py:hook", "m.py:forward"]),
    ("forward pass", [f"{SITE}/torch/optim/adam.py:step", f"{SITE}/lightning/x.py:closure", "m.py:forward"]),
    ("forward pass", [f"{SITE}/transformers/trainer.py:compute_loss", f"{SITE}/torch/nn/modules/linear.py:forward"]),
    ("loss", ["m.py:forward", f"{SITE}/torch/nn/functional.py:cross_entropy"]),
    ("loss", ["m.py:forward:y = self.lm_head(hidden)", f"{SITE}/torch/nn/modules/linear.py:forward"]),
    ("forward pass", ["m.py:forward:logits = self.net(x)", f"{SITE}/torch/nn/modules/conv.py:forward"]),
    ("model load", [f"{SITE}/transformers/modeling_utils.py:from_pretrained", f"{SITE}/torch/serialization.py:load"]),
    ("model load", [f"{SITE}/torch/nn/modules/module.py:to", f"{SITE}/torch/nn/modules/module.py:convert"]),
    ("checkpoint load", [f"{SITE}/torch/serialization.py:_load"]),
    ("all-gather", ["m.py:forward", f"{SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:unshard"]),
    ("elsewhere", []),
]  # fmt: skip


@pytest.mark.parametrize(("moment", "frames"), TRACEBACKS)
@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "3: "])
def test_the_moment_and_the_users_line(moment, frames, prefix):
    lines = ["Traceback (most recent call last):", '  File "train.py", line 9, in main', "    run()"]
    for frame in frames:
        file, function, code = (*frame.split(":"), "x = 1")[:3]
        lines += [f'  File "{file}", line 7, in {function}', f"    {code}"]
    lines.append("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    (found,) = read_log("\n".join(prefix + line for line in lines))
    assert found["moment"] == moment
    last = [frame for frame in frames if frame.startswith("m.py")]
    assert found["place"].startswith("m.py:7 in forward: " if last else "train.py:9 in main: run()")
    assert found["rank"] == (3 if prefix else None)


def test_the_first_in_time_counts_and_a_killed_process_comes_after_its_cause():
    oom = "2026-01-02T03:04:{}Z [rank{}]: CUDA out of memory. Tried to allocate 1.00 GiB"
    found = read_log("\n".join([oom.format("09", 0), oom.format("05", 1), oom.format("05", 1)]))
    assert [(item["rank"], item["asked"]) for item in found] == [(1, GiB), (0, GiB)]
    assert ":05" in found[0]["time"]
    assert [item["kind"] for item in read_log(f"exitcode  : -9 (pid: 1)\n{oom}")] == ["device", "signal"]


def frame(filename, name, line=7):
    return {"filename": filename, "line": line, "name": name}


TRAIN = frame("train.py", "main")
LOADED = [frame(f"{SITE}/torch/nn/modules/module.py", "convert"), TRAIN]
STEPPED = [frame(f"{SITE}/torch/optim/adam.py", "_init_group"), frame("train.py", "main", 9)]
FORWARD = [frame(f"{SITE}/torch/nn/functional.py", "linear"), frame("model.py", "forward", 3)]


def snapshot():
    """Parameters from before the events, activations that were freed, a failed optimizer step, and a gap."""
    block = {"state": "active_allocated", "frames": LOADED}
    return {
        "segments": [
            {
                "device": 0, "address": 1000, "total_size": 600, "allocated_size": 400, "active_size": 400,
                "segment_type": "large", "segment_pool_id": (0, 0), "stream": 0, "is_expandable": False,
                "blocks": [
                    {**block, "address": 1000, "size": 100, "requested_size": 90},
                    {"address": 1100, "size": 200, "requested_size": 0, "state": "inactive", "frames": []},
                    {**block, "address": 1300, "size": 300, "requested_size": 300, "frames": []},
                ],
            },
            {"device": 0, "address": 9000, "total_size": 50, "blocks": [{"size": 50, "state": "inactive"}]},
        ],
        "device_traces": [
            [
                {"action": "alloc", "addr": 1100, "size": 200, "stream": 0, "frames": FORWARD, "pool_id": (0, 0)},
                {"action": "free_requested", "addr": 1100, "size": 200, "stream": 0, "frames": []},
                {"action": "free_completed", "addr": 1100, "size": 200, "stream": 0, "frames": []},
                {"action": "alloc", "addr": 1300, "size": 150, "stream": 0, "frames": FORWARD},
                {"action": "free_completed", "addr": 1300, "size": 150, "stream": 0, "frames": []},
                {"action": "alloc", "addr": 1300, "size": 300, "stream": 0, "frames": []},
                {"action": "free_completed", "addr": 1300, "size": 300, "stream": 0, "frames": []},
                {"action": "alloc", "addr": 1300, "size": 300, "stream": 0, "frames": []},
                {"action": "oom", "size": 500, "device_free": 40, "stream": 0, "frames": STEPPED},
            ]
        ],
        "allocator_settings": {"expandable_segments": False, "roundup": 1.5}, "external_annotations": [None],
    }  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_snapshot_is_summed_at_the_end_and_at_the_peak(protocol):
    found = read_snapshot(pickle.dumps(snapshot(), protocol))
    assert (found["asked"], found["free"], found["moment"]) == (500, 40, "optimizer step")
    assert found["place"] == "train.py:9 in main"
    assert (found["allocated"], found["unallocated"], found["reserved"]) == (390, 200, 650)
    assert found["at_end"]["moments"] == {NO_FRAMES: 300, "model load": 90}
    assert found["at_peak"]["bytes"] == 390


def test_the_peak_has_what_was_freed_after_it():
    data = snapshot()
    (trace,) = data["device_traces"]
    trace[5:8] = []  # then the block of 300 was never allocated before the end, and is from before
    trace[3]["addr"] = trace[4]["addr"] = 1100
    trace[0]["size"] = trace[2]["size"] = 180
    found = read_snapshot(pickle.dumps(data))
    assert found["at_peak"]["moments"] == {NO_FRAMES: 300, "forward pass": 180, "model load": 90}
    assert found["at_peak"]["largest"][1] == {
        "moment": "forward pass", "place": "model.py:3 in forward", "bytes": 180, "count": 1,
    }  # fmt: skip


class Harm:
    def __reduce__(self):
        return os.system, ("touch harm",)


def bombs():
    """Values that are small in a file, and large or deep in memory."""
    shared = {"blocks": [{"size": 1, "state": "inactive", "address": 1}] * 3000}
    deep = b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b"."
    nested: list = ["x"]
    for _ in range(60):
        nested = [nested, nested]
    block = {"size": 1, "state": "active", "frames": [{"filename": nested, "line": 1, "name": ""}]}
    return {
        "text": pickle.dumps({"segments": [{"address": 0, "total_size": 1, "blocks": [block]}]}),
        "devices": pickle.dumps({"segments": [], "device_traces": [[block]] * 100_000}),
        "shared": pickle.dumps({"segments": [shared] * 3000, "device_traces": []}),
        "deep": deep,
        "key": b"\x80\x02}" + deep[2:-1] + b"Ns.",
        "places": b"\x80\x02}r\xff\xff\xff\xff.",
        "long": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "cycle": b"\x80\x02]q\x00h\x00a.",
        "marks": b"\x80\x02" + b"(" * 100_000 + b"e.",
        "protocol": b"\x80\x02.",
        "number": pickle.dumps({"segments": [], "device_traces": [[{"action": "oom", "size": 10**400}]]}),
        "nothing": b"\x80",
    }


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_is_refused(name):
    began = time.monotonic()
    with pytest.raises(ArgumentError, match=r"snapshot"):
        read_snapshot(bombs()[name])
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_of_a_snapshot_is_run(protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"nothing of it was run|damaged"):
        read_snapshot(pickle.dumps({"segments": [Harm()], "device_traces": []}, protocol))
    assert not list(tmp_path.iterdir())


def test_plain_values_are_those_of_pickle():
    value = {"a": [1, -1, 300, 70_000, 2**40, -(2**63), 1.5, None, True, False], "b": ((), (1,), (1, 2), (1, 2, 3, 4))}
    for protocol in (2, 3, 4, 5):
        assert plain_pickle(pickle.dumps(value, protocol)) == value


def test_damaged_input_is_read_or_refused():
    made, whole = random.Random(0), pickle.dumps(snapshot())
    text = "\n".join(case[1] for case in MESSAGES)
    began = time.monotonic()
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(made.randint(1, 8)):
            data[made.randrange(2, len(data))] = made.randrange(256)
        with contextlib.suppress(ArgumentError):
            read_snapshot(bytes(data[: made.randint(2, len(data))] if made.random() < 0.2 else data))
        start = made.randrange(len(text))
        read_log(
            text[:start] + "".join(map(chr, made.choices(range(1, 300), k=9))) + text[start + made.randrange(40) :]
        )
    assert time.monotonic() - began < 60
