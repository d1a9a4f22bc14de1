"""HTML pages with tables in several formats."""
