"""Order by size: the shortest, the shortest that is left, or the shortest for its wait."""
