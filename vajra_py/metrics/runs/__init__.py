"""Readers of finished runs: folders, differences between configurations, replications, and repeated runs."""
