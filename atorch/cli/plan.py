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

from atorch.auto.sources import CATALOGUE, JobSource, source_of
from atorch.cli.clusters import CLUSTER_HELP, GPU_HELP, clusters_of, one_gpu
from atorch.cli.trainers import Given, explained, exported
from atorch.cost.memory import RESERVE
from atorch.errors import ArgumentError, AtorchError, NoFeasiblePlanError, StrategyError
from atorch.files import check_target, write
from atorch.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from typing import TypeAlias

    from atorch.auto.plan_for_cluster import Subject
    from atorch.auto.planner.plan import ClusterPlan
    from atorch.auto.planner.training import RunRequest
    from atorch.cluster.spec import ClusterSpec

    Read: TypeAlias = Callable[[int | None, ClusterSpec], Subject]


NARROW = 3  # exit status: the plan of each cluster on which something fits does so by less than the estimate's error

WITHOUT_EXPLAIN = "--solve, --until, --save, --html, --export or a strategy"
What = Literal["batch", "seq", "devices", "rank", "model"]
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
EXPLAIN = (
    "Explain a configuration or a command of another trainer: its methods, their time and memory, the best changes."
)
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
    tied: Annotated[bool, typer.Option("--tied", help="The output layer shares the weights of the embedding.")] = False,
    ffn: Annotated[Number, _number("Width of the feed-forward layer, or of an expert.")] = None,
    vocab: Annotated[Number, _number("Vocabulary size.")] = None,
    experts: Annotated[Number, _number("Experts in a block.")] = None,
    top_k: Annotated[Number, _number("Experts for each token.")] = None,
    batch: Annotated[Number, _number("Global batch: samples of a step on all devices.")] = None,
    micro_batch: Annotated[Number, _number("Samples of one pass of a process, for --explain.")] = None,
    seq: Annotated[Number, _number("Sequence length: tokens of a sample.")] = None,
    lora: Annotated[Word, _word("RANK[:TARGETS]", "Adapters on frozen weights, such as 16 or 16:q,v.")] = None,
    qlora: Annotated[bool, typer.Option("--qlora", help="The same, on weights in 4 bits.")] = False,
    optimizer: Annotated[Word, _word("adamw|adamw8bit|adamw_bf16|adafactor|muon|sgd|lion", "The optimizer.")] = None,
    dtype: Annotated[Word, _word("fp32|bf16|fp16", "Dtype of the weights: fp32, or bf16 with adapters.")] = None,
    attention: Annotated[Word, _word("sdpa|flash_attention_2|eager", "The model's attention.")] = None,
    cross_entropy: Annotated[Word, _word("chunked", "Compute the loss by chunks of tokens.")] = None,
    explain: Annotated[Word, _word("FILE|COMMAND", EXPLAIN)] = None,
    within: Annotated[
        Word, typer.Option("--for", metavar="TRAINER", help="Plan what this trainer can express.")
    ] = None,
    export: Annotated[
        tuple[str, Path] | None, typer.Option(metavar="TRAINER FOLDER", help="Write the trainer's own files.")
    ] = None,
    launch: Annotated[Launcher | None, typer.Option(help="Launcher of the exported files, sh by default.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --export replace files.")] = False,
    solve: Annotated[What | None, typer.Option(help="Find the largest that fits, or the fewest devices.")] = None,
    max_step: Annotated[Word, _word("TIME", "The longest step that counts as a plan, such as 2s or 500ms.")] = None,
    until: Annotated[Word, _word("AMOUNT", "Tokens of a whole run, such as 15T; or '100000 steps'.")] = None,
    prices: Annotated[File, _file("--prices", "Prices of devices; else those of public offers.", exists=True)] = None,
    mtbf: Annotated[Word, _word("TIME", "Mean time between failures of a device, such as 50000h.")] = None,
    restart: Annotated[Word, _word("TIME", "Time from a failure until training continues, such as 10min.")] = None,
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
    from atorch.auto.solve import solved
    from atorch.cluster.prices import load_prices
    from atorch.report.text import status_line

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
        **{"cross_entropy": cross_entropy, "host_memory": host_memory, "max_step": max_step},
        "target": export[0] if export and not within else within,
    }
    if explain is not None:
        if solve or until or save or html or export or launch or force or fixed or extend:
            raise ArgumentError(f"--explain goes with --json, and not with {WITHOUT_EXPLAIN}")
        return _explained(Given(explain, named, model, shape, cluster, gpu, micro_batch, seq, wanted), outputs, top)
    request = PlanRequest(**wanted)  # before the model is read, which may take minutes
    run = _run_request(until, mtbf, restart)
    is_priced = prices is not None or run is not None or objective == "cost"
    offers = load_prices(prices) if is_priced else ()
    if solve == "model" and (named or model or any(shape.values())):
        raise ArgumentError("--solve model looks for the model itself; leave MODEL and its shape out")
    source = CATALOGUE if solve == "model" else source_of(named, model, shape, request)
    clusters = clusters_of([*(cluster or ()), *map(one_gpu, gpu or ())])
    outputs.check(len(clusters))
    _check_export(export, launch, force, micro_batch, len(clusters))
    several = len(clusters) > 1
    read = _reader(source, once=several)

    def trained(changed: PlanRequest) -> JobSource:
        if changed.recipe != request.recipe:
            return source_of(named, model, shape, changed)
        return source if solve == "seq" else replace(source, subject=read)

    def ask(spec: ClusterSpec) -> ClusterPlan:
        if solve:
            plan = solved(solve, trained, spec, seq, request, _report_size)
        else:
            asked = replace(request, verify=0 if several else verify)  # side by side, simulations are not shown
            plan = plan_for(read(seq, spec), spec, doing=status_line, request=asked)
        priced = plan.priced(offers) if is_priced else plan
        return priced.until(run) if run else priced

    answers = _answers(clusters, ask)
    give(answers, source.title, outputs, top, verbose)
    plans = [answer for _, answer in answers if not isinstance(answer, AtorchError)]
    if export:
        exported(plans[0], *export, launch or "sh")
    return NARROW if not solve and all(plan.fits_narrowly for plan in plans) else 0


def _check_export(
    export: tuple[str, Path] | None, launch: Launcher | None, force: bool, micro_batch: int | None, num_clusters: int
) -> None:
    from atorch.trainer_configs.launch import check_folder

    if micro_batch or ((launch or force) and not export):
        raise ArgumentError("--micro-batch goes with --explain, and --launch and --force with --export")
    if export:
        if num_clusters > 1:
            raise ArgumentError(f"--export writes the plan for one cluster, and there are {num_clusters}; give one")
        check_folder(*export, launch or "sh", force)


def _run_request(until: str | None, mtbf: str | None, restart: str | None) -> RunRequest | None:
    from atorch.auto.planner.training import RunRequest

    if until is None and (mtbf is not None or restart is not None):
        raise ArgumentError("--mtbf and --restart are of a whole run; give its length, as --until 15T")
    return None if until is None else RunRequest(until, mtbf, restart)


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
    clusters: Sequence[tuple[str, ClusterSpec]], ask: Callable[[ClusterSpec], ClusterPlan]
) -> list[tuple[str, ClusterPlan | AtorchError]]:
    """The answer for each cluster; of several, the error for one on which nothing fits."""
    answers: list[tuple[str, ClusterPlan | AtorchError]] = []
    for name, spec in clusters:
        try:
            answers.append((name, ask(spec)))
        except (NoFeasiblePlanError, StrategyError) as error:
            if len(clusters) == 1:
                raise
            answers.append((name, error))
    return answers


def _reader(source: JobSource, *, once: bool) -> Read:
    """A function that reads the model for a cluster; `once`: only once a device type, as nothing is simulated."""
    subjects: dict[str, Subject] = {}

    def read(seq: int | None, spec: ClusterSpec) -> Subject:
        kind = spec.device.type
        if kind not in subjects or not once:
            subjects[kind] = _read(source, seq, spec)
        return subjects[kind]

    return read


def _read(source: JobSource, seq: int | None, cluster: ClusterSpec) -> Subject:
    """Read the model, and write its size and the time that it took to standard error."""
    from atorch.report.text import status_line

    began = time.monotonic()
    with status_line(f"reading {source.title}"):
        subject = source.subject(seq, cluster)
    count, ctx = format_count(subject.profile.num_params), subject.ctx
    kind = f", {type(ctx.root).__name__}" if ctx else ""
    typer.echo(f"{count} parameters{kind}, read in {format_seconds(time.monotonic() - began)}", err=True)
    return subject


def _report_size(size: str, plan: ClusterPlan | None) -> None:
    """Write a size that was tried, and whether it fits, to standard error."""
    verdict = "nothing fits"
    if plan is not None:
        step, peak = format_seconds(plan.estimate.step_s), format_bytes(plan.estimate.peak_bytes)
        verdict = f"fits, {step} a step, {peak} a device"
    typer.echo(f"{size}: {verdict}", err=True)


def _names(options: list[str] | None) -> list[str] | None:
    """The names in options such as `--exclude fp8,compile --exclude zero2`."""
    names = [name.strip() for option in options or () for name in option.split(",")]
    return [name for name in names if name] or None


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
    answers: Sequence[tuple[str, ClusterPlan | AtorchError]], title: str, outputs: Outputs, top: int, verbose: bool
) -> None:
    """Show the answer for each cluster, and write the requested files.

    Raises:
        NoFeasiblePlanError: nothing fits on any cluster, or nothing that fits can be applied and saved.
    """
    from rich.console import Console

    from atorch.auto.planner.plan import SCHEMA
    from atorch.report.answer import answer_report, clusters_report
    from atorch.report.html import plan_page, plans_page

    console, result = Console(highlight=False), answers[0][1]
    data: Mapping[str, Any]
    if len(answers) == 1 and not isinstance(result, AtorchError):
        data = result.to_json_data()
        title = (result.solved or {}).get("model", title)
        console.print(answer_report(data, title, max_rows=top, verbose=verbose))
        page = partial(plan_page, data, title, outputs.command)
    else:
        if all(isinstance(result, AtorchError) for _, result in answers):
            reasons = "; ".join(f"{name}: {result}" for name, result in answers)
            raise NoFeasiblePlanError(f"nothing fits on any of {len(answers)} clusters. {reasons}")
        columns = [
            (name, _reason(found) if isinstance(found, AtorchError) else found.to_json_data())
            for name, found in answers
        ]
        console.print(clusters_report(columns, title))
        found_on = {name: {"error": of} if isinstance(of, str) else of for name, of in columns}
        data = {"schema": SCHEMA, "clusters": found_on}
        page = partial(plans_page, columns, title, outputs.command)
    if outputs.json is not None:
        write(outputs.json, json.dumps(data, allow_nan=False) + "\n")
        _note(outputs.json, "the answer as data")
    if outputs.html is not None:
        write(outputs.html, page())
        _note(outputs.html, "the answer as a page")
    if outputs.save is not None and not isinstance(result, AtorchError):  # of one cluster: see `Outputs.check`
        _save(result, data, outputs.save)


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
