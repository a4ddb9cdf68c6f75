"""Comparison of settings: metrics, intervals, significance, tables in every form."""
