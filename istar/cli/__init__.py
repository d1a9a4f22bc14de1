"""The command `istar`: `main` parses its arguments; every other module but `console` is one of its commands."""
