"""Packages that exist for one test: a module and its metadata in a folder of their own on the path."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from vajra_py.plugins import Registry, build_registry

POLICY_MODULE = """
    from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicySpec, hookimpl

    class Config(PolicyConfig):
        slope: float = 1.0

    class Policy:
        key_motion = KeyMotion.STATIC
        def __init__(self, config): self.config = config
        def key(self, request, now): return 0.0

    @hookimpl
    def vajra_policies():
        return [PolicySpec("{name}", Layer.REQUEST_PRIORITIZER, Config, lambda c, x: Policy(c), "A policy.", aliases={aliases})]
"""


def policy_module(name: str, aliases: tuple[str, ...] = ()) -> str:
    return POLICY_MODULE.replace("{name}", name).replace("{aliases}", repr(aliases))


class Site:
    """A folder of installed packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, distribution: str, source: str, *, version: str = "1.0", entry: str | None = None) -> str:
        """Install a one-module package and return the module's name."""
        module = distribution.replace("-", "_")
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        info = self.folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry or f"[vajra]\n{module} = {module}\n")
        return module

    def registry(self, disabled: str = "") -> Registry:
        """Return a registry of this folder's packages, without the framework's own."""
        entries = [
            entry
            for distribution in metadata.distributions(path=[str(self.folder)])
            for entry in distribution.entry_points
            if entry.group == "vajra"
        ]
        return build_registry(entries, disabled)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "") or ""):
            del sys.modules[name]


@pytest.fixture
def policy_source() -> Callable[..., str]:
    return policy_module
