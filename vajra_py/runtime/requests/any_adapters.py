"""LoRA adapters whose loads are managed by the engine: every adapter that a request names counts as loaded.

Source: vLLM's scheduler, which limits the number of adapters that running requests use (`max_loras`) and leaves loading
to its workers.
"""

from __future__ import annotations

import heapq

from vajra_py.contract import Refusal, RequestView
from vajra_py.runtime.requests.adapters import AdapterLoad, Adapters
from vajra_py.runtime.requests.request import Request


class AnyAdapters(Adapters):
    """Adapters of one replica, without loads: an adapter occupies a slot while running requests use it."""

    def __init__(self, replica_id: int, max_loras: int) -> None:
        super().__init__(replica_id, max_loras, {})

    def serves(self, name: str) -> bool:
        """See `Adapters`."""
        return bool(name)

    def has_for(self, request: RequestView) -> bool:
        """See `Adapters`."""
        return self.fits(request)

    def admit(self, request: Request, now: float) -> Refusal | None:
        """See `Adapters`; no slot is kept for a request that is not admitted after all."""
        return None if self.fits(request) else Refusal.ADAPTER

    def acquire(self, request: Request) -> None:
        """See `Adapters`."""
        name = request.adapter
        if name and name not in self._slots:
            self._slots[name] = AdapterLoad(self._num_loads, name, heapq.heappop(self._free), has_ended=True)
            self._num_loads += 1
        super().acquire(request)

    def release(self, request: Request) -> None:
        """See `Adapters`; the slot becomes free when its last user is released."""
        super().release(request)
        name = request.adapter
        if name in self._slots and not self._users[name]:
            heapq.heappush(self._free, self._slots.pop(name).slot)
            del self._users[name]
