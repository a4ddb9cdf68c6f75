"""Transfers of KV between an engine's replicas: those in flight, and the messages to their workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vajra_py.contract import Layer
from vajra_py.engine.config import ModelBackendConfig
from vajra_py.engine.kv_copy import KvExport, KvImport
from vajra_py.engine.replica import EngineReplica
from vajra_py.engine.tier_copies import tiers_beside_moves
from vajra_py.engine.worker import KvExported, KvImported
from vajra_py.errors import ConfigError, Problem
from vajra_py.runtime.records.input_log import TransferEnd
from vajra_py.runtime.serving.backend import Transfer
from vajra_py.runtime.serving.controller import Controller


@dataclass(frozen=True, slots=True)
class _UnderWay:
    transfer: Transfer[EngineReplica]
    target_blocks: Sequence[int]


class KvTransfers:
    """Transfers in flight. The source's worker copies blocks into a buffer, which is sent to the target's worker."""

    def __init__(self, notify: Callable[[KvImported], None]) -> None:
        """`notify` is called with the message that ends a transfer if the target has all blocks already."""
        self._notify = notify
        self._under_way: dict[tuple[str, int], _UnderWay] = {}

    def __len__(self) -> int:
        """Return the number of transfers in flight."""
        return len(self._under_way)

    def begin(self, transfer: Transfer[EngineReplica]) -> None:
        """Start to copy the blocks that the target lacks; if there are none, the transfer ends in the next turn."""
        source, target = transfer.source, transfer.target
        source_blocks, target_blocks = _blocks(transfer, source), _blocks(transfer, target)
        key = _key(transfer)
        self._under_way[key] = _UnderWay(transfer, target_blocks)
        if source_blocks:
            source.export_kv(KvExport(transfer.number, source_blocks))
        else:
            self._notify(KvImported((key[0], target.replica.replica_id), transfer.number))

    def cancel(self, transfer: Transfer[EngineReplica]) -> None:
        """Forget a transfer: a buffer that still arrives from its source is dropped.

        If the buffer was already sent to the target's worker, it is copied before any later step, so that a later step
        may reuse the target blocks.
        """
        self._under_way.pop(_key(transfer), None)  # absent if the transfer ended in this turn of the loop

    def exported(self, news: KvExported) -> None:
        """Pass the buffer of a source's worker to the target's worker, unless the transfer was cancelled."""
        one = self._under_way.get((news.replica[0], news.number))
        if one is not None:
            target = one.transfer.target
            copies = target.replica.memory.take_copies()
            target.import_kv(KvImport(news.number, one.target_blocks, news.content, copies))

    def imported(self, news: KvImported, now: int) -> TransferEnd | None:
        """Return the driver's input for KV that has arrived; None if the transfer was cancelled or its KV was lost."""
        key = news.replica[0], news.number
        if news.is_lost or key not in self._under_way:
            return None
        one = self._under_way.pop(key)
        return TransferEnd(now, news.replica[0], news.number, one.transfer.request.request_id)


def _key(transfer: Transfer[EngineReplica]) -> tuple[str, int]:
    return transfer.request.replicaset, transfer.number


def _blocks(transfer: Transfer[EngineReplica], end: EngineReplica) -> list[int]:
    """Return the blocks of `end` (the source or the target) for the KV that the target lacks."""
    memory = end.replica.memory
    size = memory.block_size
    return list(memory.block_table(transfer.request)[transfer.start // size : -(-transfer.end // size)])


def check_transfers(controller: Controller, settings: ModelBackendConfig) -> None:
    """Raise `ConfigError` if requests are to move with their KV in a way that the backend does not support."""
    problems = []
    for name, replicaset in controller.replicasets.items():
        if replicaset.hand_off is None:
            continue
        where = "" if len(controller.replicasets) == 1 else f"replicasets.{name}."
        problems += tiers_beside_moves(where, replicaset)
        if not settings.can_move_kv:
            message = f"moves requests with their KV, which the backend `{settings.kind}` does not"
            message = f"{replicaset.scheduler_name} {message}"
            advice = "A scheduler that lets requests stay; `engine` and `simulator` move them"
            problems.append(Problem(f"{where}scheduling.{Layer.REPLICASET_SCHEDULER.value}", message, advice))
        elif replicaset.hand_off.overlaps:
            message = f"the engine sends KV when its prompt is computed (got {replicaset.hand_off.settings.overlap})"
            problems.append(Problem(f"{where}hand_off.overlap", message, "Allowed: none"))
        stages = {one.parts.pool: one.limits.pipeline_stages for one in replicaset.replicas}
        if len(set(stages.values())) > 1:
            message = f"KV does not move between replicas of different pipeline_stages (got {stages})"
            problems.append(Problem(f"{where}pools", message, "Allowed: replica.pipeline_stages alike in all pools"))
    if problems:
        raise ConfigError(problems)
