"""Specifications of devices, models and deployments."""
