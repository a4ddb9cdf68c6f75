"""`nano_vllm` and `minivllm` against a plain re-statement of those engines' rules, on random workloads."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.golden.readers import nano


class Broken(Exception):
    """The real engine would crash here, or use a block of other content: there is nothing to compare with."""


@dataclass(eq=False)
class Seq:
    """A request as these engines keep it."""

    id: int
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    forced: list[int]
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    table: list[int] = field(default_factory=list)


class Blocks:
    """The FIFO block queue and the dictionary of contents. Content of a full block = all tokens up to its end."""

    def __init__(self, kind: str, num_blocks: int, size: int) -> None:
        self.kind, self.size = kind, size
        self.free = deque(range(num_blocks))
        self.users = [0] * num_blocks
        self.content: list[tuple[int, ...]] = [()] * num_blocks
        self.entry: dict[tuple[int, ...], int] = {}

    def count(self, seq: Seq) -> int:
        return -(-len(seq.tokens) // self.size)

    def chain(self, seq: Seq, k: int) -> tuple[int, ...]:
        """What identifies block k; () for a partly filled one."""
        end = (k + 1) * self.size
        return tuple(seq.tokens[:end]) if end <= len(seq.tokens) else ()

    def hits(self, seq: Seq) -> list[int]:
        """Leading blocks that are found, as a walk over the table finds them."""
        found: list[int] = []
        last = self.count(seq) - (self.kind == "nano_new")
        missed = False
        for k in range(last):
            key = self.chain(seq, k)
            block = self.entry.get(key) if key else None
            if block is not None and key[-self.size :] != self.content[block][-self.size :]:
                block = None
            if block is None:
                missed = True
                if self.kind == "nano_old":
                    break
                continue
            if missed and self.kind == "mini_doc":
                raise Broken("a hit behind a miss")
            if missed:
                break
            if self.content[block] != key:
                raise Broken("a block with the same own tokens and another prefix")
            found.append(block)
        return found

    def needed(self, seq: Seq) -> int:
        if self.kind != "nano_new":
            return self.count(seq)
        return self.count(seq) - sum(self.users[block] > 0 for block in self.hits(seq))

    def take(self) -> int:
        block = self.free.popleft()
        if self.kind == "nano_new" and self.entry.get(self.content[block]) == block:
            del self.entry[self.content[block]]
        self.content[block] = ()
        self.users[block] = 1
        return block

    def enter(self, block: int, key: tuple[int, ...]) -> None:
        self.content[block] = key
        self.entry[key] = block

    def allocate(self, seq: Seq) -> int:
        """Blocks for all tokens; how many tokens were found."""
        found = self.hits(seq)
        for block in found:
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
        seq.table = list(found)
        for k in range(len(found), self.count(seq)):
            block = self.take()
            seq.table.append(block)
            if self.kind != "nano_new" and (key := self.chain(seq, k)):
                self.enter(block, key)
        return len(found) * self.size

    def release(self, seq: Seq) -> None:
        mini = self.kind == "mini_doc"
        for block in seq.table if mini else reversed(seq.table):
            self.users[block] -= 1
            if not self.users[block]:
                if mini:
                    self.content[block] = ()
                self.free.append(block)
        seq.table, seq.computed = [], 0


class Engine:
    """Sections 0 to 3a of the rules."""

    def __init__(self, kind: str, config: dict[str, int]) -> None:
        self.kind, self.config = kind, config
        self.blocks = Blocks(kind, config["num_blocks"], config["block_size"])
        self.waiting: deque[Seq] = deque()
        self.running: deque[Seq] = deque()

    def prefill(self) -> list[tuple[Seq, int, int, int]]:
        """(sequence, tokens, computed before, hit) in batch order."""
        cap, budget = self.config["max_num_seqs"], self.config["max_num_batched_tokens"]
        batch: list[tuple[Seq, int, int, int]] = []
        charged = 0
        while self.waiting and len(batch) < cap:
            seq, blocks = self.waiting[0], self.blocks
            if self.kind == "nano_new":
                left = budget - charged
                if not left:
                    break
                hit = 0
                want = len(seq.tokens) - seq.computed
                if not seq.table:
                    if len(blocks.free) < blocks.needed(seq):
                        break
                    hit = len(blocks.hits(seq)) * blocks.size
                    want = len(seq.tokens) - hit
                if want > left and batch:
                    break
                if not seq.table:
                    seq.computed = blocks.allocate(seq)
                k = min(want, left)
                batch.append((seq, k, seq.computed, hit))
                seq.computed += k
                charged += k
                if seq.computed < len(seq.tokens):
                    continue
            else:
                n = len(seq.tokens)
                if charged + n > budget or len(blocks.free) < blocks.count(seq):
                    break
                hit = blocks.allocate(seq)
                if hit == n:
                    raise Broken("nothing left to compute")
                batch.append((seq, n - hit, hit, hit))
                seq.computed = n
                charged += n if self.kind == "mini_doc" else n - hit
            self.running.append(self.waiting.popleft())
        return batch

    def preempt(self, seq: Seq) -> int:
        self.blocks.release(seq)
        self.waiting.appendleft(seq)
        return seq.id

    def decode(self) -> tuple[list[Seq], list[int]]:
        cap, budget = self.config["max_num_seqs"], self.config["max_num_batched_tokens"]
        mini = self.kind == "mini_doc"
        batch: list[Seq] = []
        preempted: list[int] = []
        while self.running and (mini or len(batch) < cap):
            seq = self.running.popleft()
            starts_block = len(seq.tokens) % self.blocks.size == 1
            while starts_block and not self.blocks.free:
                if not self.running:
                    preempted.append(self.preempt(seq))
                    break
                preempted.append(self.preempt(self.running.pop()))
            else:
                if mini and (len(batch) >= min(cap, budget)):
                    self.running.appendleft(seq)
                    break
                if starts_block:
                    seq.table.append(self.blocks.take())
                elif len(seq.tokens) % self.blocks.size == 0 and self.kind != "nano_new":
                    k = len(seq.tokens) // self.blocks.size - 1
                    self.blocks.enter(seq.table[k], self.blocks.chain(seq, k))
                seq.computed += 1
                batch.append(seq)
                continue
            break
        self.running.extendleft(reversed(batch))
        if not batch and not preempted:
            raise Broken("nothing can run")
        return batch, preempted

    def step(self) -> dict[str, Any]:
        admitted = self.prefill()
        preempted: list[int] = []
        batch: list[tuple[Seq, int, int]] = [(seq, n, before) for seq, n, before, _ in admitted]
        if not admitted:
            decodes, preempted = self.decode()
            if not decodes and self.kind != "mini_doc":
                raise Broken("an empty batch")
            batch = [(seq, 1, seq.computed - 1) for seq in decodes]
        told: dict[str, Any] = {
            "is_prefill": bool(admitted),
            "scheduled": [[seq.id, n] for seq, n, _ in batch],
            "preempted": preempted,
            "free_after_schedule": len(self.blocks.free),
        }
        if admitted:
            told["computed_before"] = [before for _, _, before, _ in admitted]
            told["cache_hit"] = [hit for *_, hit in admitted]
        return told | self.postprocess(batch)

    def postprocess(self, batch: list[tuple[Seq, int, int]]) -> dict[str, Any]:
        finished = []
        blocks = self.blocks
        for seq, n, before in batch:
            if self.kind == "nano_new":
                for k in range(before // blocks.size, (before + n) // blocks.size):
                    blocks.enter(seq.table[k], blocks.chain(seq, k))
            if seq.computed < len(seq.tokens):
                continue
            token = seq.forced[len(seq.tokens) - len(seq.prompt)]
            seq.tokens.append(token)
            eos = not seq.ignore_eos and token == self.config["eos"]
            if eos or len(seq.tokens) - len(seq.prompt) >= seq.max_tokens:
                blocks.release(seq)
                self.running.remove(seq)
                finished.append(seq.id)
        return {
            "finished": finished,
            "free": len(blocks.free),
            "n_waiting": len(self.waiting),
            "n_running": len(self.running),
            "waiting": [seq.id for seq in self.waiting],
            "running": [seq.id for seq in self.running],
        }


def scenario(kind: str, seed: int) -> dict[str, Any]:
    """A random small workload over an alphabet of few tokens, so that contents coincide."""
    rng = random.Random(seed)
    size = rng.choice([2, 3, 4])
    letters = [10, 11] if rng.random() < 0.5 else list(range(10, 40))
    prefixes = [[rng.choice(letters) for _ in range(rng.randint(2, 12))] for _ in range(2)]
    requests: list[dict[str, Any]] = []
    for index in range(rng.randint(3, 12)):
        prompt = [*(rng.choice(prefixes) if rng.random() < 0.6 else []), *(rng.choice(letters) for _ in range(4))]
        most = rng.randint(1, 14)
        forced = [2 if rng.random() < 0.05 else rng.choice(letters) for _ in range(most)]
        requests.append(
            {
                "id": index,
                "arrival": rng.randint(0, 14),
                "prompt": prompt[: rng.randint(1, len(prompt))],
                "max_tokens": most,
                "ignore_eos": rng.random() < 0.6,
                "forced": forced,
            }
        )
    longest = max(len(r["prompt"]) + r["max_tokens"] for r in requests)
    config = {
        "max_num_seqs": rng.randint(1, 5),
        "max_num_batched_tokens": rng.randint(3, 20) if kind == "nano_new" else longest + rng.randint(0, 20),
        "block_size": size,
        "num_blocks": -(-longest // size) + rng.randint(0, 8),
        "eos": 2,
    }
    return {"kind": kind, "config": config, "requests": requests, "end": "all finished"}


def run_rules(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace with the steps that the rules give. Raises `Broken` where the real engine breaks."""
    engine = Engine(trace["kind"], trace["config"])
    arrivals = sorted(trace["requests"], key=lambda one: one["arrival"])
    steps: list[dict[str, Any]] = []
    t = 0
    while arrivals or engine.waiting or engine.running:
        while arrivals and arrivals[0]["arrival"] <= t:
            request = arrivals.pop(0)
            facts = {key: request[key] for key in ("id", "prompt", "max_tokens", "ignore_eos", "forced")}
            engine.waiting.append(Seq(**facts, tokens=list(request["prompt"])))
        if engine.waiting or engine.running:
            steps.append({"t": t, **engine.step()})
        t += 1
    return {**trace, "steps": steps}


@pytest.mark.parametrize("kind", ["nano_old", "nano_new", "mini_doc"])
def test_golden_nano_rules(kind: str) -> None:
    num_compared = num_preempted = num_hits = num_cut = 0
    for seed in range(150):
        try:
            trace = run_rules(scenario(kind, seed))
        except Broken:
            continue
        result = nano.compare(kind, str(seed), trace)
        assert result.matches, "\n".join([f"seed {seed}", *(result.difference.lines() if result.difference else [])])
        num_compared += 1
        for step in trace["steps"]:
            num_preempted += len(step["preempted"])
            num_hits += sum(map(bool, step.get("cache_hit", ())))
            num_cut += bool(step["is_prefill"] and step["waiting"] and not step["n_running"])
    assert num_compared > 75
    assert num_preempted > 100
    assert num_hits > 100
    assert num_cut > 20 or kind != "nano_new"
