"""LoRA adapters: caching of adapters, batches by adapter, and placement."""
