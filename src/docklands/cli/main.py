"""The `docklands` command: its sub-commands, and how an error becomes one line and an exit code.

Nothing heavy is imported here; each command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence

import typer

from docklands import __version__
from docklands.cli import config, dash, dock, doctor, evaluate, fleet, generate, inspect, models, plan, train
from docklands.errors import DocklandsError

os.environ.setdefault("GOMP_SPINCOUNT", "30000")
"""Before torch is imported: waiting OpenMP threads spin long enough to bridge two operations, and then sleep; without a
limit they steal the cores from everything beside them."""

INTERRUPTED = 130
FAILED = 3

app = typer.Typer(
    name="docklands",
    help="Reinforcement-learning training for large language models, as a dataflow over a table.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("plan")(plan.plan)
app.command("graph")(inspect.graph)
app.add_typer(config.app, name="config")
app.add_typer(dock.app, name="dock")
app.add_typer(fleet.app, name="fleet")
app.command("doctor")(doctor.doctor)
app.command("export")(models.export)
app.add_typer(models.importer, name="import")
app.command("report")(inspect.report)
app.command("trace")(inspect.trace)
app.command("dash")(dash.dash)


def show_version(value: bool) -> None:
    """Print the version and stop."""
    if value:
        print(f"docklands {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Print the version."),
) -> None:
    """Reinforcement-learning training for large language models, as a dataflow over a table."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit: 0 done, 2 the user's mistake, 3 the run failed, 4 a worker lost, 130 interrupted."""
    code = run(arguments)
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # said; another Ctrl-C would end this process by the signal
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    try:
        result = app(
            args=list(arguments) if arguments is not None else None, standalone_mode=False, prog_name="docklands"
        )
        sys.stdout.flush()
        if result == INTERRUPTED:  # typer's answer to Ctrl-C, or a run's
            return report_error(KeyboardInterrupt())
        return result if isinstance(result, int) else 0
    except (BrokenPipeError, SystemExit) as error:
        # typer answers a closed pipe (`docklands config show X | head`) with exit code 1 and a muted stdout.
        if isinstance(error, SystemExit) and error.code not in (1, None):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (KeyboardInterrupt, Exception, BaseExceptionGroup) as error:
        return report_error(error)


def report_error(error: BaseException) -> int:
    """Say what went wrong on stderr; returns the exit code."""
    causes = list(leaves(error))
    known = [cause for cause in causes if isinstance(cause, DocklandsError)]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    usage = usage_line(error)
    if usage is not None:
        if usage[0]:
            print(usage[0], file=sys.stderr)
        return usage[1]
    if known and len(known) == len(causes):
        for cause in dict.fromkeys((c.message, c.hint) for c in known):
            print_error(*cause)
        return max(cause.exit_code for cause in known)
    traceback.print_exception(error)
    return FAILED


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions inside groups (a task group wraps what its tasks raise)."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def print_error(message: str, hint: str) -> None:
    """`error: ...` for each line of the message, then `hint: ...`."""
    for line in message.splitlines() or [message]:
        print(f"error: {line}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def usage_line(error: BaseException) -> tuple[str, int] | None:
    """A wrong command line (unknown command, missing argument), as one line and its exit code."""
    if type(error).__name__ == "Abort":
        return "interrupted", INTERRUPTED
    describe, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if not callable(describe) or not isinstance(code, int):
        return None
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", None) or "docklands"
    message = " ".join(str(describe()).split())
    if not message:  # a group called without a command: its help has been printed
        return "", code
    return f"error: {message}\nhint: `{command} --help` shows the usage", code


if __name__ == "__main__":
    main()
