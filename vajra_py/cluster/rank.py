"""Actor for one rank of a replica on a node of the cluster, wrapping a model runner."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import ray

from vajra_py.engine.compute import KvRunner, LoadRunner, ModelFacts, ModelRunner, RunnerOptions
from vajra_py.engine.kv_copy import RankCopy, exported
from vajra_py.engine.worker import described, placed, set_passive_omp_wait
from vajra_py.errors import ExecutorError
from vajra_py.runtime.kv import BlockCopy

WATCH = "watch"
"""Concurrency group of calls that do not wait for earlier calls; declared on the method because Ray Client cannot set
it in a call.
"""


class Rank:
    """Actor that loads a model runner and executes calls on it in order; errors are returned as results."""

    def __init__(self, options: RunnerOptions, load: LoadRunner) -> None:
        set_passive_omp_wait()
        self._options = options
        self._load = load
        self._runner: ModelRunner | None = None

    def rendezvous(self) -> str:
        """Return an address of this node for the rendezvous of the replica's ranks."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as server:
            return f"tcp://{host}:{server.getsockname()[1]}"

    def load(self, rendezvous: str | None) -> ModelFacts | BaseException:
        """Load the model and return its facts, or the error. The device name includes the node, because device names
        are unique only within a node.
        """
        try:
            self._runner = self._load(placed(replace(self._options, rendezvous=rendezvous), 0))
            return replace(self._runner.facts, device=self._place(self._runner.facts.device))
        except BaseException as error:
            return _sendable(error)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the runner and return its result, or the error that it raised."""
        try:
            return getattr(self._runner, name)(*arguments)
        except Exception as error:
            return _sendable(error)

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def export_kv(self, number: int, block_ids: Sequence[int]) -> tuple[RankCopy | BaseException, Any]:
        """Copy KV blocks into the object store.

        Return two results: the completion message (or the error), and the bytes of the blocks (None after an error).
        The caller gets the bytes as a reference into the object store.
        """
        try:
            return RankCopy(number, part=True), exported(cast(KvRunner, self._runner), block_ids)
        except Exception as error:
            return _sendable(error), None

    def import_kv(
        self, number: int, block_ids: Sequence[int], copies: Sequence[BlockCopy], part: Sequence[Any]
    ) -> RankCopy | BaseException:
        """Import KV of another rank into KV blocks of this rank; `part` holds the reference to the exported KV."""
        try:
            buffer = np.array(ray.get(part[0]))  # tensors need a writable copy
        except ray.exceptions.RayError:
            return RankCopy(number, is_lost=True)
        try:
            cast(KvRunner, self._runner).import_kv(block_ids, buffer, copies)
        except Exception as error:
            return _sendable(error)
        return RankCopy(number)

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def watch(self) -> None:
        """Block forever. The call ends only with the actor, so the end of the call reports the loss of the rank."""
        threading.Event().wait()

    def _place(self, device: str) -> str:
        gpus = ",".join(map(str, ray.get_gpu_ids()))
        return f"{device} of node {ray.util.get_node_ip_address()}" + (f", GPU {gpus}" if gpus else "")


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error that cannot be pickled
        return ExecutorError(described(error))
    return error
