"""The geometry of whole models: every layer over a corpus, embedding matrices, checkpoints, word similarity."""
