"""LoRA adapters of vLLM's requests: their names for policies, and the limit per step.

vLLM identifies adapters by number; adapters with the same number share a slot.
"""

from __future__ import annotations

from typing import Any

from vajra_py.vllm.mechanism import adapter_salt


class AdapterNames:
    """Assigns each adapter a name for policies: vLLM's name, with the adapter's number appended if an earlier adapter
    has the same name.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def name(self, lora: Any) -> str:
        """Return the adapter's name for a vLLM `LoRARequest`; empty for None, the base model."""
        if lora is None:
            return ""
        name, number = lora.lora_name, lora.lora_int_id
        return str(name) if self._numbers.setdefault(name, number) == number else f"{name}#{number}"


def salt_of(lora: Any, salt: str) -> str:
    """Return `salt` extended by the adapter, for block hashes; adapters with equal name and path get the same salt, as
    in vLLM.
    """
    return salt if lora is None else adapter_salt(salt, f"{lora.lora_name}\n{lora.lora_path}")


def max_loras_of(vllm_config: Any) -> int:
    """Return the maximum number of adapters in a step; 0 if adapters are disabled."""
    return 0 if vllm_config.lora_config is None else int(vllm_config.lora_config.max_loras)
