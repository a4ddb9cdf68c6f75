"""Facts of devices, models and deployments."""
