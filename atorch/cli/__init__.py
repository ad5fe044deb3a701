"""The `atorch` command. Each command is one module; none imports torch before it runs, so that help is immediate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from atorch.cli import calibrate, checkpoint, doctor, oom, plan, strategy, visualize
from atorch.errors import AtorchError, NoFeasiblePlanError

__all__ = ["app", "main"]

# The base of typer's usage errors, which typer does not export; BadParameter derives from it.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="atorch",
    help="Plan, shard and train PyTorch models.",
    add_completion=False,
    rich_markup_mode=None,  # plain help: importing rich would double the time it takes
    pretty_exceptions_enable=False,
)
app.command("calibrate")(calibrate.calibrate)
app.command("doctor")(doctor.doctor)
app.command("explain-oom")(oom.explain_oom)
app.command("plan")(plan.plan)
app.command("test")(doctor.selftest)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(strategy.app, name="strategy")
app.add_typer(visualize.app, name="visualize")


@app.callback(invoke_without_command=True)
def _without_command(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    if version:
        typer.echo(f"atorch {doctor.version('atorch')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: the process's own) and return the exit status.

    Status 2 is a usage error, reported in one line; 1 is a check that failed; 130 is an interrupt. Those of
    `atorch plan` guard what comes after it: 0 fits, 3 fits narrowly, 2 nothing fits, 1 an error. `atorch explain-oom`
    has 1 for errors, too.
    """
    given = sys.argv[1:] if arguments is None else arguments
    error_status = 1 if given[:1] and given[0] in ("plan", "explain-oom") else 2
    try:
        status = app(arguments, standalone_mode=False, obj=given)
    except _UsageError as error:
        return _report_error(cast(typer.BadParameter, error).format_message(), error_status)
    except NoFeasiblePlanError as error:
        return _report_error(str(error), 2)
    except AtorchError as error:
        return _report_error(str(error), error_status)
    except typer.Abort:
        return 130
    return status if isinstance(status, int) else 0


def _report_error(message: str, status: int) -> int:
    typer.echo(f"atorch: {message}", err=True)
    return status
