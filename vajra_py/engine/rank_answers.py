"""Merge the answers of a replica's ranks into the results of its steps."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from vajra_py.engine.compute import LoadAdapter, RunnerOptions, StepOutput
from vajra_py.engine.executor import joined
from vajra_py.engine.kv_copy import RankCopy, RankMove
from vajra_py.engine.worker import (
    AdapterLoaded,
    Finished,
    KvExported,
    KvImported,
    KvMoved,
    LeftFirstStage,
    ReplicaKey,
    WorkerNews,
)


class RankAnswers:
    """Answers of a replica's ranks; each rank answers in the order of the steps.

    Tensor-parallel ranks sample the same tokens, so only the answers of the first one are used. Tokens come from the
    last pipeline stage, durations from all stages. Each KV-parallel group samples tokens for its own requests, so the
    answers of all groups are joined.
    """

    def __init__(self, replica: ReplicaKey, options: RunnerOptions) -> None:
        self._replica = replica
        self._options = options
        ranks = range(options.num_ranks)
        self._first_stage = [rank for rank in ranks if replace(options, rank=rank).stage == 0]
        self._answers: list[deque[StepOutput]] = [deque() for _ in ranks]
        self._num_answers = [0] * options.num_ranks
        self._num_left = 0
        self._copies: dict[tuple[int, bool], dict[int, RankCopy]] = {}
        """Parts of incomplete copies, by (number of the copy, True for an export) and rank."""
        self._moved: Counter[int] = Counter()
        """Number of ranks that have finished their part of each incomplete `KvMove`, by `KvMove.number`."""

    def take(self, rank: int, answer: StepOutput | RankCopy | RankMove | LoadAdapter) -> Iterator[WorkerNews]:
        """Add a rank's answer; yield, in order of delivery, the replica's messages that lacked only this answer."""
        if isinstance(answer, LoadAdapter):  # a replica with adapters has a single rank
            yield AdapterLoaded(self._replica, answer.number)
            return
        if isinstance(answer, RankCopy):
            yield from self._copied(rank, answer)
            return
        if isinstance(answer, RankMove):
            self._moved[answer.number] += 1
            if self._moved[answer.number] == self._options.num_ranks:
                del self._moved[answer.number]
                yield KvMoved(self._replica, answer.number)
            return
        self._answers[rank].append(answer)
        self._num_answers[rank] += 1
        if (
            self._options.pipeline_stages > 1
            and min(self._num_answers[one] for one in self._first_stage) > self._num_left
        ):
            self._num_left += 1
            yield LeftFirstStage(self._replica)
        if all(self._answers):
            yield Finished(self._replica, self._joined([one.popleft() for one in self._answers]))

    def _copied(self, rank: int, answer: RankCopy) -> Iterator[WorkerNews]:
        key = answer.number, answer.part is not None
        parts = self._copies.setdefault(key, {})
        parts[rank] = answer
        if len(parts) == self._options.num_ranks:
            del self._copies[key]
            if answer.part is None:
                yield KvImported(self._replica, answer.number, any(one.is_lost for one in parts.values()))
            else:
                yield KvExported(self._replica, answer.number, [parts[one].part for one in range(len(parts))])

    def _joined(self, answers: Sequence[StepOutput]) -> StepOutput:
        """Return the output of a step. Its duration is the sum over pipeline stages; a stage takes as long as
        its slowest KV-parallel group.
        """
        options = self._options
        stages, groups = range(options.pipeline_stages), range(options.kv_groups)
        if len(stages) == len(groups) == 1:
            return answers[0]
        duration_s = sum(max(answers[options.rank_of(group, one, 0)].duration_s for group in groups) for one in stages)
        outputs = [answers[options.rank_of(group, stages[-1], 0)] for group in groups]
        return replace(joined(outputs), duration_s=duration_s)
