"""Format outputs as OpenAI responses, whole or in chunks.

The chunks of one output, joined, have the content of the whole answer: text, tokens, log-probabilities, finish reason,
usage.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vajra_py.contract.observer import EndReason
from vajra_py.engine.compute.interface import NOTHING_LEFT
from vajra_py.engine.tokenizer import Tokenizer
from vajra_py.runtime.requests.rejections import ALL_FAILED, OUT_OF_SERVICE, QUEUE_FULL, SHED
from vajra_py.serve.api.logprobs import LogprobWriter, TextOffsets
from vajra_py.serve.api.schema import ChatBody, GenerationBody
from vajra_py.serve.http.errors import ApiError
from vajra_py.serve.session.output_streams import End, OutputStream, ResponseState

_FINISHED = {EndReason.STOP: "stop", EndReason.LENGTH: "length"}
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_GAP = "\0"
"""Placeholder for text that is filled in later."""


def encoded(value: Any) -> bytes:
    """Return the value as JSON without blanks."""
    return _JSON.encode(value).encode("utf-8", "replace")


def event(value: Any) -> bytes:
    """Return the value as a server-sent event."""
    return b"data: " + encoded(value) + b"\n\n"


def failure(end: End, retry_after_s: float) -> ApiError | None:
    """Return the error to send to the client for the end of an output; None if the output is complete."""
    if end.is_complete:
        return None
    if end.detail.startswith(OUT_OF_SERVICE):
        return ApiError(503, end.detail, code="out_of_service", retry_after_s=retry_after_s)
    if end.reason is EndReason.REJECTED:
        if end.detail.startswith(QUEUE_FULL):
            return ApiError(429, end.detail, code="queue_full", retry_after_s=retry_after_s)
        if end.detail.startswith(SHED):
            wait_s = retry_after_s if end.retry_after_s is None else end.retry_after_s
            return ApiError(429, end.detail, code="shed", retry_after_s=wait_s)
        if end.detail.startswith(ALL_FAILED):
            return ApiError(503, end.detail, code="no_replica", retry_after_s=retry_after_s)
        return ApiError(400, end.detail, code="refused")
    if end.reason is EndReason.EXPIRED:
        return ApiError(408, f"the request {end.detail}", code="expired")
    if end.reason is EndReason.ABORTED:
        return ApiError(400, f"the request was {end.detail}", code="aborted")
    if end.detail.endswith(NOTHING_LEFT):
        return ApiError(400, end.detail, code="no_token_left")
    return ApiError(503, end.detail, code="replica_failed", retry_after_s=retry_after_s)


DEGRADED_HEADER = "x-vajra-degraded"


def degraded_headers(streams: Sequence[OutputStream]) -> dict[str, str]:
    """Return the header that states the reduced limits under which a request was admitted; no header if nothing was
    reduced.

    If the limits of several outputs differ, each limit is preceded by the index of its output.
    """
    found = [one.degraded for one in streams]
    if not any(found):
        return {}
    if len(set(found)) == 1:
        return {DEGRADED_HEADER: found[0]}
    return {DEGRADED_HEADER: "; ".join(f"{one.index}: {one.degraded}" for one in streams if one.degraded)}


def usage(streams: Sequence[OutputStream], num_per_prompt: int) -> dict[str, Any]:
    """Return the token counts of a request; a prompt with several outputs counts once."""
    prompt_tokens = sum(stream.num_prompt_tokens for stream in streams[::num_per_prompt])
    output_tokens = sum(stream.num_tokens for stream in streams)
    firsts = [stream.end.metrics for stream in streams[::num_per_prompt] if stream.end is not None]
    cached = sum(metrics.num_cached_tokens for metrics in firsts if metrics is not None)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(slots=True)
class _Sent:
    """Amount of an output that was already sent.

    `frame` holds the bytes before and after the text of a chunk if chunks contain only text; otherwise it is None.
    """

    num_tokens: int = 0
    num_characters: int = 0
    offsets: TextOffsets = field(default_factory=TextOffsets)
    frame: tuple[bytes, bytes] | None = None


@dataclass(slots=True)
class Answer:
    """Answer to one HTTP request.

    Attributes:
        name: id of the answer.
        created: time of creation, in seconds since 1970.
        model: name of the model, as given by the client.
        body: body of the request.
        response: outputs of the request.
        tokenizer: tokenizer of the model; None if it has none.
        echoes: texts of the prompts if answers begin with them; otherwise empty.
    """

    name: str
    created: int
    model: str
    body: GenerationBody
    response: ResponseState
    tokenizer: Tokenizer | None
    echoes: Sequence[str] = ()
    _sent: dict[int, _Sent] = field(default_factory=dict)

    @property
    def _writer(self) -> LogprobWriter:
        return LogprobWriter(self.tokenizer, self.body.return_tokens_as_token_ids)

    @property
    def _is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request that has ended without an error."""
        choices = [self._choice(stream) for stream in self.response.outputs]
        kind = "chat.completion" if self._is_chat else "text_completion"
        answer = {**self._head(kind), "choices": choices, "usage": usage(self.response.outputs, self.body.n)}
        if self._is_chat and self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._ranked_prompt(self.response.outputs[0])
        return answer

    def events(self, changed: Collection[OutputStream]) -> list[bytes]:
        """Return as server-sent events what was added to these outputs since the last call."""
        found: list[bytes] = []
        for stream in changed:
            sent = self._sent.get(stream.index)
            if sent is None:
                sent = self._sent[stream.index] = self._begun(stream)
                if self._is_chat:
                    found.append(self._event(self._role_choice(stream)))
                elif self.echoes:
                    found.append(self._event(self._echo_choice(stream, sent)))
            if sent.frame is not None and stream.end is None:
                text = stream.text[sent.num_characters :]
                if text:
                    sent.num_characters += len(text)
                    found.append(sent.frame[0] + encoded(text) + sent.frame[1])
                continue
            choice = self._piece(stream, sent)
            if choice is not None:
                found.append(self._event(choice))
        return found

    def last_event(self) -> bytes:
        """Return the event with the usage, which follows the last output; empty unless the client requested it."""
        options = self.body.stream_options
        return b"" if options is None or not options.include_usage else self._event(None)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _begun(self, stream: OutputStream) -> _Sent:
        """Return the initial state of an output of which nothing was sent."""
        body, options = self.body, self.body.stream_options
        counts = options is not None and options.continuous_usage_stats
        if body.num_logprobs is not None or body.return_token_ids or counts:
            return _Sent()
        before, _, after = self._event(self._text_choice(stream.index, _GAP)).rpartition(encoded(_GAP))
        return _Sent(frame=(before, after))

    def _event(self, choice: dict[str, Any] | None) -> bytes:
        """Return one chunk as an event."""
        body = self._head("chat.completion.chunk" if self._is_chat else "text_completion")
        body["choices"] = [] if choice is None else [choice]
        options = self.body.stream_options
        if options is not None and (choice is None or options.continuous_usage_stats):
            body["usage"] = usage(self.response.outputs, self.body.n)
        elif options is not None and options.include_usage:
            body["usage"] = None
        return event(body)

    def _role_choice(self, stream: OutputStream) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": stream.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _echo_choice(self, stream: OutputStream, sent: _Sent) -> dict[str, Any]:
        """Return the choice with the prompt, for the first chunk of an output that begins with the prompt."""
        choice = self._text_choice(stream.index, self._echo(stream))
        choice["logprobs"] = self._prompt_logprobs(stream, sent)
        return choice

    def _echo(self, stream: OutputStream) -> str:
        """Return the prompt's text if the output begins with it; else an empty text."""
        return self.echoes[stream.index // self.body.n] if self.echoes else ""

    def _choice(self, stream: OutputStream) -> dict[str, Any]:
        sent = _Sent()
        choice: dict[str, Any] = {"index": stream.index}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": stream.text, "refusal": None}
        else:
            choice["text"] = self._echo(stream) + stream.text
        before = self._prompt_logprobs(stream, sent) if self.echoes else None
        choice["logprobs"] = self._logprobs(stream, sent)
        if before is not None:
            for name, column in before.items():
                choice["logprobs"][name] = column and column + choice["logprobs"][name]
        if not self._is_chat and self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._ranked_prompt(stream)
        return self._ended(choice, stream, 0)

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        """Return a choice of a chunk that contains only text."""
        if self._is_chat:
            delta = {"content": text} if text else {}
            return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _piece(self, stream: OutputStream, sent: _Sent) -> dict[str, Any] | None:
        """Return the choice for an output's next chunk.

        Return None if nothing can be sent yet (half a character, or a possible stop string).
        """
        text = stream.text[sent.num_characters :]
        is_shown = text or stream.end is not None or self.body.num_logprobs is not None or self.body.return_token_ids
        if not is_shown or (stream.end is None and sent.num_tokens == stream.num_tokens):
            return None
        choice = self._text_choice(stream.index, text)
        choice["logprobs"] = self._logprobs(stream, sent)
        start, sent.num_tokens, sent.num_characters = sent.num_tokens, stream.num_tokens, len(stream.text)
        return self._ended(choice, stream, start)

    def _ended(self, choice: dict[str, Any], stream: OutputStream, start: int) -> dict[str, Any]:
        end = stream.end
        choice["finish_reason"] = None if end is None else _FINISHED.get(end.reason)
        if end is not None:
            choice["stop_reason"] = end.stopped_by
            if stream.hides_output and end.is_complete:
                choice["finish_reason"], choice["stop_reason"] = "length", None
        if self.body.return_token_ids:
            choice["token_ids"] = list(stream.token_ids(start))
            if start == 0:
                choice["prompt_token_ids"] = list(stream.submission.prompt_token_ids)
        return choice

    # Log-probabilities

    def _prompt_logprobs(self, stream: OutputStream, sent: _Sent) -> dict[str, Any] | None:
        """Return the log-probabilities of the prompt's tokens; the first token has none."""
        if self.body.num_logprobs is None:
            return None
        submission = stream.submission
        logprobs = [None, *submission.output.prompt_logprobs]
        found = self._writer.columns(submission.prompt_token_ids, logprobs, TextOffsets(), self.body.num_logprobs)
        sent.offsets = TextOffsets(len(self._echo(stream)))
        return found

    def _logprobs(self, stream: OutputStream, sent: _Sent) -> dict[str, Any] | None:
        if self.body.num_logprobs is None:
            return None
        token_ids, logprobs = stream.token_ids(sent.num_tokens), stream.logprobs(sent.num_tokens)
        if self._is_chat:
            return self._writer.entries(token_ids, logprobs)
        return self._writer.columns(token_ids, logprobs, sent.offsets, self.body.num_logprobs)

    def _ranked_prompt(self, stream: OutputStream) -> list[dict[str, dict[str, Any]] | None]:
        """Return the log-probabilities of the prompt's tokens in vLLM's format, each with the `prompt_logprobs`
        likeliest tokens at its position.
        """
        most, scored = self.body.prompt_logprobs, stream.submission.output.prompt_logprobs
        logprobs = [None, *(replace(one, top=one.top[:most]) for one in scored)]
        return self._writer.ranked(stream.submission.prompt_token_ids, logprobs)
