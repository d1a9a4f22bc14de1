"""A run: what names it, where it lies, how it is carried out, and in which processes."""
