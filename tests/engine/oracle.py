"""Outputs of transformers' own `generate`, which the engine's have to equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Oracle:
    """Outputs of transformers' own `generate`, one prompt at a time."""

    model: Any
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        import torch

        from vajra_py.engine.compute.model.loading import quiet

        key = tuple(prompt)
        if len(self.known.get(key, ())) < count:
            ids = torch.tensor([prompt])
            options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2, "max_new_tokens": count}
            with quiet(), torch.inference_mode():
                out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            self.known[key] = out[0, len(prompt) :].tolist()
        return self.known[key][:count]
