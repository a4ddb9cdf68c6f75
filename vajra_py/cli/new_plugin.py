"""`vajra new-plugin`: start a package of policies, or of another kind of plug-in."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("new-plugin", no_args_is_help=True)
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder to create it in. Default: the current one.",
)
@click.option(
    "--kind",
    type=click.Choice(["policies", "admission", "scaler", "retention", "scorer", "filter", "picker", "decider"]),
    help="Kind of plug-in: a policy for each layer (the default), an admission policy, a scaler, a retention policy, or a part of composable routers.",
)
@click.option("--from", "original", metavar="POLICY", help="Start from a copy of this policy of the library instead.")
def new_plugin(name: str, directory: Path, kind: str | None, original: str | None) -> None:
    """Write package NAME, a working plug-in with parameters and tests: one policy for each layer, or a plug-in of KIND.

    Install it with `pip install -e NAME`; what it offers can then be selected by name in YAML.
    """
    from vajra_py.plugins.scaffold import write_plugin

    path = write_plugin(name, directory, kind, original)
    click.echo(f"package: {path}")
    click.echo(f"next: pip install -e {path} && vajra policies")
