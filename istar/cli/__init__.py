"""The command `istar`: `options` has the arguments of all commands, and a module per command executes it."""
