from __future__ import annotations

from pathlib import Path

import pytest

from vajra_py.workload import RequestSpec, RngFor, Workload, named_streams


@pytest.fixture
def data(shared_dir: Path) -> Path:
    """The public traces."""
    return shared_dir / "data"


@pytest.fixture
def streams() -> RngFor:
    return named_streams(7)


@pytest.fixture
def three() -> Workload:
    """Requests at 1, 2 and 4 s; the last waits for the first."""
    return Workload.from_requests(
        [
            RequestSpec("a", 1.0, 10, 5),
            RequestSpec("b", 2.0, 200, 7, priority=3, tenant="t", session_id="s", max_tokens=9, deadline_s=4.0),
            RequestSpec("c", 4.0, 30, 1000, follows="a", think_time_s=0.5, metadata={"model": "m", "n": 2}),
        ],
        name="three",
    )
