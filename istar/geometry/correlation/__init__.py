"""Correlations between the measures of checkpoints and their task scores, for `istar correlate`."""
