"""`vajra route`: route requests to model servers by the policies of a file."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click

from vajra_py.cli.options import overrides_option
from vajra_py.cli.serve import API_KEY_VARIABLE, limits_options
from vajra_py.errors import ConfigError, Problem

_log = logging.getLogger(__name__)
_COUNT = click.IntRange(min=1)


@click.command(no_args_is_help=True)
@click.argument("file", type=click.Path(path_type=Path))
@overrides_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port to listen on; 0: any free one.")
@click.option("--api-key", multiple=True, help=f"Bearer key that requests must carry; better: {API_KEY_VARIABLE}.")
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="File of keys, one a line: KEY, or KEY and TENANT."
)
@click.option(
    "--max-concurrent",
    type=_COUNT,
    default=4096,
    show_default=True,
    help="Maximum number of concurrent requests; more are answered 429.",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds that requests have to finish at a shutdown.",
)
@click.option("--access-log/--no-access-log", default=True, help="Log a line for each request.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option("--save-run", type=click.Path(path_type=Path), help="Record the session as a run in this folder.")
@limits_options
def route(file: Path, overrides: tuple[str, ...], **given: Any) -> None:
    """Route requests to the servers of FILE (`backend: {route: …}`) by its policies, and pass their answers on."""
    from vajra_py.config import load_system
    from vajra_py.plugins import load_registry

    try:
        from vajra_py.route.app import RouteService
        from vajra_py.route.session import RouteSession
        from vajra_py.serve.server import serve as run_server
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "vajra_py":
            raise
        message = f"its packages are not installed ({error.name})"
        raise ConfigError(Problem("route", message, 'Install the extra: pip install "vajra-py[serve]"')) from None
    from vajra_py.runtime.support.gc_control import infrequent_collections
    from vajra_py.serve.http.logs import logging_to_stderr
    from vajra_py.serve.http.options import LOOPBACK, ServeOptions

    registry = load_registry()
    keys = given["api_key"]
    given["api_key"] = (keys if len(keys) > 1 else keys[0]) if keys else os.environ.get(API_KEY_VARIABLE) or None
    options = ServeOptions(**given)
    options.check()
    if options.host not in LOOPBACK and not options.has_keys:
        click.echo(f"anyone who reaches {options.host} can use this router: there is no --api-key", err=True)
    config = load_system(file, overrides, registry)
    with logging_to_stderr(options.log_format, options.log_level):
        session = RouteSession(config, registry, options.save_run)
        service = RouteService(session, options)
        num_servers = len(session.settings.servers)
        with infrequent_collections():
            run_server(service, lambda address: _log.info("listening on %s (%d servers)", address, num_servers))
