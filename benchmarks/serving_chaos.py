"""Does a server lose anything when clients vanish, queues overflow and it is flooded? Ask one, for so many seconds.

`python benchmarks/serving_chaos.py URL --model NAME --seconds 120`: random completions, streamed and whole, a third of whose
clients go away, more at once than the queues hold. Every request must end in exactly one of: finished, given up by its
client, or an explicit error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

EXPLICIT = frozenset({400, 408, 429, 503})


@dataclass(slots=True)
class Outcome:
    """What came of the requests.

    Attributes:
        counts: how many ended in which way: "finished", "gone" (the client went away), "429", "503", …
        wrong: what must not happen, in words.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """How bad it gets.

    Attributes:
        num_clients: clients at once.
        seconds: how long they go on.
        gone_fraction: of the clients, how many go away at a random moment.
        max_prompt_tokens: longest prompt.
        max_tokens: longest output.
        vocab_size: tokens of the model.
        seed: of what they ask.
    """

    model: str
    num_clients: int = 64
    seconds: float = 120.0
    gone_fraction: float = 0.33
    max_prompt_tokens: int = 96
    max_tokens: int = 48
    vocab_size: int = 1000
    seed: int = 0


async def chaos(url: str, plan: Plan, api_key: str | None = None) -> Outcome:
    """Flood the server at `url`; what came of it."""
    outcome = Outcome()
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.num_clients)
    until = time.monotonic() + plan.seconds
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=60) as client:

        async def one(number: int) -> None:
            stream = np.random.default_rng([plan.seed, number])
            while time.monotonic() < until:
                await _one_request(client, plan, stream, outcome)

        await asyncio.gather(*(one(number) for number in range(plan.num_clients)))
    return outcome


async def _one_request(client: httpx.AsyncClient, plan: Plan, stream: np.random.Generator, outcome: Outcome) -> None:
    length = int(stream.integers(1, plan.max_prompt_tokens + 1))
    body = {
        "model": plan.model,
        "prompt": stream.integers(1, plan.vocab_size, length).tolist(),
        "max_tokens": int(stream.integers(1, plan.max_tokens + 1)),
        "stream": bool(stream.integers(2)),
        "priority": int(stream.integers(-2, 3)),
        "ignore_eos": True,
        "return_token_ids": True,
    }
    patience_s = float(stream.exponential(0.05)) if stream.random() < plan.gone_fraction else None
    try:
        async with asyncio.timeout(patience_s):
            how = await _ask(client, body)
    except TimeoutError:
        how = "gone"
    except httpx.HTTPError as error:
        how = "broken"
        outcome.wrong.append(f"{type(error).__name__}: {error}")
    if how.startswith("wrong"):
        outcome.wrong.append(how)
    outcome.counts[how.split(":")[0]] += 1


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    if not body["stream"]:
        response = await client.post("/v1/completions", json=body)
        if response.status_code != 200:
            return _status(response.status_code, response.text)
        answer = response.json()["choices"][0]
        return _judged(len(answer["token_ids"]), answer["finish_reason"], body)
    async with client.stream("POST", "/v1/completions", json=body) as streamed:
        if streamed.status_code != 200:
            await streamed.aread()
            return _status(streamed.status_code, streamed.text)
        events = [line.removeprefix("data: ") async for line in streamed.aiter_lines() if line]
    if not events or events[-1] != "[DONE]":
        return f"wrong: a stream ended without [DONE] ({events[-1:]})"
    pieces = [json.loads(event) for event in events[:-1]]
    if "error" in pieces[-1]:
        return "error in the stream"
    choices = [piece["choices"][0] for piece in pieces]
    num_tokens = sum(len(choice["token_ids"]) for choice in choices)
    return _judged(num_tokens, choices[-1]["finish_reason"], body)


def _status(status: int, text: str) -> str:
    return str(status) if status in EXPLICIT else f"wrong: status {status} ({text[:200]})"


def _judged(num_tokens: int, reason: str, body: dict[str, Any]) -> str:
    if num_tokens == body["max_tokens"] and reason == "length":
        return "finished"
    return f"wrong: {num_tokens} tokens and {reason!r} where {body['max_tokens']} were to come"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Flood a server with clients that vanish; exit 1 if anything is lost.")
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--api-key")
    given = parser.parse_args()
    plan = Plan(given.model, given.clients, given.seconds, vocab_size=given.vocab_size)
    outcome = asyncio.run(chaos(given.url, plan, given.api_key))
    print(json.dumps(dict(outcome.counts), indent=1))
    for line in outcome.wrong[:20]:
        print(line)
    return 1 if outcome.wrong or not outcome.counts["finished"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
