"""Measure the CPU time per streamed token of everything except the model.

`python benchmarks/serving_cpu.py MODEL` starts a server whose model only waits, 15 ms a step, and reads 64 streams of it, in
rounds. For each round: µs of CPU a token that the event loop's thread, the engine's and the worker's took, and the client.
`taskset -c 1` before it keeps it to one core. CPU time varies with whatever else keeps caches busy: compare rounds that
alternate. Linux only: a thread's time is read from /proc.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
from serving import FLAGS, NUM_STREAMS, Served, asked, over_http

from vajra_py.engine.compute import ModelFacts, RunnerOptions, StepInput, StepOutput
from vajra_py.engine.worker import set_passive_omp_wait

STEP_S = 0.015
ROUNDS = 6


class WaitingRunner:
    """A `ModelRunner` that computes nothing."""

    def __init__(self, options: RunnerOptions) -> None:
        longest = options.max_model_len or 1024
        self._lengths: dict[int, int] = {}
        self.facts = ModelFacts(
            "waiting", 1, 4, 1, 1, 1, 1, 8, options.block_size, longest, 1024, (0,), "float32", "cpu", "waiting"
        )

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """Return a small number."""
        return 1024

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Do nothing."""

    def run(self, step: StepInput) -> StepOutput:
        """Return arbitrary tokens after a delay."""
        time.sleep(STEP_S)
        slots = list(step.decodes)
        for slot in slots:
            self._lengths[slot] += 1
        for chunk in step.chunks:
            self._lengths[chunk.slot] = chunk.num_computed + len(chunk.token_ids)
            if chunk.samples:
                slots.append(chunk.slot)
        return StepOutput(slots, [20 + (7 * self._lengths[slot] + 13 * slot) % 900 for slot in slots], STEP_S, {})

    def close(self) -> None:
        """Do nothing."""


def serve_waiting(model: str) -> None:
    """Run the server's process; it prints its address and then its threads' names on standard error."""
    set_passive_omp_wait()
    from vajra_py.plugins import load_registry
    from vajra_py.serve.app import Service
    from vajra_py.serve.http.options import ServeOptions
    from vajra_py.serve.server import serve
    from vajra_py.serve.session.configure import ModelFlags, config_of_flags
    from vajra_py.serve.session.session import EngineSession, SessionParts

    given = {name.replace("-", "_"): value for name, value in FLAGS.items()}
    registry = load_registry()
    config = config_of_flags(ModelFlags(model=model, **given), (), registry)  # type: ignore[arg-type]
    session = EngineSession(SessionParts(config, registry, replaced={"load": WaitingRunner}))

    def said(url: str) -> None:
        def wait() -> None:
            while not session.is_ready:
                time.sleep(0.05)
            names = {thread.native_id: thread.name for thread in threading.enumerate()}
            print(json.dumps([url, names]), file=sys.stderr, flush=True)

        threading.Thread(target=wait, daemon=True).start()

    serve(Service(session, ServeOptions(port=0, served_names=("m",))), said)


def thread_times(pid: int) -> dict[str, int]:
    """Return the CPU time of each thread, nanoseconds."""
    tasks = Path(f"/proc/{pid}/task")
    return {one.name: int((one / "schedstat").read_text().split()[0]) for one in tasks.iterdir()}


def main() -> None:
    """Run the command."""
    if len(sys.argv) == 3 and sys.argv[1] == "--serve":
        serve_waiting(sys.argv[2])
        return
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "config.json").is_file():
        sys.exit("serving_cpu.py MODEL: MODEL is a model's directory (`vajra model tiny MODEL` writes one)")
    command = [sys.executable, __file__, "--serve", sys.argv[1]]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address, names = json.loads(next(line for line in process.stderr if line.startswith("[")))
        url = httpx.URL(address)
        served = Served(process, url.host, url.port or 80)
        assert httpx.get(f"{served.url}/ready").status_code == 200
        for round_number in range(ROUNDS + 1):
            before, own = thread_times(process.pid), time.process_time()
            wanted = asked(round_number, NUM_STREAMS)
            over_http(served, wanted)
            after = thread_times(process.pid)
            took = {names[one]: after[one] - before[one] for one in after if one in names and one in before}
            took["client"] = round(1e9 * (time.process_time() - own))
            shown = {
                name: round(time_ns / 1e3 / sum(one.max_tokens for one in wanted), 1) for name, time_ns in took.items()
            }
            if round_number:  # the first one warms up
                print(json.dumps({name: value for name, value in shown.items() if value}), flush=True)
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
