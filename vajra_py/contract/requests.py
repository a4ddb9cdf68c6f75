"""View of a request for policies: facts of its arrival and its progress, never its true output length."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Protocol, TypeAlias

from vajra_py.contract.programs import ProgramView

RequestId: TypeAlias = str
ReplicaId: TypeAlias = int


class EndReason(Enum):
    """Reason that a request ended; every request ends exactly once."""

    STOP = "stop"
    """Its output ended with the end of sequence or a stop string."""
    LENGTH = "length"
    """It reached `max_tokens` or the model's length."""
    ABORTED = "aborted"
    """Its client cancelled it."""
    EXPIRED = "expired"
    """It waited longer for its admission than its client allows."""
    REJECTED = "rejected"
    """It was refused (too large, shed by an admission policy, or queues full), or dropped by a scheduler."""
    FAILED = "failed"
    """An error ended it: a replica failed, its KV could not be loaded, or a policy broke the contract."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash, of the name, is several times slower


class RequestView(Protocol):
    """Read-only facts about one request.

    A request has known tokens (its prompt and the tokens generated so far), of which a leading part is computed. It
    decodes if only its newest generated token is left to compute; otherwise it prefills. Two views are the same request
    if and only if they are the same object; requests are hashable by identity.
    """

    @property
    def request_id(self) -> RequestId:
        """Name of the request, given by the client or the workload."""

    @property
    def replicaset(self) -> str:
        """Name of the replicaset that serves it."""

    @property
    def index(self) -> int:
        """Position in the order of submission over the whole run, from 0; the last tie-breaker of every order."""

    @property
    def arrived_at(self) -> float:
        """Arrival, seconds on the run's clock."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens: the client's limit, or a lower one set by model length or admission."""

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far; a preemption does not change it."""

    @property
    def num_known_tokens(self) -> int:
        """Number of prompt tokens plus tokens generated so far."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of leading tokens whose KV is in memory, or is being written by a step in flight."""

    @property
    def num_remaining_tokens(self) -> int:
        """Number of known tokens not computed yet; 1 for a decode that is not in flight."""

    @property
    def num_remaining_prompt_tokens(self) -> int:
        """Number of prompt tokens not computed yet; the whole prompt again after a preemption by recompute."""

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that were cached or loaded, and so not computed, at its first admission."""

    @property
    def num_draft_tokens(self) -> int:
        """Number of its draft tokens that steps have verified so far."""

    @property
    def num_accepted_tokens(self) -> int:
        """Number of its draft tokens that were accepted as output so far."""

    @property
    def num_preemptions(self) -> int:
        """Number of its preemptions by recompute or swap, plus failures of its replica while it ran."""

    @property
    def preempted_index(self) -> int:
        """Position of its latest preemption in the replica's sequence of preemptions, from 1; 0 if never preempted."""

    @property
    def admitted_index(self) -> int:
        """Position of its latest admission in the replica's sequence of admissions, from 1; 0 if never admitted."""

    @property
    def is_resident(self) -> bool:
        """True if it is running: it was admitted, and has not been preempted, handed off or ended since."""

    @property
    def is_swapped(self) -> bool:
        """True if its KV is in host memory, from which it is copied back when the request is next added to a batch."""

    @property
    def is_prefill_complete(self) -> bool:
        """True if it has generated a token, and at most its newest known token is left to compute."""

    @property
    def end_reason(self) -> EndReason | None:
        """Reason of its end, available in `on_departures`; None while it waits or runs."""

    @property
    def priority(self) -> int:
        """The user's priority; lower is more urgent, 0 by default."""

    @property
    def tenant(self) -> str:
        """Sender of the request; empty when unknown."""

    @property
    def slo_class(self) -> str:
        """Name of its SLO class; empty without one."""

    @property
    def ttft_slo_s(self) -> float | None:
        """SLO for the time to first token, seconds from arrival; None without one."""

    @property
    def tpot_slo_s(self) -> float | None:
        """SLO for the mean time per output token after the first, seconds; None without one."""

    @property
    def tbt_slo_s(self) -> float | None:
        """SLO for the longest time between two consecutive tokens, seconds; None without one."""

    @property
    def first_token_at(self) -> float | None:
        """Time at which its client received its first token, seconds on the run's clock; None before any token."""

    @property
    def last_token_at(self) -> float | None:
        """Time at which its client received its newest token, seconds on the run's clock; None before any token."""

    @property
    def next_token_due_at(self) -> float | None:
        """Time at which its next token is due, seconds on the run's clock; None without the SLO that applies.

        The first token is due `ttft_slo_s` after the arrival, a later one `tbt_slo_s` after the newest token.
        """

    @property
    def deadline_at(self) -> float | None:
        """Time by which the request should end, seconds on the run's clock; None without a deadline."""

    @property
    def session_id(self) -> str:
        """Id of the conversation to which it belongs; empty if there is none."""

    @property
    def adapter(self) -> str:
        """Name of its LoRA adapter; empty for the base model."""

    @property
    def program_id(self) -> str:
        """Id of the program of which it is a call; empty if there is none."""

    @property
    def stage(self) -> str:
        """Name of this kind of call in the program, such as `plan`; empty if there is none."""

    @property
    def parent_calls(self) -> tuple[str, ...]:
        """Ids of the calls of its program whose results it uses; empty if its client states none."""

    @property
    def num_program_calls(self) -> int | None:
        """Total number of calls of its program, as stated by its client; None: unknown."""

    @property
    def is_last_call(self) -> bool:
        """True if its client states that it is the last call of its program."""

    @property
    def next_call_after_s(self) -> float | None:
        """Expected time from its end to its program's next call, seconds; None: unknown."""

    @property
    def program_slo_s(self) -> float | None:
        """SLO for the time from the first call of its program to the program's end, seconds; None without one."""

    @property
    def program(self) -> ProgramView | None:
        """Program of the request, as far as it is known now; None for a request without one."""

    def block_hashes(self) -> Sequence[Hashable]:
        """Return the hashes of the prompt's full KV blocks, first block first, as in its replicaset's prefix caches.

        Two requests of a replicaset share their first n blocks if and only if their first n hashes are equal. Empty for
        a prompt that shares nothing, and before the request reaches the admission policy or a queue.
        """

    def prefix_hit_tokens(self) -> int:
        """Return the present prefix hit in tokens on the replica where it waits; does not change the order of eviction.

        0 for a request in a shared queue, where the hit depends on the replica (`ReplicaLoadView.prefix_hit_tokens`),
        and for a request that runs or waits with KV, such as a swapped one.
        """

    def tier_hit_tokens(self) -> Mapping[str, int]:
        """Return the number of leading prompt tokens in each memory tier of the replica where it waits, by tier.

        A token in several tiers counts for the nearest: with `{"device": 512, "host": 1024}`, 1024 further tokens could
        be loaded instead of computed. Empty without tiers, for requests in a shared queue, and for requests that run or
        wait with KV. Does not change the order of eviction.
        """

    @property
    def metadata(self) -> Mapping[str, str | int | float]:
        """Other facts that the workload or the client attached."""
