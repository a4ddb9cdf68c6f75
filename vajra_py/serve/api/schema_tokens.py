"""Bodies of `/tokenize` and `/detokenize`, with vLLM's fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from vajra_py.engine.tokenizer import ChatEnd
from vajra_py.serve.api.schema import Body, ChatMessage, EndpointBody, OffSwitch, Switch, Text, TokenId, chat_end
from vajra_py.serve.api.schema_facts import Name


class TokenizeBody(EndpointBody):
    """Body of `/tokenize`: a prompt, or messages."""

    model: Name | None = Field(None, description="Name of the model; may be left out where one is served.")
    prompt: Text | None = Field(None, description="A text; or `messages` in its place.")
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] | None = Field(
        None, description="Conversation, to which the chat template is applied."
    )
    add_special_tokens: Switch | None = Field(
        None, description="Add the special tokens that the model expects; null: for a prompt, not for messages."
    )
    add_generation_prompt: Switch | None = Field(None, description="As in `/v1/chat/completions`.")
    continue_final_message: OffSwitch = Field(False, description="As in `/v1/chat/completions`.")
    return_token_strs: OffSwitch = Field(False, description="Return the tokens as in the vocabulary too.")

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("one of prompt and messages is needed")
        if self.messages is None and (self.add_generation_prompt is not None or self.continue_final_message):
            raise ValueError("add_generation_prompt and continue_final_message are only allowed with messages")
        self.ends  # noqa: B018 (raises if the two fields contradict each other)
        return self

    @property
    def adds_special_tokens(self) -> bool:
        """True if special tokens are added to the text."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    @property
    def ends(self) -> ChatEnd:
        """Place at which the conversation's rendered text ends."""
        return chat_end(self.add_generation_prompt, self.continue_final_message)


class DetokenizeBody(Body):
    """Body of `/detokenize`."""

    model: Name | None = Field(None, description="Name of the model; may be left out where one is served.")
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(description="Token ids.")
