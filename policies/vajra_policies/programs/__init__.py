"""Programs: fair and fast service of agents whose calls belong together."""
