"""Readers of workload files, one module for each format."""
