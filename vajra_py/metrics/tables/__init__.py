"""Tables of a run: builders, columns and files of requests, steps, gaps between tokens and emitted figures."""
