"""The runs that a plan names, as entries of its file."""

from typing import TypedDict


class PlannedRun(TypedDict):
    """A run of the grid of a sweep."""

    name: str
    task: str
    model: str  # last part of the model's name
    method: str  # with its settings, as in the report
    seed: int


class Repetitions(TypedDict):
    """Runs with further seeds. Only those of one configuration will be run: the best of a group of configurations."""

    task: str
    model: str
    method: str  # without its settings
    grid: str  # name of the grid in the sweep; empty if the sweep has no named grids
    seeds: list[int]  # further seeds, with which the best configuration is repeated
    names: list[str]  # names of the runs of every configuration of the group with every further seed
