"""`atorch plan --explain` and `--export`: another trainer's configuration in, and one out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from atorch.auto.sources import JobSource, source_of
from atorch.errors import ArgumentError
from atorch.trainer_configs import Entry, Source, TrainingSetup, recognised
from atorch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from atorch.auto.planner.plan import ClusterPlan
    from atorch.auto.planner.request import PlanRequest
    from atorch.cluster.spec import ClusterSpec

VERSION = 1  # of the form of --json
RECIPE = ("lora", "qlora", "optimizer", "dtype", "attention")  # options that a configuration may have as well


@dataclass(frozen=True)
class Given:
    """Options beside a configuration, which fill in what it does not say."""

    configuration: str
    named: str | None
    model: Path | None
    shape: Mapping[str, Any]
    clusters: Sequence[str] | None
    gpus: Sequence[str] | None
    micro_batch: int | None
    seq: int | None
    wanted: Mapping[str, Any]  # knobs of a `PlanRequest`


def explained(given: Given) -> tuple[dict[str, Any], str]:
    """Explain a configuration; returns the data for `--json` and the title of its model.

    Raises:
        ArgumentError: the configuration is invalid, contradicts itself or the options, or something is missing.
    """
    from atorch.auto.plan_for_cluster import cluster_of
    from atorch.auto.planner.assessment import assess
    from atorch.auto.planner.request import PlanRequest

    source = Source.of(given.configuration)
    trainer = recognised(source)
    setup = _with_options(trainer.read(source), given)
    _need_all(setup, given)
    spec = cluster_of(_cluster_name(setup, given))
    setup = _for_cluster(setup, spec)
    wanted = {**setup.knobs, **{name: value for name, value in given.wanted.items() if value or name not in RECIPE}}
    total = setup.batches(spec.world_size)[2]
    request = PlanRequest(**{**wanted, "global_batch": total, "included": None, "traits": setup.traits})
    setup = _for_adapters(setup, request)
    job = _job(setup, given, request)
    profile = job.subject(given.seq or setup.seq, spec).profile
    setup = _with_loading(setup, profile.param_bytes * spec.devices_per_node, spec.host_memory_bytes)
    assessed = assess(profile, spec, setup.strategy(spec.world_size), request)
    data = {
        "version": VERSION,
        "source": source.name,
        "trainer": trainer.title,
        "target": request.target,
        "setup": {name: value for name, value in asdict(setup).items() if name not in ("entries", "traits")},
        "entries": [asdict(entry) for entry in setup.entries],
        **assessed.to_json_data(),
    }
    return data, job.title


def _job(setup: TrainingSetup, given: Given, request: PlanRequest) -> JobSource:
    """The model of the options, or else that of the configuration."""
    if given.named or given.model or any(value is not None for value in given.shape.values()):
        return source_of(given.named, given.model, given.shape, request)
    shape = {**dict.fromkeys(given.shape), **(setup.shape if setup.model is None else {})}
    return source_of(setup.model, None, shape, request)


def _with_options(setup: TrainingSetup, given: Given) -> TrainingSetup:
    """The setup with the batch of the options and the methods that they include, and notes on what they replace."""
    from atorch.auto.planner.request import EXPERTS
    from atorch.auto.strategy import Strategy

    batch = given.wanted.get("global_batch")
    assumed = {entry.key.rpartition("--")[2] for entry in setup.entries if entry.kind == "assumed"}
    changed: dict[str, Any] = {"seq": given.seq or setup.seq}
    for name, option, value, key in (
        ("micro_batch", "--micro-batch", given.micro_batch, "per_device_train_batch_size"),
        ("global_batch", "--batch", batch, ""),
    ):
        held = getattr(setup, name)
        if value is not None and held not in (None, value) and key not in assumed:
            raise ArgumentError(f"{option} is {value}, and {given.configuration} says {held}; leave the option out")
        if value is not None:
            changed[name] = value
    pairs = {"model": (setup.model, given.named), "seq": (setup.seq, given.seq)}
    pairs |= {name: (setup.knobs.get(name), given.wanted.get(name)) for name in RECIPE}
    changed["entries"] = (*setup.entries, *(
        Entry(name, held, "assumed", f"the configuration has {held}; this is for {value} of the option")
        for name, (held, value) in pairs.items() if held and value and str(held) != str(value)
    ))  # fmt: skip
    if batch is not None and "gradient_accumulation_steps" in assumed:
        changed["accumulation"] = None
    setup = replace(setup, **changed)
    names = [*(given.wanted.get("included") or ()), *(["cross_entropy"] if given.wanted.get("cross_entropy") else [])]
    for name in names:
        if name not in Strategy.of(list(setup.methods)):
            if name == EXPERTS:
                raise ArgumentError(f"--include {EXPERTS} does not say over how many processes; the configuration does")
            setup = replace(setup, methods=(*setup.methods, name))
    return setup


def _need_all(setup: TrainingSetup, given: Given) -> None:
    missing, has_shape = [], any(value is not None for value in given.shape.values())
    if not (given.named or given.model or has_shape or setup.model or setup.shape):
        missing.append("the model: give MODEL, such as Qwen/Qwen3-8B, or --layers and the rest of its shape")
    if not given.clusters and not given.gpus:
        world = setup.world_size
        devices = f", {setup.num_nodes} × {setup.devices_per_node} of which it has" if world else ""
        missing.append(f"the devices: give --gpu NAME{devices}, or --cluster")
    if setup.global_batch is None and setup.micro_batch is None:
        missing.append("the batch: give --batch (samples of a step on all devices), --micro-batch, or both")
    if missing:
        raise ArgumentError(f"{given.configuration} does not say {'; nor '.join(missing)}")


def _cluster_name(setup: TrainingSetup, given: Given) -> str:
    """The cluster of the options; --gpu has as many devices as the configuration says."""
    named = [*(given.clusters or ())]
    for gpu in given.gpus or ():
        has_count = gpu[:1].isdecimal() and "x" in gpu.lower()[:4]
        sizes = f"{setup.num_nodes}x{setup.devices_per_node}" if setup.world_size else "1"
        named.append(gpu if has_count and not setup.world_size else f"{sizes}x{gpu}" if not has_count else gpu)
    if len(named) != 1:
        raise ArgumentError(f"--explain is for one cluster, and {len(named)} are given; give one")
    return named[0]


def _for_cluster(setup: TrainingSetup, spec: ClusterSpec) -> TrainingSetup:
    """The setup on the devices that there are, with a default for its micro-batches and a note on what it says."""
    notes = []
    if setup.world_size not in (None, spec.world_size):
        note = f"the configuration starts {setup.world_size} processes; this is for the {spec.world_size} of the option"
        notes.append(Entry("processes", setup.world_size, "assumed", note))
    setup = replace(setup, num_nodes=spec.num_nodes, devices_per_node=spec.devices_per_node)
    micro, count, total = setup.batches(spec.world_size)
    if count is None:
        shares = setup.shares(spec.world_size)
        if total is not None and total % shares:
            raise ArgumentError(f"the batch is {total}, which {shares} processes do not share evenly; give another")
        setup = replace(setup, accumulation=1)
        notes.append(Entry("accumulation", None, "assumed", "1: nothing says how many micro-batches a step has"))
    return replace(setup, entries=(*setup.entries, *notes))


def _for_adapters(setup: TrainingSetup, request: PlanRequest) -> TrainingSetup:
    """The setup without a precision method beside adapters, whose frozen weights are in 16 bits already."""
    names = ("half", "amp_native")
    kept = tuple(item for item in setup.methods if (item if isinstance(item, str) else item[0]) not in names)
    if request.adapters is None or len(kept) == len(setup.methods):
        return setup
    note = "frozen weights in 16 bits, and adapters in fp32, without fp32 copies"
    return replace(setup, methods=kept, entries=(*setup.entries, Entry("adapters", None, "assumed", note)))


def _with_loading(setup: TrainingSetup, loaded: float, host_bytes: float) -> TrainingSetup:
    """The setup with a note on what loading takes on a node, if every process loads the whole model."""
    if not setup.loads_whole:
        return setup
    short = f", and a node has {format_bytes(host_bytes)}" if loaded > host_bytes else ""
    note = (
        f"every process loads the whole model, {format_bytes(loaded)} of a node's host memory{short}; "
        "cpu_ram_efficient_loading (FSDP) and zero3_init_flag (DeepSpeed) avoid that"
    )
    return replace(setup, entries=(*setup.entries, Entry("loading", None, "not expressed", note)))


START: Mapping[str, str] = {"sh": "sh", "slurm": "sbatch", "kubernetes": "kubectl apply -f", "skypilot": "sky launch"}


def exported(plan: ClusterPlan, name: str, folder: Path, launcher: str) -> None:
    """Write the files of a trainer, and tell what was written and how to start it.

    Raises:
        StrategyError: the trainer lacks something of the plan; the message names it, and what to do.
    """
    files = plan.export(name, folder, launcher=launcher, force=True)
    for path in files:
        typer.echo(f"Wrote {path}")
    step, peak = format_seconds(plan.estimate.step_s), format_bytes(plan.estimate.peak_bytes)
    typer.echo(f"Start it with {START[launcher]} {files[-1].name}: {step} a step, {peak} a device, estimated")
