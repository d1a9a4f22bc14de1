"""Geometry of whole models: hidden states over a corpus, embedding matrices, checkpoints and word similarity."""
