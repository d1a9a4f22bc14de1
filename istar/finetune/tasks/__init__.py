"""Tasks: their specifications, data loading, tokenization, metrics and evaluation."""
