"""Generate a working plug-in package.

The template of policies is the example package of the documentation: one policy for each layer, with parameters of its own, tests
that run the shipped conformance suite, and an experiment that selects the policies by name. That of routing parts has one part of the
wanted kind in one file, with the same around it.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vajra_py import __version__
from vajra_py.errors import ConfigError, Problem

TEMPLATE = Path(__file__).parent / "template"
PART_TEMPLATE = Path(__file__).parent / "part_template"
SHARED = ("pyproject.toml.j2", "src/__package__/py.typed.j2")
"""Files of the first template that the second one has too."""
PART_KINDS = ("scorer", "filter", "picker", "decider")
"""Kinds of routing parts that there is a template of, each a file of that name."""
SUFFIX = ".j2"
PACKAGE_FOLDER = "__package__"
RESERVED = frozenset({"vajra", "vajra_py", "vajra_policies", "vajra_kernels"})


@dataclass(frozen=True, slots=True)
class PluginNames:
    """All names of a package generated from the template."""

    distribution: str
    """Name for pip: words joined by hyphens."""
    package: str
    """Name for imports: words joined by underscores."""
    prefix: str
    """Prefix of its policies' names, so that packages generated from the template do not clash."""


def plugin_names(name: str) -> PluginNames:
    """Derive the names from the one given by the user; raises `ConfigError` if it is not a valid package name."""
    package = re.sub(r"[-_. ]+", "_", name.strip().lower())
    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", package) or keyword.iskeyword(package):
        allowed = "A name is made of letters, digits, hyphens and underscores, begins with a letter, and is not a Python keyword"
        raise ConfigError(Problem("NAME", f"cannot be a package's name (got {name!r})", allowed))
    if package in RESERVED or package in sys.stdlib_module_names:
        raise ConfigError(Problem("NAME", f"is the name of an existing package (got {name!r})", "Choose another name"))
    prefix = package.removeprefix("vajra_").removesuffix("_policies")
    return PluginNames(package.replace("_", "-"), package, prefix or package)


def render_plugin(name: str, part_kind: str | None = None) -> Mapping[str, str]:
    """Return the files of a new package: text by path inside its folder, sorted by path.

    `part_kind`: one of `PART_KINDS`, for a package with a routing part; None: for one with policies.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    names = plugin_names(name)
    environment = Environment(
        loader=FileSystemLoader([TEMPLATE] if part_kind is None else [PART_TEMPLATE, TEMPLATE]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    part = f"{names.prefix.replace('_', '-')}-{part_kind}"
    files: dict[str, str] = {}
    for path in sorted(_template_files(part_kind)):
        target = path.removesuffix(SUFFIX).replace(PACKAGE_FOLDER, names.package)
        template = environment.get_template(path)
        files[target] = template.render(names=names, vajra_version=__version__, kind=part_kind, part=part)
    return files


def _template_files(part_kind: str | None) -> Iterator[str]:
    """Paths of the template's files inside it."""
    if part_kind is None:
        yield from (path.relative_to(TEMPLATE).as_posix() for path in TEMPLATE.rglob(f"*{SUFFIX}"))
        return
    yield from SHARED
    for path in PART_TEMPLATE.rglob(f"*{SUFFIX}"):
        kind = path.name.removesuffix(f".py{SUFFIX}")
        if kind == part_kind or kind not in PART_KINDS:
            yield path.relative_to(PART_TEMPLATE).as_posix()


def write_plugin(name: str, directory: str | Path, part_kind: str | None = None) -> Path:
    """Write a package named `name` into `directory`/<distribution> and return that folder.

    The package is complete: `pip install` makes its policies, or its routing part, available by name. Raises `ConfigError` if the
    name is invalid or the folder exists and is not empty; nothing is overwritten.
    """
    folder = Path(directory) / plugin_names(name).distribution
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            Problem(str(folder), "is there already and not an empty folder", "Choose another name or folder")
        )
    for path, text in render_plugin(name, part_kind).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder
