"""Record a session of a vLLM as a run's folder, as `vajra serve --save-run` does: to compare, plot and replay it.

The tokens of a request are written when they are known, which may be after the mechanism has ended it. A token that was computed
after a request had stopped, as happens with asynchronous scheduling, is written as 0: no client got it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

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
        """Requests whose last tokens come with the next step's."""
        self._run.begin({mechanism.replica.replicaset: description}, mechanism.controller)
        mechanism.note = self._run.note
        mechanism.on_ended = lambda *end: self._ended.append(end)
        mechanism.watch(self._run.observers)

    def take_tokens(self) -> None:
        """Record the tokens of all steps that have ended, which are known now."""
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
    """Begin a recording that is finished before the process of a stopped vLLM ends."""
    abort_at_once(vllm_config)
    end_before_workers()
    return SessionRecording(run, mechanism, description)


def _tokens(request: Request, submission: Submission) -> Sequence[int]:
    """Return as many tokens as the mechanism has counted since the request was handed in."""
    count = request.num_output_tokens
    known = submission.output[submission.num_kept : submission.num_kept + count]
    return known + [0] * (count - len(known))


def facts_of(
    vllm_config: Any, sizes: Sizes, bytes_per_token: int, connector: ConnectorRules | None
) -> Mapping[str, Any]:
    """Return the facts of a vLLM that a replay and a reader of the results need; `connector`: rules of the one that it has."""
    return {
        **({} if connector is None else {"connector": asdict(connector)}),
        **({"drafts_unseen": True} if sizes.drafts.unseen else {}),
        **model_facts_of(vllm_config),
        "forward": "vllm " + ".".join(map(str, sizes.version)),
        "kv_bytes_per_token": bytes_per_token,
        "num_blocks": sizes.num_blocks,
    }
