"""The commands as one typer application, and the way from exceptions to exit codes."""

from __future__ import annotations

import sys

import typer

from gradstow._errors import BudgetError, GradstowError, PolicyError, StalePlan
from gradstow.cli import demo, frontier, max_batch, plan, profile, train, verify
from gradstow.cli._input import InputError
from gradstow.cli.bench._group import bench

_BAD_INPUT = (BudgetError, PolicyError, StalePlan, InputError)
_INTERRUPTED = 130

app = typer.Typer(
    name="gradstow",
    help="Train a PyTorch model inside a memory budget: the same numbers in less memory.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo", epilog=demo.EXAMPLE)(demo.demo)
app.command("profile", epilog=profile.EXAMPLE)(profile.profile)
app.command("plan", epilog=plan.EXAMPLE)(plan.plan)
app.command("frontier", epilog=frontier.EXAMPLE)(frontier.frontier)
app.command("verify", epilog=verify.EXAMPLE)(verify.verify)
app.command("max-batch", epilog=max_batch.EXAMPLE)(max_batch.max_batch)
app.command("train", epilog=train.EXAMPLE)(train.train)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        import gradstow

        print(gradstow.__version__)
        raise typer.Exit


def run(arguments: list[str]) -> int:
    """Run one command; what users can cause becomes a line on stderr, never a traceback."""
    command = typer.main.get_command(app)
    try:
        result = command.main(args=arguments or ["--help"], prog_name="gradstow", standalone_mode=False)
    except GradstowError as error:
        complain(str(error))
        return 2 if isinstance(error, _BAD_INPUT) else 1
    except OSError as error:  # such as a full disk behind stdout
        complain(f"the result cannot be written: {error.strerror or error}")
        return 1
    except (KeyboardInterrupt, typer.Abort):
        result = _INTERRUPTED
    except Exception as error:
        # click's usage errors; typer carries a click of its own or uses the installed one
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        complain(f"{str(format_message()).rstrip('. ')}. See gradstow --help.")
        return int(getattr(error, "exit_code", 2))
    if result == _INTERRUPTED:  # some versions of typer return this code instead of raising
        complain("interrupted")
    return result if isinstance(result, int) else 0


def complain(message: str) -> None:
    """One line on stderr, however the message was wrapped."""
    print(f"gradstow: {' '.join(message.split())}", file=sys.stderr)
