"""Sampling: penalties, constraints, log-probabilities."""
