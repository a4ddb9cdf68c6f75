"""Ideal makespans of programs: the time that each would take alone on the system. A program's slowdown is relative to
its ideal makespan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from vajra_py.config import ExperimentConfig
from vajra_py.contract.latency import BatchFeatures, LatencyModel
from vajra_py.latency import ReplaysDurations
from vajra_py.workload import Workload
from vajra_py.workload.content import NO_NODE, ContentColumn

SoloTime: TypeAlias = Callable[[int, int, int], float]
"""Returns the seconds of a call that runs alone, given (prompt tokens, cached prompt tokens, output tokens)."""
_MOST_LOOKED_AT = 64
"""Number of segments at the end of a call's prompt among which the end of its parent's prompt is searched. If the
search finds nothing, the whole prompts are compared.
"""


def ideal_makespans(
    config: ExperimentConfig, workload: Workload, models: Mapping[str, LatencyModel], requests: Any
) -> dict[str, float]:
    """Return the ideal makespan of each program in seconds, by id; empty without programs or without predictions.

    It is the length of the critical path through a program's graph from its first arrival. The path consists of delays
    and calls; each call runs alone, computes its prompt in one step, and finds in the prefix cache, if enabled, every
    prompt token that its parents have computed. `requests` is the requests table; a call's time comes from the latency
    model of the replicaset that served it.
    """
    solo = {
        name: _solo_time(models[name], caches=one.replica.memory.prefix_cache.enabled)
        for name, one in config.effective_replicasets.items()
        if name in models and not isinstance(models[name], ReplaysDurations)
    }
    columns = workload.columns
    program_ids = columns.program_id
    if not solo or program_ids is None:
        return {}
    places = zip(requests.column("request_id").to_pylist(), requests.column("replicaset").to_pylist(), strict=True)
    replicaset_of = dict(places)
    ids, programs = columns.request_id.tolist(), program_ids.tolist()
    prompts, outputs = columns.num_prompt_tokens.tolist(), columns.num_output_tokens
    if columns.max_tokens is not None:
        outputs = np.where(columns.max_tokens < 0, outputs, np.minimum(outputs, columns.max_tokens))
    sizes = outputs.tolist()
    arrived_at = columns.arrived_at.tolist()
    think_s = [0.0] * len(ids) if columns.think_time_s is None else columns.think_time_s.tolist()
    cached = _CachedTokens(columns.content, sizes, ids)
    ended: list[float] = []
    start: dict[str, float] = {}
    makespan: dict[str, float] = {}
    for row, (request_id, program) in enumerate(zip(ids, programs, strict=True)):
        parents = columns.parents(row)
        at = max((ended[parent] for parent in parents), default=arrived_at[row]) + (think_s[row] if parents else 0.0)
        time = solo.get(replicaset_of.get(request_id, ""))
        if not program or time is None:
            ended.append(at)
            continue
        ended.append(at + time(prompts[row], cached.of(row, parents, prompts), sizes[row]))
        begin = start.setdefault(program, at)
        makespan[program] = max(makespan.get(program, 0.0), ended[row] - begin)
    return makespan


def _solo_time(model: LatencyModel, *, caches: bool) -> SoloTime:
    def time(prompt: int, cached: int, output: int) -> float:
        cached = min(cached, prompt - 1) if caches else 0
        first = model.batch_time_s(BatchFeatures().with_chunk(prompt - cached, cached))
        if output < 2:
            return first
        # Step times are nearly linear in the context length, so the decodes' mean context represents them.
        return first + (output - 1) * model.batch_time_s(BatchFeatures(1, prompt + output // 2))

    return time


class _CachedTokens:
    """Computes the number of leading prompt tokens of a call that its parents have computed."""

    def __init__(self, content: ContentColumn | None, outputs: list[int], ids: list[str]) -> None:
        self._content = content
        self._outputs = outputs
        self._ids = ids
        if content is not None:
            self._above = content.store.parent.tolist()
            self._nodes = content.nodes.tolist()

    def of(self, row: int, parents: tuple[int, ...], prompts: list[int]) -> int:
        """Return the length in tokens of the longest prefix that a row's prompt shares with a parent's prompt and
        answer.
        """
        if self._content is None or not parents or self._nodes[row] == NO_NODE:
            return 0
        return max(self._shared(row, parent, prompts) for parent in parents)

    def _shared(self, row: int, parent: int, prompts: list[int]) -> int:
        wanted, node, after = self._nodes[parent], self._nodes[row], NO_NODE
        content = self._content
        assert content is not None
        for _ in range(_MOST_LOOKED_AT):
            if node in (wanted, NO_NODE):
                break
            node, after = self._above[node], node
        if node == wanted and node != NO_NODE:
            goes_on = after != NO_NODE and content.store.segment_id(after) == ("out", self._ids[parent])
            return prompts[parent] + (self._outputs[parent] if goes_on else 0)
        mine, theirs = content.get(row, prompts[row]), content.get(parent, prompts[parent])
        return 0 if mine is None or theirs is None else mine.shared_prefix_tokens(theirs)
