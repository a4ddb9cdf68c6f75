"""Comparing scheduling policies from Python, in cells: open it as a notebook in VS Code or Spyder, or with jupytext, or run it as a script.

It takes a few seconds. `VAJRA_EXAMPLE_REQUESTS` sets how many requests each run has (200), `VAJRA_EXAMPLE_FOLDER` where results go (runs).
"""

# %% [markdown]
# # Which policy, at which load?
#
# Load an experiment, run it, vary it, compare the runs, look at pictures, and try a policy of one's own.

# %%
from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import vajra_py as vajra
from vajra_py.contract import BatchBuilder, KeyMotion, LocalReplicaView, RequestView, fill
from vajra_py.testing import Harness, HarnessOptions

NUM_REQUESTS = int(os.environ.get("VAJRA_EXAMPLE_REQUESTS", "200"))
FOLDER = Path(os.environ.get("VAJRA_EXAMPLE_FOLDER", "runs"))

# %% [markdown]
# ## One run
#
# An experiment can be loaded from a YAML file or, as here, be built from plain values. Mistakes are all reported at once.

# %%
EXPERIMENT = {
    "version": 1,
    "name": "notebook",
    "seed": 7,
    "scheduling": {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "round_robin",
        "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 512}},
    },
    "num_replicas": 2,
    "workload": {
        "type": "profile",
        "profile": "azure2023_conv",
        "num_requests": NUM_REQUESTS,
        "rate": 12,
        "slo_classes": [{"name": "chat", "ttft_slo_s": 0.5, "tpot_slo_s": 0.05}],
    },
    "backend": {"simulator": {"latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}}},
    "output": {"dir": str(FOLDER)},
}
config = vajra.load(EXPERIMENT)
print(vajra.load_workload(config).statistics())

# %%
run = vajra.run(config, overwrite=True)
print("stability:", run.summary.value("stability.label"))
print("TTFT P99:", run.summary.value("overall.ttft_s.p99"), "s")

# %% [markdown]
# The tables are data frames: one row a request, one row a step.

# %%
requests = run.requests_frame("num_prompt_tokens", "num_output_tokens", "queue_s", "ttft_s", "tpot_s")
print(requests.describe().loc[["mean", "50%", "max"]])
steps = run.steps_frame("duration_s", "num_decodes", "prefill_tokens")
print(steps.groupby(steps.prefill_tokens > 0).duration_s.describe())

# %% [markdown]
# ## A sweep
#
# Policies against load. Finished points are kept, so that a cell can be run again after a change. With more than one worker, points run in
# processes of their own, which a notebook cannot share its cells with; here they run one after another.

# %%
sweep = vajra.load(
    EXPERIMENT,
    {
        "name": "notebook-sweep",
        "sweep": {
            "scheduling.replicaset_scheduler": ["round_robin", "pull"],
            "scheduling.replica_scheduler": [
                {"policy": "fixed_chunk", "params": {"chunk_size": 512}},
                {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.04}},
            ],
            "workload.rate": [6, 12, 18],
        },
    },
)
result = vajra.sweep(sweep, workers=1, overwrite=True)
assert not result.failures

# %%
comparison = vajra.compare(result.runs)
print(comparison.to_markdown())
frame = comparison.frame()
print(sorted(frame.columns)[:10])

# %% [markdown]
# ## Pictures
#
# Each function returns a matplotlib figure; the report holds them all.

# %%
figures = {
    "latency-by-rate": vajra.plots.latency_by_rate(result.runs),
    "attainment-by-rate": vajra.plots.attainment_by_rate(result.runs),
    "one-run": vajra.plots.queue_and_kv([run]),
}
for name, figure in figures.items():
    figure.savefig(FOLDER / f"{name}.png")

# %%
print(vajra.report([run, *result.runs[:3]], FOLDER / "notebook.html", title="Which policy, at which load?"))

# %% [markdown]
# ## A policy of one's own
#
# Any object with the right methods is a policy. The harness runs it on the real mechanism beside installed ones, without registering
# anything; to name it in experiments, put it into a package (`vajra new-plugin`).


# %%
class ShortPromptsFirst:
    """Key = prompt tokens left; the less, the more urgent."""

    key_motion = KeyMotion.PROGRESS

    def key(self, request: RequestView, now: float) -> float:
        """Tokens of the prompt that are not computed yet."""
        return request.num_remaining_prompt_tokens


class HalfForPrompts:
    """At most half of the step's tokens go to prompts while anything decodes."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Decodes first, then prompts by urgency."""
        fill(replica, batch, self._next_chunk)

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int:
        budget = self._step_tokens // 2 if replica.num_decodes else self._step_tokens
        return max(0, min(batch.max_chunk(request), budget - batch.features().prefill_tokens))


def order_of_first_tokens(harness: Harness) -> Sequence[str]:
    """Return the requests in the order of their first tokens in the harness."""
    return [name for step in harness.steps_until_idle() for name in step.admitted]


harness = Harness(ShortPromptsFirst(), "pull", HalfForPrompts(128), HarnessOptions(num_blocks=64, max_batch_size=4))
harness.submit("essay", num_prompt_tokens=400, num_output_tokens=3)
harness.submit("question", num_prompt_tokens=20, num_output_tokens=3)
harness.submit("mail", num_prompt_tokens=90, num_output_tokens=3)
print(order_of_first_tokens(harness))
for step in harness.steps:
    print(f"{step.formed_at:.3f} s  {dict(step.tokens)}")
