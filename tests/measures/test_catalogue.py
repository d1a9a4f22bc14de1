"""The catalogue names every measure that is computed exactly once, and its functions are public."""

import dataclasses
import importlib
from collections import Counter

import pytest
import torch

from istar import measures
from istar.errors import UserError
from istar.geometry.collect.layers import Layer, LayerSettings
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.collect.sample import Sample
from istar.geometry.collect.token_batch import TokenBatch
from istar.measures import LayerNormSummary, catalogue_rows, find_measure
from istar.measures.catalogue import MEASURES
from istar.measures.matrix_summary import measure_matrix

SHAPE = {"rows", "dimensions"}
"""Entries of a matrix that are no measures of it."""
TABLES = {"norm_by_position", "inter_sim_by_position", "norm_by_frequency", "inter_sim_by_frequency", "gride"}
"""Measures of a layer with a field of their own in `measures.json`, or a column and a field: `<column>_<field>`."""


def measure_names(subject):
    return {measure.name for measure in MEASURES if measure.subject == subject}


def test_every_measure_of_a_layer_is_in_the_catalogue():
    layer = Layer(3, torch.zeros(4), LayerSettings("all", num_groups=2))
    points = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    # The tokens are sorted by group, as the points of a batch must be.
    layer.update(
        points, TokenBatch.of(torch.arange(30) % 3, torch.arange(30) % 10, torch.arange(30) // 15, num_groups=2)
    )
    sample = Sample(["layer"], 5, 0)
    sample.update([0], [30], torch.arange(30), {"layer": points})
    computed = {*layer.compute_measures(), *sample.compute_cosines("layer"), "two_nn", "two_nn_error"}
    assert computed | TABLES == measure_names("layers")
    tables = {"by_position": layer.summarize_by_position(), "by_frequency": layer.summarize_by_frequency()}
    columns = {f"{column}_{field}" for field, table in tables.items() for column in table}
    assert columns & TABLES == TABLES - {"gride"}
    assert TABLES - columns <= {field.name for field in dataclasses.fields(Measurements)}


def test_every_measure_of_a_matrix_and_of_the_final_norm_is_in_the_catalogue():
    matrix = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    assert measure_names("matrices") == measure_matrix(matrix).keys() - SHAPE
    assert measure_names("final_norm") == {field.name for field in dataclasses.fields(LayerNormSummary)}


def test_no_measure_is_there_twice():
    counts = Counter((measure.name, measure.subject) for measure in MEASURES)
    assert [key for key, count in counts.items() if count > 1] == []
    assert len({(measure.title, measure.subject) for measure in MEASURES}) == len(MEASURES)


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: f"{measure.subject}-{measure.name}")
def test_its_function_is_public_and_its_columns_are_filled(measure):
    module, _, name = measure.function.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    assert callable(function)
    assert function.__doc__
    assert name in measures.__all__
    assert not name.startswith("_")
    for column, text in dataclasses.asdict(measure).items():
        assert text or column == "paper", f"{measure.name} has no {column}"
        assert "\n" not in text
        assert text == text.strip()


def test_rows_have_the_columns_asked_for():
    rows = catalogue_rows()
    assert [row["name"] for row in rows] == [measure.name for measure in MEASURES]
    assert all(list(row) == [field.name for field in dataclasses.fields(MEASURES[0])] for row in rows)
    assert {row["subject"] for row in catalogue_rows("matrices")} == {"matrices"}
    assert list(catalogue_rows("layers", ["range", "name"])[0]) == ["range", "name"]
    assert find_measure("average_norm", "matrices").subject == "matrices"


INVALID_CALLS = {
    "name": (lambda: find_measure("inter_simm"), "no measure 'inter_simm'; did you mean inter_sim?"),
    "subject of a name": (lambda: find_measure("gain"), "layers have no measure 'gain'"),
    "subject": (lambda: catalogue_rows("layer"), "expected one of layers, matrices, final_norm"),
    "column": (lambda: catalogue_rows(columns=["titel"]), "no column 'titel'; did you mean title?"),
}


@pytest.mark.parametrize(("call", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_unknown_names_are_refused_in_one_line(call, message):
    with pytest.raises(UserError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
