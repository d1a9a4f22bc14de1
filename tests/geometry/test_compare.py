"""`istar compare` on the measures of two tiny models."""

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
from istar.errors import UserError
from istar.figures import drawing
from istar.geometry import compare, compare_page, measure, measures_file
from istar.geometry.compare import MeasuredModel
from istar.geometry.corpus import Source
from istar.geometry.measures_file import Measurements
from istar.geometry.stream import Pass
from istar.models import tiny
from istar.tasks import demo
from tests.reports.test_report import balanced, parsed

WORDS = demo.vocabulary()[:20]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measurements]:
    """Measurements of an encoder of two layers, and of a decoder of three with a final normalization, over a text."""
    place = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(0)
    (place / "text.txt").write_text("\n".join(" ".join(random.choice(WORDS, 9)) for _ in range(40)))
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    shape = {"num_attention_heads": 2, "intermediate_size": 32, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    models = {
        "encoder": hf.BertModel(hf.BertConfig(hidden_size=16, num_hidden_layers=2, **shape)),
        "decoder": hf.GPTNeoXForCausalLM(
            hf.GPTNeoXConfig(hidden_size=24, num_hidden_layers=3, bos_token_id=1, eos_token_id=1, **shape)
        ),
    }
    results = {}
    for name, model in models.items():
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
        source = Source("text", place / "text.txt")
        results[name] = measure.measure_model(
            str(place / name), [source], Pass(16, sample=0), place / f"{name}-measures"
        )
    return results


def read(arguments: list[str]) -> list[MeasuredModel]:
    """Read finished folders as the command does."""
    chosen = compare.parse_compared_models(arguments)
    return compare.label_models(
        chosen, [measures_file.read(Path(choice.name) / measures_file.JSON_FILE) for choice in chosen]
    )


@pytest.fixture
def folders(measured: dict[str, Measurements], tmp_path: Path) -> list[str]:
    """The folders of `istar measure` for both models."""
    for name, result in measured.items():
        (tmp_path / name).mkdir()
        measures_file.write(result, tmp_path / name)
    return [str(tmp_path / name) for name in measured]


def test_tables_hold_the_measures_of_each_model(measured: dict[str, Measurements], folders: list[str]) -> None:
    subjects = read(folders)
    assert [subject.label for subject in subjects] == ["encoder", "decoder"]
    frame = compare.make_layer_table(subjects)
    layers = {model: group["layer"].tolist() for model, group in frame.groupby("model")}
    assert layers == {
        "encoder": ["embeddings", "layer_1", "layer_2"],
        "decoder": ["embeddings", "layer_1", "layer_2", "layer_3", "final_norm"],
    }
    depths = [0, 1 / 3, 2 / 3, 1, np.nan]
    assert frame[frame["model"] == "decoder"]["relative_depth"].tolist() == pytest.approx(depths, nan_ok=True)
    for name, result in measured.items():
        columns = frame[frame["model"] == name].set_index("layer")
        for tap, figures in result.all_texts.items():
            assert columns.loc[tap, "inter_sim"] == pytest.approx(figures["inter_sim"], rel=1e-12)
    summary = compare.summarize_models(subjects).set_index("model")
    assert summary.loc["decoder", "matrix"] == "output"
    raw = measured["decoder"].matrices["output"]["raw"]
    assert summary.loc["decoder", "partition_raw"] == pytest.approx(raw["partition_isotropy_both"], rel=1e-12)
    assert summary.loc["encoder", "dimensions"] == 16
    assert np.isnan(summary.loc["encoder", "gain"])


def test_plots_have_a_line_for_each_model(folders: list[str]) -> None:
    plots = {plot.name: plot for plot in compare_page.make_plots(read(folders))}
    for name in ("spectra", "state_norms"):
        for panel in plots[name].panels:
            assert [line.label for line in panel.lines] == ["encoder", "decoder"], name
    for name in ("isotropy", "directions", "spectrum", "outliers", "norms"):
        for panel in plots[name].panels:
            assert [line.label for line in panel.lines] == ["encoder", "decoder", "decoder"], name
    # The decoder alone has output embeddings of its own and a final normalization.
    assert [[line.label for line in panel.lines] for panel in plots["partition"].panels] == [
        *[["encoder", "decoder"]] * 2,
        *[["decoder"]] * 2,
    ]
    assert [[line.label for line in panel.lines] for panel in plots["final_norm"].panels] == [["decoder"]]
    [norms] = plots["state_norms"].panels
    for line in norms.lines:
        assert list(line.y) == sorted(line.y)
        assert (line.y[0], line.y[-1]) == (0, 100)


def test_the_final_norm_is_a_mark_beyond_the_last_layer(measured: dict[str, Measurements], folders: list[str]) -> None:
    plot = {plot.name: plot for plot in compare_page.make_plots(read(folders))}["directions"]
    for key, panel in zip(("inter_sim", "intra_sim", "adjusted_intra_sim"), plot.panels, strict=True):
        _, layers, mark = panel.lines
        figures = measured["decoder"].all_texts
        assert layers.y == tuple(values[key] for tap, values in figures.items() if tap != "final_norm")
        assert mark.y == (figures["final_norm"][key],)
        assert mark.x[0] > max(layers.x)
        assert plot.x_names[mark.x[0]] == "final\nnorm"
    # The error bar is half of the 95% interval.
    [inter_sim, *_] = plot.panels
    error = measured["decoder"].all_texts["final_norm"]["inter_sim_error"]
    assert inter_sim.lines[2].y_error == pytest.approx((scipy.stats.t.ppf(0.975, 9) * error,), rel=1e-12)
    # Without a final normalization, the axis has plain numbers.
    encoders = [MeasuredModel(name, measured["encoder"]) for name in "ab"]
    assert {plot.name: plot for plot in compare_page.make_plots(encoders)}["directions"].x_names == {}


def test_a_model_has_the_same_colour_in_all_figures(measured: dict[str, Measurements]) -> None:
    """The encoder, which is between the decoders, has no line in the figure of the final normalization.

    `Base` is the label of runs without a penalty, which the figures of runs draw in black; a model is none.
    """
    names = ("small", "encoder", "Base", "large")
    subjects = [MeasuredModel(name, measured["encoder" if name == "encoder" else "decoder"]) for name in names]
    plots = {
        plot.name: plot for plot in (compare_page._make_difference_plot(subjects), *compare_page.make_plots(subjects))
    }
    assert {line.label for panel in plots["final_norm"].panels for line in panel.lines} == {"small", "Base", "large"}
    styles = {name: drawing._assign_line_styles(plot) for name, plot in plots.items()}
    first = {label: styles["directions"][label] for label in names}
    assert len({style["color"] for style in first.values()}) == 4
    for name, of_plot in styles.items():
        assert {label: of_plot[label] for label in names} == first, name


def test_i_w_has_both_conventions_of_the_signs(measured: dict[str, Measurements], folders: list[str]) -> None:
    plot = {plot.name: plot for plot in compare_page.make_plots(read(folders))}["partition"]
    assert [(panel.task, panel.y_label) for panel in plot.panels] == [
        (f"{which} embeddings", f"I(W), {signs}")
        for which in ("input", "output")
        for signs in ("signs as computed", "both signs")
    ]
    for panel, which, signs in zip(plot.panels[2:], ("output", "output"), ("as_computed", "both"), strict=True):
        forms = measured["decoder"].matrices[which]
        assert panel.lines[0].y == tuple(figures[f"partition_isotropy_{signs}"] for figures in forms.values())


def test_the_page_has_differences_with_intervals(measured: dict[str, Measurements], tmp_path: Path) -> None:
    subjects = [MeasuredModel(name, result) for name, result in measured.items()]
    out = compare_page.write_page(subjects, tmp_path / "page").parent
    said = " ".join(" ".join(parsed(out / "index.html").text).split())
    assert "decoder and encoder read the same documents in the same groups" in said
    frame = pd.read_csv(out / "tables" / "differences.csv").set_index("measure")
    assert set(frame["layer"]) == {"layer_3"}
    replicates = [
        np.array(result.replicates["text"][tap]["inter_sim"])
        for result, tap in zip(measured.values(), ("layer_2", "layer_3"), strict=True)
    ]
    # The standard error of the mean of pseudo-values; each is -9 times a difference, apart from a constant.
    error = scipy.stats.sem(9 * (replicates[1] - replicates[0]))
    assert frame.loc["inter_sim", "error"] == pytest.approx(error, rel=1e-9)
    plot = compare_page._make_difference_plot(subjects)
    for panel in plot.panels:
        zero, difference = panel.lines
        assert (zero.label, zero.y, difference.label) == ("encoder", (0.0,), "decoder")
    [names] = {tuple(panel.y_label for panel in plot.panels)}
    assert "difference of InterSim" in names
    assert (out / "figures" / "differences.svg").is_file()


@pytest.mark.slow
def test_without_errors_the_page_has_a_sentence_instead_of_differences(
    measured: dict[str, Measurements], tmp_path: Path
) -> None:
    bare = {
        tap: {name: value for name, value in figures.items() if not name.endswith("_error")}
        for tap, figures in measured["decoder"].all_texts.items()
    }
    without = replace(measured["decoder"], sources={"text": bare}, replicates={})
    subjects = [MeasuredModel("encoder", measured["encoder"]), MeasuredModel("decoder", without)]
    out = compare_page.write_page(subjects, tmp_path / "page").parent
    said = " ".join(" ".join(parsed(out / "index.html").text).split())
    assert (
        "No differences between decoder and encoder: decoder has no standard errors; measure it with --groups" in said
    )
    assert not (out / "figures" / "differences.svg").exists()
    assert (out / "tables" / "differences.csv").read_text().strip() in ("", '""')


def test_spectra_are_root_mean_squares(measured: dict[str, Measurements], folders: list[str]) -> None:
    """The squares of the raw values add up to the mean squared norm of the last layer's states."""
    plots = {plot.name: plot for plot in compare_page.make_plots(read(folders))}
    raw, centered = plots["spectra"].panels
    for number, name in enumerate(measured):
        layers = {tap: figures for tap, figures in measured[name].all_texts.items() if tap != "final_norm"}
        average_norm = list(layers.values())[-1]["average_norm"]
        total = sum(value**2 for value in raw.lines[number].y)
        assert total >= average_norm**2 * (1 - 1e-6)
        assert total == pytest.approx(average_norm**2, rel=0.05)
        assert sum(value**2 for value in centered.lines[number].y) < total


@pytest.mark.slow
def test_the_command_writes_a_page(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page"
    assert main(["compare", f"first={folders[0]}", folders[1], "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "first" in printed
    assert "decoder" in printed
    assert parsed(out / "index.html").tags
    balanced((out / "tables" / "models.tex").read_text())
    frame = pd.read_csv(out / compare.TABLE_FILE)
    assert set(frame["model"]) == {"first", "decoder"}
    assert {"models.tex", "layers.md"} <= {path.name for path in (out / "tables").iterdir()}
    # A second comparison replaces the first; another folder is refused.
    assert main(["compare", *folders, "--out", str(out)]) == 0
    assert set(pd.read_csv(out / compare.TABLE_FILE)["model"]) == {"encoder", "decoder"}
    assert main(["compare", *folders, "--out", folders[0]]) == 2
    assert "which is no part of a comparison" in capsys.readouterr().err
    assert (Path(folders[0]) / measures_file.JSON_FILE).is_file()


@pytest.mark.slow
def test_models_are_measured_and_their_layers_compared(
    measured: dict[str, Measurements], folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One model is measured already, the other is not; CKA needs both models and a text."""
    decoder, text = measured["decoder"].model["name"], measured["decoder"].settings["texts"]["text"]
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


def test_other_texts_and_settings_are_pointed_out(measured: dict[str, Measurements]) -> None:
    encoder = compare.MeasuredModel("encoder", measured["encoder"])
    assert compare.describe_differences([encoder, compare.MeasuredModel("decoder", measured["decoder"])]) == []
    settings = {**measured["decoder"].settings, "texts": {"other": "other.txt"}, "length": 8}
    # A file of another name with the same content is the same text, and the size of batches changes no measure.
    renamed = replace(
        measured["decoder"],
        settings={**settings, "length": 16, "batch_tokens": 64, "batch_size": 32},
        text_hashes={"other": measured["decoder"].text_hashes["text"]},
    )
    assert compare.describe_differences([encoder, compare.MeasuredModel("decoder", renamed)]) == []
    other = compare.MeasuredModel(
        "decoder", replace(measured["decoder"], settings=settings, text_hashes={"other": "0123"})
    )
    assert compare.describe_differences([encoder, other]) == [
        "decoder was measured over other texts than encoder.",
        "decoder was measured with other settings than encoder: length 8 instead of 16.",
    ]


def test_equal_names_get_their_folders(measured: dict[str, Measurements], tmp_path: Path) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        measures_file.write(measured["encoder"], tmp_path / folder)
    folders = [str(tmp_path / folder) for folder in ("first", "second")]
    assert [subject.label for subject in read(folders)] == ["encoder (first)", "encoder (second)"]
    with pytest.raises(UserError, match="several models are called a; give them names"):
        read([f"a={folder}" for folder in folders])
    with pytest.raises(UserError, match="is given twice"):
        compare.parse_compared_models([folders[0], f"again={folders[0]}"])


def test_models_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    (tmp_path / "a@b").mkdir()
    run, odd, hub, named = compare.parse_compared_models(
        [str(tmp_path / "run"), str(tmp_path / "a@b"), "EleutherAI/pythia-70m@step10", "mine=bert-base-cased"]
    )
    assert (run.model_name, run.is_measured) == (str(tmp_path / "run" / "model"), False)
    assert (odd.name, odd.revision) == (str(tmp_path / "a@b"), None)
    assert (hub.name, hub.revision, hub.default_label) == ("EleutherAI/pythia-70m", "step10", "pythia-70m-step10")
    assert (named.label, named.name) == ("mine", "bert-base-cased")


def test_a_run_is_named_by_its_folder(measured: dict[str, Measurements], tmp_path: Path) -> None:
    for revision in (None, "step10"):
        model = {**measured["encoder"].model, "name": "runs/rte-small-istar-0123/model", "revision": revision}
        folder = tmp_path / str(revision)
        folder.mkdir()
        measures_file.write(replace(measured["encoder"], model=model), folder)
    labels = [subject.label for subject in read([str(tmp_path / "None"), str(tmp_path / "step10")])]
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
