"""`vajra new-plugin`: start a package of policies."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("new-plugin", no_args_is_help=True)
@click.argument("name")
@click.option("--directory", type=click.Path(path_type=Path), default=Path(), help="Where to put it. Default: here.")
@click.option(
    "--kind",
    type=click.Choice(["policies", "admission"]),
    default="policies",
    help="What it has: a policy for each layer, or an admission policy. Default: policies.",
)
def new_plugin(name: str, directory: Path, kind: str) -> None:
    """Write package NAME: one working policy for each layer, or an admission policy, with parameters and tests.

    Install it with `pip install -e NAME`; its policies can then be selected by name in YAML.
    """
    from vajra_py.plugins import write_plugin

    path = write_plugin(name, directory, kind)
    click.echo(f"package: {path}")
    click.echo(f"next: pip install -e {path} && vajra policies")
