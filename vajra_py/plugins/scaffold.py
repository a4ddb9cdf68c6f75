"""Generate a working plug-in package.

The template of policies is the example package of the documentation: one policy for each layer, with parameters of its own, tests
that run the shipped conformance suite, and an experiment that selects the policies by name. Other kinds of plug-ins have templates of
the same form; those of routing parts share one, with a file for each kind of part. A package that starts from a policy of the library
holds a copy of its file.
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
from vajra_py.plugins.copying import CopiedPolicy, copied_policy
from vajra_py.plugins.discovery import load_registry

POLICIES = "policies"
"""Kind of package that is generated unless another is asked for."""
PART_KINDS = ("scorer", "filter", "picker", "decider")
"""Kinds of routing parts that there is a template of, each a file of that name."""
_HERE = Path(__file__).parent
KINDS: Mapping[str, Path] = {
    POLICIES: _HERE / "template",
    "admission": _HERE / "template_admission",
    "scaler": _HERE / "template_scaler",
    "retention": _HERE / "template_retention",
    **dict.fromkeys(PART_KINDS, _HERE / "template_routing_part"),
}
"""Folder of templates by kind of package."""
COPY = _HERE / "template_copy"
"""Folder of templates of packages that start from a policy of the library."""
SHARED = ("pyproject.toml.j2", "src/__package__/py.typed.j2")
"""Files of the template of policies that every kind has."""
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
    """Return the files of a new package of this kind (`KINDS`): text by path inside its folder, sorted by path."""
    names = plugin_names(name)
    part = f"{names.prefix.replace('_', '-')}-{kind}"
    return _rendered(names, KINDS[kind], kind, part=part)


def render_copy(name: str, original: str, kind: str | None = None) -> Mapping[str, str]:
    """Return the files of a new package with a copy of the library policy `original`, as `render_plugin` does.

    `kind` is needed where policies of several kinds have the name. Raises `UnknownNameError` if none has it.
    """
    names = plugin_names(name)
    copied = copied_policy(original, names.prefix, load_registry(), kind)
    files = {**_rendered(names, COPY, POLICIES, copied=copied)}
    files[f"src/{names.package}/{copied.module}.py"] = copied.source
    return dict(sorted(files.items()))


def _rendered(names: PluginNames, folder: Path, kind: str, **known: str | CopiedPolicy) -> Mapping[str, str]:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, KINDS[POLICIES]]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    files: dict[str, str] = {}
    for path in sorted({*SHARED, *_template_files(folder, kind)}):
        target = path.removesuffix(SUFFIX).replace(PACKAGE_FOLDER, names.package)
        template = environment.get_template(path)
        files[target] = template.render(names=names, vajra_version=__version__, kind=kind, **known)
    return files


def _template_files(folder: Path, kind: str) -> Iterator[str]:
    """Paths of a template's files inside it, without those of other kinds of parts."""
    for path in folder.rglob(f"*{SUFFIX}"):
        stem = path.name.removesuffix(f".py{SUFFIX}")
        if stem == kind or stem not in PART_KINDS:
            yield path.relative_to(folder).as_posix()


def write_plugin(name: str, directory: str | Path, kind: str | None = None, original: str | None = None) -> Path:
    """Write a package named `name` into `directory`/<distribution> and return that folder.

    `kind` is one of `KINDS`, by default one of policies; `original` names a policy of the library to start from. The package is
    complete: `pip install` makes what it offers available by name. Raises `ConfigError` if the name is invalid or the folder exists
    and is not empty (nothing is overwritten), and `UnknownNameError` if the library has no such policy.
    """
    folder = Path(directory) / plugin_names(name).distribution
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            Problem(str(folder), "is there already and not an empty folder", "Choose another name or folder")
        )
    files = render_plugin(name, kind or POLICIES) if original is None else render_copy(name, original, kind)
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder
