"""A profile as an engine would record it: two steps over chunks of which the device holds a few at a time."""

from atorch.patrickstar.profiler import ChunkEvent, MemoryEvent, PhaseEvent, Profile

MiB = 1024**2
KINDS = ("MOMENTUM", "PARAM_FP16", "VARIANCE", "PARAM_FP32")  # in no order


def recorded(chunks: int = 12, room: int = 5, steps: int = 2, stepped_on_device: int = 2) -> Profile:
    """`room` of `chunks` are on the device at a time; the last few are stepped there and never leave it."""
    phases, memory, moved = [], [], []
    moment, now, size = 0, 0.0, 128 * MiB
    stay = range(chunks - stepped_on_device, chunks)
    here: list[int] = []

    def tick(other: int) -> None:
        nonlocal moment, now
        moment, now = moment + 1, now + 0.013
        on_device = size * (len(here) + 7 * len(stay))
        memory.append(MemoryEvent(moment, now, "GPU", on_device + other, on_device))
        memory.append(MemoryEvent(moment, now, "CPU", size * 8 * chunks + 600 * MiB, size * 8 * (chunks - len(stay))))

    def need(chunk: int) -> None:
        if chunk in stay or chunk in here:
            return
        if len(here) == room:
            moved.append(ChunkEvent(moment, now, "PARAM_FP16", here.pop(0), "GPU", 0))
        here.append(chunk)
        moved.append(ChunkEvent(moment, now, "PARAM_FP16", chunk, "GPU", size))

    for kind in KINDS:
        for chunk in range(chunks):
            wide = size if kind == "PARAM_FP16" else 2 * size
            moved.append(ChunkEvent(0, 0.0, kind, chunk, "GPU" if chunk in stay else "CPU", wide))
    for _ in range(steps):
        phases.append(PhaseEvent(moment, now, "forward"))
        for chunk in range(chunks):
            need(chunk)
            tick((chunk + 1) * 40 * MiB)
        phases.append(PhaseEvent(moment, now, "backward"))
        for chunk in reversed(range(chunks)):
            need(chunk)
            tick((chunk + 1) * 40 * MiB)
            tick((chunk + 1) * 44 * MiB)
        phases.append(PhaseEvent(moment, now, "optimizer"))
        while here:
            moved.append(ChunkEvent(moment, now, "PARAM_FP16", here.pop(0), "GPU", 0))
        for _ in range(6):
            tick(0)
        phases.append(PhaseEvent(moment, now, "other"))
        now += 0.01
    return Profile(
        device="cuda:0",
        budget_bytes=3 * 1024 * MiB,
        end_s=now,
        phases=tuple(phases),
        memory=tuple(memory),
        chunks=tuple(moved),
    )
