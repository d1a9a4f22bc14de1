"""Figures and tables of the page of `istar measure`, from synthetic measures."""

import math
from dataclasses import replace
from typing import Any

import pytest
import scipy.stats

from istar.geometry.collect.measures_file import Measurements
from istar.geometry.show import model_figures, model_page
from istar.geometry.show.compare_page import _LAYER_PLOTS as COMPARED_LAYER_PLOTS
from istar.geometry.show.model_figures import MEASURE_TITLES
from istar.measures.catalogue import MEASURES

TAPS = ("embeddings", "layer_1", "layer_2", "final_norm")
TABLES_OF_A_LAYER = {
    "norm_by_position", "inter_sim_by_position", "norm_by_frequency", "inter_sim_by_frequency", "gride",
}  # fmt: skip
"""Entries of the catalogue that have several numbers for each layer."""


def make_measurements(**fields: Any) -> Measurements:
    """Return measurements of three texts, with a different number for each text, layer and measure."""
    sources = {
        source: {
            tap: {
                name: 0.1 + measure_index / 1e3 + layer_index / 10 + source_index
                for measure_index, name in enumerate(["tokens", *MEASURE_TITLES])
            }
            | {"isoscore_error": 0.01 + layer_index / 1e3, "two_nn_error": 0.3}
            for layer_index, tap in enumerate(TAPS)
        }
        for source_index, source in enumerate(("news", "talk", "combined"))
    }
    columns = {"first": [0, 1, 2], "last": [0, 1, 3], "tokens": [5, 5, 9], "norm": [9.0, 2.0, 1.0]}
    columns_by_tap = {"combined": {tap: {**columns, "inter_sim": [0.9, 0.2, math.nan]} for tap in TAPS}}
    scales = [
        {"n1": 1, "value": 9.0, "error": 0.2, "distance": 1.0},
        {"n1": 2, "value": 8.0, "error": 0.1, "distance": 2.0},
    ]
    defaults: dict[str, Any] = {
        "model": {"name": "model", "revision": None},
        "weights": "",
        "settings": {"groups": 10, "measures": "all"},
        "sources": sources,
        "spectra": {"combined": {tap: {"raw": [3.0] * 24, "centered": [2.0] * 24} for tap in TAPS}},
        "matrices": {},
        "final_norm": None,
        "by_position": columns_by_tap,
        "by_frequency": columns_by_tap,
        "gride": {"combined": dict.fromkeys(TAPS, scales)},
    }
    return Measurements(**{**defaults, **fields})


def test_every_measure_of_a_layer_has_a_name_and_a_column() -> None:
    names = {measure.name for measure in MEASURES if measure.subject == "layers"}
    names_of_numbers = {name for name in names if not name.endswith("_error")} - TABLES_OF_A_LAYER - {"tokens"}
    assert MEASURE_TITLES.keys() == names_of_numbers
    assert len(set(MEASURE_TITLES.values())) == len(MEASURE_TITLES)
    sheet = model_page._build_layer_sheet(make_measurements())
    assert len(sheet.header) == len(set(sheet.header)) == 2 + len(names_of_numbers)
    assert all(len(line) <= 26 for header in sheet.header for line in header.split("\n"))


def test_every_measure_of_the_figures_exists() -> None:
    keys = {key for keys in model_figures._LAYER_PLOTS.values() for key in keys}
    keys |= {key for _, _, compared_keys in COMPARED_LAYER_PLOTS.values() for key in compared_keys}
    keys |= model_figures._SAMPLE_COSINE_LABELS.keys() | {
        key for share_keys in model_figures._SHARE_LABELS.values() for key in share_keys
    }
    assert keys <= MEASURE_TITLES.keys()


def test_bands_are_95_percent_intervals() -> None:
    plots = {plot.name: plot for plot in model_figures.plot_layers(make_measurements())}
    quantile = scipy.stats.t.ppf(0.975, 9)
    for line in plots["isotropy"].panels[0].lines:
        assert line.y_error == pytest.approx(
            [quantile * (0.01 + layer_index / 1e3) for layer_index in range(4)], rel=1e-12
        )
    assert plots["isotropy"].panels[1].lines[0].y_error == ()
    two_nn, rank, _ = plots["dimension"].panels
    assert two_nn.lines[0].y_error == pytest.approx([scipy.stats.norm.ppf(0.975) * 0.3] * 4, rel=1e-12)
    assert (rank.y_bounds, two_nn.y_bounds) == ((1, 24), None)


def find_log_panels(sources: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    plots = model_figures.plot_layers(make_measurements(sources=sources))
    return [panel.y_label for plot in plots for panel in plot.panels if panel.log_y]


def test_norms_that_differ_more_than_tenfold_have_a_logarithmic_axis() -> None:
    sources = make_measurements().sources
    for taps in sources.values():
        for measures in taps.values():
            measures |= {"average_norm": 0.5, "effective_rank": 0.5, "largest_activation_ratio": 0.5}
    assert find_log_panels(sources) == []
    # The effective rank has bounds, which its axis shows.
    sources["news"]["layer_2"] |= {"average_norm": 16.0, "effective_rank": 16.0, "largest_activation_ratio": 16.0}
    assert find_log_panels(sources) == ["average norm", "largest activation / median"]
    # An interval from 0 or below has no place on a logarithmic axis.
    half_width = scipy.stats.t.ppf(0.975, 9)
    sources["talk"]["layer_1"]["average_norm_error"] = 0.49 / half_width
    assert "average norm" in find_log_panels(sources)
    sources["talk"]["layer_1"]["average_norm_error"] = 0.51 / half_width
    assert "average norm" not in find_log_panels(sources)


def test_the_table_of_layers_has_half_widths() -> None:
    sheet = model_page._build_layer_sheet(make_measurements())
    row = sheet.rows_by_group["news"][0]
    column = sheet.header.index("IsoScore")
    value = 0.1 + (1 + list(MEASURE_TITLES).index("isoscore")) / 1e3
    assert row[column].text == f"{value:.4g} ± {scipy.stats.t.ppf(0.975, 9) * 0.01:.2g}"
    assert all("±" not in entry.text for entry in row[sheet.header.index("InterSim") :][:3])


def test_single_dimensions_leave_out_shares_of_an_inter_sim_near_zero() -> None:
    sources = make_measurements().sources
    sources["combined"]["layer_1"]["inter_sim"] = 0.04
    plot = model_figures.plot_single_dimensions(make_measurements(sources=sources))
    changes, cosine, variance = plot.panels
    assert [line.label for line in changes.lines] == list(model_figures._SAMPLE_COSINE_LABELS.values())
    for panel, keys in (
        (cosine, model_figures._SHARE_LABELS["InterSim"]),
        (variance, model_figures._SHARE_LABELS["the variance"]),
    ):
        for line, key in zip(panel.lines, keys, strict=True):
            expected = [measures[key] for measures in sources["combined"].values()]
            if panel is cosine:
                expected[1] = math.nan
            assert line.y == pytest.approx(expected, nan_ok=True)


def test_positions_frequencies_and_scales_have_a_line_for_each_layer() -> None:
    measurements = make_measurements()
    for plot in (model_figures.plot_positions(measurements), model_figures.plot_frequency(measurements)):
        norm, cosine = plot.panels
        assert [line.label for line in norm.lines] == ["embeddings", "layer 1", "layer 2", "final norm"]
        assert {(line.x, line.y) for line in norm.lines} == {((0, 1, 2), (9.0, 2.0, 1.0))}
        assert cosine.y_label == "InterSim"
        assert not norm.log_y
    large_first = {
        "combined": {"layer_1": {**measurements.by_position["combined"]["layer_1"], "norm": [90.0, 2.0, 1.0]}}
    }
    norm, cosine = model_figures.plot_positions(replace(measurements, by_position=large_first)).panels
    assert (norm.log_y, cosine.log_y) == (True, False)
    [panel] = model_figures.plot_scales(measurements).panels
    assert (panel.lines[0].x, panel.lines[0].y) == ((1, 2), (9.0, 8.0))
    assert panel.lines[0].y_error == pytest.approx([scipy.stats.norm.ppf(0.975) * error for error in (0.2, 0.1)])
    measurements_without_tables = replace(measurements, by_position={}, by_frequency={}, gride={})
    for make_plot in (model_figures.plot_positions, model_figures.plot_frequency, model_figures.plot_scales):
        assert make_plot(measurements_without_tables).panels == ()


def make_activation(value: float, ratio: float | None = 2_000.0) -> dict[str, Any]:
    fields = {"value": value, "dimension": 1415, "token": 7, "position": 0, "text": "the"}
    return fields if ratio is None else {**fields, "ratio": ratio}


def test_massive_activations_have_a_small_table() -> None:
    activations = {
        "layer_1": [make_activation(-3e3), make_activation(2e3), make_activation(1e3), make_activation(900.0)],
        "layer_2": [],
    }
    measurements = make_measurements(massive={"news": activations, "combined": activations})
    sheet = model_page._build_massive_sheet(measurements)
    assert len(sheet.frame) == 8
    assert [entry.text for entry in sheet.rows[0]] == ["layer 1", "1415", "-3,000", "2,000", "0", "the"]
    assert len(sheet.rows) == 3
    assert model_page._build_massive_sheet(make_measurements(massive={"combined": {"layer_1": []}})).rows == []
    # Files of earlier versions have no ratio.
    [row] = model_page._build_massive_sheet(
        make_measurements(massive={"combined": {"layer_1": [make_activation(200.0, None)]}})
    ).rows
    assert row[3].text == "\u2013"


def test_the_page_says_what_the_bands_are() -> None:
    assert "2.26 standard errors on either side, from the jackknife over 10 groups" in model_page._describe_intervals(
        make_measurements()
    )
    measurements_without_groups = make_measurements(
        settings={"groups": 0, "measures": "all"}, sources={"news": {"layer_1": {"isoscore": 0.1}}}
    )
    assert "There are no standard errors from groups of documents" in model_page._describe_intervals(
        measurements_without_groups
    )
