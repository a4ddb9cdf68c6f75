"""Latency models from measured operator times: profile bundles and aiconfigurator's tables."""
