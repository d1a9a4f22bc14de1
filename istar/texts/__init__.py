"""Texts, read from files or the hub, and how they are tokenized."""
