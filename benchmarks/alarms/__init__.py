"""How often the alarms of `istar.Monitor` fire in healthy trainings, and in trainings that collapse."""
