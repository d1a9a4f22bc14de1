"""What a run is and what it leaves: its key, its record, its task, and the names of its metrics."""
