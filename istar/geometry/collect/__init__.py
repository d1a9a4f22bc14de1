"""From texts to measures: the pass of a model over a corpus and the accumulators of its layers."""
