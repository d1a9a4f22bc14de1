"""What is learned: the tasks, their data, and their metrics."""
