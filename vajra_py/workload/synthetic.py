"""Draw synthetic workloads: independent requests, or a closed loop of users who wait for answers.

Each part draws from its own named random stream, so that changing one part does not change the numbers of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from vajra_py.workload.arrays import F64, I64, StringColumn, int64s
from vajra_py.workload.arrivals import ArrivalProcess, arrival_times
from vajra_py.workload.columns import Columns
from vajra_py.workload.distributions import Constant, Distribution, NonNegative, correlated_normals, sample, to_tokens
from vajra_py.workload.workload import Workload

__all__ = [
    "ClosedLoop",
    "Lengths",
    "RngFor",
    "closed_loop_workload",
    "named_streams",
    "starts_of",
    "stream_facts",
    "synthetic_workload",
]

RngFor: TypeAlias = Callable[[str], np.random.Generator]
"""Function that returns the random stream of a name; it is called once per name and workload."""


class Lengths(BaseModel):
    """Distributions of prompt and output lengths, and their correlation."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    prompt_tokens: Distribution = Field(description="Prompt length in tokens (rounded, at least 1).")
    output_tokens: Distribution = Field(description="Output length in tokens (rounded, at least 1).")
    correlation: float = Field(
        0.0, ge=-1, le=1, description="Correlation of prompt and output in the Gaussian copula (0: independent)."
    )

    def draw(self, rng: np.random.Generator, size: int) -> tuple[I64, I64]:
        """Draw prompt and output lengths of `size` requests, in tokens."""
        first, second = correlated_normals(rng, size, self.correlation)
        return to_tokens(self.prompt_tokens, first), to_tokens(self.output_tokens, second)


class ClosedLoop(BaseModel):
    """Closed loop: each user sends a request, waits for its end, thinks, and sends the next request."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    type: Literal["closed_loop"] = "closed_loop"
    num_users: int = Field(
        ge=1, le=1_000_000, description="Number of users, and so the maximum number of requests in the system."
    )
    think_time_s: Distribution = Field(
        Constant(value=0.0), description="Time between an answer and the user's next request, in seconds."
    )
    ramp_up_s: NonNegative = Field(0.0, description="The users start evenly spread over this many seconds.")


def named_streams(seed: int) -> RngFor:
    """Return a function that creates independent random streams by name; equal seeds and names give equal numbers.

    The streams are for use outside an experiment; an experiment derives streams from its own seed.
    """

    def rng_for(name: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=tuple(name.encode()))))

    return rng_for


def starts_of(process: ArrivalProcess, rng_for: RngFor) -> Callable[[int], F64]:
    """Return a function that draws the first n arrival times of a process."""

    def times(number: int) -> F64:
        return arrival_times(process, rng_for("arrivals"), rng_for("arrival_rates"), num_requests=number)

    return times


def stream_facts(rngs: Mapping[str, np.random.Generator]) -> dict[str, Any]:
    """Return a manifest's entry for random streams: entropy and spawn key of each generator that exposes them."""
    facts: dict[str, Any] = {}
    for name, rng in sorted(rngs.items()):
        seeds = getattr(rng.bit_generator, "seed_seq", None)
        if isinstance(seeds, np.random.SeedSequence):
            facts[name] = {"entropy": str(seeds.entropy), "spawn_key": list(seeds.spawn_key)}
        else:
            facts[name] = {}
    return facts


def synthetic_workload(
    arrivals: ArrivalProcess,
    lengths: Lengths,
    rng_for: RngFor,
    *,
    num_requests: int | None = None,
    duration_s: float | None = None,
) -> Workload:
    """Draw independent requests. Streams: `arrivals`, `arrival_rates`, `lengths`.

    Raises:
        WorkloadError: the arrivals have no end, or too few requests arrive (see `arrival_times`).
    """
    times = arrival_times(
        arrivals, rng_for("arrivals"), rng_for("arrival_rates"), num_requests=num_requests, duration_s=duration_s
    )
    prompts, outputs = lengths.draw(rng_for("lengths"), len(times))
    columns = Columns(times, prompts, outputs, StringColumn.numbered("", np.arange(len(times), dtype=np.int64)))
    return Workload(columns, "synthetic", {"kind": "synthetic"})


def closed_loop_workload(loop: ClosedLoop, lengths: Lengths, rng_for: RngFor, num_requests: int) -> Workload:
    """Draw the requests of a closed loop; request i belongs to user i modulo the number of users.

    The nominal arrival of a request is the user's start plus the think times since then, as if answers took no time.
    Streams: `lengths`, `think_times`.
    """
    rows = np.arange(num_requests, dtype=np.int64)
    users, turns = rows % loop.num_users, rows // loop.num_users
    prompts, outputs = lengths.draw(rng_for("lengths"), num_requests)
    think = np.where(turns > 0, sample(loop.think_time_s, rng_for("think_times"), num_requests), 0.0)
    columns = Columns(
        arrived_at=users * (loop.ramp_up_s / loop.num_users) + _sum_by_user(think, loop.num_users),
        num_prompt_tokens=prompts,
        num_output_tokens=outputs,
        request_id=StringColumn.numbered("", rows),
        stated={"session_id": StringColumn.numbered("user-", users)},
        follows=np.where(turns > 0, rows - loop.num_users, int64s(num_requests, -1)),
        think_time_s=think,
    )
    return Workload(columns, "closed_loop", {"kind": "closed_loop", "num_users": loop.num_users})


def _sum_by_user(values: F64, num_users: int) -> F64:
    """Return the running sum per user, where value i belongs to user i modulo `num_users`."""
    padded = np.zeros(-(-len(values) // num_users) * num_users)
    padded[: len(values)] = values
    sums: F64 = np.cumsum(padded.reshape(-1, num_users), axis=0).reshape(-1)[: len(values)]
    return sums
