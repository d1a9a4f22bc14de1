"""Figures: plots as numbers, and their rendering to SVG and PNG."""
