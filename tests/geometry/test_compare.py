"""`istar compare` on the measures of two tiny models."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
import transformers as hf

from istar.cli.main import main
from istar.drawing import rendering
from istar.errors import UserError
from istar.geometry.collect import measure, measures_file
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.collect.stream import Pass
from istar.geometry.show import compare, compare_page
from istar.geometry.show.compare import MeasuredModel
from istar.inputs import demo, tiny
from istar.inputs.corpus import Source
from tests.geometry.measured import write_measures
from tests.reports.test_report import balanced, parsed

WORDS = demo.vocabulary()[:20]


@pytest.fixture(scope="module")
def measurements_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measurements]:
    """Measure a two-layer encoder and a three-layer decoder with a final normalization over one text."""
    folder = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(0)
    (folder / "text.txt").write_text("\n".join(" ".join(random.choice(WORDS, 9)) for _ in range(40)))
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    shape = {"num_attention_heads": 2, "intermediate_size": 32, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    models = {
        "encoder": hf.BertModel(hf.BertConfig(hidden_size=16, num_hidden_layers=2, **shape)),
        "decoder": hf.GPTNeoXForCausalLM(
            hf.GPTNeoXConfig(hidden_size=24, num_hidden_layers=3, bos_token_id=1, eos_token_id=1, **shape)
        ),
    }
    measurements = {}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        source = Source("text", folder / "text.txt")
        measurements[name] = measure.measure_model(
            str(folder / name), [source], Pass(16, sample=0), folder / f"{name}-measures"
        )
    return measurements


def read_models(arguments: list[str]) -> list[MeasuredModel]:
    """Parse the arguments and read the finished folders as `istar compare` does."""
    model_arguments = compare.parse_compared_models(arguments)
    return compare.label_models(
        model_arguments,
        [measures_file.read(Path(argument.name) / measures_file.JSON_FILE) for argument in model_arguments],
    )


@pytest.fixture
def folders(measurements_by_name: dict[str, Measurements], tmp_path: Path) -> list[str]:
    """Write the measurements of both models as `istar measure` does; return their folders."""
    for name, measurements in measurements_by_name.items():
        (tmp_path / name).mkdir()
        write_measures(measurements, tmp_path / name)
    return [str(tmp_path / name) for name in measurements_by_name]


def test_tables_hold_the_measures_of_each_model(
    measurements_by_name: dict[str, Measurements], folders: list[str]
) -> None:
    models = read_models(folders)
    assert [model.label for model in models] == ["encoder", "decoder"]
    frame = compare.make_layer_table(models)
    layers_by_model = {name: group["layer"].tolist() for name, group in frame.groupby("model")}
    assert layers_by_model == {
        "encoder": ["embeddings", "layer_1", "layer_2"],
        "decoder": ["embeddings", "layer_1", "layer_2", "layer_3", "final_norm"],
    }
    expected_depths = [0, 1 / 3, 2 / 3, 1, np.nan]
    assert frame[frame["model"] == "decoder"]["relative_depth"].tolist() == pytest.approx(expected_depths, nan_ok=True)
    for name, measurements in measurements_by_name.items():
        row_by_layer = frame[frame["model"] == name].set_index("layer")
        for tap, measures in measurements.all_texts.items():
            assert row_by_layer.loc[tap, "inter_sim"] == pytest.approx(measures["inter_sim"], rel=1e-12)
    summary = compare.summarize_models(models).set_index("model")
    assert summary.loc["decoder", "matrix"] == "output"
    raw_measures = measurements_by_name["decoder"].matrices["output"]["raw"]
    assert summary.loc["decoder", "partition_raw"] == pytest.approx(raw_measures["partition_isotropy_both"], rel=1e-12)
    assert summary.loc["encoder", "dimensions"] == 16
    assert np.isnan(summary.loc["encoder", "gain"])


def test_plots_have_a_line_for_each_model(folders: list[str]) -> None:
    plots = {plot.name: plot for plot in compare_page.make_plots(read_models(folders))}
    for name in ("spectra", "state_norms"):
        for panel in plots[name].panels:
            assert [line.label for line in panel.lines] == ["encoder", "decoder"], name
    for name in ("isotropy", "directions", "spectrum", "outliers", "norms"):
        for panel in plots[name].panels:
            # The 16 dimensions of the encoder have too few ranks for alpha-ReQ.
            encoder = [] if "alpha" in panel.y_label else ["encoder"]
            assert [line.label for line in panel.lines] == [*encoder, "decoder", "decoder"], name
    # Only the decoder has separate output embeddings and a final normalization.
    assert [[line.label for line in panel.lines] for panel in plots["partition"].panels] == [
        *[["encoder", "decoder"]] * 2,
        *[["decoder"]] * 2,
    ]
    assert [[line.label for line in panel.lines] for panel in plots["final_norm"].panels] == [["decoder"]]
    [norms] = plots["state_norms"].panels
    for line in norms.lines:
        assert list(line.y) == sorted(line.y)
        assert (line.y[0], line.y[-1]) == (0, 100)


def test_the_final_norm_is_a_mark_beyond_the_last_layer(
    measurements_by_name: dict[str, Measurements], folders: list[str]
) -> None:
    plot = {plot.name: plot for plot in compare_page.make_plots(read_models(folders))}["directions"]
    for key, panel in zip(("inter_sim", "intra_sim", "adjusted_intra_sim"), plot.panels, strict=True):
        _, layer_line, marker = panel.lines
        measures_by_tap = measurements_by_name["decoder"].all_texts
        assert layer_line.y == tuple(measures[key] for tap, measures in measures_by_tap.items() if tap != "final_norm")
        assert marker.y == (measures_by_tap["final_norm"][key],)
        assert marker.x[0] > max(layer_line.x)
        assert plot.x_names[marker.x[0]] == "final\nnorm"
    # The error bar is half of the 95% interval.
    [inter_sim, *_] = plot.panels
    standard_error = measurements_by_name["decoder"].all_texts["final_norm"]["inter_sim_error"]
    assert inter_sim.lines[2].y_error == pytest.approx((scipy.stats.t.ppf(0.975, 9) * standard_error,), rel=1e-12)
    # Without a final normalization, the axis has plain numbers.
    models = [MeasuredModel(name, measurements_by_name["encoder"]) for name in "ab"]
    assert {plot.name: plot for plot in compare_page.make_plots(models)}["directions"].x_names == {}


def test_a_model_has_the_same_colour_in_all_figures(measurements_by_name: dict[str, Measurements]) -> None:
    """The encoder, which stands between the decoders, has no line in the figure of the final normalization.

    In the figures of runs, `Base` is the label of runs without a penalty, whose line is black. A model with this label
    has a colour like any other.
    """
    labels = ("small", "encoder", "Base", "large")
    models = [
        MeasuredModel(name, measurements_by_name["encoder" if name == "encoder" else "decoder"]) for name in labels
    ]
    plots = {plot.name: plot for plot in (compare_page._make_difference_plot(models), *compare_page.make_plots(models))}
    assert {line.label for panel in plots["final_norm"].panels for line in panel.lines} == {"small", "Base", "large"}
    styles_by_plot = {name: rendering._assign_line_styles(plot) for name, plot in plots.items()}
    expected_styles = {label: styles_by_plot["directions"][label] for label in labels}
    assert len({style["color"] for style in expected_styles.values()}) == 4
    for name, styles_of_plot in styles_by_plot.items():
        assert {label: styles_of_plot[label] for label in labels} == expected_styles, name


def test_i_w_has_both_conventions_of_the_signs(
    measurements_by_name: dict[str, Measurements], folders: list[str]
) -> None:
    plot = {plot.name: plot for plot in compare_page.make_plots(read_models(folders))}["partition"]
    assert [(panel.task, panel.y_label) for panel in plot.panels] == [
        (f"{matrix} embeddings", f"I(W), {signs}")
        for matrix in ("input", "output")
        for signs in ("signs as computed", "both signs")
    ]
    for panel, (matrix, signs) in zip(
        plot.panels, itertools.product(("input", "output"), ("as_computed", "both")), strict=True
    ):
        expected_values = {
            name: tuple(form[f"partition_isotropy_{signs}"] for form in measurements.matrices[matrix].values())
            for name, measurements in measurements_by_name.items()
            if matrix in measurements.matrices
        }
        assert {line.label: line.y for line in panel.lines} == expected_values


def test_the_page_has_differences_with_intervals(measurements_by_name: dict[str, Measurements], tmp_path: Path) -> None:
    models = [MeasuredModel(name, measurements) for name, measurements in measurements_by_name.items()]
    out = compare_page.write_page(models, tmp_path / "page").parent
    page_text = " ".join(" ".join(parsed(out / "index.html").text).split())
    assert "decoder and encoder read the same documents in the same groups" in page_text
    assert page_text.index("What stands out The variance of the last layer") < page_text.index("How to read this The")
    frame = pd.read_csv(out / "tables" / "differences.csv").set_index("measure")
    assert set(frame["layer"]) == {"layer_3"}
    replicates = [
        np.array(measurements.replicates["text"][tap]["inter_sim"])
        for measurements, tap in zip(measurements_by_name.values(), ("layer_2", "layer_3"), strict=True)
    ]
    # The standard error of the mean of pseudo-values, which are -9 times a difference plus a constant.
    expected_error = scipy.stats.sem(9 * (replicates[1] - replicates[0]))
    assert frame.loc["inter_sim", "error"] == pytest.approx(expected_error, rel=1e-9)
    plot = compare_page._make_difference_plot(models)
    for panel in plot.panels:
        zero_line, difference_line = panel.lines
        assert (zero_line.label, zero_line.y, difference_line.label) == ("encoder", (0.0,), "decoder")
    [y_labels] = {tuple(panel.y_label for panel in plot.panels)}
    assert "difference of InterSim" in y_labels
    assert (out / "figures" / "differences.svg").is_file()


@pytest.mark.slow
def test_without_errors_the_page_has_a_sentence_instead_of_differences(
    measurements_by_name: dict[str, Measurements], tmp_path: Path
) -> None:
    measures_without_errors = {
        tap: {name: value for name, value in measures.items() if not name.endswith("_error")}
        for tap, measures in measurements_by_name["decoder"].all_texts.items()
    }
    decoder_without_errors = replace(
        measurements_by_name["decoder"], sources={"text": measures_without_errors}, replicates={}
    )
    models = [
        MeasuredModel("encoder", measurements_by_name["encoder"]),
        MeasuredModel("decoder", decoder_without_errors),
    ]
    out = compare_page.write_page(models, tmp_path / "page").parent
    page_text = " ".join(" ".join(parsed(out / "index.html").text).split())
    assert (
        "Differences of decoder from encoder are not computed: decoder has no standard errors; measure it with --groups"
        in page_text
    )
    assert not (out / "figures" / "differences.svg").exists()
    assert (out / "tables" / "differences.csv").read_text().strip() in ("", '""')


def test_spectra_are_root_mean_squares(measurements_by_name: dict[str, Measurements], folders: list[str]) -> None:
    """The squares of the raw values add up to the mean squared norm of the last layer's states."""
    plots = {plot.name: plot for plot in compare_page.make_plots(read_models(folders))}
    raw, centered = plots["spectra"].panels
    for index, name in enumerate(measurements_by_name):
        measures_by_layer = {
            tap: measures for tap, measures in measurements_by_name[name].all_texts.items() if tap != "final_norm"
        }
        average_norm = list(measures_by_layer.values())[-1]["average_norm"]
        sum_of_squares = sum(value**2 for value in raw.lines[index].y)
        assert sum_of_squares >= average_norm**2 * (1 - 1e-6)
        assert sum_of_squares == pytest.approx(average_norm**2, rel=0.05)
        assert sum(value**2 for value in centered.lines[index].y) < sum_of_squares


@pytest.mark.slow
def test_the_command_writes_a_page(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page"
    assert main(["compare", f"first={folders[0]}", folders[1], "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert "first" in output
    assert "decoder" in output
    assert parsed(out / "index.html").tags
    balanced((out / "tables" / "models.tex").read_text())
    frame = pd.read_csv(out / compare.TABLE_FILE)
    assert set(frame["model"]) == {"first", "decoder"}
    assert {"models.tex", "layers.md"} <= {path.name for path in (out / "tables").iterdir()}
    # A second comparison replaces the first; another folder is refused.
    assert main(["compare", *folders, "--out", str(out)]) == 0
    assert set(pd.read_csv(out / compare.TABLE_FILE)["model"]) == {"encoder", "decoder"}
    assert main(["compare", *folders, "--out", folders[0]]) == 2
    assert "would replace files of the input" in capsys.readouterr().err
    assert (Path(folders[0]) / measures_file.JSON_FILE).is_file()


@pytest.mark.slow
def test_models_are_measured_and_their_layers_compared(
    measurements_by_name: dict[str, Measurements],
    folders: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One model has been measured, the other has not; CKA needs both models and a text."""
    decoder, text = (
        measurements_by_name["decoder"].model["name"],
        measurements_by_name["decoder"].settings["texts"]["text"],
    )
    out = tmp_path / "page"
    command = ["compare", folders[0], f"new={decoder}", "--text", text, "--documents", "30", "--out", str(out)]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "measuring" in captured.err
    assert "warning: new was measured with other settings than encoder: length 128 instead of 16" in captured.out
    assert measures_file.read(tmp_path / "page-measures" / "new" / measures_file.JSON_FILE).model["name"] == decoder
    frame = pd.read_csv(out / "tables" / "similarity.csv")
    assert len(frame) == 3 * 5  # embeddings and two layers; embeddings, three layers and the final normalization
    assert set(frame["first"]) == {"encoder"}
    assert set(frame["second"]) == {"new"}
    assert (out / "figures" / "similarity.svg").is_file()


def test_other_texts_and_settings_are_pointed_out(measurements_by_name: dict[str, Measurements]) -> None:
    encoder = compare.MeasuredModel("encoder", measurements_by_name["encoder"])
    assert (
        compare.describe_differences([encoder, compare.MeasuredModel("decoder", measurements_by_name["decoder"])]) == []
    )
    settings = {**measurements_by_name["decoder"].settings, "texts": {"other": "other.txt"}, "length": 8}
    # A file of another name with the same content is the same text, and the size of batches changes no measure.
    renamed = replace(
        measurements_by_name["decoder"],
        settings={**settings, "length": 16, "batch_tokens": 64},
        text_hashes={"other": measurements_by_name["decoder"].text_hashes["text"]},
    )
    assert compare.describe_differences([encoder, compare.MeasuredModel("decoder", renamed)]) == []
    other = compare.MeasuredModel(
        "decoder", replace(measurements_by_name["decoder"], settings=settings, text_hashes={"other": "0123"})
    )
    assert compare.describe_differences([encoder, other]) == [
        "decoder was measured over other texts than encoder.",
        "decoder was measured with other settings than encoder: length 8 instead of 16.",
    ]


def test_models_that_differ_alike_share_a_sentence(measurements_by_name: dict[str, Measurements]) -> None:
    encoder = measurements_by_name["encoder"]
    other = replace(encoder, settings={**encoder.settings, "limit": 99}, text_hashes={"other": "0123"})
    models = [compare.MeasuredModel(label, other) for label in ("a", "b", "c")]
    assert compare.describe_differences([compare.MeasuredModel("first", encoder), *models]) == [
        "a, b and c were measured over other texts than first.",
        "a, b and c were measured with other settings than first: max_tokens 99 instead of None.",
    ]


def test_the_table_of_all_models_has_intervals(measurements_by_name: dict[str, Measurements]) -> None:
    encoder = measurements_by_name["encoder"]
    measures_by_tap = {
        tap: {**measures, "inter_sim": 0.25, "inter_sim_error": 0.01} for tap, measures in encoder.all_texts.items()
    }
    measured = replace(
        encoder, sources={encoder.combined_key: measures_by_tap}, settings={**encoder.settings, "groups": 10}
    )
    sheet = compare_page._make_model_table([compare.MeasuredModel("encoder", measured)])
    [row] = sheet.rows
    assert row[sheet.header.index("InterSim")].text == "0.250 ± 0.023"


def test_equal_names_get_their_folders(measurements_by_name: dict[str, Measurements], tmp_path: Path) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        write_measures(measurements_by_name["encoder"], tmp_path / folder)
    folders = [str(tmp_path / folder) for folder in ("first", "second")]
    assert [model.label for model in read_models(folders)] == ["encoder (first)", "encoder (second)"]
    with pytest.raises(UserError, match="several models are called a; give them names"):
        read_models([f"a={folder}" for folder in folders])
    with pytest.raises(UserError, match="is given twice"):
        compare.parse_compared_models([folders[0], f"again={folders[0]}"])


def test_models_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    (tmp_path / "a@b").mkdir()
    run_folder, folder_with_at_sign, hub_model, labelled_model = compare.parse_compared_models(
        [str(tmp_path / "run"), str(tmp_path / "a@b"), "EleutherAI/pythia-70m@step10", "mine=bert-base-cased"]
    )
    assert (run_folder.model_name, run_folder.is_measured) == (str(tmp_path / "run" / "model"), False)
    assert (folder_with_at_sign.name, folder_with_at_sign.revision) == (str(tmp_path / "a@b"), None)
    assert (hub_model.name, hub_model.revision, hub_model.default_label) == (
        "EleutherAI/pythia-70m",
        "step10",
        "pythia-70m-step10",
    )
    assert (labelled_model.label, labelled_model.name) == ("mine", "bert-base-cased")


def test_a_run_is_named_by_its_folder(measurements_by_name: dict[str, Measurements], tmp_path: Path) -> None:
    for revision in (None, "step10"):
        model = {
            **measurements_by_name["encoder"].model,
            "name": "runs/rte-small-istar-0123/model",
            "revision": revision,
        }
        folder = tmp_path / str(revision)
        folder.mkdir()
        write_measures(replace(measurements_by_name["encoder"], model=model), folder)
    labels = [
        measured_model.label for measured_model in read_models([str(tmp_path / "None"), str(tmp_path / "step10")])
    ]
    assert labels == ["rte-small-istar-0123", "rte-small-istar-0123 at step10"]


def test_bad_input(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", folders[0]]) == 2
    assert "a comparison needs two models or more" in capsys.readouterr().err
    assert main(["compare", folders[0], str(tmp_path / "nowhere")]) == 2
    assert "holds no measures.json; give a folder of istar measure, or --text" in capsys.readouterr().err
    values = {**asdict(measures_file.read(Path(folders[1]) / measures_file.JSON_FILE)), "format": -1}
    (Path(folders[1]) / measures_file.JSON_FILE).write_text(json.dumps(values))
    assert main(["compare", *folders]) == 2
    assert "has format -1" in capsys.readouterr().err
