"""A server with pools: clients notice neither hand-offs nor a killed process of either pool."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.fake_runner import expected_output, runner_that_takes_its_time
from vajra_py.experiment.runs.replay import replay
from vajra_py.runtime.records.input_log import Failure, TransferEnd, read_inputs

SETTINGS = {
    "preset": "vllm-v1",
    "replica": {"max_batch_size": 8, "max_model_len": 512, "memory": {"num_blocks": 300}},
}
NUM_TOKENS = 60


@pytest.mark.parametrize(("lost", "sizes", "hand_off"), [(0, (2, 1), "sglang-pd"), (2, (1, 2), "vllm-pd")])
def test_clients_do_not_notice_that_a_process_of_a_pool_is_killed(
    lost: int,
    sizes: tuple[int, int],
    hand_off: str,
    puppet_server: Callable[..., Any],
    until: Callable[..., None],
    tmp_path: Path,
) -> None:
    engine = {"workers": "process", "recovery": {"backoff_s": 0.0}}
    pools = {name: {"num_replicas": count} for name, count in zip(("prefill", "decode"), sizes, strict=True)}
    settings = SETTINGS | {"pools": pools, "hand_off": hand_off}
    server = puppet_server(settings, load=runner_that_takes_its_time, engine=engine, save_run=tmp_path / "session")
    session = server.service.session
    results: dict[int, Any] = {}

    def ask(number: int) -> None:
        body = {"prompt": [number, 2, 3] * 30, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
        results[number] = server.post(timeout=120, **body)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads[:6]:
        thread.start()
    decoders = session.controller.replicas()[sizes[0] :]
    until(lambda: all(replica.running_set.num_running for replica in decoders), "they decode")
    os.kill(session.engine.replicas["default", lost].worker._processes[0].pid, signal.SIGKILL)
    for thread in threads[6:]:
        thread.start()
    for thread in threads:
        thread.join(120)
    for number, result in results.items():
        assert isinstance(result, httpx.Response)
        assert result.json()["choices"][0]["token_ids"] == expected_output([number, 2, 3] * 30, NUM_TOKENS)
    assert len(results) == 8
    until(lambda: session.num_replicas_up == 3, "it came back")
    for replica in session.controller.replicas():
        assert replica.memory.free_blocks == replica.memory.num_blocks
    server.stop()
    inputs = read_inputs(tmp_path / "session" / "inputs.jsonl.gz")
    assert sum(isinstance(one, TransferEnd) for one in inputs) >= 8
    assert [one.replica_id for one in inputs if isinstance(one, Failure)] == [lost]
    assert replay(tmp_path / "session").difference is None
