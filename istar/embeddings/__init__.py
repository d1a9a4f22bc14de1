"""Embedding matrices: their measures, post-processing and word similarity, for `istar embed`."""
