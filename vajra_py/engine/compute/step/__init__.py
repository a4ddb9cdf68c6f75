"""Steps on a device: runner, memory, graphs, results in flight."""
