"""Metadata of the fields of a run's config."""

FURTHER_KEYS = {"further_keys": True}
"""Metadata of a field that collects the group's keys without a field, by name."""
NOT_IN_IDENTITY = {"identity": False}
"""Metadata of a field that does not change the outcome of a run."""
