"""A publisher of KV events as vLLM's, on loopback."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """vLLM's base of events; its older ones are arrays (`array_like`)."""


class BlockStored(_Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = 0
    kv_cache_spec_kind: str | None = "full_attention"
    session_id: str | None = None


class BlockRemoved(_Event):
    block_hashes: list[int | bytes]
    medium: str | None = "GPU"
    group_idx: int | None = 0


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def chain(tokens: Sequence[int], block_size: int = 16, seed: int = 0, **more: Any) -> BlockStored:
    """The event of a prompt's full blocks, by hashes that only a server with this seed has."""
    count = len(tokens) // block_size
    hashes: list[int | bytes] = [hash((seed, tuple(tokens[: (one + 1) * block_size]))) for one in range(count)]
    return BlockStored(hashes, None, list(tokens[: count * block_size]), block_size, **more)


class Publisher:
    """Publishes batches with numbers, and replays those that it keeps."""

    def __init__(self, *, keeps: int | None = 10_000, port: int = 0, replay_port: int = 0) -> None:
        """`keeps`: batches kept for the replay socket; None: there is no such socket."""
        self._context = zmq.Context()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keeps)
        self._pub = self._context.socket(zmq.XPUB)  # a PUB socket that reports its subscribers
        self.port = self._bind(self._pub, port)
        self._replay = None if keeps is None else self._context.socket(zmq.ROUTER)
        self.replay_port = 0 if self._replay is None else self._bind(self._replay, replay_port)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        if self._replay is not None:
            self._thread.start()

    @staticmethod
    def _bind(socket: Any, port: int) -> int:
        if port:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return port
        return int(socket.bind_to_random_port("tcp://127.0.0.1"))

    def settings(self) -> dict[str, str]:
        """Settings of it in a router's file."""
        found = {"endpoint": f"tcp://127.0.0.1:{self.port}"}
        if self._replay is not None:
            found["replay_endpoint"] = f"tcp://127.0.0.1:{self.replay_port}"
        return found

    def wait_for_subscriber(self) -> None:
        assert self._pub.poll(20_000)
        assert self._pub.recv() == b"\x01"

    def publish(self, *events: Any, is_lost: bool = False) -> None:
        """Publish a batch; one that is lost is kept, and not sent."""
        self.publish_bytes(msgspec.msgpack.encode(KVEventBatch(1.0, list(events), 0)), is_lost=is_lost)

    def publish_bytes(self, payload: bytes, *, is_lost: bool = False) -> None:
        with self._lock:
            number, self._number = self._number, self._number + 1
            self._kept.append((number, payload))
        if not is_lost:
            self._pub.send_multipart((b"", number.to_bytes(8, "big"), payload))

    def _answer(self) -> None:
        replay = self._replay
        assert replay is not None
        while not self._stop.is_set():
            if not replay.poll(20):
                continue
            client, _, first = replay.recv_multipart()
            with self._lock:
                kept = list(self._kept)
            for number, payload in kept:
                if number >= int.from_bytes(first, "big"):
                    replay.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
            replay.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))
        replay.close(linger=0)

    def close(self) -> None:
        self._stop.set()
        if self._replay is not None:
            self._thread.join(20)
        self._pub.close(linger=0)
        self._context.term()
