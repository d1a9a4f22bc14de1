"""Many runs from one command: which ones (`trials`, `study`), N at a time (`pool`), watched (`board`), what they cost."""
