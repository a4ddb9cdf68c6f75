"""One step: the batch builder, the plan it writes, batch features, decode fast-forward."""
