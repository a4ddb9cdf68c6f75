"""Fresh random inputs for every run; the seed is in the test's report, and VAJRA_KERNEL_SEED repeats it."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    seed = int(os.environ.get("VAJRA_KERNEL_SEED") or int.from_bytes(os.urandom(4), "big"))
    request.node.add_report_section("setup", "seed", f"VAJRA_KERNEL_SEED={seed}")
    return torch.Generator().manual_seed(seed)
