"""From vectors, texts or batches to measures: the passes over them, and the accumulators of each state."""
