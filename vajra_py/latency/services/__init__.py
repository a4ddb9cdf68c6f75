"""Services for policies: output-length predictors and prefill times."""
