"""Shared configuration of all tests: repeatable hypothesis runs, optional reference data, optional GPU."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from msgspec import structs

if TYPE_CHECKING:
    from vajra_py.contract import PolicySpec
    from vajra_py.contract.observer import Observer
    from vajra_py.plugins import Registry

# Before anything imports a numeric library: one thread per worker (workers share the cores), figures into files, no model hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent

# `ci` (the default): the same examples in every run, no deadline, since a shared machine stalls now and then.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# `explore`: new examples each time, and more of them; add each failure as an explicit @example.
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


ORDER_SEED = "VAJRA_TEST_ORDER"
"""Environment variable: a whole number by which modules, and the tests of each, are put in random order."""

OPENS_SOCKETS = ("serve", "engine")
"""Folders of tests that open sockets, processes and event loops."""


def pytest_report_header() -> str | None:
    """Report the order of the tests, if it is not the default."""
    seed = os.environ.get(ORDER_SEED)
    return None if seed is None else f"random order: {ORDER_SEED}={seed}"


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """The tests in random order, those of a module side by side, so that module-scoped fixtures are created once."""
    stream = random.Random(seed)
    by_module: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_module.setdefault(item.nodeid.partition("::")[0], []).append(item)
    modules = list(by_module.values())
    stream.shuffle(modules)
    for module in modules:
        stream.shuffle(module)
    return [item for module in modules for item in module]


@pytest.fixture(autouse=True)
def _closes_what_it_opens(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect garbage after each test, so that leaked resources fail the test that leaked them.

    Older objects are frozen, since traversing those of the tensor libraries would take a quarter of a second.
    """
    folder = request.path.relative_to(ROOT / "tests").parts[0] if request.path.is_relative_to(ROOT / "tests") else ""
    if folder not in OPENS_SOCKETS:
        yield
        return
    gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply the requested order, and skip GPU tests if torch, imported only for such tests, finds none."""
    if ORDER_SEED in os.environ:
        items[:] = shuffled(items, int(os.environ[ORDER_SEED]))
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none"))


@pytest.fixture(scope="session")
def repository_root() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture
def with_observer() -> Callable[[str, Observer], Registry]:
    """Make the installed registry with one more observer, which `observers: [{type: NAME}]` selects."""
    from vajra_py.contract import PolicyConfig
    from vajra_py.contract.hookspecs import ObserverSpec
    from vajra_py.plugins import load_registry
    from vajra_py.plugins.registry import PluginSource

    class NoParameters(PolicyConfig):
        """No parameters."""

    def registry(name: str, observer: Observer) -> Registry:
        installed = load_registry()
        claim = (
            PluginSource("test-observers", "1.0", name),
            ObserverSpec(name, NoParameters, lambda _: observer, "A test's."),
        )
        return structs.replace(
            installed, lazy=lambda hook: [*installed.lazy(hook), *([claim] if hook == "vajra_observers" else [])]
        )

    return registry


@pytest.fixture(scope="module")
def _checked_later() -> Iterator[list[tuple[PolicySpec, Mapping[str, Any]]]]:
    """Policies whose decisions are compared under other hash seeds when the tests of a module are over."""
    from vajra_py.testing import hash_seeds

    found: list[tuple[PolicySpec, Mapping[str, Any]]] = []
    yield found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_seeds, "TIMEOUT_S", 1_200.0)
        all_runs = hash_seeds.rows_by_hash_seed(found)
    for (spec, params), runs in zip(found, all_runs, strict=True):
        assert len(runs) == len(hash_seeds.HASH_SEEDS)
        assert all(set(rows) == set(runs[0]) for rows in runs)
        assert hash_seeds.first_difference(runs) is None, f"{spec.name} with {dict(params)}"


@pytest.fixture
def hash_seeds_at_once(
    _checked_later: list[tuple[PolicySpec, Mapping[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave the comparison of processes to one pair for all policies of the module, since each takes seconds to start."""

    def put_off(policies: Sequence[tuple[PolicySpec, Mapping[str, Any]]]) -> list[list[dict[str, list[str]]]]:
        _checked_later.extend(policies)
        return [[{}] for _ in policies]

    monkeypatch.setattr("vajra_py.testing.conformance.rows_by_hash_seed", put_off)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference traces and recorded decisions that are not shipped: `../shared`, or the folder in VAJRA_SHARED_DIR."""
    folder = Path(os.environ.get("VAJRA_SHARED_DIR", ROOT.parent / "shared")).resolve()
    if not folder.is_dir():
        pytest.skip(f"reference data absent: no folder {folder} (VAJRA_SHARED_DIR names another)")
    return folder
