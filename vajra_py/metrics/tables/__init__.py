"""Tables of a run (requests, steps, gaps between tokens, emitted values and others): builders, columns and files."""
