"""Sweeps: grids and searches over many runs, executed in parallel, shown in a live table and compared at the end."""
