"""Measure an engine's step times and fit a profile to them."""
