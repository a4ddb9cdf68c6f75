"""OpenAI-compatible API: schemas, reading requests, preparing them, writing responses."""
