"""LoRA adapters of vLLM's requests: their names for policies, and how many a step may have.

vLLM's front end, its workers and its scheduler number adapters; adapters of one number share a slot.
"""

from __future__ import annotations

from typing import Any

from vajra_py.vllm.mechanism import adapter_salt


class AdapterNames:
    """Gives each adapter a name for policies: vLLM's, unless another adapter had this name before."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def name(self, lora: Any) -> str:
        """Return the name of the adapter of a vLLM's `LoRARequest`; for None the base model's, which is empty."""
        if lora is None:
            return ""
        name, number = lora.lora_name, lora.lora_int_id
        return str(name) if self._numbers.setdefault(name, number) == number else f"{name}#{number}"


def salt_of(lora: Any, salt: str) -> str:
    """Return the salt of content of an adapter; adapters of one name and path share it, as in vLLM."""
    return salt if lora is None else adapter_salt(salt, f"{lora.lora_name}\n{lora.lora_path}")


def max_loras_of(vllm_config: Any) -> int:
    """Return how many adapters the requests of a step may have; 0: there are none."""
    return 0 if vllm_config.lora_config is None else int(vllm_config.lora_config.max_loras)
