"""Prompts beside decodes: how many prompt tokens a step takes while others decode."""
