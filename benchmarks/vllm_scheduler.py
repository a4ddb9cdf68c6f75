"""CPU time of `schedule` + `update_from_output` in steady decode: this project's scheduler against vLLM's own, in turns.

python benchmarks/vllm_scheduler.py MODEL_FOLDER [STEPS [RUNNING ...]]   in an environment that has vLLM; no model is computed
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm.v1.core.sched.scheduler import Scheduler as VllmsOwn

from tests.vllm.core import Core, RequestScript, make_scheduler, vllm_config
from vajra_py.vllm import Scheduler


def steady(cls: type[Any], model: str, num_running: int, num_waiting: int) -> Core:
    """A scheduler whose requests all decode, with others behind them."""
    config = vllm_config(
        model, max_model_len=2048, max_num_seqs=num_running, max_num_batched_tokens=8192, enable_prefix_caching=True
    )
    core = Core(make_scheduler(cls, config, num_running * 40 + 1, 16))
    for index in range(num_running + num_waiting):
        tokens = tuple((index * 31 + place * 7) % 500 for place in range(24 + index % 16))
        core.add(RequestScript(f"r-{index}", tokens, 600, 0), 16, True)
    while len(core.tokens) < num_running:
        core.step()
    return core


def timed(core: Core) -> float:
    """CPU seconds of one step's two calls."""
    start = time.process_time()
    output = core.scheduler.schedule()
    middle = time.process_time()
    core.note(output)
    result = core.execute(output)
    begin = time.process_time()
    core.scheduler.update_from_output(output, result)
    return middle - start + time.process_time() - begin


def main() -> None:
    """Print a line for each size: medians of the steps."""
    model, num_steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100
    for num_running in map(int, sys.argv[3:] or ("32", "256", "1024")):
        for num_waiting in (0, 10_000):
            cores = [steady(cls, model, num_running, num_waiting) for cls in (VllmsOwn, Scheduler)]
            times: list[list[float]] = [[], []]
            for _ in range(num_steps):
                for core, each in zip(cores, times, strict=True):
                    each.append(timed(core))
            own, ours = (statistics.median(each) * 1e6 for each in times)
            print(
                f"{num_running:5d} running, {num_waiting:6d} waiting: vLLM {own:8.0f} us, here {ours:8.0f} us, ratio {ours / own:.3f}"
            )


if __name__ == "__main__":
    main()
