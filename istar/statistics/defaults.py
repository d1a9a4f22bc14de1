"""The test with which methods are compared by default, in plans and in reports."""

TEST = "sign-flip"
"""Key of `istar.statistics.paired.TESTS`."""
ALPHA, POWER = 0.05, 0.8
"""Significance level, and probability of finding the smallest difference that a comparison names."""
