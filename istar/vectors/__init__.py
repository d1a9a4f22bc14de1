"""Clouds of vectors, read block by block from memory or from files, and affine maps that are fitted to them."""
