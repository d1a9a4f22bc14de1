"""Tables, figures and statistics computed from the files that finished runs leave on disk."""
