"""The gauntlet tells a leak from warm-up, noise and heaps that grow in steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

MIB = 2**20


@pytest.fixture
def memory(repository_root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = repository_root / "benchmarks" / "gauntlet_memory.py"
    spec = importlib.util.spec_from_file_location("gauntlet_memory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gauntlet_memory", module)
    spec.loader.exec_module(module)
    return module


class Series:
    """Memory of a server, sampled while it answers requests at an uneven rate: warm-up of 80 MiB, and noise of up to 3 MiB."""

    def __init__(self, seed: int, num_requests: int = 6000) -> None:
        stream = np.random.default_rng(seed)
        self.requests = np.sort(stream.integers(0, num_requests, 120)).astype(float)
        self.part = self.requests / num_requests
        self.size = 400 * MIB + 80 * MIB * (1 - np.exp(-self.part / 0.06)) + stream.uniform(0, 3 * MIB, 120)

    def judged(self, memory: ModuleType) -> object:
        samples = [memory.Sample(*one) for one in zip(self.requests, self.size, strict=True)]
        return memory.growth(samples).is_leak


@pytest.mark.parametrize("seed", range(20))
def test_two_kib_a_request_are_a_leak(memory: ModuleType, seed: int) -> None:
    series = Series(seed)
    series.size += 2048 * series.requests
    assert series.judged(memory)


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is_found_though_the_heap_takes_memory_in_pieces(memory: ModuleType, seed: int) -> None:
    series = Series(seed)
    series.size += 2048 * series.requests
    series.size = np.ceil(series.size / MIB) * MIB
    assert series.judged(memory)


@pytest.mark.parametrize("seed", range(20))
def test_warm_up_and_noise_are_none(memory: ModuleType, seed: int) -> None:
    assert not Series(seed).judged(memory)


@pytest.mark.parametrize("at", [0.2, 0.4, 0.6, 0.8, 0.95])
def test_a_heap_that_grows_once_is_none(memory: ModuleType, at: float) -> None:
    series = Series(0)
    series.size += 60 * MIB * (series.part > at)
    assert not series.judged(memory)


def test_memory_that_comes_and_goes_is_none(memory: ModuleType) -> None:
    series = Series(0)
    series.size += 40 * MIB * (np.floor(series.part * 9) % 2)
    assert not series.judged(memory)


def test_few_requests_show_only_large_leaks(memory: ModuleType) -> None:
    series = Series(0, num_requests=300)
    series.size += 2048 * series.requests
    assert not series.judged(memory)
    series.size += 100_000 * series.requests
    assert series.judged(memory)


def test_a_server_that_answered_nobody_is_judged_by_nobody(memory: ModuleType) -> None:
    assert memory.growth([]) is None
    assert memory.growth([memory.Sample(0.0, 1e9 + number) for number in range(100)]) is None
