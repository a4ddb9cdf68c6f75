"""`vajra serve`: serve models over an OpenAI-compatible API."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vajra_py.cli.options import on_option, overrides_option
from vajra_py.errors import ConfigError, Problem

if TYPE_CHECKING:
    from vajra_py.cluster.connect import RayCluster
    from vajra_py.serve.api.tracing import Tracing
    from vajra_py.serve.http.options import ServeOptions

_log = logging.getLogger(__name__)
API_KEY_VARIABLE = "VAJRA_API_KEY"
ADMIN_KEY_VARIABLE = "VAJRA_ADMIN_API_KEY"
SSL_PASSWORD_VARIABLE = "VAJRA_SSL_KEYFILE_PASSWORD"
_COUNT = click.IntRange(min=1)
_PATH = click.Path(path_type=Path)


_SECRETS = {
    "api_key": API_KEY_VARIABLE,
    "admin_api_key": ADMIN_KEY_VARIABLE,
    "ssl_keyfile_password": SSL_PASSWORD_VARIABLE,
}
"""Environment variables by option; unlike arguments, they do not appear in the process list."""


def _flags(command: click.Command | Any) -> Any:
    """Add the flags that replace an experiment file, under vLLM's names."""
    options = (
        click.option("--model", help="Serve the model of this directory, without an experiment file."),
        click.option(
            "--preset", help="Preset with the policies and sizes of a whole system; `vajra presets` lists them."
        ),
        click.option("--scheduling-policy", help="fcfs or priority, as in vLLM."),
        click.option("--max-num-seqs", type=_COUNT, help="Maximum number of requests in a step."),
        click.option("--max-num-batched-tokens", type=_COUNT, help="Maximum number of tokens in a step."),
        click.option("--max-model-len", type=_COUNT, help="Maximum length of a sequence, prompt and output."),
        click.option("--block-size", type=_COUNT, help="Number of tokens in a KV block."),
        click.option("--num-gpu-blocks-override", type=_COUNT, help="Number of KV blocks of a replica."),
        click.option(
            "--gpu-memory-utilization",
            type=float,
            help="Fraction of the memory to use where the number of KV blocks is not given.",
        ),
        click.option(
            "--enable-prefix-caching/--no-enable-prefix-caching", default=None, help="Reuse the KV of common prefixes."
        ),
        click.option(
            "--tensor-parallel-size", "-tp", type=_COUNT, help="Number of devices that each layer is divided among."
        ),
        click.option(
            "--data-parallel-size", "-dp", type=_COUNT, help="Number of replicas; on a CPU, each is a process."
        ),
        click.option("--dtype", help="auto, float32, float16 or bfloat16."),
        click.option("--device", help="cpu, cuda or cuda:N."),
        click.option(
            "--load-format", type=click.Choice(["auto", "dummy"]), help="Source of the weights; dummy: random ones."
        ),
        click.option("--seed", type=click.IntRange(min=0), help="Seed of every random stream."),
        click.option(
            "--max-num-queued-reqs", type=_COUNT, help="Maximum number of waiting requests; more are answered 429."
        ),
        click.option(
            "--max-num-queued-tokens",
            type=_COUNT,
            help="Maximum number of waiting prompt tokens; requests beyond it are answered 429.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


_LIMITS = {
    "--max-body-bytes": "Maximum size of a request body in bytes; larger ones are answered 413.",
    "--max-body-values": "Maximum number of JSON values in a request body; each token id of a prompt counts.",
    "--max-body-containers": "Maximum number of JSON arrays and objects in a request body; each message counts.",
    "--max-buffered-bytes": "Maximum number of bytes of large request bodies read at once; more are answered 429.",
    "--max-header-bytes": "Maximum size of a request's head in bytes; larger ones are answered 431.",
    "--max-connections": "Maximum number of open connections.",
    "--max-connections-per-client": "Maximum number of open connections from one address.",
}
_TIMEOUTS = {
    "--header-timeout": "Maximum time to send the head of a request, in seconds.",
    "--body-timeout": "Maximum time to send the body of a request, in seconds.",
    "--idle-timeout": "Maximum time without a request before a connection is closed, in seconds.",
    "--send-timeout": "Maximum time in which a client receives nothing of its answer, in seconds.",
}


def limits_options(command: click.Command | Any) -> Any:
    """Add options that limit the resources of one client."""
    from vajra_py.serve.http.options import ServeOptions

    default = ServeOptions()
    for flag, meaning in reversed(_TIMEOUTS.items()):
        name, kind = flag[2:].replace("-", "_") + "_s", click.FloatRange(min=0, min_open=True)
        command = click.option(flag, name, type=kind, default=getattr(default, name), show_default=True, help=meaning)(
            command
        )
    for flag, meaning in reversed(_LIMITS.items()):
        value = getattr(default, flag[2:].replace("-", "_"))
        command = click.option(flag, type=_COUNT, default=value, show_default=True, help=meaning)(command)
    return command


def _operations(command: click.Command | Any) -> Any:
    """Add options for logs, Unix sockets, TLS, and proxies between the server and its clients."""
    from vajra_py.serve.http.options import ServeOptions

    default = ServeOptions()
    options = (
        click.option("--access-log/--no-access-log", default=True, help="Log a line for each request."),
        click.option(
            "--log-format", type=click.Choice(["text", "json"]), default=default.log_format, show_default=True
        ),
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            default=default.log_level,
            show_default=True,
        ),
        click.option("--uds", type=_PATH, help="Listen on this Unix socket instead of --host and --port."),
        click.option(
            "--root-path", default=default.root_path, help="Path prefix under which a proxy serves this server."
        ),
        click.option("--ssl-certfile", type=_PATH, help="Certificate file (PEM); turns TLS on."),
        click.option("--ssl-keyfile", type=_PATH, help="Private key file of the certificate."),
        click.option(
            "--ssl-keyfile-password",
            help=f"Password of an encrypted key; better: the variable {SSL_PASSWORD_VARIABLE}.",
        ),
        click.option(
            "--ssl-ca-certs",
            type=_PATH,
            help="File of certificate authorities; clients need a certificate that one of them signed.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _server_options(command: click.Command | Any) -> Any:
    """Add options of the server itself."""
    from vajra_py.serve.http.options import ServeOptions

    default = ServeOptions()
    options = (
        click.option("--host", default=default.host, show_default=True, help="Address to listen on."),
        click.option(
            "--port", type=int, default=default.port, show_default=True, help="Port to listen on; 0: any free one."
        ),
        click.option(
            "--served-model-name", "served_names", multiple=True, help="Model name in the API. May be repeated."
        ),
        click.option(
            "--max-choices",
            type=_COUNT,
            default=default.max_choices,
            show_default=True,
            help="Maximum number of outputs of one HTTP request (prompts times n).",
        ),
        click.option(
            "--max-concurrent",
            type=_COUNT,
            default=default.max_concurrent,
            show_default=True,
            help="Maximum number of HTTP requests that generate at once; more are answered 429.",
        ),
        click.option(
            "--strict-fields", is_flag=True, help="Refuse requests with unknown fields, which are ignored otherwise."
        ),
        click.option(
            "--grace",
            "grace_s",
            type=click.FloatRange(min=0),
            default=default.grace_s,
            show_default=True,
            help="Seconds that requests have to finish at a shutdown.",
        ),
        click.option(
            "--metric-names",
            type=click.Choice(["vajra", "vllm", "both"]),
            default=default.metric_names,
            show_default=True,
            help="Prefixes in /metrics of metrics that vLLM has too.",
        ),
        click.option(
            "--otlp-traces-endpoint",
            help="URL to send spans to (OTLP over HTTP); the OTEL_* variables work too.",
        ),
        click.option(
            "--admin", is_flag=True, help="Allow policies to be swapped while the server runs (POST /admin/policy)."
        ),
        click.option(
            "--admin-api-key",
            help=f"Bearer key of /admin, in the place of --api-key; better: the variable {ADMIN_KEY_VARIABLE}.",
        ),
        click.option("--save-run", type=click.Path(path_type=Path), help="Record the session as a run in this folder."),
    )
    for option in reversed(options):
        command = option(command)
    return command


_LISTS = {
    "--allowed-hosts": "Host name under which clients may call the server; *.NAME allows all subdomains; default: any.",
    "--allowed-origins": "Origin from which browsers may call the server; * allows all; default: none.",
    "--allowed-methods": "HTTP method that is allowed for such origins; default: GET and POST.",
    "--allowed-headers": "Header that is allowed for such origins; default: any.",
    "--forwarded-allow-ips": "Proxy, or network of proxies, whose X-Forwarded-For is trusted; * trusts all; default: none.",
}
"""Options with several values: repeated, as a JSON list (as for vLLM), or separated by commas."""


def _listed(values: tuple[str, ...]) -> tuple[str, ...]:
    """Flatten option values, each of which is a single entry, a JSON list, or comma-separated entries."""
    found: list[str] = []
    for value in values:
        if value.startswith('["'):
            try:
                found += map(str, json.loads(value))
            except ValueError as error:
                raise click.BadParameter(f"is not a JSON list ({error})") from None
        else:
            found += filter(None, map(str.strip, value.split(",")))
    return tuple(found)


def _access_options(command: click.Command | Any) -> Any:
    """Add options for access to the server: keys, host names, browser origins, proxies."""
    options = (
        click.option(
            "--api-key",
            multiple=True,
            help=f"Bearer key that requests must carry; better: the variable {API_KEY_VARIABLE}. May be repeated.",
        ),
        click.option("--api-key-file", type=_PATH, help="File of keys, one a line: KEY, or KEY and its TENANT."),
        click.option("--guard-health", is_flag=True, help="Require the key at /health and /ready too."),
        click.option("--guard-metrics", is_flag=True, help="Require the key at /metrics too."),
        click.option("--allow-credentials", is_flag=True, help="Allow pages of --allowed-origins to send credentials."),
    )
    for option in reversed(options):
        command = option(command)
    for flag, meaning in reversed(_LISTS.items()):
        command = click.option(flag, multiple=True, help=f"{meaning} May be repeated.")(command)
    return command


@click.command(no_args_is_help=True)
@click.argument("file", type=click.Path(path_type=Path), required=False)
@overrides_option
@on_option
@_flags
@_server_options
@_access_options
@_operations
@limits_options
def serve(file: Path | None, overrides: tuple[str, ...], on: str, **given: Any) -> None:
    """Serve the system of FILE (or of --model DIR) over HTTP, as OpenAI's API does, under its policies."""
    from vajra_py.cluster.connect import ray_cluster
    from vajra_py.config import load_system
    from vajra_py.plugins import load_registry
    from vajra_py.serve.http.options import LOOPBACK
    from vajra_py.serve.session.configure import FLAG_NAMES, ModelFlags, config_of_flags

    registry = load_registry()
    flags = {name: given.pop(name) for name in FLAG_NAMES}
    if file is None:
        if flags["model"] is None:
            raise ConfigError(Problem("serve", "there is nothing to serve", "A system FILE, or --model DIR"))
        config = config_of_flags(ModelFlags(**flags), overrides, registry)
    else:
        not_with_file = sorted("--" + name.replace("_", "-") for name, value in flags.items() if value is not None)
        if not_with_file:
            message = f"cannot be combined with a file ({', '.join(not_with_file)})"
            raise ConfigError(Problem("serve", message, "Write it into the file, or `--set PATH=VALUE`"))
        config = load_system(file, overrides, registry)
    for flag in _LISTS:
        name = flag[2:].replace("-", "_")
        entries = _listed(given.pop(name))
        if entries:
            given[name] = entries
    keys = given["api_key"]
    given["api_key"] = keys if len(keys) > 1 else keys[0] if keys else None
    for name, variable in _SECRETS.items():
        if given[name] is None:
            given[name] = os.environ.get(variable) or None
    if not given["admin"] and os.environ.get(ADMIN_KEY_VARIABLE) == given["admin_api_key"]:
        given["admin_api_key"] = None
    if given["host"] not in LOOPBACK and given["uds"] is None and not (given["api_key"] or given["api_key_file"]):
        click.echo(f"anyone who reaches {given['host']} can use this server: there is no --api-key", err=True)
    with ray_cluster(on) as cluster:
        _run(config, registry, given, cluster)
    _leave()


def _tracing(options: ServeOptions) -> Tracing:
    try:
        from vajra_py.serve.api.tracing import make_tracing
    except ModuleNotFoundError as error:
        message = f"spans are enabled, but their packages are not installed ({error.name})"
        raise ConfigError(Problem("serve", message, 'Install the extra: pip install "vajra-py[otel]"')) from None
    return make_tracing(options.otlp_traces_endpoint)


def _run(config: Any, registry: Any, given: dict[str, Any], cluster: RayCluster | None) -> None:
    try:
        from vajra_py.serve.app import Service
        from vajra_py.serve.server import serve as run_server
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "vajra_py":
            raise
        message = f"its packages are not installed ({error.name})"
        raise ConfigError(Problem("serve", message, 'Install the extra: pip install "vajra-py[serve]"')) from None
    from vajra_py.experiment.runs.recording import RunRecording
    from vajra_py.serve.http.logs import logging_to_stderr
    from vajra_py.serve.http.options import ServeOptions
    from vajra_py.serve.session.session import EngineSession, SessionParts

    options = ServeOptions(**given)
    options.check()
    with logging_to_stderr(options.log_format, options.log_level):
        recording = None if options.save_run is None else RunRecording(config, registry, options.save_run)
        replaced: dict[str, Any] = {}
        if cluster is not None:
            from vajra_py.cluster.replicas import workers_on

            replaced["make_worker"] = workers_on(cluster, config)
        session = EngineSession(SessionParts(config, registry, recording, replaced))
        service = Service(session, options, _tracing(options) if options.traces else None)
        names = ", ".join(service.names)
        run_server(service, lambda address: _log.info("listening on %s (models: %s)", address, names))


def _leave() -> None:
    """Exit the process without teardown of libraries, which takes seconds once a model is loaded.

    The operating system frees the memory.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the stream may be a pipe whose reader has closed it
            stream.flush()
    os._exit(0)
