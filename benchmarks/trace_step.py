"""Print every function that one steady decode step of the simulator enters, and how many files they are in.

    python benchmarks/trace_step.py

What a reader has to follow to understand a step. Six requests decode together, there is no observer, steps are not fast-forwarded, and
steps take a constant time, so that no latency model counts but the simplest; the policy, `fixed_chunk`, counts.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from vajra_py.latency import ConstantModel
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.workload import RequestSpec

STEP = 25
"""A step in which no request gets a block, joins or ends."""


def entered(step: int = STEP) -> Counter[tuple[str, str]]:
    """Count the calls of each function of the framework and the policies by (file, qualified name)."""
    options = HarnessOptions(
        num_blocks=200,
        max_batch_size=8,
        max_model_len=1000,
        latency=ConstantModel(0.01),
        prefix_cache=PrefixCacheOptions(),
    )
    harness = Harness("fcfs", "round_robin", "fixed_chunk", options)
    harness.controller.watch(())
    replica, calls = harness.replica(), Counter[tuple[str, str]]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and replica.num_steps == step:
            code = frame.f_code
            package = next((one for one in ("vajra_policies", "vajra_py") if f"/{one}/" in code.co_filename), None)
            if package is not None:
                file = f"{package}/{code.co_filename.split(f'/{package}/')[-1]}"
                calls[file, code.co_qualname] += 1

    simulator = harness.simulator(SimulationOptions(fast_forward=False))
    sys.setprofile(note)
    try:
        simulator.run([RequestSpec(f"r{index}", 0.0, 20, 100) for index in range(6)])
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    """Print the functions by file, and the totals."""
    calls = entered()
    for (file, name), count in sorted(calls.items()):
        print(f"{count} {file} {name}")
    files = {file for file, _ in calls}
    print(f"{len(files)} files, {len(calls)} functions, {sum(calls.values())} calls ({Path(__file__).name})")


if __name__ == "__main__":
    main()
