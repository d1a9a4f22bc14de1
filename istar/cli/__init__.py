"""The command `istar`: `main` parses the arguments, and every other module but `console` implements one command."""
