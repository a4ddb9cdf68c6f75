"""`/tokenize` and `/detokenize`, with vLLM's requests and answers."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from vajra_py.engine.tokenizer import Tokenizer
from vajra_py.errors import ConfigError
from vajra_py.serve.api import schema_answers as answers
from vajra_py.serve.api.prepare import unknown_model
from vajra_py.serve.api.reading import BodyReader, documented_body
from vajra_py.serve.api.schema_tokens import DetokenizeBody, TokenizeBody
from vajra_py.serve.api.tokenizing import Tokenizing
from vajra_py.serve.http.errors import ApiError, bad_request, of_config_error
from vajra_py.serve.session.catalogue import Catalogue
from vajra_py.serve.session.session import EngineSession

MOST_TOKENS = 2**17
"""Maximum number of tokens to detokenize. A text to tokenize must have fewer tokens than this, or than the model's
limit if that is higher.
"""
_ERRORS = answers.errors(400, 401, 404, 413, 429, 503)


@dataclass(frozen=True, slots=True)
class TokenPaths:
    """Parts of a service that `/tokenize` and `/detokenize` use."""

    session: EngineSession
    catalogue: Catalogue
    bodies: BodyReader
    tokenizing: Tokenizing

    def add_to(self, app: FastAPI) -> None:
        """Add the paths to the application."""

        @app.post(
            "/tokenize",
            response_model=answers.TokenizeAnswer,
            responses=_ERRORS,
            openapi_extra=documented_body(TokenizeBody),
            tags=["tokens"],
        )
        async def tokenize(request: Request) -> JSONResponse:
            """Return the tokens of a text, or of a conversation in the model's chat template."""
            return await self._tokenize(await self.bodies.read(request, TokenizeBody))

        @app.post(
            "/detokenize",
            response_model=answers.DetokenizeAnswer,
            responses=_ERRORS,
            openapi_extra=documented_body(DetokenizeBody),
            tags=["tokens"],
        )
        async def detokenize(request: Request) -> JSONResponse:
            """Return the text of tokens."""
            return await self._detokenize(await self.bodies.read(request, DetokenizeBody))

    async def _tokenize(self, body: TokenizeBody) -> JSONResponse:
        replicaset, tokenizer = self._model(body.model)
        longest = self.session.prompt_limits(replicaset).max_request_tokens
        most, is_rendered = max(longest, MOST_TOKENS), not body.adds_special_tokens
        if body.messages is None:
            param, text = "prompt", body.prompt or ""
        else:
            param = "messages"
            try:
                text = await self.tokenizing.render(tokenizer, [one.plain() for one in body.messages], body.ends)
            except ConfigError as error:
                raise of_config_error(error) from None
        tokens = await self.tokenizing.tokens(tokenizer, text, most, param=param, is_rendered=is_rendered)
        if len(tokens) >= most:
            raise bad_request(f"is too long ({len(tokens)} tokens). Allowed: up to {most - 1}", param)
        names = [tokenizer.name(token) for token in tokens] if body.return_token_strs else None
        answer = {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": names}
        return JSONResponse(answer)

    async def _detokenize(self, body: DetokenizeBody) -> JSONResponse:
        replicaset, tokenizer = self._model(body.model)
        vocab_size = self.session.prompt_limits(replicaset).vocab_size
        if len(body.tokens) > MOST_TOKENS:
            raise bad_request(f"tokens: are too many ({len(body.tokens)}). Allowed: up to {MOST_TOKENS}", "tokens")
        if body.tokens and max(body.tokens) >= vocab_size:
            message = f"tokens: {max(body.tokens)} is not in the model's vocabulary. Allowed: 0 to {vocab_size - 1}"
            raise bad_request(message, "tokens")
        return JSONResponse({"prompt": await self.tokenizing.text(tokenizer.with_special, body.tokens)})

    def _model(self, name: str | None) -> tuple[str, Tokenizer]:
        """Return a replicaset that serves the model, and its tokenizer. Raises `ApiError`."""
        if self.session.engine is None:
            raise ApiError(503, self.session.why_unavailable(), code="unavailable", retry_after_s=1)
        names = self.catalogue.names
        if name is None and len({self.catalogue.behind(one)[0] for one in names}) > 1:
            raise bad_request(f"model: is missing. Allowed: {', '.join(names)}", "model")
        name = names[0] if name is None else name
        if name not in names:
            raise unknown_model(name, names)
        replicaset = self.catalogue.behind(name)[0]
        tokenizer = self.session.client.tokenizers[replicaset]
        if tokenizer is None:
            raise bad_request("the model has no tokenizer", "model", "no_tokenizer")
        return replicaset, tokenizer
