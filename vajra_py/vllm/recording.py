"""Record a session of a vLLM in a run's folder, like `vajra serve --save-run`, so that the session can be compared,
plotted and replayed.

The tokens of a request are written when they are known, which may be after the mechanism has ended the request. With
asynchronous scheduling, tokens may be computed after a request has stopped; they are written as 0, since no client
receives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from vajra_py.experiment.runs.recording import RunRecording, SessionEnd
from vajra_py.vllm.mechanism import ConnectorRules, EndReason, Mechanism, Request, Submission
from vajra_py.vllm.model_facts import model_facts_of
from vajra_py.vllm.plugin import abort_at_once, end_before_workers
from vajra_py.vllm.settings import Sizes


class SessionRecording:
    """Records a mechanism's inputs and decisions, from before the first request until `finish`."""

    def __init__(self, run: RunRecording, mechanism: Mechanism, description: Mapping[str, Any]) -> None:
        self._run = run
        self._mechanism = mechanism
        self._ended: list[tuple[Request, EndReason, Submission]] = []
        """Ended requests that are recorded when their last tokens are known."""
        self._run.begin({mechanism.replica.replicaset: description}, mechanism.controller)
        mechanism.note = self._run.note
        mechanism.on_ended = lambda *end: self._ended.append(end)
        mechanism.watch(self._run.observers)

    def take_tokens(self) -> None:
        """Record the requests that ended since the last call, with their tokens, which must be known by now."""
        ended, self._ended = self._ended, []
        for request, reason, submission in ended:
            self._run.ended(request, reason, _tokens(request, submission))

    def finish(self) -> None:
        """End the recording."""
        self.take_tokens()
        mechanism = self._mechanism
        alive = [(request, _tokens(request, submission)) for request, submission in mechanism.alive()]
        self._run.finish(SessionEnd(mechanism.controller, mechanism.now, mechanism.num_steps, alive), None)


def start_recording(
    run: RunRecording, mechanism: Mechanism, vllm_config: Any, description: Mapping[str, Any]
) -> SessionRecording:
    """Start a recording, and arrange that it is finished before the scheduling process of a stopped vLLM ends."""
    abort_at_once(vllm_config)
    end_before_workers()
    return SessionRecording(run, mechanism, description)


def _tokens(request: Request, submission: Submission) -> Sequence[int]:
    """Return the tokens since the submission: as many as the mechanism has counted, with 0 in place of missing ones."""
    count = request.num_output_tokens
    known = submission.output[submission.num_kept : submission.num_kept + count]
    return known + [0] * (count - len(known))


def facts_of(
    vllm_config: Any, sizes: Sizes, bytes_per_token: int, connector: ConnectorRules | None
) -> Mapping[str, Any]:
    """Return the facts about a vLLM for replays and readers of the results; `connector` holds its connector's rules."""
    return {
        **({} if connector is None else {"connector": structs.asdict(connector)}),
        **({"drafts_unseen": True} if sizes.drafts.unseen else {}),
        **model_facts_of(vllm_config),
        "forward": "vllm " + ".".join(map(str, sizes.version)),
        "kv_bytes_per_token": bytes_per_token,
        "num_blocks": sizes.num_blocks,
    }
