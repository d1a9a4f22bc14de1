"""The geometry of vectors and of the states of models, for `istar.measure`, `istar.compare` and their commands."""
