"""Logs of a run: inputs from outside, steps, decisions."""
