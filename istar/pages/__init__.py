"""HTML pages and tables in several formats. Used by the instrument and by the reports."""
