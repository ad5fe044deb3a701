"""Reference, tables of names and quoted messages in the documents are those of the code."""

import ast
import dataclasses
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, get_args

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import atorch
import atorch.smp as smp
from atorch.auto.accelerate import auto_accelerate
from atorch.auto.arguments import CallOptions
from atorch.auto.job import Job
from atorch.auto.plan_for_cluster import plan_for
from atorch.auto.planner.plan import Why
from atorch.auto.planner.training import Training
from atorch.auto.strategy import METHODS, RECIPES, Strategy
from atorch.cli import app
from atorch.cluster.prices import Price
from atorch.cost.memory import CATEGORIES
from atorch.cost.time import StepTime
from atorch.distributed import init, rank_table, use_mesh
from atorch.patrickstar.core import PatrickStarClient
from atorch.patrickstar.merge import merge_checkpoints
from atorch.patrickstar.runtime import initialize_engine
from atorch.report.figures import shown_name, summary, why_not
from tests.house.source import modules
from tests.house.test_docs import DOCS, DOCUMENTS, name_of, table, tables

MIGRATION = sorted((DOCS / "migration").glob("*.md"))
FRONT_DOORS: tuple[Callable[..., Any], ...] = (
    auto_accelerate, atorch.RunMonitor, atorch.StragglerDetector, atorch.checkpoint_sequential,
    atorch.checkpoint_wrapper, atorch.clip_grad_norm, atorch.export, atorch.load_checkpoint, atorch.load_methods,
    atorch.load_pretrained, atorch.load_whole_state, atorch.resume_or_start, atorch.save_checkpoint,
    atorch.wait_for_checkpoint, atorch.whole_state, init, initialize_engine, merge_checkpoints, PatrickStarClient,
    rank_table, use_mesh,
)  # fmt: skip
SMP = [getattr(owner, name) for owner in (smp, smp.nn, smp.optimizers) for name in owner.__all__]
MESH = ("parallel_mode", ([("tensor", 2), ("data", 2), ("pipeline", 2)], None))  # that recipes need
VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)

_SPAN = re.compile(r"`([^`]+)`")
_GAP = "\0"  # a name or figure in a message


def undocumented(function: Callable[..., Any]) -> set[str]:
    """Public parameters that the docstring of a function or class does not name."""
    words = f"{inspect.getdoc(function)} {inspect.getdoc(function.__init__) if inspect.isclass(function) else ''}"
    parameters = inspect.signature(function).parameters.values()
    names = {each.name for each in parameters if each.kind not in VARIADIC and not each.name.startswith("_")}
    return {name for name in names if not re.search(rf"\b{name}\b", words)}


@pytest.mark.parametrize("function", FRONT_DOORS, ids=lambda function: function.__name__)
def test_docstrings_name_every_argument(function: Callable[..., Any]) -> None:
    assert not undocumented(function)


def forms_of_plan() -> list[ast.FunctionDef]:
    """The overloads of `plan`: for the job's own devices, and for a cluster."""
    (source,) = (module for module in modules("atorch/auto") if module.name == "atorch.auto.accelerate")
    return [node for node in source.tree.body if isinstance(node, ast.FunctionDef) and node.name == "plan"][:-1]


def test_the_docstring_of_plan_names_every_argument_of_both_forms() -> None:
    named = {each.arg for form in forms_of_plan() for each in (*form.args.args, *form.args.kwonlyargs)}
    shared = set(inspect.signature(auto_accelerate).parameters)  # those have their meaning there
    words = inspect.getdoc(atorch.plan) or ""
    assert not {name for name in named - shared if not re.search(rf"\b{name}\b", words)}


def test_the_defaults_of_plan_are_those_of_the_code() -> None:
    arguments = forms_of_plan()[1].args
    parameters = inspect.signature(plan_for).parameters
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None and argument.arg in parameters:
            assert ast.literal_eval(default) == parameters[argument.arg].default, argument.arg


def test_the_signature_of_auto_accelerate_is_that_of_the_models_which_check_it() -> None:
    fields = {**Job.model_fields, **CallOptions.model_fields}
    parameters = inspect.signature(auto_accelerate).parameters
    assert fields.keys() == parameters.keys() - {"kargs"}
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        assert field.is_required() or parameters[name].default == (None if default == {} else default), name


def test_arguments_of_smp_are_in_docstrings_or_the_table() -> None:
    rows = table(DOCS / "reference" / "smp.md", "argument", "of", "meaning")
    listed = {name for cells in rows for name in _SPAN.findall(cells[0])}
    functions = [each for each in (*SMP, smp.amp.GradScaler) if inspect.isfunction(each) or inspect.isclass(each)]
    missing = {name for each in functions if not _is_enum(each) for name in undocumented(each)}
    assert missing == listed


def _is_enum(given: Callable[..., Any]) -> bool:
    return inspect.isclass(given) and issubclass(given, Enum)


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    documented = re.findall(r"^\.\. auto(?:function|class|module):: (\S+)$", pages, re.MULTILINE)
    assert {f"atorch.{name}" for name in atorch.__all__} <= set(documented)
    assert "atorch.smp" in documented


def keywords() -> dict[str, Any]:
    """The arguments of `auto_accelerate` that are given by name alone, with their defaults."""
    parameters = inspect.signature(auto_accelerate).parameters.values()
    return {known.name: known.default for known in parameters if known.kind is known.KEYWORD_ONLY}


def test_the_table_of_keywords_is_that_of_the_code() -> None:
    rows = table(DOCS / "reference" / "training.md", "keyword", "default", "meaning")
    assert [cells[:2] for cells in rows] == [[f"`{name}`", f"`{default!r}`"] for name, default in keywords().items()]


def test_the_lines_of_a_plan_are_those_of_the_code() -> None:
    page = DOCS / "plan_lines.md"
    estimate = {"step_s": 1.0, "flops_per_s": 1.0, "peak_bytes": 1.0}
    near = {"chance": None, "saves": 0.1, "strategy": None, "kind": "host"}
    plan = {"estimate": estimate, "memory_bytes": 1.0, "strategy": (), "num_compositions": 1, "seconds": 1.0}
    run = dict.fromkeys((field.name for field in dataclasses.fields(Training)), 1.0) | {"unit": "steps"}
    price = dict.fromkeys((field.name for field in dataclasses.fields(Price)), 1.0) | {"currency": "USD"}
    whole = {"training": run, "price": price}
    given = {**plan, **whole, "fits_narrowly": True, "near_ties": [near], "decisive": [near]}
    lines = [f"`{name}`" for name, _ in summary(given)]
    cluster_table = next(rows for rows in tables(page) if rows[0] == ["line", "content"])
    assert [cells[0] for cells in cluster_table[1:]] == lines

    memory = {f"`{name}`" for name in (*CATEGORIES, "slack")}
    assert {cells[0] for cells in table(page, "memory", "is")} == memory
    times = {shown_name(name.removesuffix("_s")) for name in StepTime._fields} - {"total"}
    assert {cells[0] for cells in table(page, "time", "is")} == {f"`{name}`" for name in times}
    reasons = [cells[:2] for cells in table(page, "in JSON", "in words", "meaning")]
    assert sorted(reasons) == sorted([f"`{name}`", why_not(name)] for name in get_args(Why))


def texts(node: ast.AST) -> str:
    """The text of an expression, with a gap for whatever is computed; all of an expression is a gap if it has none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdg]", _GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(texts, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return texts(node.left) + texts(node.right)
    return _GAP


def messages() -> set[str]:
    """All texts in the source."""
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    return {texts(node) for module in modules("atorch") for node, _ in module.nodes(*kinds)} - {_GAP}


def test_quoted_messages_are_in_the_code() -> None:
    rows = [rows for rows in tables(DOCS / "troubleshooting.md") if rows[0] == ["message", "meaning", "what to do"]]
    quotes = [_SPAN.findall(cells[0])[0] for found in rows for cells in found[1:]]
    source = messages()
    pattern = {quote: re.compile(".*".join(map(re.escape, quote.split("…"))), re.DOTALL) for quote in quotes}
    assert len(pattern) == len(quotes) > 50
    lost = [quote for quote in quotes if not any(pattern[quote].search(text) for text in source)]
    assert not lost, "no message in the source reads like\n" + "\n".join(lost)


def literals(text: str) -> Iterator[Any]:
    """Strategies in code spans: a method in quotes, a pair, or a list of them."""
    for span in _SPAN.findall(text):
        if re.fullmatch(r'"\w+"', span) and (span[1:-1] in METHODS or span[1:-1] in RECIPES):
            yield span[1:-1]
        elif span.startswith(('("', "[")) and "..." not in span:
            yield from [value] if isinstance(value := ast.literal_eval(span), tuple) else value


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path.parent.name in ("migration", "tutorials")], ids=name_of
)
def test_strategies_in_tables_are_valid(path: Any) -> None:
    for rows in tables(path):
        for item in (item for cells in rows for item in literals(cells[-1])):
            assert Strategy.of([MESH, item] if item in RECIPES else [item]).methods


@pytest.mark.parametrize("path", [*MIGRATION, DOCS / "your_script.md"], ids=name_of)
def test_arguments_in_tables_exist(path: Any) -> None:
    names = {*inspect.signature(auto_accelerate).parameters, *keywords()}
    for rows in tables(path):
        spans = [span for cells in rows for span in _SPAN.findall(cells[-1] if len(cells) == 2 else cells[1])]
        given = {found[1] for span in spans if (found := re.match(r"(\w+)=", span))}
        assert given <= names, f"{name_of(path)} gives auto_accelerate {sorted(given - names)}"


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """(document, words) of every `atorch` command in `bash` blocks, from the word after `atorch` on."""
    for path in DOCUMENTS:
        for block in re.findall(r"^```bash\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                words = re.split(r"^(?:.* -m )?atorch(?:\.cli)? ", line.partition("  #")[0])
                if len(words) == 2:
                    yield name_of(path), shlex.split(words[1])


def test_commands_have_the_options_that_documents_give() -> None:
    found = list(command_lines())
    assert len(found) > 20
    for document, words in found:
        command: Any = get_command(app)
        names = iter(words)
        while isinstance(command, TyperGroup):
            word = next(names)  # `atorch visualize FILE` is `atorch visualize profile FILE`
            command = command.commands.get(word) or command.commands.get("profile")
            assert command is not None, f"{document}: there is no command {word!r}"
        options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        given = {word for word in names if re.match(r"--?[a-z]", word)}
        assert given <= options, f"{document}: {words} has {sorted(given - options)}"
