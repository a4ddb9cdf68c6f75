"""Active sequences of a router: for each replica, the prompt tokens to compute and the blocks held for the requests
that the router sent to it.

Source: Dynamo, `lib/kv-router`, active sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vajra_policies.routers.block_index import BlockHolders
from vajra_policies.routers.figures import Integers
from vajra_py.contract import ReplicaId, RequestView


@dataclass(slots=True)
class _Booking:
    replica_id: ReplicaId
    prefill_tokens: int
    """Number of prompt tokens to compute; 0 once the prompt is computed."""
    blocks: Sequence[Hashable]
    num_blocks: int
    """Number of full blocks of the prompt, including blocks of unknown content."""
    num_output_blocks: int = field(default=0)


class ActiveSequences:
    """Prompt tokens, blocks and requests that are active at each replica.

    With `assume_reuse`, a block that several requests of a replica have in common counts once; otherwise it counts once
    for each request.
    """

    def __init__(self, num_replicas: int, *, assume_reuse: bool, track_prefill: bool) -> None:
        self._assume_reuse = assume_reuse
        self._track_prefill = track_prefill
        self.prefill_tokens: Integers = np.zeros(num_replicas, dtype=np.int64)
        """Number of prompt tokens that each replica still has to compute."""
        self.blocks: Integers = np.zeros(num_replicas, dtype=np.int64)
        """Number of full blocks of the prompts and outputs of each replica's active requests."""
        self.requests: Integers = np.zeros(num_replicas, dtype=np.int64)
        """Number of active requests of each replica."""
        self._bookings: dict[RequestView, _Booking] = {}
        self._admitted: dict[RequestView, None] = {}
        self._users: list[Counter[Hashable]] = [Counter() for _ in range(num_replicas)]
        self._holders = BlockHolders(num_replicas)

    def potential_blocks(self, blocks: Sequence[Hashable], num_blocks: int) -> Integers:
        """Return the number of blocks that each replica would have if this request were added.

        `blocks`: full blocks of the request's prompt whose content is known; `num_blocks`: number of all full blocks of
        the prompt.
        """
        total = self.blocks + num_blocks
        return total - self._holders.counts(blocks) if self._assume_reuse else total

    def book(
        self, request: RequestView, replica_id: ReplicaId, blocks: Sequence[Hashable], num_blocks: int, tokens: int
    ) -> None:
        """Count the request at the replica, where `tokens` of its prompt are to be computed."""
        self.free(request)
        booking = self._bookings[request] = _Booking(
            replica_id, tokens if self._track_prefill else 0, blocks, num_blocks
        )
        self.requests[replica_id] += 1
        self.prefill_tokens[replica_id] += booking.prefill_tokens
        if not self._assume_reuse:
            self.blocks[replica_id] += num_blocks
            return
        users = self._users[replica_id]
        self.blocks[replica_id] += num_blocks - len(blocks)
        for block in blocks:
            users[block] += 1
            if users[block] == 1:
                self.blocks[replica_id] += 1
                self._holders.add(block, replica_id)

    def admitted(self, request: RequestView) -> None:
        """Record that the replica now computes the request's prompt."""
        if request in self._bookings:
            self._admitted[request] = None

    def note_first_tokens(self) -> None:
        """Call `prefill_complete` for the requests that got their first token since the last call."""
        for request in [one for one in self._admitted if one.num_output_tokens]:
            self.prefill_complete(request)

    def prefill_complete(self, request: RequestView) -> None:
        """Count the request's prompt as computed."""
        self._admitted.pop(request, None)
        booking = self._bookings.get(request)
        if booking is not None:
            self.prefill_tokens[booking.replica_id] -= booking.prefill_tokens
            booking.prefill_tokens = 0

    def add_output_block(self, request: RequestView) -> None:
        """Count one more block of the request's output."""
        booking = self._bookings[request]
        booking.num_output_blocks += 1
        self.blocks[booking.replica_id] += 1

    def note_output_blocks(self, block_size: int) -> None:
        """Count the full blocks of output that the active requests have generated since the last call."""
        for request, booking in self._bookings.items():
            for _ in range(request.num_output_tokens // block_size - booking.num_output_blocks):
                self.add_output_block(request)

    def free(self, request: RequestView) -> None:
        """Stop counting a request, which has ended or is about to be counted anew."""
        self.prefill_complete(request)
        booking = self._bookings.pop(request, None)
        if booking is None:
            return
        replica_id = booking.replica_id
        self.requests[replica_id] -= 1
        self.blocks[replica_id] -= booking.num_output_blocks
        if not self._assume_reuse:
            self.blocks[replica_id] -= booking.num_blocks
            return
        users = self._users[replica_id]
        self.blocks[replica_id] -= booking.num_blocks - len(booking.blocks)
        for block in booking.blocks:
            users[block] -= 1
            if not users[block]:
                del users[block]
                self.blocks[replica_id] -= 1
                self._holders.remove(block, replica_id)
