"""Services of policies: output-length predictors and prefill times."""
