"""Many runs from one command: which (`trials`, `study`), N at a time (`pool`), watched (`board`), at what `cost`."""
