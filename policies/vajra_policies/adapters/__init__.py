"""LoRA adapters: which of them stay loaded, who runs with which, and where."""
