"""Configuration of the site: `make docs` builds it from the Markdown pages of the repository, without a network."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints
from zipfile import ZIP_DEFLATED, ZipFile

from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command

import atorch
from atorch.cli import app as command_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "atorch"
author = "The atorch authors"
release = atorch.__version__
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "examples/*.md", "benchmarks/*.md"]
exclude_patterns = [".*", "atorch", "build", "runs", "tests", "tools", "wheels"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures: torch's are on another site
default_role = "code"  # docstrings mark names by single backquotes
maximum_signature_line_length = 100
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"atorch {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = False


def choices_of(hint: Any) -> tuple[str, ...]:
    """The values of a `Literal`, also inside `Literal[...] | None`."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for part in get_args(hint) for choice in choices_of(part))


class CommandOptions(SphinxDirective):
    """A table of the arguments and options of an atorch command, such as `strategy show`, from the command itself."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        command = get_command(command_line)
        for name in self.arguments[0].split():
            command = command.commands[name]
        hints = get_type_hints(inspect.unwrap(command.callback))
        rows = ["| option | default | meaning |", "|---|---|---|"]
        for parameter in command.params:
            options = [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-")]
            names = ", ".join(f"`{name}`" for name in options or [parameter.metavar or parameter.name.upper()])
            default = "" if parameter.default in (None, False) else f"`{parameter.default}`"
            choices = ", ".join(f"`{choice}`" for choice in choices_of(hints[parameter.name]))
            rows.append(f"| {names} | {default} | {parameter.help}{choices and f' One of {choices}.'} |")
        return [nodes.container("", *self.parse_text_to_nodes("\n".join(rows)), classes=["command-options"])]


def reading_order(env: BuildEnvironment, name: str) -> Iterator[str]:
    """The pages below a page, as the tables of contents list them."""
    yield name
    for child in env.toctree_includes.get(name, ()):
        yield from reading_order(env, child)


def write_index_files(app: Sphinx, failure: Exception | None) -> None:
    """Write `llms.txt`, a list of the pages with their first sentences, and a page that leads to the first one."""
    if failure is not None or app.builder.format != "html":
        return
    summaries = [f"# {project}", ""]
    for name in reading_order(app.env, root_doc):
        paragraph = next(app.env.get_doctree(name).findall(nodes.paragraph))
        opening = textwrap.shorten(paragraph.astext(), 300, placeholder=" …")
        summaries.append(f"- [{app.env.titles[name].astext()}](_sources/{name}.md.txt): {opening}")
    out = Path(app.outdir)
    (out / "llms.txt").write_text("\n".join(summaries) + "\n", encoding="utf-8")
    target = f"{root_doc}.html"
    write_planner(out / "docs")
    (out / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={target}">\n')


PLANNING = (
    "auto", "cluster", "compat", "cost", "files", "report", "runtime/pipeline/capture", "runtime/precision",
    "trainer_configs",
)  # fmt: skip
"""Folders of the package with the modules that plan by arithmetic, which need no torch."""


def write_planner(out: Path) -> None:
    """Put the page that plans in the browser in a folder, with a wheel of the modules that it runs."""
    package = Path(atorch.__file__).parent
    within = (path for folder in PLANNING for path in (package / folder).rglob("*.*") if path.suffix != ".pyc")
    with ZipFile(out / "atorch.whl", "w", ZIP_DEFLATED) as wheel:
        for path in sorted({*package.glob("*.py"), *within}):
            wheel.write(path, path.relative_to(package.parent))
        metadata = f"Metadata-Version: 2.1\nName: atorch\nVersion: {release}\n"
        wheel.writestr(f"atorch-{release}.dist-info/METADATA", metadata)
    shutil.copy(Path(__file__).with_name("planner.html"), out)


def keep_sentences(app: Sphinx, what: str, name: str, given: Any, options: Any, lines: list[str]) -> None:
    """Put a dash in place of a colon in docstrings of attributes: napoleon takes what is before a colon for a type."""
    if what in ("attribute", "data", "property"):
        lines[:] = [line.replace(": ", " – ") for line in lines]


def setup(app: Sphinx) -> None:
    """Register the directive, the change to docstrings, and the files that are written after the pages."""
    app.add_directive("command-options", CommandOptions)
    app.connect("autodoc-process-docstring", keep_sentences, priority=400)  # before napoleon
    app.connect("build-finished", write_index_files)
