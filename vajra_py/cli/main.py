"""Entry point of the command line; each command's module is imported on first use, so that `--help` is instant."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from vajra_py import __version__
from vajra_py.errors import VajraError
from vajra_py.runtime.support.gc_control import skip_collection_at_exit

_COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("vajra_py.cli.run", "Run an experiment, or every point of its sweep."),
    "serve": ("vajra_py.cli.serve", "Put an engine behind HTTP, as OpenAI's API does."),
    "route": ("vajra_py.cli.route", "Place requests at vLLM, SGLang or other servers by policies."),
    "compare": ("vajra_py.cli.compare", "Compare runs: a table, and an HTML report."),
    "capacity": ("vajra_py.cli.capacity", "Find the highest rate, or the fewest replicas, at which an SLO holds."),
    "atlas": ("vajra_py.cli.atlas", "Compare policies on several workloads and loads, on one page."),
    "validate": ("vajra_py.cli.validate", "Compare a real engine's run with its simulation."),
    "calibrate": ("vajra_py.cli.calibrate", "Fit a profile bundle's overheads to a measured run."),
    "figures": ("vajra_py.cli.figures", "Write figures and tables of runs as files for a paper."),
    "replay": ("vajra_py.cli.replay", "Check that the simulator decides what the engine decided."),
    "profile": ("vajra_py.cli.profile", "Measure a model's steps on this machine, for predictions."),
    "trace": ("vajra_py.cli.trace", "Write a run's timeline for ui.perfetto.dev."),
    "check": ("vajra_py.cli.check", "Check an experiment file without running it."),
    "schema": ("vajra_py.cli.check", "Print the JSON schema of experiment files, for editors."),
    "policies": ("vajra_py.cli.policies", "List installed policies, or show one with its parameters."),
    "presets": ("vajra_py.cli.policies", "List presets: whole systems by name."),
    "profiles": ("vajra_py.cli.workloads", "List built-in workload profiles, models and devices."),
    "workloads": ("vajra_py.cli.workloads", "Describe and draw the workload of an experiment file."),
    "model": ("vajra_py.cli.model", "Write a small model without a network, or look at a model directory."),
    "new-plugin": ("vajra_py.cli.new_plugin", "Write a package of policies, or of another kind of plug-in."),
}
"""Module and summary of each command; the module defines a click command of that name, with dashes as underscores."""


_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a write to a full disk or beyond a quota; the `OSError` of such a write names no file."""


class LazyCommands(click.Group):
    """Command group that imports commands on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of typical use."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name."""
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(importlib.import_module(entry[0]), cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list of `--help` without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest name if a name is unknown."""
        from vajra_py.errors import did_you_mean

        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no such command ({args[0]!r}). {did_you_mean(args[0], _COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="vajra")
@click.option("--traceback", is_flag=True, help="Show where in the code an error came from.")
def vajra(traceback: bool) -> None:
    """Scheduling policies for LLM inference: compare them on real workloads, in simulation or on an engine."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code.

    0: success; 1: failure; 2: wrong input; 3: a violation of the contract by a policy; 4: a step that could not be
    executed; 5: a run that rejected most requests; 130: an interruption. Codes of errors are in `vajra_py.errors`.
    """
    skip_collection_at_exit()
    # NumPy's OpenBLAS threads would otherwise spin for 25 ms at the start and after each matrix product.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> int:
    wants_traceback = "--traceback" in arguments
    try:  # `--traceback` is accepted at any position, so it is removed before click parses the rest
        given = [one for one in arguments if one != "--traceback"]
        result: Any = vajra.main(given, prog_name="vajra", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except VajraError as error:
        _print(error, str(error), wants_traceback)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    except SystemExit as error:  # if stdout is a closed pipe, click wraps it and exits with an error
        if type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
            return 0
        raise error
    except OSError as error:  # e.g. a folder without write permission, or a full disk
        if error.filename is None and error.errno not in _FULL:
            raise
        text = f"{error.filename or 'output'}: {os.strerror(error.errno) if error.errno else error}."
        _print(error, text, wants_traceback)
        return 1
    return result if isinstance(result, int) else 0


def _print(error: Exception, text: str, wants_traceback: bool) -> None:
    if wants_traceback:
        import traceback

        traceback.print_exception(error)
    else:
        click.echo(text, err=True)
