"""CPU time of `schedule` + `update_from_output` in steady decode: this project's scheduler against vLLM's own, in turns.

python benchmarks/vllm_scheduler.py MODEL_FOLDER [--steps 100] [--running 32 256 1024] [--drafts N] [--adapters N] [--windows]
    [--connector] [--ahead]

In an environment that has vLLM; no model is computed. With `--drafts` every decode has so many, of which half are right. With
`--adapters` requests have so many LoRA adapters in turn, all of which a step may have. With `--windows` the model has two groups of KV
blocks: layers of full attention, and of a window of 64 tokens. With `--connector` both have vLLM's `ExampleConnector`, which has
nothing to load. With `--ahead` scheduling is asynchronous.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm.config import KVTransferConfig
from vllm.config.lora import LoRAConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmsOwn
from vllm.v1.outputs import DraftTokenIds

from tests.vllm.core import Core, RequestScript, kv_cache, make_scheduler, vllm_config
from vajra_py.vllm import Scheduler


@dataclass
class Drafting(Core):
    """A core whose workers propose tokens, the first half of them right."""

    num_drafts: int = 0
    proposals: Any = None

    def propose(self, result: Any) -> None:
        """Make the proposals; `hand_over` gives them to the scheduler."""
        right = (self.num_drafts + 1) // 2
        drafts = {
            name: [self.token(name, place + ahead) if ahead < right else 5 for ahead in range(self.num_drafts)]
            for name, place in self.worker.places.items()
        }
        if self.is_async:
            self.worker.propose(drafts)
        else:
            self.proposals = DraftTokenIds(list(result.req_ids), [drafts.get(name, []) for name in result.req_ids])

    def hand_over(self) -> None:
        """Give the scheduler the proposed tokens."""
        if self.num_drafts and not self.is_async:
            self.scheduler.update_draft_token_ids(self.proposals)


def steady(cls: type[Any], given: argparse.Namespace, num_running: int, num_waiting: int) -> Drafting:
    """A scheduler so many of whose requests decode, and so many wait behind them, of the kind that is `given`."""
    num_drafts, num_adapters = given.drafts, given.adapters
    speculative = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_max": 3}
    config = vllm_config(
        given.model,
        is_async=given.ahead,
        max_model_len=2048,
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
        speculative_config=speculative if num_drafts else None,
    )
    if num_adapters:
        config.lora_config = LoRAConfig(max_loras=num_adapters)
    if given.connector:
        place = {"shared_storage_path": tempfile.mkdtemp()}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=place
        )
    config.scheduler_config.disable_hybrid_kv_cache_manager = given.connector
    windows = (None, 64) if given.windows else (None,)
    num_blocks = num_running * 40 * (1 + num_drafts) * len(windows) + 1
    scheduler = make_scheduler(cls, config, num_blocks, 16, cache=kv_cache(num_blocks, 16, windows))
    core = Drafting(scheduler, given.ahead, num_drafts=num_drafts)
    for index in range(num_running + num_waiting):
        tokens = tuple((index * 31 + place * 7) % 500 for place in range(24 + index % 16))
        adapter = f"lora-{index % num_adapters + 1}" if num_adapters else None
        core.add(RequestScript(f"r-{index}", tokens, 600 * (1 + num_drafts // 2), 0, adapter=adapter), 16, True)
    while len(core.tokens) < num_running:
        core.step()
        core.hand_over()
    return core


def timed(core: Drafting) -> float:
    """CPU seconds of one step's calls: two, and a third for proposed tokens."""
    start = time.process_time()
    output = core.scheduler.schedule()
    middle = time.process_time()
    core.note(output)
    result = core.execute(output)
    if core.num_drafts:
        core.propose(result)
    core.queue.appendleft((output, result))
    known = core.queue.pop()
    begin = time.process_time()
    core.scheduler.update_from_output(*known)
    core.hand_over()
    return middle - start + time.process_time() - begin


def main() -> None:
    """Print a line for each size: medians of the steps, and the fastest ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--running", type=int, nargs="+", default=(32, 256, 1024))
    parser.add_argument("--waiting", type=int, nargs="+", default=(0, 10_000))
    parser.add_argument("--drafts", type=int, default=0, help="tokens that are proposed for each decode")
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters that the requests have in turn")
    parser.add_argument(
        "--windows", action="store_true", help="with a second group of KV blocks, of windows of 64 tokens"
    )
    parser.add_argument("--connector", action="store_true", help="with a KV connector; nobody waits then")
    parser.add_argument("--ahead", action="store_true", help="with asynchronous scheduling")
    given = parser.parse_args()
    for num_running in given.running:
        for num_waiting in (0,) if given.connector else given.waiting:  # waiting requests are queried
            classes = AsyncScheduler if given.ahead else VllmsOwn, Scheduler
            cores = [steady(cls, given, num_running, num_waiting) for cls in classes]
            times: list[list[float]] = [[], []]
            for _ in range(given.steps):
                for core, each in zip(cores, times, strict=True):
                    each.append(timed(core))
            own, ours = (statistics.median(each) * 1e6 for each in times)
            least_own, least = (min(each) * 1e6 for each in times)
            print(
                f"{num_running:5d} running, {num_waiting:6d} waiting: vLLM {own:8.0f} us, here {ours:8.0f} us, ratio {ours / own:.3f};"
                f" fastest steps {least_own:8.0f} and {least:8.0f} us, ratio {least / least_own:.3f}"
            )


if __name__ == "__main__":
    main()
