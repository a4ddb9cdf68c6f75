"""Comparison of settings: metrics, intervals, significance tests, and tables in several formats."""
