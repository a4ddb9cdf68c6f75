"""`vajra model`: write a tiny model for trying things out, or describe a model directory."""

from __future__ import annotations

from pathlib import Path

import click


@click.group(no_args_is_help=True)
def model() -> None:
    """Write a small model, or describe a model directory."""


@model.command("tiny", no_args_is_help=True)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--family", default="llama", show_default=True, help="Architecture: llama, qwen3, gemma2, mixtral, …")
@click.option("--size", default="1m", show_default=True, help="Approximate number of parameters: 1m, 10m or 30m.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random weights.")
def tiny(directory: Path, family: str, size: str, seed: int) -> None:
    """Write a small model to DIRECTORY: random weights, a real tokenizer, a chat template; no network needed."""
    from vajra_py.engine.tiny import write_tiny_model

    path = write_tiny_model(directory, family=family, seed=seed, size=size)
    click.echo(f"model: {path}")


@model.command("show", no_args_is_help=True)
@click.argument("directory", type=click.Path(path_type=Path))
def show(directory: Path) -> None:
    """Show the model in DIRECTORY from its files' headers: architecture, parameters, positions."""
    from vajra_py.engine.compute.model.inspect import inspect_model

    files = inspect_model(directory)
    click.echo(f"model: {files.directory}")
    click.echo(f"  architecture: {files.model_type}")
    click.echo(f"  parameters: {files.num_elements:,} in {len(files.weight_files)} files")
    for name in (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ):
        if name in files.config:
            click.echo(f"  {name}: {files.config[name]}")
