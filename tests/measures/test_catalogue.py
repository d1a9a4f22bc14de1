"""The table of measures names every measure that is computed exactly once; its functions and figures exist."""

import dataclasses
import importlib
from collections import Counter

import pytest
import torch

from istar.errors import UserError
from istar.geometry.collect.measures_file import Measurements
from istar.measures import LayerNormSummary, find_measure
from istar.measures.catalogue import FIGURES, MEASURES
from istar.measures.matrix_forms import measure_matrix
from istar.sums.layers import Layer
from istar.sums.rows import Rows
from istar.sums.sample import Sample
from istar.sums.stack_sums import LayerSettings, StackSums
from tests.sums.layer_measures import measure_layer

SHAPE = {"rows", "dimensions"}
"""Entries of a matrix that are no measures of it."""
TABLES = {"norm_by_position", "inter_sim_by_position", "norm_by_frequency", "inter_sim_by_frequency", "gride"}
"""Measures of a layer with a field of their own in `measures.json`, or a column and a field: `<column>_<field>`."""


def measure_names(subject):
    return {measure.name for measure in MEASURES if measure.subject == subject}


def test_every_measure_of_a_layer_is_in_the_catalogue():
    sums = StackSums({"layer": torch.zeros(4)}, 3, LayerSettings("all", num_groups=2))
    points = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    # The tokens are sorted by group, as the points of a batch must be.
    sums.update({"layer": points}, Rows.of(torch.arange(30) // 15, torch.arange(30) % 3, torch.arange(30) % 10))
    layer = Layer(sums, "layer")
    sample = Sample({"layer": torch.device("cpu")}, 5, 0)
    sample.update([0], [30], torch.arange(30), {"layer": points})
    of_pairs = sample.compute_cosines("layer") | sample.compute_neighbour_measures("layer")
    computed = {*measure_layer(layer), *of_pairs, "two_nn", "two_nn_error"}
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


def test_functions_are_public_and_columns_are_filled():
    for measure in MEASURES:
        module, _, name = measure.function.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
        for column in ("title", "formula", "range", "convention", "cost", "blind_to", "meaning", "flag"):
            text = getattr(measure, column)
            assert text or column in ("meaning", "flag"), f"{measure.name} has no {column}"
            assert "\n" not in text
            assert text == text.strip()


def test_figures_exist_and_flags_have_one_bound():
    assert {measure.figure for measure in MEASURES} - {""} <= FIGURES.keys()
    for measure in MEASURES:
        bounds = [measure.flag_at_least, measure.flag_at_most]
        assert bounds.count(None) == (1 if measure.flag else 2), measure.name


@pytest.mark.parametrize(
    ("name", "message"),
    [("inter_simm", "no measure 'inter_simm'; did you mean inter_sim?"), ("gain", "layers have no measure 'gain'")],
)
def test_unknown_names_are_refused_in_one_line(name, message):
    with pytest.raises(UserError) as caught:
        find_measure(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert find_measure("average_norm", "matrices").subject == "matrices"
