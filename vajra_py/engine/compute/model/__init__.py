"""Weights, forward pass, attention and parallel ranks of a model."""
