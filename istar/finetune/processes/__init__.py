"""The processes of a run: how many there are, their ranks, how they are started, stopped and waited for."""
