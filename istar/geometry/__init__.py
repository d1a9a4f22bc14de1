"""The geometry of whole models over a corpus, for `istar measure`, `istar compare` and `istar correlate`."""
