"""Request bodies and headers, and their translation to sampling parameters and request facts.

Invariants:
    - `null` in an optional field means that the field is absent.
    - Fields of other servers' APIs that this server does not support are refused by name, unless their value requests
      nothing (`vajra_py.serve.http.unsupported`); unknown fields are stored separately (`unknown_fields`) and have no
      effect.
    - A list gives at most one error, however many of its entries are invalid.
    - Limits that need the model (vocabulary, lengths) are checked where the request is prepared, not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
    model_validator,
)

from vajra_py.engine.compute import SamplingParams
from vajra_py.engine.params import MAX_BIAS, MAX_BIASES, MAX_LOGPROBS
from vajra_py.engine.tokenizer import ChatEnd
from vajra_py.serve.api.schema_facts import Name, body_fields, header_fields, null_is
from vajra_py.serve.http.unsupported import (
    WrongField,
    is_known_elsewhere,
    refuse_content_part,
    refuse_fields_of,
    refuse_unsupported,
    refuse_unsupported_message,
)

Count: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
Natural: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
TokenId: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Switch: TypeAlias = Annotated[bool, Field(strict=True)]
Text: TypeAlias = Annotated[str, Field(strict=True)]
Penalty: TypeAlias = Annotated[float, Field(strict=True, ge=-2, le=2)]
BadWord: TypeAlias = Annotated[str, Field(strict=True, min_length=1, max_length=256)]
_MAX_STOPS = 16
_MAX_BAD_WORDS = 256
_MAX_METADATA = 16


def _few_entries() -> BeforeValidator:
    """Return a validator of a mapping's size; it runs before the entries' validators, to limit the number of errors."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > _MAX_METADATA:
            raise ValueError(f"has {len(given)} entries. Allowed: up to {_MAX_METADATA}")
        return given

    return BeforeValidator(check)


def _biases(given: Any) -> Any:
    """Validate a mapping from token ids, written as text, to biases; stop at the first error."""
    if not isinstance(given, dict):
        return given
    if len(given) > MAX_BIASES:
        raise ValueError(f"has {len(given)} tokens. Allowed: up to {MAX_BIASES}")
    for token, bias in given.items():
        if not re.fullmatch(r"\d{1,10}", token, re.ASCII):
            raise ValueError(f"has a key that is not a token id ({token[:32]!r})")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"has a bias that is out of range (of token {token}). Allowed: -100 to 100")
    if len({int(token) for token in given}) < len(given):
        raise ValueError("has a token twice")
    return given


OffSwitch: TypeAlias = Annotated[bool, Field(strict=True), null_is(False, bool)]


class Body(BaseModel):
    """Base of all bodies: unknown fields are stored separately, NaN and infinity are refused."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class EndpointBody(Body):
    """Base of bodies that refuse fields for unsupported features of other servers."""

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_unsupported(given, cls.model_fields)
        return given


class StreamOptions(Body):
    """Contents of a stream other than the outputs."""

    include_usage: OffSwitch = Field(False, description="Send the usage in a last chunk without choices.")
    continuous_usage_stats: OffSwitch = Field(False, description="Send the usage so far in every chunk.")


class _SamplingBody(EndpointBody):
    model: Name = Field(description="Name of a model that `/v1/models` lists.")
    n: Annotated[Count, null_is(1, Count)] = Field(1, description="Number of outputs for each prompt.")
    max_tokens: Count | None = Field(None, description="Maximum number of output tokens.")
    min_tokens: Annotated[Natural, null_is(0, Natural)] = Field(0, description="Minimum number of output tokens.")
    temperature: Annotated[float, Field(strict=True, ge=0, le=100)] | None = Field(
        None, description="Sampling temperature; 0: greedy; null: 1."
    )
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = Field(
        None,
        description="Sample from the smallest set of most likely tokens whose probabilities reach this sum; null: 1.",
    )
    top_k: Annotated[int, Field(strict=True, ge=-1, le=2**31 - 1)] | None = Field(
        None, description="Sample from the k most likely tokens only; null, 0 and -1: all."
    )
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = Field(
        None, description="Sample only from tokens with at least this fraction of the largest probability."
    )
    presence_penalty: Penalty | None = Field(None, description="Penalty on the logit of every token already generated.")
    frequency_penalty: Penalty | None = Field(
        None, description="Penalty on a token's logit for each time that it was generated."
    )
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=100)] | None = Field(
        None, description="Factor that reduces the logits of tokens in the prompt or output; null: 1."
    )
    seed: Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description="Seed of sampling; the outputs of one request get different streams."
    )
    stop: Text | Annotated[list[Text], Field(fail_fast=True, max_length=_MAX_STOPS)] | None = Field(
        None, description=f"Strings that end the output, at most {_MAX_STOPS}; they are not part of it."
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=64)] | None = Field(
        None, description="Tokens that end the output, besides the model's own."
    )
    include_stop_str_in_output: OffSwitch = Field(
        False, description="Include the stop string or the stop token's text in the output."
    )
    skip_special_tokens: Annotated[Switch, null_is(True, bool)] = Field(
        True, description="Leave special tokens out of the text."
    )
    add_special_tokens: Switch | None = Field(
        None, description="Add the special tokens that the model expects to the prompt."
    )
    bad_words: Annotated[list[BadWord], Field(fail_fast=True, max_length=_MAX_BAD_WORDS)] | None = Field(
        None, description="Words that the output must not contain."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1)] | None = Field(
        None, description="Tokens that the output is restricted to."
    )
    logit_bias: Annotated[dict[str, float], BeforeValidator(_biases)] | None = Field(
        None, description="Value to add to a token's logit by token id, -100 to 100."
    )
    prompt_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="Report log-probabilities of the prompt's tokens and of this many most likely ones; not in streams.",
    )
    return_tokens_as_token_ids: OffSwitch = Field(
        False, description="Name tokens in log-probabilities as `token_id:NUMBER`."
    )
    cache_salt: Annotated[str, Field(strict=True, min_length=1, max_length=256)] | None = Field(
        None, description="Salt of the prefix cache: only requests with the same salt share cached prefixes."
    )
    ignore_eos: OffSwitch = Field(False, description="Do not end the output at the model's end-of-sequence tokens.")
    stream: OffSwitch = Field(False, description="Stream the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Options of a stream; only with `stream`.")
    return_token_ids: OffSwitch = Field(False, description="Return the token ids of prompt and output too.")


if TYPE_CHECKING:
    _StatingBody: TypeAlias = _SamplingBody
    _StatingHeaders: TypeAlias = BaseModel
else:
    _StatingBody = create_model("_StatingBody", __base__=_SamplingBody, __module__=__name__, **body_fields())
    _StatingHeaders = create_model("_StatingHeaders", __module__=__name__, **header_fields())


class GenerationBody(_StatingBody):
    """Fields common to both endpoints: sampling parameters, scheduling facts, and metadata."""

    metadata: Annotated[dict[Name, Name], Field(max_length=_MAX_METADATA), _few_entries()] | None = Field(
        None, description="Metadata of the request, which policies see."
    )

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        if any(not one for one in self.stops):
            raise ValueError("stop has an empty string")
        if self.prompt_logprobs is not None and self.stream:
            raise WrongField("prompt_logprobs", "is only allowed without stream")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of the request."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report with each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to report with each token of the prompt; None: no log-probabilities."""
        return self.prompt_logprobs

    @property
    def adds_special_tokens(self) -> bool:
        """True if special tokens are added to the prompt; by default not for chats, whose template writes them."""
        return self.add_special_tokens is not False

    def wanted_tokens(self) -> int | None:
        """Return the maximum number of output tokens that the client states; None: as many as fit."""
        return self.max_tokens

    def sampling(self, max_tokens: int, seed: int | None) -> SamplingParams:
        """Return the sampling parameters for the engine."""
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
            prompt_logprobs=self.num_prompt_logprobs,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(sorted(set(self.allowed_token_ids))),
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            bad_words=tuple(dict.fromkeys(self.bad_words or ())),
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


def _form_of(prompt: Any) -> str:
    """Return the form of a prompt, determined by its first element, so that only errors of that form are reported.

    The names of forms have brackets, which distinguish them from field names in an error's location.
    """
    if not isinstance(prompt, list):
        return "<text>"
    first = prompt[0] if prompt else 0
    return "<texts>" if isinstance(first, str) else "<token_lists>" if isinstance(first, list) else "<tokens>"


_PromptText: TypeAlias = Annotated[str, Field(strict=True, min_length=1)]
_PromptTokens: TypeAlias = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Prompt: TypeAlias = Annotated[
    Annotated[_PromptText, Tag("<text>")]
    | Annotated[_PromptTokens, Tag("<tokens>")]
    | Annotated[list[_PromptText], Field(fail_fast=True, min_length=1), Tag("<texts>")]
    | Annotated[list[_PromptTokens], Field(fail_fast=True, min_length=1), Tag("<token_lists>")],
    Discriminator(_form_of),
]
"""A text, the token ids of a text, or a list of either."""


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`."""

    prompt: Prompt = Field(description="A text, token ids, or a list of either.")
    max_tokens: Natural | None = Field(
        16,
        description="Maximum number of output tokens; null: as many as fit; 0 only with `echo`, for the prompt alone.",
    )
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Report log-probabilities of the token and of this many most likely ones."
    )
    echo: OffSwitch = Field(
        False,
        description="Put the prompt before the output, with its tokens' log-probabilities if they are requested.",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_completions(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_fields_of(given, _CHAT_ONLY, "/v1/chat/completions")
        return given

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationBody`."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """See `GenerationBody`."""
        asked = [one for one in (self.prompt_logprobs, self.logprobs if self.echo else None) if one is not None]
        return max(asked, default=None)

    def prompts(self) -> list[str | list[int]]:
        """Return all prompts of the request."""
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return list(prompt) if several else [prompt]


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text", "refusal"]
    text: Annotated[Text, null_is("", Text)] = Field("", description="With the type `text`.")
    refusal: Annotated[Text, null_is("", Text)] = Field("", description="With the type `refusal`.")

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_content_part(given.get("type"))
        return given

    @property
    def plain(self) -> str:
        """Text of the part."""
        return self.text if self.type == "text" else self.refusal


class ChatMessage(Body):
    """One message of a conversation; the chat template determines the allowed roles."""

    role: Annotated[str, Field(strict=True, min_length=1, max_length=64)]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)] | None = None
    refusal: Text | None = Field(None, description="Placeholder for the content of a message that has none.")
    name: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_unsupported_message(given)
        return given

    def plain(self) -> dict[str, str]:
        """Return the message in the form that chat templates take, with its parts joined by line breaks."""
        given = self.content if self.content is not None else self.refusal or ""
        content = given if isinstance(given, str) else "\n".join(part.plain for part in given)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] = Field(
        description="The conversation so far."
    )
    max_completion_tokens: Count | None = Field(
        None, description="Maximum number of output tokens; goes before `max_tokens`."
    )
    logprobs: Switch | None = Field(None, description="Report log-probabilities.")
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = Field(
        None, description="Number of most likely tokens to report too; with `logprobs`."
    )
    add_generation_prompt: Switch | None = Field(
        None, description="End the template where the model's answer begins; null: unless `continue_final_message`."
    )
    continue_final_message: OffSwitch = Field(
        False, description="Let the model continue the last message; not with `add_generation_prompt`."
    )

    @model_validator(mode="before")
    @classmethod
    def _of_chats(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_fields_of(given, _COMPLETION_ONLY, "/v1/completions")
        return given

    @property
    def adds_special_tokens(self) -> bool:
        """See `GenerationBody`."""
        return self.add_special_tokens is True

    @property
    def ends(self) -> ChatEnd:
        """Place at which the conversation's rendered text ends."""
        return chat_end(self.add_generation_prompt, self.continue_final_message)

    @model_validator(mode="after")
    def _logprobs_asked(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        self.ends  # noqa: B018 (raises if the two fields contradict each other)
        return self

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationBody`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def wanted_tokens(self) -> int | None:
        """See `GenerationBody`."""
        return self.max_completion_tokens or self.max_tokens


_CHAT_ONLY = frozenset(
    ("messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt", "continue_final_message")
)
_COMPLETION_ONLY = frozenset(("prompt",))


def chat_end(begins_answer: bool | None, continues: bool) -> ChatEnd:
    """Return where the rendered text of a conversation ends, given `add_generation_prompt` (`begins_answer`) and
    `continue_final_message` (`continues`).

    Raises `ValueError` if both are set.
    """
    if continues and begins_answer:
        raise WrongField("continue_final_message", "cannot be combined with add_generation_prompt")
    if continues:
        return ChatEnd.MESSAGE
    return ChatEnd.NOWHERE if begins_answer is False else ChatEnd.ANSWER


def unknown_fields(body: GenerationBody) -> Iterator[str]:
    """Yield the names of the body's unknown fields that have a value."""
    parts: list[Body] = [body] if body.stream_options is None else [body, body.stream_options]
    if isinstance(body, ChatBody):
        parts.extend(body.messages)
    for part in parts:
        for name, value in (part.model_extra or {}).items():
            if value is not None and not is_known_elsewhere(name):
                yield name


class SchedulingHeaders(_StatingHeaders):
    """Facts that gateways state in headers; a header overrides the body's field.

    If a fact has two headers, the first one in `Fact.headers` has priority.
    """

    model_config = ConfigDict(allow_inf_nan=False)
