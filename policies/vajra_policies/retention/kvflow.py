"""KVFlow: the content of the agent whose turn is furthest away is evicted first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from vajra_py.contract import (
    CachedBlock,
    KeyMotion,
    PolicyConfig,
    PolicyContext,
    ProgramView,
    RequestView,
    RetentionSpec,
)


class KvflowConfig(PolicyConfig):
    """Parameters of `kvflow`."""

    next_stages: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Step graph: stages that may follow each stage. Empty: learned from the order in which programs' calls came.",
    )
    hold_steps: int = Field(
        16, ge=0, description="Number of steps to look ahead; all content needed later is equal (hold_step)."
    )
    max_learned_stages: int = Field(1024, ge=1, description="Stages whose successors are learned.")


class Kvflow:
    """Key = (-rank, last use): content with the highest rank is evicted first.

    A block's rank is min(`hold_steps` + 1, least STE of its agents), or `hold_steps` + 2 if the block has no agents.

    An agent is a stage of a program that has not ended. Its steps to execution (STE) are the number of calls until its
    turn: 0 while one of its calls waits or runs, else 1 + the smallest STE of the stages before it in the step graph.
    The prefix of the agent that runs next therefore stays, whereas `lru` would evict this prefix first, since it was
    used longest ago.

    Left out: prefetching of the next agents' prefixes, which policies cannot request from a memory tier; and joins. For
    a stage that waits for the calls of several stages before it, the paper takes the largest STE of these stages, and
    this policy the smallest. The default of `hold_steps` is a round figure chosen here.

    Source: Pan et al., "KVFlow: Efficient Prefix Caching for Accelerating LLM-Based Multi-Agent Workflows", NeurIPS'25 (arXiv:2507.07400);
    code PanZaifeng/KVFlow.
    """

    key_motion = KeyMotion.ARBITRARY
    """A block's steps to execution change with the calls of every program that uses it."""

    def __init__(self, config: KvflowConfig) -> None:
        self._hold = config.hold_steps
        self._most_learned = config.max_learned_stages
        self._learns = not config.next_stages
        self._next: dict[str, dict[str, None]] = {
            name: dict.fromkeys(following) for name, following in config.next_stages.items()
        }
        self._alive: dict[ProgramView, dict[RequestView, None]] = {}
        """Calls that wait or run, of each program that has not ended."""
        self._last: dict[ProgramView, str] = {}
        """Stage of the latest call of each program."""
        self._steps: dict[ProgramView, Mapping[str, int]] = {}
        """Steps to execution by stage, cached for each program until one of its calls arrives or ends, or a successor
        of a stage is learned.
        """
        self._agents: dict[CachedBlock, dict[tuple[ProgramView, str], None]] = {}

    def key(self, block: CachedBlock, now: float) -> tuple[float, float]:
        """Return (minus the rank, time of the last use)."""
        ranks = [
            min(self._hold + 1, self.steps_to_execution(program).get(stage, self._hold + 1))
            for program, stage in self._agents.get(block, ())
            if program in self._alive
        ]
        return (-float(min(ranks, default=self._hold + 2)), block.last_used_at)

    def steps_to_execution(self, program: ProgramView) -> Mapping[str, int]:
        """Return, by stage, the number of calls until the stage's turn, for the stages that may run within `hold_steps`
        calls.
        """
        known = self._steps.get(program)
        if known is None:
            known = self._steps[program] = self._walk(program)
        return known

    def _walk(self, program: ProgramView) -> dict[str, int]:
        alive = dict.fromkeys(call.stage for call in self._alive[program])
        steps = dict.fromkeys(alive, 0)
        front: Iterable[str] = alive or (self._last[program],)
        for distance in range(1, self._hold + 1):
            reached = dict.fromkeys(name for stage in front for name in self._next.get(stage, ()) if name not in steps)
            steps.update(dict.fromkeys(reached, distance))
            front = reached
        return steps

    # Programs

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Record that the stages of these requests run now, and learn which stages follow each other."""
        for request in requests:
            program, stage = request.program, request.stage
            if program is None or not stage:
                continue
            before = self._last.get(program)
            if self._learns and before is not None and (before in self._next or len(self._next) < self._most_learned):
                following = self._next.setdefault(before, {})
                if stage not in following and len(following) < self._most_learned:
                    following[stage] = None
                    self._steps.clear()
            self._last[program] = stage
            self._alive.setdefault(program, {})[request] = None
            self._steps.pop(program, None)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Record that these calls no longer run; a stage's turn is over when none of its calls waits or runs."""
        for request in requests:
            program = request.program
            if program is not None and program in self._alive:
                self._alive[program].pop(request, None)
                self._steps.pop(program, None)

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget the program: none of its stages will run again."""
        for known in (self._alive, self._last, self._steps):
            known.pop(program, None)

    # Content

    def on_stored(self, blocks: Sequence[CachedBlock], now: float) -> None:
        """Assign new content to the agent of the request that stored it."""
        self.on_used(blocks, now)

    def on_used(self, blocks: Sequence[CachedBlock], now: float) -> None:
        """Add to each block's agents the agent of the request that uses the block."""
        for block in blocks:
            program, stage = block.request.program, block.request.stage
            if program is None or not stage:
                continue
            agents = self._agents.setdefault(block, {})
            agents[program, stage] = None
            if len(agents) > 2 * len(self._alive) + 8:
                self._agents[block] = {one: None for one in agents if one[0] in self._alive}

    def on_evicted(self, block: CachedBlock, now: float) -> None:
        """Forget the content."""
        self._agents.pop(block, None)

    def on_withdrawn(self, block: CachedBlock, now: float) -> None:
        """Forget the content."""
        self._agents.pop(block, None)

    def on_cleared(self, now: float) -> None:
        """Forget all content."""
        self._agents.clear()


def _build(config: KvflowConfig, context: PolicyContext) -> Kvflow:
    return Kvflow(config)


SPEC = RetentionSpec(
    name="kvflow",
    config=KvflowConfig,
    build=_build,
    summary="The content of the agent whose turn is furthest away in its workflow is evicted first.",
    source="KVFlow (NeurIPS'25, arXiv:2507.07400)",
    advice=(
        "Use it for workflows whose agents take turns, each with its own prompt, and a cache that is too small for "
        "all of them: `lru` would evict just the prefix that is needed next. Not for calls without a `stage`."
    ),
)
