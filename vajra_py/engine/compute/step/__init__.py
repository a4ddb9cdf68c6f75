"""Steps on a device: runner, memory, graphs, steps in flight."""
