"""Latency model of measured operators: profile bundles and aiconfigurator's tables."""
