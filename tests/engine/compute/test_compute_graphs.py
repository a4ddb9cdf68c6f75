"""Batches of decodes that are replayed as graphs; interpreted checks need processes of their own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
triton = pytest.importorskip("triton")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["check_graphs.py", "check_families.py"])
def test_what_a_gpu_runs_is_right_in_the_interpreter(name: str) -> None:
    if version(triton.__version__) < (3, 9) and version(np.__version__) >= (2, 4):
        pytest.skip(f"the interpreter of Triton {triton.__version__} cannot loop with numpy {np.__version__}")
    path = Path(__file__).parent / "interpreted" / name
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


def test_what_cannot_be_captured_runs_without_graphs(
    compute_kit: Any, small_models: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    from vajra_py.engine.compute import RunnerOptions
    from vajra_py.engine.compute.step.runner import TorchRunner

    def refuse(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    runner = TorchRunner.load(RunnerOptions(small_models("llama"), block_size=4, max_requests=40), refuse)
    with caplog.at_level(logging.WARNING):
        runner.allocate(32)
    assert caplog.messages == [
        "decodes run without CUDA graphs: capturing failed (RuntimeError: operation not permitted when stream is capturing)"
    ]
    found = []
    for one in (runner, compute_kit.runner(small_models("llama"), 32)):
        jobs = [compute_kit.job([5, 9, 33, index], 6) for index in range(3)]
        compute_kit.driver(one, 32, 0).run(jobs)
        found.append([job.outputs for job in jobs])
    assert found[0] == found[1]


@pytest.mark.parametrize("largest", [1, 2, 7, 8, 60, 100, 256, 300])
def test_sizes_reach_the_largest_and_pad_little(largest: int) -> None:
    from vajra_py.engine.compute.step.graphs import ladder

    sizes = ladder(largest)
    assert sizes[-1] == largest
    for num_rows in range(1, largest + 1):
        padded = min(size for size in sizes if size >= num_rows)
        assert padded - num_rows <= max(7, num_rows / 4)


def test_captured_grids_follow_the_chip_and_not_the_longest_sequence() -> None:
    from vajra_kernels.config import H200, MAX_PIECES
    from vajra_kernels.decode_plan import is_split, max_pieces
    from vajra_py.engine.compute.batch import BatchState
    from vajra_py.engine.compute.step.graphs import DecodeGraphs, ladder

    found = {}
    for longest in (512, 8192, 131072):
        state = BatchState(256, longest, 16, torch.device("cpu"))
        graphs = DecodeGraphs(lambda *_: torch.zeros(1), [], state, 8, 256)  # type: ignore[arg-type]
        assert graphs.sizes == ladder(256)
        assert all(is_split(graphs.metadata(size), 8, 64, None, H200) for size in graphs.sizes)
        found[longest] = [max_pieces(graphs.metadata(size), 8, 64, H200) for size in graphs.sizes]
    most = [size + 8 * H200.num_sms // 8 for size in ladder(256)]
    assert found[131072] == most
    for shorter in (512, 8192):
        assert all(one <= other for one, other in zip(found[shorter], most, strict=True))
    assert most[-1] <= 256 + MAX_PIECES
