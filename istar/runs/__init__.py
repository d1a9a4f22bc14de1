"""What a run is and what it leaves: its identity, its record, its task, and the names of its metrics."""
