"""What a run is and what it leaves: its config, its identity, its record, and the names of its metrics."""
