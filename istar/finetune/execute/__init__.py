"""Single runs: their folders and records, their training, and the processes that they run in."""
