"""Order by size: shortest job, shortest remaining job, or size relative to the wait."""
