"""Sums of the states of a source, by state and group of rows, and the measures computed from them."""
