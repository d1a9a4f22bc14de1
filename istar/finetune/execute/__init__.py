"""Single runs: their folders and records, their training, and their results."""
