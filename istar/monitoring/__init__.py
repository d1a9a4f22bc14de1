"""The geometry of every state during a training of the user: readings, their table, and alarms of a collapse."""
