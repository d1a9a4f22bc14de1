"""What `istar.measure` and `istar.compare` return: the geometry of points, of models and of trainings."""
