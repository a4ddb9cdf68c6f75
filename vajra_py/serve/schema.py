"""Request bodies and headers, and their translation to sampling parameters and request facts.

Invariants:
    - Unknown fields are refused by name; fields that OpenAI knows and this server cannot do are refused unless they ask
      for nothing.
    - Limits that need the model (vocabulary, lengths) are checked where the request is prepared, not here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vajra_py.engine.compute import SamplingParams
from vajra_py.engine.params import MAX_LOGPROBS

Count: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
Natural: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
TokenId: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Switch: TypeAlias = Annotated[bool, Field(strict=True)]
Text: TypeAlias = Annotated[str, Field(strict=True)]
Name: TypeAlias = Annotated[str, Field(strict=True, max_length=256)]
Milliseconds: TypeAlias = Annotated[float, Field(gt=0, le=1e12)]
Penalty: TypeAlias = Annotated[float, Field(strict=True, ge=-2, le=2)]
_MAX_STOPS = 16


class Body(BaseModel):
    """Base of every body: nothing unknown, no NaN."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream carries besides its text."""

    include_usage: Switch = Field(False, description="A last chunk without choices says how many tokens it took.")
    continuous_usage_stats: Switch = Field(False, description="Every chunk says how many tokens it took so far.")


class GenerationBody(Body):
    """What both endpoints share: sampling, scheduling, and fields that are understood and mean nothing here."""

    model: Name = Field(description="A name that `/v1/models` lists.")
    n: Count = Field(1, description="Outputs for each prompt.")
    max_tokens: Count | None = Field(None, description="Most output tokens.")
    min_tokens: Natural = Field(0, description="The output does not end before it has so many tokens.")
    temperature: Annotated[float, Field(strict=True, ge=0, le=100)] | None = Field(
        None, description="Logits are divided by it; 0 is greedy; null: 1."
    )
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = Field(
        None, description="The fewest tokens whose probabilities reach this; null: 1."
    )
    top_k: Annotated[int, Field(strict=True, ge=-1, le=2**31 - 1)] | None = Field(
        None, description="Only the k likeliest tokens; null, 0 and -1: all."
    )
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = Field(
        None, description="Only tokens with at least this part of the largest probability."
    )
    presence_penalty: Penalty | None = Field(None, description="Taken from the logit of every token put out already.")
    frequency_penalty: Penalty | None = Field(None, description="The same, times how often.")
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=100)] | None = Field(
        None, description="Divides the logits of tokens that occurred; null: 1."
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)] | None = Field(
        None, description="Of the outputs' random streams; the outputs of one request get different ones."
    )
    stop: Text | Annotated[list[Text], Field(max_length=_MAX_STOPS)] | None = Field(
        None, description=f"Strings that end the output, at most {_MAX_STOPS}; they are not part of it."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = Field(
        None, description="Tokens that end the output, besides the model's own."
    )
    ignore_eos: Switch = Field(False, description="The model's own end-of-sequence tokens do not end the output.")
    stream: Switch | None = Field(False, description="Answer in server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    return_token_ids: Switch | None = Field(None, description="Say the tokens of prompt and output too.")
    priority: Annotated[int, Field(strict=True, ge=-(2**31), le=2**31 - 1)] = Field(
        0, description="Lower is more urgent."
    )
    slo_class: Name | None = Field(None, description="Class of service; the header `x-slo-class` goes before it.")
    ttft_slo_ms: Milliseconds | None = Field(None, description="Promised time to the first token; as `x-slo-ttft-ms`.")
    tpot_slo_ms: Milliseconds | None = Field(None, description="Promised time per further token; as `x-slo-tpot-ms`.")
    deadline_ms: Milliseconds | None = Field(None, description="Promised end, from arrival; as `x-deadline-ms`.")
    expires_after_ms: Milliseconds | None = Field(
        None, description="Give up when it still waits after this; as `x-expires-after-ms`."
    )
    session_id: Name | None = Field(None, description="The conversation it belongs to; as `x-session-id`.")
    user: Name | None = Field(None, description="The tenant, where no header names one.")
    metadata: Annotated[dict[Name, Name], Field(max_length=16)] | None = Field(
        None, description="Policies see it as the request's metadata."
    )
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(
        None, description="Not supported: only null or empty."
    )
    service_tier: Literal["auto", "default"] | None = Field(None, description="Has no effect.")
    store: Literal[False] | None = Field(None, description="Nothing is stored.")

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        if any(not one for one in self.stops):
            raise ValueError("stop has an empty string")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report with each token; None: no log-probabilities."""
        raise NotImplementedError

    def wanted_tokens(self) -> int | None:
        """Most output tokens as the client said; None: as many as fit."""
        return self.max_tokens

    def sampling(self, max_tokens: int, seed: int | None) -> SamplingParams:
        """How tokens are chosen."""
        top_k = self.top_k if self.top_k is not None and self.top_k > 0 else None
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            seed=seed,
            logprobs=self.num_logprobs,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
        )


Prompt: TypeAlias = (
    Annotated[str, Field(strict=True, min_length=1)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(strict=True, min_length=1)]], Field(min_length=1)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
)
"""A text, its tokens, or several of either."""


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`."""

    prompt: Prompt = Field(description="A text, token ids, or a list of either.")
    max_tokens: Count | None = Field(16, description="Most output tokens; null: as many as fit.")
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Report log-probabilities: of the token and so many of the likeliest."
    )
    echo: Literal[False] | None = Field(None, description="Not supported.")
    suffix: None = Field(None, description="Not supported.")
    best_of: Literal[1] | None = Field(None, description="Not supported beyond 1.")

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationBody`."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Every prompt."""
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return list(prompt) if several else [prompt]


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    """One message of a conversation; which roles there are is the model's chat template's affair."""

    role: Annotated[str, Field(strict=True, min_length=1, max_length=64)]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
    name: Name | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it: parts joined by line breaks."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


class ResponseFormat(Body):
    """Only plain text."""

    type: Literal["text"]


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)] = Field(description="The conversation so far.")
    max_completion_tokens: Count | None = Field(None, description="Most output tokens; goes before `max_tokens`.")
    logprobs: Switch | None = Field(None, description="Report log-probabilities.")
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = Field(
        None, description="With `logprobs`: so many of the likeliest tokens too."
    )
    response_format: ResponseFormat | None = Field(None, description="Only text.")
    tools: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="Not supported: only empty.")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="Has no effect.")
    parallel_tool_calls: Switch | None = Field(None, description="Has no effect.")

    @model_validator(mode="after")
    def _logprobs_asked(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationBody`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def wanted_tokens(self) -> int | None:
        """See `GenerationBody`."""
        return self.max_completion_tokens or self.max_tokens


class SchedulingHeaders(BaseModel):
    """What gateways say about a request; a header goes before the body's field. Two spellings of one thing: the first."""

    model_config = ConfigDict(allow_inf_nan=False)

    x_slo_ttft_ms: Milliseconds | None = None
    x_llm_d_slo_ttft_ms: Milliseconds | None = None
    x_slo_tpot_ms: Milliseconds | None = None
    x_llm_d_slo_tpot_ms: Milliseconds | None = None
    x_llm_d_inference_fairness_id: Annotated[str, Field(max_length=256)] | None = None
    x_slo_class: Annotated[str, Field(max_length=256)] | None = None
    x_deadline_ms: Milliseconds | None = None
    x_expires_after_ms: Milliseconds | None = None
    x_session_id: Annotated[str, Field(max_length=256)] | None = None
