"""Steps in flight on a device: their tokens, decodes started ahead, and steps of two parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from vajra_py.engine.compute.batch import Ints
from vajra_py.engine.compute.interface import LOST_ROW, PendingStep, StepOutput, TokenLogprobs
from vajra_py.engine.compute.sampling.logprobs import PendingLogprobs
from vajra_py.engine.compute.sampling.sampler import NO_TOKEN, Logprobs
from vajra_py.errors import ExecutorError


@dataclass(slots=True)
class Computed:
    """Tokens of a step, in the order of its sampled rows, and their log-probabilities.

    Attributes:
        slots: slot of each sampled row.
        tokens: sampled token of each row.
        logprobs: log-probabilities for rows with `logprobs`.
        prompt_logprobs: by slot, log-probabilities of the prompt tokens that this step scored, in order.
    """

    slots: Ints
    tokens: torch.Tensor
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, list[PendingLogprobs]] = field(default_factory=dict)

    def read_logprobs(self) -> tuple[dict[int, TokenLogprobs], dict[int, list[TokenLogprobs]]]:
        """Return the log-probabilities of output tokens and of prompts, by slot.

        The device must have completed them.
        """
        of_tokens = {
            slot: one for slots, found in self.logprobs for slot, one in zip(slots, found.result(), strict=True)
        }
        of_prompts = {
            slot: [one for piece in pieces for one in piece.result()] for slot, pieces in self.prompt_logprobs.items()
        }
        return of_tokens, of_prompts


@dataclass(slots=True)
class TorchStep:
    """A step of `TorchRunner` in flight."""

    computed: Computed
    started: float | torch.cuda.Event
    done: torch.cuda.Event | None = None
    duration_s: float = 0.0
    faults: Mapping[int, str] = field(default_factory=dict)

    def result(self) -> StepOutput:
        """See `PendingStep`."""
        if self.done is not None:
            assert isinstance(self.started, torch.cuda.Event)
            try:
                self.done.synchronize()
            except RuntimeError as error:
                raise ExecutorError(f"the device failed in a step ({error})") from error
            self.duration_s = self.started.elapsed_time(self.done) / 1000
        computed, faults = self.computed, self.faults
        slots, tokens = computed.slots.tolist(), computed.tokens.tolist()
        if NO_TOKEN in tokens:
            lost = {slot: LOST_ROW for slot, token in zip(slots, tokens, strict=True) if token == NO_TOKEN}
            faults = lost | dict(faults)
        return StepOutput(slots, tokens, self.duration_s, *computed.read_logprobs(), faults)


@dataclass(frozen=True, slots=True)
class PendingLookahead:
    """Decodes submitted before the scheduler decided which of them are needed, and the state needed to undo them.

    Besides `last_tokens` and the slots' token counts, the decodes change only KV at positions that no request has
    reached. A request that reaches such a position overwrites the KV there.

    Attributes:
        pending: the step in flight.
        slots: slots of the decodes.
        last_tokens: copy of the last tokens before the decodes.
        grown: for each slot that wrote into a spare block, the index of this block's entry in the slot's block table.
    """

    pending: PendingStep
    slots: Sequence[int]
    last_tokens: torch.Tensor
    grown: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class JoinedStep:
    """A step for which some decodes were started early.

    Attributes:
        begun: the step that contains the decodes started early, and possibly rows that were not needed.
        slots: slots of those decodes that belong to this step.
        rest: the other rows of this step, or None.
        order: slots of all sampled rows, in the step's order.
    """

    begun: PendingStep
    slots: Sequence[int]
    rest: PendingStep | None
    order: Sequence[int]

    def result(self) -> StepOutput:
        """See `PendingStep`."""
        begun = self.begun.result()
        if self.rest is None and begun.slots == self.order:
            return begun
        rest = StepOutput([], [], 0.0) if self.rest is None else self.rest.result()
        found = dict(zip(begun.slots, begun.token_ids, strict=True))
        found = {slot: found[slot] for slot in self.slots} | dict(zip(rest.slots, rest.token_ids, strict=True))
        faults = {slot: why for slot, why in begun.faults.items() if slot in set(self.slots)} | dict(rest.faults)
        tokens = [found[slot] for slot in self.order]
        duration_s = begun.duration_s + rest.duration_s
        return StepOutput(self.order, tokens, duration_s, rest.logprobs, rest.prompt_logprobs, faults)
