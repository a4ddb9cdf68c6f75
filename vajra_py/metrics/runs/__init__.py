"""Finished runs: read folders, compare configurations, group replications, and find runs that repeat another."""
