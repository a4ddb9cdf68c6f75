"""KV blocks swapped to the host and back, in whatever order two streams get to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import pytest
import torch

from vajra_kernels import SwapSpace, allocate_kv_cache, swap
from vajra_kernels.swap import StreamKind

NUM_BLOCKS, NUM_HOST_BLOCKS = 7, 6


Stream: TypeAlias = tuple[StreamKind, int]
Choose: TypeAlias = Callable[[list[Stream]], Stream]


class Queues:
    """Two streams, and two more beside them, whose work is done later, in any order that the events allow.

    `missing`: (direction, stream) of waits that are left out.
    """

    def __init__(self, missing: tuple[str, StreamKind] | None = None) -> None:
        self.direction = ""
        self.num_copies = 0
        self._missing = missing
        self._side = 0
        self._queues: dict[Stream, deque[tuple[str, Any]]] = {
            (kind, one): deque() for one in (0, 1) for kind in StreamKind
        }
        self._happened: set[int] = set()
        self._events = count(1)

    def run(self, stream: StreamKind, work: Callable[[], None]) -> None:
        self.num_copies += stream is StreamKind.TRANSFER
        self._queues[stream, self._side].append(("run", work))

    def mark(self, stream: StreamKind) -> int:
        event = next(self._events)
        self._queues[stream, self._side].append(("mark", event))
        return event

    def wait(self, stream: StreamKind, event: int) -> None:
        if (self.direction, stream) != self._missing:
            self._queues[stream, self._side].append(("wait", event))

    def reach(self, event: int) -> None:
        while event not in self._happened:
            self._go_on(lambda able: able[0])

    def synchronize(self) -> None:
        while self._queues[StreamKind.COMPUTE, self._side] or self._queues[StreamKind.TRANSFER, self._side]:
            self._go_on(lambda able: able[-1])

    def beside(self) -> Queues:
        other = copy(self)
        other._side = 1
        return other

    def drain(self, choose: Choose) -> None:
        while any(self._queues.values()):
            self._go_on(choose)

    def _go_on(self, choose: Choose) -> None:
        stream = choose([stream for stream in self._queues if self._can_go_on(stream)])
        kind, what = self._queues[stream].popleft()
        if kind == "run":
            what()
        elif kind == "mark":
            self._happened.add(what)

    def _can_go_on(self, stream: Stream) -> bool:
        queue = self._queues[stream]
        return bool(queue) and (queue[0][0] != "wait" or queue[0][1] in self._happened)


def caches() -> list[torch.Tensor]:
    """K and V of two layers, and one of another width."""
    wide = allocate_kv_cache(2, NUM_BLOCKS, (4, 2, 8), torch.float16, "cpu")
    narrow, _ = allocate_kv_cache(1, NUM_BLOCKS, (4, 1, 2), torch.float16, "cpu")
    return [*wide, narrow.transpose(2, 3).contiguous().transpose(2, 3)]


def outcome(seed: int, streams: Queues | None, choose: Choose) -> list[torch.Tensor]:
    """What a random run of writes and swaps leaves on device and host; the run is the same for every `streams`."""
    random, made = Random(seed), caches()
    space = SwapSpace(made, NUM_HOST_BLOCKS, streams=streams)
    for value in range(1, 13):
        kind = random.choice(["write", "to_host", "to_device"])
        size = random.randrange(1, 6)
        blocks, hosts = random.sample(range(NUM_BLOCKS), size), random.sample(range(NUM_HOST_BLOCKS), size)
        pairs = list(zip(blocks, hosts, strict=True))
        if streams is not None:
            streams.direction = kind
        if kind == "write":

            def write(blocks: list[int] = blocks, value: int = value) -> None:
                for cache in made:
                    cache[:, blocks] = value

            if streams is None:
                write()
            else:
                streams.run(StreamKind.COMPUTE, write)
        elif kind == "to_host":
            space.to_host(pairs)
        else:
            space.to_device(pairs)
    if streams is not None:
        streams.drain(choose)
    return [*made, space._host]


def orders(seed: int) -> list[Choose]:
    """Each stream as far ahead as it can get, and a mixture."""
    random = Random(seed)
    return [lambda able: able[0], lambda able: able[-1], random.choice]


def differs(seed: int, missing: tuple[str, StreamKind] | None = None) -> bool:
    wanted = outcome(seed, None, lambda able: able[0])
    found = [outcome(seed, Queues(missing), choose) for choose in orders(seed)]
    return not all(torch.equal(one, other) for each in found for one, other in zip(each, wanted, strict=True))


@pytest.fixture
def two_rows_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "BUFFER_BYTES", 2 * 4 * SwapSpace(caches(), 1)._host.shape[1])


@pytest.mark.usefixtures("two_rows_a_buffer")
def test_blocks_are_the_same_in_whatever_order_the_streams_get_there() -> None:
    assert not any(differs(seed) for seed in range(40))


@pytest.mark.usefixtures("two_rows_a_buffer")
@pytest.mark.parametrize("direction", ["to_host", "to_device"])
@pytest.mark.parametrize("stream", list(StreamKind))
def test_no_event_can_be_left_out(direction: str, stream: StreamKind) -> None:
    assert any(differs(seed, (direction, stream)) for seed in range(40))


@pytest.mark.usefixtures("two_rows_a_buffer")
@pytest.mark.parametrize("follows", [True, False])
def test_copies_beside_read_and_overwrite_what_was_before_their_mark(follows: bool) -> None:
    found = [copied_beside(Random(seed), follows) for seed in range(20)]
    right = [[1, 2, 3, 4, 0, 1, 3] * len(caches())] * len(found)
    assert (found == right) is follows


def copied_beside(random: Random, follows: bool) -> list[float]:
    """Return the content of every block after copies down and up beside writes; `follows`: they wait for those before their mark."""
    made, streams = caches(), Queues()
    space = SwapSpace(made, NUM_HOST_BLOCKS, streams=streams)
    down, up = space.beside(), space.beside()

    def write(block: int, value: int) -> None:
        def fill() -> None:
            for cache in made:
                cache[:, block] = value

        streams.run(StreamKind.COMPUTE, fill)

    for block in range(4):
        write(block, block + 1)
    if follows:
        down.follow(streams.mark(StreamKind.COMPUTE))
    down.to_host([(0, 3), (1, 0), (2, 5)])
    down.synchronize()
    write(5, 9)
    if follows:
        up.follow(streams.mark(StreamKind.COMPUTE))
    up.to_device([(5, 3), (6, 5)])
    streams.drain(random.choice)
    return [float(cache[0, block].flatten()[0]) for cache in made for block in range(NUM_BLOCKS)]


@pytest.mark.usefixtures("two_rows_a_buffer")
def test_at_most_two_copies_beside_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's tokens wait for no more than those."""
    made, streams = caches(), Queues()
    beside = SwapSpace(made, NUM_HOST_BLOCKS, streams=streams).beside()
    on_their_way: list[int] = []
    run = Queues.run

    def counted(one: Queues, stream: StreamKind, work: Callable[[], None]) -> None:
        run(one, stream, work)
        waiting = streams._queues[StreamKind.TRANSFER, 1]
        on_their_way.append(sum(kind == "run" for kind, _ in waiting))

    monkeypatch.setattr(Queues, "run", counted)
    beside.to_host([(block, block) for block in range(6)])  # three buffers full
    assert max(on_their_way) == 2


@pytest.mark.parametrize("shared", [False, True])
def test_swapped_blocks_come_back(shared: bool, tmp_path: Path) -> None:
    made = caches()
    for cache in made:
        cache.copy_(torch.randn(cache.shape))
    before = [cache.clone() for cache in made]
    file = str(tmp_path / "swap") if shared else None
    pairs = [(5, 0), (1, 3), (2, 1)]
    space = SwapSpace(made, NUM_HOST_BLOCKS, file)
    space.to_host(pairs)
    if shared:  # as another process sees it
        space = SwapSpace(made, NUM_HOST_BLOCKS, file)
    for cache in made:
        cache[:, [5, 1, 2]] = 0
    space.to_device(pairs)
    assert all(torch.equal(one, other) for one, other in zip(made, before, strict=True))
    space.to_host([])
    space.to_device([])


def test_neighbours_cross_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap is few large copies, however many layers and caches there are."""
    made, streams = caches(), Queues()
    space = SwapSpace(made, NUM_HOST_BLOCKS, streams=streams)
    copied: list[int] = []
    plain = torch.Tensor.copy_
    space.to_host([(6, 2), (0, 1), (3, 3), (1, 5)])
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, of, **how: copied.append(to.shape[0]) or plain(to, of, **how))
    streams.drain(lambda able: able[0])
    assert copied == [3, 1]
    assert streams.num_copies == 1
