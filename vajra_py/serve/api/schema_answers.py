"""Response schemas for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Body of every error response."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="Number of prompt tokens found in the prefix cache.")


class UsageAnswer(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Log-probabilities; each list has one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None] = Field(
        description="Log-probability; null for the first token of an echoed prompt."
    )
    tokens: list[str] = Field(description="Text; bytes in hexadecimal for part of a character; else the number.")
    top_logprobs: list[dict[str, float] | None] | None


class Choice(BaseModel):
    """Fields common to both kinds of outputs."""

    index: int
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = Field(description="Stop string or token that ended the output.")
    token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")
    prompt_token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")


class RankedLogprob(BaseModel):
    """A token's log-probability and its rank, 1 being the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(Choice):
    """One output of `/v1/completions`."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | None = Field(
        None,
        description="Log-probabilities of each prompt token, by token id, with `prompt_logprobs`; null for the first.",
    )


class CompletionAnswer(BaseModel):
    """Answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class TopLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None = Field(description="UTF-8, perhaps part of a character; null for special tokens.")


class ChatLogprob(TopLogprob):
    """A generated token, with the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities, with one entry per token."""

    content: list[ChatLogprob]
    refusal: None


class AnswerMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Choice):
    """One output of `/v1/chat/completions`."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(BaseModel):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | None = Field(
        None,
        description="Log-probabilities of each prompt token, by token id, with `prompt_logprobs`; null for the first.",
    )


class TokenizeAnswer(BaseModel):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int = Field(description="Maximum length of a sequence, prompt and output.")
    tokens: list[int]
    token_strs: list[str] | None = Field(description="Tokens as in the vocabulary, with `return_token_strs`.")


class DetokenizeAnswer(BaseModel):
    """Answer of `/detokenize`."""

    prompt: str = Field(description="The tokens' text, special tokens written out.")


class ModelAnswer(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="Folder of the model, or of the adapter.")
    parent: str | None = Field(description="Name of an adapter's base model; null: it is a model itself.")
    max_model_len: int | None = Field(description="Longest sequence; null while the model is being loaded.")


class ModelsAnswer(BaseModel):
    """Answer of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelAnswer]


class HealthAnswer(BaseModel):
    """Answer of `/health` and `/ready`."""

    status: str
    replicas_up: int
    replicas: int
    replicas_restarting: int = Field(
        description="Number of replicas that are being started again, of those that are not up."
    )
    unavailable: dict[str, str] = Field(description="Replicasets that accept no requests now, with the reason.")


class VersionAnswer(BaseModel):
    """Answer of `/version`."""

    version: str


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a path, for OpenAPI."""
    return {status: {"model": ErrorAnswer, "description": _DESCRIPTIONS[status]} for status in statuses}


_DESCRIPTIONS = {
    400: "The request is wrong.",
    401: "The key is missing or wrong.",
    404: "There is no such model.",
    408: "The request waited longer than it allows.",
    409: "The request conflicts with what is being served.",
    413: "The request is too large.",
    429: "Queues are full, or the admission policy sheds load; `Retry-After` is the time to wait before a retry.",
    503: "No replica is ready, or the one that ran the request failed.",
}
