"""`vajra policies` and `vajra presets`: list the installed policies and presets, with parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from vajra_py.contract.hookspecs import Preset
    from vajra_py.plugins import AnyOffer, Offer


class _Policies(click.Group):
    """Group `vajra policies`, which suggests `show` for an unknown command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest `show` if a policy's name is given in place of a command."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            hint = f"One policy: vajra policies show {args[0]}. All of them: vajra policies"
            raise click.UsageError(f"no such command ({args[0]!r}). {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Policies, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def policies(ctx: click.Context, as_json: bool) -> None:
    """List installed policies, parts of composable routers and presets, by layer or kind: name, package, version, summary."""
    if ctx.invoked_subcommand is not None:
        return
    from vajra_py.contract import Layer
    from vajra_py.plugins import load_registry

    registry = load_registry()
    rows = [
        (layer.value, name, offer.source.package, offer.source.version, offer.spec.summary)
        for layer in Layer
        for name, offer in sorted(registry.policies(layer).items())
    ]
    rows += [
        (kind, name, one.package, one.version, one.spec.summary)
        for kind, offers in registry.others.items()
        for name, one in offers.items()
    ]
    rows += [
        ("preset", name, one.source.package, one.source.version, one.spec.summary)
        for name, one in sorted(registry.presets.items())
    ]
    _print_rows(("layer", "name", "package", "version", "summary"), rows, as_json)


@policies.command("show", no_args_is_help=True)
@click.argument("name")
def show(name: str) -> None:
    """Show policy, routing part or preset NAME: its parameters with defaults and units, and the paper it follows."""
    from vajra_py.contract import Layer
    from vajra_py.errors import UnknownNameError
    from vajra_py.plugins import load_registry

    registry = load_registry()
    policies = {one for layer in Layer for one in registry.policy_names(layer)}
    others = {kind: offers[name] for kind, offers in registry.others.items() if name in offers}
    if name not in policies and name not in registry.presets and not others:
        known = policies.union(registry.presets, *registry.others.values())
        raise UnknownNameError("policy, routing part or preset", name, known)
    for offer in registry.find_policies(name) if name in policies else ():
        aliases = f" (also {', '.join(offer.spec.aliases)})" if offer.spec.aliases else ""
        _show_one(offer, offer.spec.layer.value, aliases)
    for kind, one in others.items():
        _show_one(one, kind)
    if name in registry.presets:
        _show_preset(registry.presets[name])


def _show_preset(offer: Offer[Preset]) -> None:
    from vajra_py.metrics.runs.differences import flatten

    preset = offer.spec
    click.echo(f"{preset.name}, preset, from {offer.package} {offer.version}")
    click.echo(f"  {preset.summary}")
    click.echo(f"  source: {preset.source}")
    for key, value in flatten(preset.settings).items():
        click.echo(f"    {key}: {value}")


def _show_one(offer: AnyOffer, kind: str, aliases: str = "") -> None:
    from vajra_py.plugins import parameters_of

    spec = offer.spec
    click.echo(f"{spec.name}{aliases}, {kind}, from {offer.source.package} {offer.source.version}")
    click.echo(f"  {spec.summary}")
    if spec.source:
        click.echo(f"  source: {spec.source}")
    if spec.advice:
        click.echo(f"  {spec.advice}")
    parameters = parameters_of(spec.config)
    click.echo("  parameters:" if parameters else "  parameters: none")
    for one in parameters:
        default = "required" if one.required else f"default {one.default}"
        facts = ", ".join(fact for fact in (one.type, one.limits, one.unit, default) if fact)
        click.echo(f"    {one.name}: {facts}")
        if one.description:
            click.echo(f"      {one.description}")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def presets(as_json: bool) -> None:
    """List presets: `vajra run FILE --preset NAME` replaces the file's policies by those of the preset.

    In a file, `preset: NAME` supplies the settings that the file does not set.
    """
    from vajra_py.plugins import load_registry

    rows = [
        (name, offer.source.package, offer.spec.summary, offer.spec.source)
        for name, offer in sorted(load_registry().presets.items())
    ]
    _print_rows(("name", "package", "summary", "source"), rows, as_json)


def _print_rows(header: tuple[str, ...], rows: list[tuple[Any, ...]], as_json: bool) -> None:
    if as_json:
        import json

        click.echo(json.dumps([dict(zip(header, row, strict=True)) for row in rows], indent=1))
        return
    from vajra_py.cli.options import show_table
    from vajra_py.metrics.comparison.table_model import table_of_texts

    show_table(table_of_texts(header, rows))
