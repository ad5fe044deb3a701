"""`atorch plan`: the best strategy for a model on a cluster, without the weights or the GPUs.

The model is a Hugging Face config, a job in a file, or a shape. The answer goes to the terminal, and on request to a
JSON file, a page, and a strategy file. Answers for several clusters are shown side by side.
"""

from __future__ import annotations

import gc
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from atorch.auto.sources import JobSource, source_of
from atorch.cli.clusters import CLUSTER_HELP, GPU_HELP, clusters_of, one_gpu
from atorch.cli.trainers import Export, Given, explained
from atorch.cost.memory import RESERVE
from atorch.errors import ArgumentError, AtorchError, NoFeasiblePlanError, StrategyError
from atorch.files import check_target, write
from atorch.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from typing import TypeAlias

    from atorch.auto.plan_for_cluster import Fit, Subject
    from atorch.auto.planner.plan import ClusterPlan
    from atorch.cluster.spec import ClusterSpec

    Read: TypeAlias = Callable[[ClusterSpec], Subject]


MAX_DEVICES, MAX_BATCH, MAX_SEQ, FIRST_SEQ = 2**17, 2**24, 2**24, 4096  # limits of --fit, and where seq begins
NARROW = 3  # exit status: the plan of each cluster on which something fits does so by less than the estimate's error

What = Literal["devices", "batch", "seq"]
ObjectiveName = Literal["step_time", "throughput", "cost", "fewest_devices"]
Launcher = Literal["sh", "slurm", "kubernetes", "skypilot"]
PrecisionName = Literal["fp32", "autocast", "half", "fp8"]


def _number(help_text: str) -> Any:
    return typer.Option(min=1, metavar="N", help=help_text)


def _file(name: str, help_text: str, exists: bool = False) -> Any:
    return typer.Option(name, exists=exists, dir_okay=False, metavar="FILE", help=help_text)


def _word(metavar: str, help_text: str) -> Any:
    return typer.Option(metavar=metavar, help=help_text)


MODEL = "A config.json, a folder that has one, a model on the Hub, or a job FILE.py:NAME (arguments of atorch.plan)."
EXPLAIN = "Explain a configuration or a command of another trainer: its methods, what they take, what gains most."
Number = int | None
Word = str | None
File = Path | None
Names = Annotated[list[str] | None, typer.Option(metavar="NAMES", help="Method names, separated by commas.")]


def plan(
    context: typer.Context,
    named: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL)] = None,
    cluster: Annotated[list[str] | None, typer.Option(metavar="TEXT", help=CLUSTER_HELP)] = None,
    gpu: Annotated[list[str] | None, typer.Option(metavar="NAME", help=GPU_HELP)] = None,
    model: Annotated[File, _file("--model", "The same as MODEL: a config.json.", exists=True)] = None,
    layers: Annotated[Number, _number("Number of blocks. With --hidden and the rest, in place of MODEL.")] = None,
    hidden: Annotated[Number, _number("Hidden size.")] = None,
    heads: Annotated[Number, _number("Attention heads.")] = None,
    kv_heads: Annotated[Number, _number("Key and value heads.")] = None,
    head_dim: Annotated[Number, _number("Features of a head, if they are not --hidden / --heads.")] = None,
    tied: Annotated[bool, typer.Option("--tied", help="The head has the weights of the embedding.")] = False,
    ffn: Annotated[Number, _number("Width of the feed-forward layer, or of an expert.")] = None,
    vocab: Annotated[Number, _number("Vocabulary size.")] = None,
    experts: Annotated[Number, _number("Experts in a block.")] = None,
    top_k: Annotated[Number, _number("Experts for each token.")] = None,
    batch: Annotated[Number, _number("Global batch: samples of a step on all devices.")] = None,
    micro_batch: Annotated[Number, _number("Samples of one pass of a process, for --explain.")] = None,
    seq: Annotated[Number, _number("Sequence length: tokens of a sample.")] = None,
    lora: Annotated[Word, _word("RANK[:TARGETS]", "Adapters beside frozen weights, such as 16 or 16:q,v.")] = None,
    qlora: Annotated[bool, typer.Option("--qlora", help="The same beside weights in 4 bits.")] = False,
    optimizer: Annotated[Word, _word("adamw|adamw8bit|adamw_bf16|adafactor|muon|sgd|lion", "The optimizer.")] = None,
    dtype: Annotated[Word, _word("fp32|bf16|fp16", "Numbers of the weights; bf16 beside adapters.")] = None,
    attention: Annotated[Word, _word("sdpa|flash_attention_2|eager", "The model's attention.")] = None,
    cross_entropy: Annotated[Word, _word("chunked", "Compute the loss by chunks of tokens.")] = None,
    explain: Annotated[Word, _word("FILE|COMMAND", EXPLAIN)] = None,
    within: Annotated[
        Word, typer.Option("--for", metavar="TRAINER", help="Plan what this trainer can express.")
    ] = None,
    export: Annotated[
        tuple[str, Path] | None, typer.Option(metavar="TRAINER FOLDER", help="Write the trainer's own files.")
    ] = None,
    launch: Annotated[Launcher | None, typer.Option(help="What starts the files of --export, sh by default.")] = None,
    fit: Annotated[What | None, typer.Option(help="Find the fewest devices, largest batch, longest sample.")] = None,
    objective: Annotated[ObjectiveName, typer.Option(help="The figure to optimize.")] = "step_time",
    exclude: Names = None,
    include: Names = None,
    fixed: Annotated[File, _file("--fixed", "A strategy file: use exactly these methods.", exists=True)] = None,
    extend: Annotated[File, _file("--extend", "A strategy file: use these methods, and others.", exists=True)] = None,
    precision: Annotated[PrecisionName, typer.Option(help="The lowest precision that you allow.")] = "half",
    host_memory: Annotated[bool | None, typer.Option(help="Allow or forbid offloading to host memory.")] = None,
    reserve: Annotated[float, typer.Option(min=0, max=0.99, help="Share of a device's memory to keep free.")] = RESERVE,
    verify: Annotated[
        Number, typer.Option(min=0, max=32, metavar="N", help="Simulate the best N candidates, without a time limit.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of each table.")] = 8,
    verbose: Annotated[bool, typer.Option(help="Show all that was tried, and compositions by axis.")] = False,
    json_file: Annotated[File, _file("--json", "Write the answer as JSON.")] = None,
    html: Annotated[File, _file("--html", "Write the answer as a page.")] = None,
    save: Annotated[File, _file("--save", "Write the chosen strategy to a file.")] = None,
) -> int:
    """Find the best strategy for a model on a cluster. You need neither the weights nor the GPUs.

    Exit status: 0 it fits, 3 it fits narrowly, 2 nothing fits, 1 an error.
    """
    gc.disable()  # imports leave little garbage, and looking for it takes a fifth of a short plan's time
    from atorch.auto.plan_for_cluster import plan_for
    from atorch.auto.planner.request import PlanRequest
    from atorch.report.text import telling

    gc.freeze()
    gc.enable()
    outputs = Outputs(json_file, html, save, shlex.join(["atorch", *(context.obj or ())]))
    shape = {
        **{"layers": layers, "hidden": hidden, "heads": heads, "kv-heads": kv_heads, "ffn": ffn, "vocab": vocab},
        **{"experts": experts, "top-k": top_k, "head-dim": head_dim, "tied": tied or None},
    }
    wanted: dict[str, Any] = {
        **{"global_batch": batch, "excluded": _names(exclude), "included": _names(include), "fixed": fixed},
        **{"extend": extend, "precision": precision, "objective": objective, "reserve": reserve},
        **{"lora": lora, "qlora": qlora, "optimizer": optimizer, "dtype": dtype, "attention": attention},
        **{"cross_entropy": cross_entropy, "host_memory": bool(host_memory) if fit else host_memory},
        "target": export[0] if export and not within else within,
    }
    if explain is not None:
        if fit or save or html or export or fixed or extend:
            raise ArgumentError(
                "--explain goes with --json, and not with --fit, --save, --html, --export or a strategy"
            )
        asked = Given(explain, named, model, shape, cluster, gpu, micro_batch, seq, wanted)
        return _explained(asked, outputs, top)
    if micro_batch or (launch and not export):
        raise ArgumentError("--micro-batch goes with --explain, and --launch with --export")
    exporting = Export(*export, launch or "sh") if export else None
    request = PlanRequest(**wanted)  # before the model is read, which may take minutes
    source, clusters = (
        source_of(named, model, shape, request),
        clusters_of([*(cluster or ()), *map(one_gpu, gpu or ())]),
    )
    outputs.check(len(clusters))
    if exporting is not None:
        exporting.check(len(clusters))
    several = len(clusters) > 1
    read = _reader(source, seq, once=several)
    verify = 0 if several else verify  # side by side, results of simulations are not shown

    def ask(spec: ClusterSpec) -> NamedAnswer:
        if fit:
            return _fit_answer(fit, source, read, spec, seq, wanted)
        return NamedAnswer(plan_for(read(spec), spec, verify=verify, doing=telling, **wanted))

    answers = _answers(clusters, ask)
    give(answers, source.title, outputs, top, verbose)
    plans = [answer.plan for _, answer in answers if isinstance(answer, NamedAnswer)]
    if exporting is not None:
        is_on_hub = named is not None and ":" not in named and not Path(named).exists()
        exporting.write(plans[0], model=named if is_on_hub else None, seq=seq, knobs=request.recipe)
    return NARROW if not fit and all(plan.fits_narrowly for plan in plans) else 0


def _explained(asked: Given, outputs: Outputs, top: int) -> int:
    from rich.console import Console

    from atorch.report.answer import explanation_report

    outputs.check(1)
    data, title = explained(asked)
    Console(highlight=False).print(explanation_report(data, title, max_rows=top))
    if outputs.json is not None:
        write(outputs.json, json.dumps(data, allow_nan=False) + "\n")
        _note(outputs.json, "the explanation as data")
    return 2 if not data["fits"] else NARROW if data["fits_narrowly"] else 0


def _answers(
    clusters: Sequence[tuple[str, ClusterSpec]], ask: Callable[[ClusterSpec], NamedAnswer]
) -> list[tuple[str, NamedAnswer | AtorchError]]:
    """The answer for each cluster; of several, the error for one on which nothing fits."""
    answers: list[tuple[str, NamedAnswer | AtorchError]] = []
    for name, spec in clusters:
        try:
            answers.append((name, ask(spec)))
        except (NoFeasiblePlanError, StrategyError) as error:
            if len(clusters) == 1:
                raise
            answers.append((name, error))
    return answers


def _fit_answer(
    what: What, source: JobSource, read: Read, spec: ClusterSpec, seq: int | None, wanted: Mapping[str, Any]
) -> NamedAnswer:
    """The answer at the largest or smallest size that fits. Sizes are estimated, and not simulated."""
    from atorch.auto.plan_for_cluster import largest, plan_for, smallest_cluster
    from atorch.auto.strategy import METHODS, Method

    _check_fit(what, source, wanted)
    if what == "seq":

        def of_length(size: int) -> ClusterPlan:
            return plan_for(source.subject(size, spec), spec, verify=0, advise=False, **wanted)

        return _limit_answer(what, largest(of_length, seq or FIRST_SEQ, MAX_SEQ, _size_reporter("tokens a sample")))
    subject = read(spec)
    if what == "devices":
        of_cluster = partial(plan_for, subject, verify=0, advise=False, **wanted)
        return _limit_answer(what, smallest_cluster(of_cluster, spec, MAX_DEVICES, _size_reporter("devices")))
    in_parts = {name for name in METHODS if METHODS[name].in_parts is not Method.in_parts}
    whole = {**wanted, "excluded": sorted(in_parts.union(wanted["excluded"] or ()))}

    def of_batch(size: int) -> ClusterPlan:
        return plan_for(subject, spec, verify=0, advise=False, **{**whole, "global_batch": size})

    return _limit_answer(what, largest(of_batch, spec.world_size, MAX_BATCH, _size_reporter("samples a step")))


def _check_fit(what: What, source: JobSource, wanted: Mapping[str, Any]) -> None:
    """Raise ArgumentError if the number to find is given or cannot vary, or if one that it depends on is missing."""
    if what == "batch" and wanted["global_batch"] is not None:
        raise ArgumentError("--fit batch looks for the batch; leave --batch out")
    if what == "devices" and wanted["global_batch"] is None:
        raise ArgumentError("--fit devices needs the batch that all devices share; give --batch")
    if what == "seq" and not source.takes_seq:
        raise ArgumentError(f"--fit seq varies the length of a sample; let {source.title} have a parameter seq")


def _reader(source: JobSource, seq: int | None, *, once: bool) -> Read:
    """A function that reads the model for a cluster; `once`: only once a device type, as nothing is simulated."""
    subjects: dict[str, Subject] = {}

    def read(spec: ClusterSpec) -> Subject:
        kind = spec.device.type
        if kind not in subjects or not once:
            subjects[kind] = _read(source, seq, spec)
        return subjects[kind]

    return read


def _read(source: JobSource, seq: int | None, cluster: ClusterSpec) -> Subject:
    """Read the model, and write its size and the time that it took to standard error."""
    from atorch.report.text import telling

    began = time.monotonic()
    with telling(f"reading {source.title}"):
        subject = source.subject(seq, cluster)
    count, ctx = format_count(subject.profile.num_params), subject.ctx
    kind = f", {type(ctx.root).__name__}" if ctx else ""
    typer.echo(f"{count} parameters{kind}, read in {format_seconds(time.monotonic() - began)}", err=True)
    return subject


def _size_reporter(unit: str) -> Callable[[int, ClusterPlan | None], None]:
    def tell(size: int, plan: ClusterPlan | None) -> None:
        verdict = "nothing fits"
        if plan is not None:
            step, peak = format_seconds(plan.estimate.step_s), format_bytes(plan.estimate.peak_bytes)
            verdict = f"fits, {step} a step, {peak} a device"
        typer.echo(f"{size:,} {unit}: {verdict}", err=True)

    return tell


def _limit_answer(what: What, fit: Fit) -> NamedAnswer:
    words = {
        "devices": "The fewest devices that fit: {}",
        "batch": "The largest batch that fits in one pass: {} samples a step",
        "seq": "The longest sequence that fits: {} tokens",
    }
    headline = words[what].format(f"{fit.size:,}") + ("" if fit.is_bounded else ", where the search ends")
    data = {"what": what, "size": fit.size, "is_bounded": fit.is_bounded, "tried": fit.tried, "words": headline}
    return NamedAnswer(fit.plan, data)


def _names(options: list[str] | None) -> list[str] | None:
    """The names in options such as `--exclude fp8,compile --exclude zero2`."""
    names = [name.strip() for option in options or () for name in option.split(",")]
    return [name for name in names if name] or None


@dataclass(frozen=True)
class NamedAnswer:
    """A plan, and for `--fit` the limit that was found, as data and in `words`."""

    plan: ClusterPlan
    fit: Mapping[str, Any] | None = None

    @property
    def data(self) -> dict[str, Any]:
        return self.plan.to_json_data() | ({"fit": self.fit} if self.fit else {})


@dataclass(frozen=True)
class Outputs:
    json: Path | None
    html: Path | None
    save: Path | None
    command: str = ""  # for the page

    def check(self, num_clusters: int) -> None:
        """Refuse files that cannot be written, before anything is computed for them.

        Raises:
            ArgumentError: a file cannot be written, or is for one cluster while there are several.
        """
        for path in (self.json, self.html, self.save):
            if path is not None:
                check_target(path)
        if self.save is not None and num_clusters > 1:
            raise ArgumentError(f"--save writes the answer for one cluster, and there are {num_clusters}; give one")


def give(
    answers: Sequence[tuple[str, NamedAnswer | AtorchError]], title: str, outputs: Outputs, top: int, verbose: bool
) -> None:
    """Show the answer for each cluster, and write the requested files.

    Raises:
        NoFeasiblePlanError: nothing fits on any cluster, or nothing that fits can be applied and saved.
    """
    from rich.console import Console

    from atorch.report.answer import answer_report, clusters_report
    from atorch.report.html import plan_page, plans_page

    console, result = Console(highlight=False), answers[0][1]
    data: Mapping[str, Any]
    if len(answers) == 1 and isinstance(result, NamedAnswer):
        data = result.data
        if result.fit:
            console.print(result.fit["words"], style="bold", markup=False)
        console.print(answer_report(data, title, max_rows=top, verbose=verbose))
        page = partial(plan_page, data, title, outputs.command)
    else:
        if not any(isinstance(result, NamedAnswer) for _, result in answers):
            reasons = "; ".join(f"{name}: {result}" for name, result in answers)
            raise NoFeasiblePlanError(f"nothing fits on any of {len(answers)} clusters. {reasons}")
        columns = [(name, given.data if isinstance(given, NamedAnswer) else _reason(given)) for name, given in answers]
        console.print(clusters_report(columns, title))
        data = {"clusters": {name: {"error": of} if isinstance(of, str) else of for name, of in columns}}
        page = partial(plans_page, columns, title, outputs.command)
    if outputs.json is not None:
        write(outputs.json, json.dumps(data, allow_nan=False) + "\n")
        _note(outputs.json, "the answer as data")
    if outputs.html is not None:
        write(outputs.html, page())
        _note(outputs.html, "the answer as a page")
    if outputs.save is not None and isinstance(result, NamedAnswer):  # of one cluster: see `Outputs.check`
        _save(result.plan, data, outputs.save)


def _reason(error: AtorchError) -> str:
    """The reason why there is no plan, short enough for a column."""
    if isinstance(error, NoFeasiblePlanError) and error.rejected and "short_bytes" in error.rejected[0]:
        return f"nothing fits: the nearest miss is {format_bytes(error.rejected[0]['short_bytes'])} short"
    return str(error)


def _save(plan: ClusterPlan, data: Mapping[str, Any], path: Path) -> None:
    """Write the chosen strategy with the plan, without the columns of all candidates."""
    report = {name: value for name, value in data.items() if name != "candidates"}
    replace(plan.strategy, metadata={"report": report}).save(path)
    _note(path, f"the choice, {plan.strategy}, for load_strategy")


def _note(path: Path, what: str) -> None:
    typer.echo(f"Wrote {path}: {what}")
