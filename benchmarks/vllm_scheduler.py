"""CPU time of `schedule` + `update_from_output` in steady decode: this project's scheduler against vLLM's own, in turns.

python benchmarks/vllm_scheduler.py MODEL_FOLDER [STEPS [RUNNING ...]] [--connector]   in an environment that has vLLM

No model is computed. `--connector`: both have vLLM's `ExampleConnector`, which has nothing to load.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm.config import KVTransferConfig
from vllm.v1.core.sched.scheduler import Scheduler as VllmsOwn

from tests.vllm.core import Core, RequestScript, make_scheduler, vllm_config
from vajra_py.vllm import Scheduler


def steady(cls: type[Any], model: str, num_running: int, num_waiting: int, transfer: Any = None) -> Core:
    """A scheduler whose requests all decode, with others behind them; `transfer`: configuration of a connector."""
    config = vllm_config(
        model, max_model_len=2048, max_num_seqs=num_running, max_num_batched_tokens=8192, enable_prefix_caching=True
    )
    config.kv_transfer_config = transfer
    config.scheduler_config.disable_hybrid_kv_cache_manager = transfer is not None
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
    given = [one for one in sys.argv[1:] if one != "--connector"]
    model, num_steps, transfer = given[0], int(given[1]) if len(given) > 1 else 100, None
    if "--connector" in sys.argv:
        place = {"shared_storage_path": tempfile.mkdtemp()}
        transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=place)
    for num_running in map(int, given[2:] or ("32", "256", "1024")):
        for num_waiting in (0, 10_000) if transfer is None else (0,):  # who waits is asked about
            cores = [steady(cls, model, num_running, num_waiting, transfer) for cls in (VllmsOwn, Scheduler)]
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
