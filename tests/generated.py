"""The data of `task=demo`, which the server of `tests.forks` generates once for all its forks."""

from istar.inputs import demo

for split in ("train", "validation"):
    demo.generate("demo", split)
