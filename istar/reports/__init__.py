"""From results to tables and figures. Knows the files that `istar.results` defines, and nothing of the trainer."""
