"""Simulated low-bit linear layers, and the scores of finished runs with them."""
