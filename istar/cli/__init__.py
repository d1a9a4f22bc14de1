"""The command `istar`: `main` parses the arguments, and every other module implements one command."""
