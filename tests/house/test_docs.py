"""The documents say what the code does.

Every `python` block runs, unless its first line begins with `# not run`: the blocks of a document one after another, in
one namespace, on two processes. A `text` block right after one is what it prints on the first process. Tables that
repeat what is in the code are compared with it, and links lead somewhere.
"""

import ast
import contextlib
import io
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atorch.auto.opt_lib.module_replace_optimization import REPLACEMENTS
from atorch.auto.strategy import METHODS
from atorch.cli import app
from atorch.compat.fsdp1_arguments import ROWS
from tests.house.source import ROOT
from tests.pool import Pool

DOCS = ROOT / "docs"
PAGES = {path.stem: path for path in sorted((DOCS / "methods").glob("*.md")) if path.stem != "README"}
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if path.is_file()]
NOT_RUN = "# not run"

SECTIONS = ("Configuration", "Knobs", "Cost", "Composes with", "Limits")
"""What every method's page has, in this order; others may stand between them."""

_BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)


def name_of(path: Path) -> str:
    """A document's path below the root."""
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[tuple[int, str, str]]:
    """`(line, code, what it prints or "")` of each `python` block that runs."""
    text = path.read_text(encoding="utf-8")
    found: list[tuple[int, str, str]] = []
    end = -1  # of the last block, where it is one that runs
    for match in _BLOCK.finditer(text):
        language, body = match.groups()
        if language == "text" and end >= 0 and not text[end : match.start()].strip():
            line, code, _ = found[-1]
            found[-1] = line, code, body
        runs = language == "python" and not body.startswith(NOT_RUN)
        if runs:
            found.append((text.count("\n", 0, match.start()) + 2, body, ""))
        end = match.end() if runs else -1
    return found


def tables(path: Path) -> Iterator[list[list[str]]]:
    """The tables of a document as rows of cells, the head first and without the line below it."""
    rows: list[list[str]] = []
    for line in (*_BLOCK.sub("", path.read_text(encoding="utf-8")).splitlines(), ""):
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not all(set(cell) <= {"-", ":"} for cell in cells):
                rows.append(cells)
        elif rows:
            yield rows
            rows = []


def table(path: Path, *head: str) -> list[list[str]]:
    """The rows of the document's one table with this head."""
    found = [rows[1:] for rows in tables(path) if tuple(rows[0]) == head]
    assert len(found) == 1, f"{name_of(path)} has {len(found)} tables with the head {head}"
    return found[0]


def prose(path: Path) -> str:
    """The document without its blocks."""
    return _BLOCK.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The anchors that a document's headings have on a page."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(prose(path))}


def test_every_method_has_a_page_and_every_page_a_method() -> None:
    assert sorted(PAGES) == sorted(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_page_has_its_sections_and_the_knobs_of_its_method(name: str) -> None:
    headings = _HEADING.findall(prose(PAGES[name]))
    assert headings[0] == name
    assert [heading for heading in headings if heading in SECTIONS] == list(SECTIONS)
    documented = {
        cells[0].strip("`"): ast.literal_eval(cells[1].strip("`"))
        for cells in table(PAGES[name], "knob", "default", "meaning")
    }
    fields = {knob: field.get_default() for knob, field in METHODS[name].model_fields.items()}
    assert list(documented) == list(fields)
    assert documented == fields
    assert all(cells[2] for cells in table(PAGES[name], "knob", "default", "meaning"))


def test_the_index_of_methods_is_in_the_order_in_which_they_apply() -> None:
    rows = table(DOCS / "methods" / "README.md", "method", "phase", "slot", "what it does")
    methods = sorted((METHODS[name] for name in METHODS), key=lambda each: (each.phase, each.name))
    expected = [[f"[`{m.name}`]({m.name}.md)", f"`{m.phase.name}`", f"`{m.slot}`"] for m in methods]
    assert [cells[:3] for cells in rows] == expected


def test_the_table_of_fsdp1_arguments_is_that_of_the_code() -> None:
    rows = table(PAGES["fsdp"], "argument", "", "under FSDP2")
    assert [cells[:2] for cells in rows] == [[f"`{name}`", row.meaning] for name, row in ROWS.items()]
    assert all(cells[2].endswith(".") for cells in rows)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for link in _LINK.findall(prose(path)):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), f"{name_of(path)} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors(there), f"{name_of(path)} links to {link}, and no heading there is called so"


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if name_of(path) != "README.md"], ids=name_of)
def test_every_document_opens_with_who_it_is_for(path: Path) -> None:
    opening = prose(path).split("\n\n")[1]
    assert opening.startswith("For "), f"{name_of(path)} opens with: {opening[:80]}"


def run_blocks(rank: int, size: int, path: str, found: list[tuple[int, str, str]], folder: str) -> list[str]:
    """Run a document's blocks in `folder` on this process; what each printed. What they register is taken back."""
    registries: tuple[Any, ...] = (METHODS, REPLACEMENTS)
    before = [set(registry) for registry in registries]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed, home = [], os.getcwd()
    os.chdir(folder)
    try:
        for line, code, _ in found:
            out = io.StringIO()
            # Lines of a traceback are those of the document.
            program = compile("\n" * (line - 1) + code, path, "exec")
            with contextlib.redirect_stdout(out), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own
                exec(program, namespace)  # noqa: S102  the documents are ours
            printed.append(out.getvalue())
    finally:
        os.chdir(home)
        for registry, names in zip(registries, before, strict=True):
            for name in set(registry) - names:
                registry.remove(name)
    return printed


RUNNING = [path for path in DOCUMENTS if blocks(path)]


@pytest.mark.parametrize("path", RUNNING, ids=name_of)
def test_blocks_run_and_print_what_stands_below_them(pool: Pool, path: Path, tmp_path: Path) -> None:
    found = blocks(path)
    printed = pool.run(run_blocks, name_of(path), found, str(tmp_path), ranks=2)[0]
    for (line, _, expected), got in zip(found, printed, strict=True):
        if expected:
            assert got == expected, f"{name_of(path)}:{line} prints otherwise"


def test_commands_on_checkpoints_run(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = DOCS / "checkpoints.md"
    pool.run(run_blocks, name_of(path), blocks(path), str(tmp_path), ranks=2)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^atorch (checkpoint .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        run = CliRunner().invoke(app, command.split())
        assert run.exit_code == 0, f"{command}: {run.output}"
