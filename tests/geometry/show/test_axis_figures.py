"""Figures over layers, relative depth and steps, and of single layers, from synthetic measures with known numbers."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import scipy.stats

from istar.drawing.plot import Line, Plot
from istar.geometry.show import axis_figures, measured_training, model_figures
from istar.geometry.show.compare import MeasuredModel
from istar.geometry.show.measured_training import MeasuredTraining
from istar.geometry.show.model_figures import LAYER_MEASURES
from istar.measures.catalogue import find_measure
from istar.models.saved_checkpoints import Checkpoint
from tests.geometry.synthetic import TAPS, WIDTH, make_measurements, make_model, make_value

T_QUANTILE = scipy.stats.t.ppf(0.975, 9)
NORMAL_QUANTILE = scipy.stats.norm.ppf(0.975)


def plot_layers(*models: MeasuredModel) -> dict[str, Plot]:
    """Return the figures of measures of these models by name."""
    plots = axis_figures.plot_measures(axis_figures.make_layer_axis(models), WIDTH)
    return {plot.name: plot for plot in plots}


def make_training(
    label: str = "m", steps: tuple[int | None, ...] = (0, 1, 2, 4, 8), **options: Any
) -> MeasuredTraining:
    """Return a training in which a measure of checkpoint i and layer l has the value of layer l, plus i."""
    measured = {}
    for index, _ in enumerate(steps):
        measurements = make_measurements(**options)
        for taps in measurements.sources.values():
            for measures in taps.values():
                measures["isoscore"] += index
        measured[f"c{index}"] = measurements
    checkpoints = [Checkpoint(f"c{index}", "m", step=step) for index, step in enumerate(steps)]
    return measured_training.make_training(label, checkpoints, measured)


def test_every_measure_with_a_figure_has_a_panel_with_a_line_for_each_text() -> None:
    plots = plot_layers(make_model())
    expected = {(measure.figure, measure.title) for measure in LAYER_MEASURES if measure.figure}
    titles = {
        (plot.name, ", ".join(filter(None, (panel.y_label, line.variant))))
        for plot in plots.values()
        for panel in plot.panels
        for line in panel.lines
    }
    assert titles == expected
    assert not any(model_figures.find_missing_measures(plot) for plot in plots.values())
    panel = plots["directions"].panels[0]
    assert [line.label for line in panel.lines] == ["news", "talk", "combined"]
    assert panel.lines[0].y == pytest.approx([make_value("intra_sim", index) for index in range(4)])
    assert (plots["directions"].reference_label, plots["directions"].title) == ("combined", "Cosines by layer")
    assert "InterSim is the mean cosine" in plots["isotropy"].caption


def test_the_overview_has_a_measure_and_its_other_estimate_in_one_panel() -> None:
    overview = plot_layers(make_model(texts=["news"]))["isotropy"]
    assert overview.title == "Overview by layer"
    assert [panel.y_label for panel in overview.panels] == ["IsoScore", "InterSim", "effective rank"]
    isoscore, unbiased = overview.panels[0].lines
    assert (isoscore.label, isoscore.variant, unbiased.label, unbiased.variant) == ("news", "", "news", "unbiased")
    assert isoscore.y == pytest.approx([make_value("isoscore", index) for index in range(4)])
    assert unbiased.y == pytest.approx([make_value("isoscore_unbiased", index) for index in range(4)])
    assert [line.variant for line in overview.panels[2].lines] == ["", "corrected"]
    assert "corrects its bias" in overview.caption
    # Alone, as in the readings of a monitor, the other estimate has a panel of its own.
    model = make_model(texts=["news"])
    for measures in model.measurements.all_texts.values():
        del measures["isoscore"]
    panel = plot_layers(model)["isotropy"].panels[0]
    assert (panel.y_label, [line.variant for line in panel.lines]) == ("IsoScore, unbiased", [""])


def test_bands_are_95_percent_intervals_and_axes_have_bounds() -> None:
    plots = plot_layers(make_model())
    panels = {panel.y_label: panel for plot in plots.values() for panel in plot.panels}
    assert panels["IsoScore"].lines[0].y_error == pytest.approx([T_QUANTILE * 0.01] * 4, rel=1e-12)
    assert panels["TwoNN dimension"].lines[0].y_error == pytest.approx([NORMAL_QUANTILE * 0.3] * 4, rel=1e-12)
    assert panels["IntraSim"].lines[0].y_error == ()
    assert [panels[title].y_bounds for title in ("effective rank", "TwoNN dimension", "IsoScore")] == [
        (1, WIDTH), None, (0, 1),
    ]  # fmt: skip


def find_log_panels(model: MeasuredModel) -> list[str]:
    return [panel.y_label for plot in plot_layers(model).values() for panel in plot.panels if panel.log_y]


def test_norms_that_differ_more_than_tenfold_have_a_logarithmic_axis() -> None:
    model = make_model()
    layers = model.measurements.sources["news"]
    layers["layer_2"] |= {"average_norm": 0.19, "effective_rank": 16.0}
    assert find_log_panels(model) == []
    layers["layer_2"]["average_norm"] = 16.0
    assert find_log_panels(model) == ["average norm"]
    # An interval from 0 or below has no place on a logarithmic axis.
    layers["layer_2"]["average_norm_error"] = 16.01 / T_QUANTILE
    assert find_log_panels(model) == []


def test_shares_of_an_inter_sim_near_zero_are_left_out() -> None:
    model = make_model(texts=["news"])
    model.measurements.all_texts["layer_1"]["inter_sim"] = 0.04
    panels = {panel.y_label: panel.lines[0].y for panel in plot_layers(model)["shares"].panels}
    assert [math.isnan(y) for y in panels["InterSim share, top 5"]] == [False, True, False, False]
    assert not any(map(math.isnan, panels["variance share, top 5"]))


def test_models_are_compared_over_relative_depth_with_a_mark_for_the_final_norm() -> None:
    encoder = make_model("encoder", taps=TAPS[:3])
    decoder = make_model("decoder", taps=["embeddings", "layer_1", "layer_2", "layer_3", "layer_4", "final_norm"])
    plots = plot_layers(encoder, decoder)
    lines = plots["norms"].panels[0].lines
    assert [(line.label, line.x) for line in lines] == [
        ("encoder", (0, 0.5, 1)), ("decoder", (0, 0.25, 0.5, 0.75, 1)), ("decoder", (1.15,)),
    ]  # fmt: skip
    assert lines[2].y == pytest.approx([make_value("average_norm", 5)])
    assert plots["norms"].x_names[1.15] == "final\nnorm"
    # A model has the same colour in all figures, whether it has a line in them or not.
    figures = [*plots.values(), *model_figures.plot_states([encoder, decoder])]
    assert {(plot.labels, plot.reference_label) for plot in figures} == {(("encoder", "decoder"), "")}
    assert plot_layers(encoder, encoder)["norms"].x_names == {}


def test_a_training_has_lines_for_layers_and_trainings_for_models() -> None:
    training = make_training()
    axis = axis_figures.make_step_axis([training])
    plots = {plot.name: plot for plot in axis_figures.plot_measures(axis, WIDTH)}
    lines = plots["isotropy"].panels[0].lines
    assert [line.label for line in lines] == 2 * ["embeddings", "layer 1", "layer 2", "final norm"]
    assert [line.variant for line in lines] == 4 * [""] + 4 * ["unbiased"]
    assert lines[1].x == (0, 1, 2, 4, 8)
    assert lines[1].y == pytest.approx([make_value("isoscore", 1) + index for index in range(5)])
    assert lines[1].y_error == pytest.approx([T_QUANTILE * 0.01] * 5)
    assert (axis.label, plots["isotropy"].ordered) == ("step (logarithmic)", True)
    partition, final_norm = axis_figures.plot_parameters(training.checkpoints, [training], axis)
    titles = [(panel.title, panel.y_label) for panel in partition.panels]
    assert titles == [
        (f"{side} embeddings", f"I(W), {signs}")
        for side, signs in itertools.product(("input", "output"), ("signs as computed", "both signs"))
    ]
    assert partition.panels[1].lines[0].y == (0.8,) * 5
    assert [panel.lines[0].y for panel in final_norm.panels] == [(1.0,) * 5, (0.5,) * 5]

    encoder = make_training("encoder", (0, 500), taps=TAPS[:3], final_norm=None)
    axis = axis_figures.make_step_axis([training, encoder])
    overview = axis_figures.plot_measures(axis, WIDTH)[0]
    panels = [panel for panel in overview.panels if panel.y_label == "InterSim"]
    assert [(panel.title, [line.label for line in panel.lines]) for panel in panels] == [
        ("last layer", ["m", "encoder"]),
        ("final normalization", ["m"]),
    ]
    assert panels[0].lines[1].y == pytest.approx([make_value("inter_sim", 2)] * 2)
    assert (overview.labels, overview.log_x, overview.share_y_by_label) == (("m", "encoder"), True, True)
    final_norm = axis_figures.plot_parameters([], [training, encoder], axis)[1]
    assert ([len(panel.lines) for panel in final_norm.panels], final_norm.labels) == ([1, 1], ("m", "encoder"))


def test_checkpoints_are_called_by_step_or_by_name_and_position() -> None:
    def get_names(*steps: int | None) -> list[str]:
        return [checkpoint.label for checkpoint in make_training(steps=steps).checkpoints]

    assert get_names(2000, 1) == ["step 1", "step 2,000"]
    assert get_names(1, 1) == ["c0 (step 1)", "c1 (step 1)"]
    assert get_names(5, None) == ["c0 (1 of 2)", "c1 (2 of 2)"]
    axis = axis_figures.make_step_axis([make_training(steps=(5, None))])
    assert (axis.label, list(axis.points["x"].unique())) == ("checkpoint, in the given order", [1, 2])
    assert not axis_figures.make_step_axis([make_training(steps=(10, 20, 30, 40))]).log


def test_states_are_layers_of_a_model_or_last_layers_of_models() -> None:
    plots = {plot.name: plot for plot in model_figures.plot_states([make_model()])}
    assert [line.label for line in plots["scales"].panels[0].lines] == [
        "embeddings", "layer 1", "layer 2", "final norm",
    ]  # fmt: skip
    line = plots["scales"].panels[0].lines[0]
    assert (line.x, line.y) == ((1, 2), (9.0, 8.0))
    assert line.y_error == pytest.approx([NORMAL_QUANTILE * 0.1, NORMAL_QUANTILE * 0.2])
    norm, cosine = plots["positions"].panels
    assert (norm.lines[0].x, norm.lines[0].y, cosine.y_label) == ((0, 1, 2), (3.0, 2.0, 1.0), "InterSim")
    # Singular values are divided by the root of the 500 tokens, so that their squares add up to the mean squared norm.
    raw, centered = plots["spectra"].panels
    assert raw.lines[0].y == pytest.approx([3.0 / math.sqrt(500)] * WIDTH)
    assert (centered.title, plots["spectra"].share_axes, plots["spectra"].log_y) == ("centered", True, True)
    # Of the five tokens, one is outside of the histogram.
    assert plots["state_norms"].panels[0].lines[0].y == (0.0, 20.0, 60.0, 0.0)
    for plot in model_figures.plot_states([make_model("a"), make_model("b")]):
        assert [line.label for line in plot.panels[0].lines] == ["a", "b"]
    empty = make_model(by_position={}, by_frequency={}, gride={}, norms={}, spectra={})
    assert all(not plot.panels for plot in model_figures.plot_states([empty]))


def test_models_have_bars_of_both_sign_conventions() -> None:
    models = [make_model("a"), make_model("b", matrices={"input": make_measurements().matrices["input"]})]
    axis = axis_figures.make_layer_axis(models)
    partition, final_norm = axis_figures.plot_parameters(models, [], axis)
    bars = {(panel.title, panel.y_label): [line.label for line in panel.lines] for panel in partition.panels}
    assert bars["input embeddings", "I(W), both signs"] == ["a", "b"]
    assert bars["output embeddings", "I(W), signs as computed"] == ["a"]
    assert partition.panels[0].lines[0].y == (0.9,) * 3
    assert final_norm.panels[0].lines[0].y == (1.0, 0.5)


@pytest.mark.parametrize("num_taps", [2, 3, 8, 13, 14, 26, 50])
@pytest.mark.parametrize("has_norm", [False, True])
def test_ticks_have_room(num_taps: int, has_norm: bool) -> None:
    taps = ["embeddings", *(f"layer_{number}" for number in range(1, num_taps)), *(["final_norm"] if has_norm else [])]
    names = axis_figures._make_tick_names(taps)
    assert len(names) <= 8
    assert names[0.0] == "emb."
    assert min(after - before for before, after in itertools.pairwise(sorted(names))) >= math.ceil(num_taps / 7)
    assert (names.get(float(num_taps)) == "final\nnorm") == has_norm


def test_states_with_short_names_have_these_on_the_axis() -> None:
    assert axis_figures._make_tick_names(["0", "3", "fc"]) == {0.0: "0", 1.0: "3", 2.0: "fc"}
    assert axis_figures._make_tick_names(["0", "classifier"]) == {0.0: "1", 1.0: "2"}


def test_the_axis_of_cosines_begins_at_0_unless_they_are_negative() -> None:
    for value, low in ((0.5, 0), (-0.5, -1)):
        lines = [Line("a", (0.0, 1.0), (value, math.nan))]
        assert model_figures.make_measure_panel(find_measure("inter_sim"), lines, WIDTH).y_bounds == (low, 1)


def test_labels_differ_and_are_short() -> None:
    labels = model_figures.shorten_labels(["a" * 90, "a" * 91, "b\nc", "b c", "\x00", "_d"])
    assert len(set(labels)) == 6
    assert max(map(len, labels)) <= model_figures._MAX_LABEL + 4
    assert labels[2:] == ["b c", "b c (4)", "text", " _d"]


def test_differences_have_a_point_for_the_first_model() -> None:
    other = replace(make_measurements(), replicates={})
    plot = model_figures.plot_differences([make_model("a"), MeasuredModel("b", other)])
    panel = next(panel for panel in plot.panels if panel.y_label == "difference of IsoScore")
    assert [(line.label, line.y) for line in panel.lines] == [("a", (0.0,)), ("b", (0.0,))]
    assert panel.lines[1].y_error == pytest.approx([T_QUANTILE * math.sqrt(2) * 0.01])
