"""Limit the prompt tokens of steps that also contain decodes."""
