"""Installs packages for one test: faulty policies, and this package's own entry points if it runs from its sources."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from vajra_py.contract import Layer
from vajra_py.plugins import Registry, build_registry, load_registry

ROOT = Path(__file__).resolve().parents[2]
BROKEN = '''
import math, time
from vajra_py.contract import BatchBuilder, KeyMotion, Layer, PolicyConfig, PolicySpec, fill, hookimpl


class ScheduleConfig(PolicyConfig):
    at_step: int = 4
    how: str = "raises"


class Breaks:
    """First come first served, until a step in which it does what no policy may."""

    def __init__(self, config):
        self.config, self.step = config, 0

    def schedule(self, replica, batch, now):
        self.step += 1
        if self.step >= self.config.at_step:
            if self.config.how == "raises":
                raise ZeroDivisionError("a slip")
            if self.config.how == "too_many":
                for request in replica.running():
                    batch.add(request, request.num_remaining_tokens + 1)
            if self.config.how == "never_returns":
                while True:
                    pass
        fill(replica, batch, lambda request, batch, replica: min(batch.max_chunk(request), batch.tokens_left))

    def solo_chunk_size(self, num_done_tokens, num_remaining_tokens):
        return num_remaining_tokens


class KeyConfig(PolicyConfig):
    at_call: int = 3


class NoNumber:
    key_motion = KeyMotion.STATIC

    def __init__(self, config):
        self.config, self.calls = config, 0

    def key(self, request, now):
        self.calls += 1
        return math.nan if self.calls >= self.config.at_call else request.arrived_at


@hookimpl
def vajra_policies():
    return [
        PolicySpec("breaks", Layer.REPLICA_SCHEDULER, ScheduleConfig, lambda c, x: Breaks(c), "Breaks the contract."),
        PolicySpec("no_number", Layer.REQUEST_PRIORITIZER, KeyConfig, lambda c, x: NoNumber(c), "Keys that are none."),
    ]
'''


def install(folder: Path, distribution: str, entry_points: str, source: str | None = None) -> None:
    """Make a package of one module, or of metadata alone."""
    module = distribution.replace("-", "_")
    if source is not None:
        (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def install_broken(folder: Path) -> None:
    install(folder, "broken-policies", "[vajra]\nbroken_policies = broken_policies\n", BROKEN)


def breaking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Registry]:
    """Return settings whose replica scheduler breaks at its ninth step, and whose fallback then decides, with the registry that has it."""
    install_broken(folder)
    monkeypatch.syspath_prepend(str(folder))
    registry = build_registry(metadata.entry_points(group="vajra"))
    monkeypatch.setattr("vajra_py.vllm.scheduler.load_registry", lambda: registry)
    text = (
        "preset: sarathi\nscheduling: {replica_scheduler: {policy: breaks, params: {at_step: 9}}}\n"
        "backend: {vllm: {fallback: vllm-v1}}"
    )
    return text, registry


def install_own_doors(folder: Path) -> None:
    """Install this package's entry points from pyproject.toml, if no installation provides them."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines: list[str] = []
    for group, entries in groups.items():
        known = {one.name for one in metadata.entry_points(group=group)}
        absent = [f"{name} = {value}" for name, value in entries.items() if name not in known]
        lines += [f"[{group}]", *absent]
    install(folder, "vajra-py-from-sources", "\n".join(lines) + "\n")


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a process that imports this package from its sources."""
    own = (ROOT, ROOT / "policies", ROOT / "kernels", ROOT / "examples" / "plugin_template" / "src")
    return ":".join(map(str, (*folders, *own)))


def built_in(layer: Layer) -> list[str]:
    """Names of this project's own policies of a layer."""
    return sorted(name for name, offer in load_registry().policies(layer).items() if offer.package == "vajra-py")
