"""The end of a replica's processes."""

from __future__ import annotations

import threading

from vajra_py.engine.compute import RunnerOptions
from vajra_py.engine.processes import ProcessWorker
from vajra_py.testing.fake_runner import FakeRunner


def test_a_worker_may_be_closed_and_discarded_at_once() -> None:
    """As when an engine ends while somebody replaces a worker that it lost."""
    worker = ProcessWorker(("default", 0), RunnerOptions(model="none"), 0, FakeRunner)
    worker.wait_loaded()
    starts, errors = threading.Barrier(4), []

    def end(how: str) -> None:
        starts.wait()
        try:
            getattr(worker, how)()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=end, args=(how,)) for how in ("close", "discard") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
