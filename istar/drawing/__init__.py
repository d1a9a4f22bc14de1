"""Plots as numbers, their rendering, tables, HTML pages and the terminal."""
