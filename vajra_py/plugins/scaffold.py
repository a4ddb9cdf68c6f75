"""Generate a working plug-in package.

The template of policies is the example package of the documentation: one policy for each layer, with parameters of its own,
tests that run the shipped conformance suite, and an experiment that selects the policies by name. Other kinds of package replace
its files but for those that are the same for all.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vajra_py import __version__
from vajra_py.errors import ConfigError, Problem

TEMPLATE = Path(__file__).parent / "template"
POLICIES = "policies"
KINDS: Mapping[str, Path] = {POLICIES: TEMPLATE, "admission": TEMPLATE.with_name("template_admission")}
"""Templates by kind of package."""
_OF_ALL_KINDS = ("pyproject.toml.j2", "src/__package__/py.typed.j2")
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


def render_plugin(name: str, kind: str = POLICIES) -> Mapping[str, str]:
    """Return the files of a new package: text by path inside its folder, sorted by path."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    names, folder = plugin_names(name), KINDS[kind]
    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATE]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    own = {source.relative_to(folder).as_posix() for source in folder.rglob(f"*{SUFFIX}")}
    files: dict[str, str] = {}
    for path in sorted(own.union(_OF_ALL_KINDS)):
        target = path.removesuffix(SUFFIX).replace(PACKAGE_FOLDER, names.package)
        files[target] = environment.get_template(path).render(names=names, vajra_version=__version__)
    return files


def write_plugin(name: str, directory: str | Path, kind: str = POLICIES) -> Path:
    """Write a package named `name` into `directory`/<distribution> and return that folder. `kind`: one of `KINDS`.

    The package is complete: `pip install` makes its policies available by name. Raises `ConfigError` if the name is
    invalid or the folder exists and is not empty; nothing is overwritten.
    """
    folder = Path(directory) / plugin_names(name).distribution
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            Problem(str(folder), "is there already and not an empty folder", "Choose another name or folder")
        )
    for path, text in render_plugin(name, kind).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder
