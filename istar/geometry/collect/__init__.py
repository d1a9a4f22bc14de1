"""From texts, batches or points to measures: the passes over a source."""
