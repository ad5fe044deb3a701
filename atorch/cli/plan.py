"""`atorch plan`: the best strategy for a model on a cluster, neither of which need be here.

The model is a Hugging Face config, a job in a file, or a shape. The answer goes to the terminal, and where it is asked
for into a JSON file, a page, and a strategy file. Answers for several clusters stand beside each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from atorch.cli.answers import NamedAnswer, Outputs, give
from atorch.cli.sources import JobSource, source_of
from atorch.cost.memory import RESERVE

if TYPE_CHECKING:
    from typing import TypeAlias

    from atorch.auto.capacity_search import Fit
    from atorch.auto.plan_for_cluster import Subject
    from atorch.auto.planner.cluster_plan import ClusterPlan
    from atorch.cluster.spec import ClusterSpec
    from atorch.errors import AtorchError

    Read: TypeAlias = Callable[[ClusterSpec], Subject]

MAX_DEVICES, MAX_BATCH, MAX_SEQ = 2**17, 2**24, 2**24  # where --fit stops looking
FIRST_SEQ = 4096
IN_PARTS = ("micro_batch", "pipeline_parallel")  # with these a batch goes through the model part by part
TYPICAL = ("8xA100-80GB", "8xH100-80GB", "8xH200", "8xB200")
CLUSTER_HELP = (
    "8xA100-40GB is one node of 8 devices, 16x8xH100-80GB are 16 nodes of 8, and 64xH100-80GB is one node of 64; a "
    "cloud's machine such as 4xp5.48xlarge; or a cluster file. Given several times, clusters stand beside each other. "
    "Without it: the GPUs of this machine, or where it has none one node each of a few usual ones."
)

What = Literal["devices", "batch", "seq"]
ObjectiveName = Literal["step_time", "throughput", "cost", "fewest_devices"]
PrecisionName = Literal["fp32", "autocast", "half", "fp8"]


def _number(help_text: str) -> Any:
    return typer.Option(min=1, metavar="N", help=help_text)


def _file(name: str, help_text: str, exists: bool = False) -> Any:
    return typer.Option(name, exists=exists, dir_okay=False, metavar="FILE", help=help_text)


MODEL = "A Hugging Face config.json, a folder that has one, or a job FILE.py:NAME: arguments of atorch.plan."
Number = int | None
File = Path | None
Names = Annotated[list[str] | None, typer.Option(metavar="NAMES", help="Methods, separated by commas.")]


def plan(
    named: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL)] = None,
    cluster: Annotated[list[str] | None, typer.Option(metavar="TEXT", help=CLUSTER_HELP)] = None,
    model: Annotated[File, _file("--model", "The same as MODEL: a config.json.", exists=True)] = None,
    layers: Annotated[Number, _number("Instead of MODEL, a shape: its blocks.")] = None,
    hidden: Annotated[Number, _number("Of a shape: elements of the stream between blocks.")] = None,
    heads: Annotated[Number, _number("Of a shape: attention heads.")] = None,
    kv_heads: Annotated[Number, _number("Of a shape: heads of keys and values.")] = None,
    ffn: Annotated[Number, _number("Of a shape: elements inside the feed-forward layer, or an expert.")] = None,
    vocab: Annotated[Number, _number("Of a shape: tokens that there are.")] = None,
    experts: Annotated[Number, _number("Of a shape: experts of a block.")] = None,
    top_k: Annotated[Number, _number("Of a shape: experts that a token goes to.")] = None,
    batch: Annotated[Number, _number("Samples of a step, on all devices together.")] = None,
    seq: Annotated[Number, _number("Tokens of a sample.")] = None,
    fit: Annotated[What | None, typer.Option(help="Find the fewest devices, largest batch, longest sample.")] = None,
    objective: Annotated[ObjectiveName, typer.Option(help="What is best.")] = "step_time",
    exclude: Names = None,
    include: Names = None,
    fixed: Annotated[File, _file("--fixed", "A strategy file: these methods alone.", exists=True)] = None,
    precision: Annotated[PrecisionName, typer.Option(help="The least exact numbers that are allowed.")] = "half",
    host_memory: Annotated[bool | None, typer.Option(help="Whether something may wait in host memory.")] = None,
    reserve: Annotated[float, typer.Option(min=0, max=0.99, help="Share of a device's memory to keep free.")] = RESERVE,
    verify: Annotated[
        Number, typer.Option(min=0, max=32, metavar="N", help="How many of the best are simulated, however long.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of each table.")] = 8,
    verbose: Annotated[bool, typer.Option(help="Show all that was tried, and compositions by axis.")] = False,
    json_file: Annotated[File, _file("--json", "Write the answer as JSON.")] = None,
    html: Annotated[File, _file("--html", "Write the answer as a page.")] = None,
    save: Annotated[File, _file("--save", "Write the chosen strategy to a file.")] = None,
) -> None:
    """Find the best strategy for a model on a cluster, neither of which need be here."""
    outputs = Outputs(json_file, html, save)
    shape = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv-heads": kv_heads,
        "ffn": ffn,
        "vocab": vocab,
        "experts": experts,
        "top-k": top_k,
    }
    source, clusters = source_of(named, model, shape), clusters_of(cluster)
    outputs.check(len(clusters))
    wanted = {
        "global_batch": batch,
        "excluded": _names(exclude),
        "included": _names(include),
        "fixed": fixed,
        "precision": precision,
        "host_memory": bool(host_memory) if fit else host_memory,
        "objective": objective,
        "reserve": reserve,
    }

    several = len(clusters) > 1
    read = _reader(source, seq, once=several)
    verify = 0 if several else verify  # what simulating would find is not shown there

    def ask(spec: ClusterSpec) -> NamedAnswer:
        return _fitting(fit, source, read, spec, seq, wanted) if fit else _answer(read, spec, wanted, verify)

    give(_asked(clusters, ask), source.title, outputs, top, verbose)


def _asked(
    clusters: Sequence[tuple[str, ClusterSpec]], ask: Callable[[ClusterSpec], NamedAnswer]
) -> list[tuple[str, NamedAnswer | AtorchError]]:
    """The results for each cluster, or of several why nothing fits there.

    Raises:
        NoFeasiblePlanError, StrategyError: nothing fits on the one that there is.
    """
    from atorch.errors import NoFeasiblePlanError, StrategyError

    answers: list[tuple[str, NamedAnswer | AtorchError]] = []
    for name, spec in clusters:
        try:
            answers.append((name, ask(spec)))
        except (NoFeasiblePlanError, StrategyError) as error:
            if len(clusters) == 1:
                raise
            answers.append((name, error))
    return answers


def _answer(read: Read, spec: ClusterSpec, wanted: Mapping[str, Any], verify: int | None) -> NamedAnswer:
    from atorch.auto.plan_for_cluster import plan_for
    from atorch.report.progress import telling

    return NamedAnswer(plan_for(read(spec), spec, verify=verify, doing=telling, **wanted))


def _fitting(
    what: What, source: JobSource, read: Read, spec: ClusterSpec, seq: int | None, wanted: Mapping[str, Any]
) -> NamedAnswer:
    """The border of what fits. Nothing is simulated on the way: that is for the size that is then chosen.

    Raises:
        NoFeasiblePlanError: nothing fits at any size.
    """
    from atorch.auto.capacity_search import largest, smallest_cluster
    from atorch.auto.plan_for_cluster import plan_for

    _check_fit(what, source, wanted)
    if what == "seq":

        def of_length(size: int) -> ClusterPlan:
            return plan_for(source.subject(size, spec), spec, verify=0, advise=False, **wanted)

        return _border(what, largest(of_length, seq or FIRST_SEQ, MAX_SEQ, _tell("tokens a sample")))
    subject = read(spec)
    if what == "devices":
        of_cluster = partial(plan_for, subject, verify=0, advise=False, **wanted)
        return _border(what, smallest_cluster(of_cluster, spec, MAX_DEVICES, _tell("devices")))
    whole = {**wanted, "excluded": sorted({*(wanted["excluded"] or ()), *IN_PARTS})}

    def of_batch(size: int) -> ClusterPlan:
        return plan_for(subject, spec, verify=0, advise=False, **{**whole, "global_batch": size})

    return _border(what, largest(of_batch, spec.world_size, MAX_BATCH, _tell("samples a step")))


def _check_fit(what: What, source: JobSource, wanted: Mapping[str, Any]) -> None:
    """Raises:
    ArgumentError: the number that is looked for is given, or cannot be varied, or what it depends on is missing.
    """
    from atorch.errors import ArgumentError

    if what == "batch" and wanted["global_batch"] is not None:
        raise ArgumentError("--fit batch looks for the batch; leave --batch out")
    if what == "devices" and wanted["global_batch"] is None:
        raise ArgumentError("--fit devices needs the batch that all devices share; give --batch")
    if what == "seq" and not source.takes_seq:
        raise ArgumentError(f"--fit seq varies the length of a sample; let {source.title} have a parameter seq")


def _reader(source: JobSource, seq: int | None, *, once: bool) -> Read:
    """Reads the model for a cluster; `once`: for all of one kind of device, as nothing will be simulated there."""
    known: dict[str, Subject] = {}

    def read(spec: ClusterSpec) -> Subject:
        kind = spec.device.type
        if kind not in known or not once:
            known[kind] = _read(source, seq, spec)
        return known[kind]

    return read


def _read(source: JobSource, seq: int | None, cluster: ClusterSpec) -> Subject:
    """The model in numbers; how long that took goes to standard error."""
    from atorch.report.progress import telling
    from atorch.units import format_count, format_seconds

    began = time.monotonic()
    with telling(f"reading {source.title}"):
        subject = source.subject(seq, cluster)
    count, ctx = format_count(subject.profile.num_params), subject.ctx
    kind = f", {type(ctx.root).__name__}" if ctx else ""
    typer.echo(f"{count} parameters{kind}, read in {format_seconds(time.monotonic() - began)}", err=True)
    return subject


def _tell(unit: str) -> Callable[[int, ClusterPlan | None], None]:
    """Says of each size that was tried whether it fits, on standard error."""

    def tell(size: int, found: ClusterPlan | None) -> None:
        from atorch.units import format_bytes, format_seconds

        told = "nothing fits"
        if found is not None:
            step, peak = format_seconds(found.estimate.step_s), format_bytes(found.estimate.peak_bytes)
            told = f"fits, {step} a step, {peak} a device"
        typer.echo(f"{size:,} {unit}: {told}", err=True)

    return tell


def _border(what: What, found: Fit) -> NamedAnswer:
    words = {
        "devices": "The fewest devices that fit: {}",
        "batch": "The largest batch that fits in one pass: {} samples a step",
        "seq": "The longest sequence that fits: {} tokens",
    }
    said = words[what].format(f"{found.size:,}") + ("" if found.is_bounded else ", where the search ends")
    data = {"what": what, "size": found.size, "is_bounded": found.is_bounded, "tried": found.tried}
    return NamedAnswer(found.plan, said, data)


def _names(given: list[str] | None) -> list[str] | None:
    """The names in options such as `--exclude fp8,compile --exclude zero2`."""
    names = [name.strip() for each in given or () for name in each.split(",")]
    return [name for name in names if name] or None


def clusters_of(given: Sequence[str] | None) -> list[tuple[str, ClusterSpec]]:
    """(what it was called, the cluster) of each, all read before anything is planned for any.

    Raises:
        ArgumentError: one is not known, or is given twice.
    """
    from atorch.auto.plan_for_cluster import cluster_of
    from atorch.errors import ArgumentError

    if not given:
        here = _here()
        return [here] if here else [(name, cluster_of(name)) for name in _usual()]
    for name in given:
        if given.count(name) > 1:
            raise ArgumentError(f"--cluster {name} is given {given.count(name)} times; give each cluster once")
    found = [(name, cluster_of(name)) for name in given]
    for name, spec in found:
        _tell_of_large_node(name, spec)
    return found


def _usual() -> Sequence[str]:
    typer.echo(f"no --cluster is given and there is no GPU here: beside each other {', '.join(TYPICAL)}", err=True)
    return TYPICAL


def _here() -> tuple[str, ClusterSpec] | None:
    """This machine's GPUs, where it has some."""
    import torch

    if not torch.cuda.is_available():
        return None
    from atorch.cluster.spec import ClusterSpec
    from atorch.distributed import world

    number = torch.cuda.device_count()
    spec = replace(ClusterSpec.detect(world.init(), measure=False), num_nodes=1, devices_per_node=number)
    typer.echo(f"no --cluster is given: the {number} × {spec.device.name} of this machine", err=True)
    return "this machine", spec


def _tell_of_large_node(name: str, spec: ClusterSpec) -> None:
    """One node of more devices than such machines have is rarely meant."""
    from atorch.cluster.catalogue import usual_devices

    usual, given = usual_devices(name), spec.devices_per_node
    if spec.num_nodes == 1 and given > usual > 1 and given % usual == 0:
        rest = name.lstrip("0123456789 ").lstrip("xX×* ")
        nodes = f"{given // usual}x{usual}x{rest}"
        typer.echo(
            f"{name} is one node of {given} devices; {nodes} would be {given // usual} nodes of {usual}", err=True
        )
