"""Justitia: agents in the order in which they would end if all shared the memory evenly; the first gets all that it can
use.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from pydantic import Field

from vajra_policies.size.lengths import LengthConfig, Lengths
from vajra_py.contract import EndedStep, KeyMotion, Layer, PolicyContext, PolicySpec, ProgramView, RequestView

_MOST = 1e18
"""Largest cost that is accepted from a client; a larger one is ignored."""


class JustitiaConfig(LengthConfig):
    """Parameters of `justitia`."""

    cost_metadata: str = Field(
        "agent_cost",
        description="Metadata key of an agent's first call with its total cost, KV tokens times steps; predicted where it is absent or invalid.",
    )


class FluidShares:
    """Virtual time of a fluid server that is shared evenly by all agents in it.

    The virtual time V grows by work / (number of agents). An agent that arrives at V with cost C leaves when the
    virtual time reaches its finish tag V + C; the progress of the real server does not matter.
    """

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self._tags: list[float] = []

    def join(self, cost: float) -> float:
        """Add an agent with this cost, and return its finish tag."""
        tag = self.virtual_time + cost
        heappush(self._tags, tag)
        return tag

    def serve(self, work: float) -> None:
        """Divide `work`, in the unit of costs, evenly among the agents; an agent leaves when its finish tag is
        reached.
        """
        tags = self._tags
        while tags:
            needed = (tags[0] - self.virtual_time) * len(tags)
            if needed > work:
                self.virtual_time += work / len(tags)
                return
            self.virtual_time = heappop(tags)
            work -= needed


class Justitia:
    """Key = F_j, the finish tag of the request's agent j under even sharing: V(arrival of j) + C_j.

    - C_j is the agent's cost in KV memory over time: the sum over its calls of p * d + d^2 / 2. A call with p prompt
      tokens and d output tokens holds p + i tokens in its i-th decode step.
    - V is the virtual time. It grows by M / N(t) in each step of a replica, with M the tokens that the replica's KV
      memory can hold, and N(t) the number of agents that would not have finished yet under even sharing.

    The agent with the least F_j gets all that its calls can use, so agents end one after the other, most of them
    earlier than under even sharing and none much later. An agent is a program; a request without one is an agent of its
    own.

    C_j is the cost stated in the first call's metadata, or else the first call's cost (predicted with the backend's
    `output_length`) times the number of calls that the program declares. Left out: the paper's predictor of costs from
    the text of prompts. The formula for V follows the paper's idea; it could not be checked against the paper's text.

    Source: Yang et al., "Justitia: Fair and Efficient Scheduling of Task-parallel LLM Agents" (arXiv:2510.17015).
    """

    key_motion = KeyMotion.STATIC

    def __init__(self, config: JustitiaConfig, context: PolicyContext) -> None:
        self._cost_metadata = config.cost_metadata
        self._lengths = Lengths(config, context.output_lengths)
        self._num_kv_tokens = context.limits.num_blocks * context.limits.block_size
        self._shares = FluidShares()
        self._tags: dict[ProgramView | RequestView, float] = {}

    def key(self, request: RequestView, now: float) -> float:
        """Return the agent's finish tag: a virtual time, in KV tokens times steps."""
        agent = request.program or request
        tag = self._tags.get(agent)
        if tag is None:
            tag = self._tags[agent] = self._shares.join(self._cost(request))
        return tag

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Add new agents to the fluid server."""
        for request in requests:
            self.key(request, now)

    def on_step_end(self, step: EndedStep) -> None:
        """Advance the virtual time by one step of a replica: the tokens that its KV memory can hold, times one step."""
        self._shares.serve(self._num_kv_tokens)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget requests without a program, which were agents of their own."""
        for request in requests:
            self._tags.pop(request, None)

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget the program."""
        self._tags.pop(program, None)

    def _cost(self, first: RequestView) -> float:
        stated = first.metadata.get(self._cost_metadata)
        if isinstance(stated, int | float) and 0 <= stated <= _MOST:
            return float(stated)
        length = self._lengths.total(first)
        return (first.num_program_calls or 1) * length * (first.num_prompt_tokens + length / 2.0)


SPEC = PolicySpec(
    name="justitia",
    layer=Layer.REQUEST_PRIORITIZER,
    config=JustitiaConfig,
    build=Justitia,
    summary="Agents one after the other, in the order in which they would end if all shared the memory evenly.",
    source="Justitia (arXiv:2510.17015)",
    advice=(
        "Use it for agents with many parallel calls: the agents end one after the other, hardly any of them later than "
        "under even sharing. Not where costs cannot be estimated beforehand."
    ),
)
