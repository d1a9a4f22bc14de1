"""`istar compare` of trainings, on tables whose numbers are known."""

import csv
import io
import math
import re
import zlib
from pathlib import Path

import pandas as pd
import pytest
import scipy.stats
from rich.console import Console

from istar.cli.main import main
from istar.drawing import rendering
from istar.errors import UserError
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.show import compare, trajectory_comparison
from istar.geometry.show.measured_training import MeasuredTraining
from istar.geometry.show.training_findings import describe_training, describe_trainings
from tests.geometry.measured import write_measures
from tests.geometry.test_training_findings import compute_half_width, make_checkpoint
from tests.reports.test_report import parsed

COLUMNS = (
    "model,revision,step,weights,source,layer,inter_sim,intra_sim,isoscore,two_nn,two_nn_error,"
    "partition_isotropy_as_computed,partition_isotropy_both,layer_norm_gain,layer_norm_bias"
)


def compute_value(model: str, step: int, layer: str, measure: str) -> float:
    """Return a value in [0, 1) that differs for each model, step, layer and measure."""
    return zlib.crc32(f"{model} {step} {layer} {measure}".encode()) / 2**32


def write_trajectory(
    folder: Path, model: str, steps: list[int], layers: int, has_final_norm: bool = True, source: str = "wiki"
) -> Path:
    """Write a trajectory; a model without a final normalization has no output embeddings either."""
    rows = []
    for step in steps:
        state_layers = [
            "embeddings",
            *(f"layer_{layer}" for layer in range(1, layers + 1)),
            *(["final_norm"] if has_final_norm else []),
        ]
        cells = [(source, layer, ("inter_sim", "intra_sim", "isoscore", "two_nn")) for layer in state_layers]
        matrices = ["input_embeddings", *(["output_embeddings"] if has_final_norm else [])]
        measures = ("partition_isotropy_as_computed", "partition_isotropy_both")
        cells += [("", layer, measures) for layer in matrices]
        if has_final_norm:
            cells.append(("", "final_norm_parameters", ("layer_norm_gain", "layer_norm_bias")))
        for source_name, layer, names in cells:
            keys = {
                "model": model,
                "revision": f"step{step}",
                "step": step,
                "weights": f"w{step}",
                "source": source_name,
            }
            values = {name: repr(compute_value(model, step, layer, name)) for name in names}
            rows.append({**keys, "layer": layer, **values})
    folder.mkdir(parents=True)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS.split(","), restval="")
    writer.writeheader()
    writer.writerows(rows)
    (folder / "trajectory.csv").write_text(buffer.getvalue())
    return folder


def read_trainings(*arguments: object) -> list[MeasuredTraining]:
    return trajectory_comparison.read_trainings(compare.parse_compared_models(list(map(str, arguments))))


def read_trainings_of(folder: Path) -> list[MeasuredTraining]:
    """Read a single training, which the command line does not compare."""
    return trajectory_comparison.read_trainings(compare.parse_models([str(folder)]))


@pytest.fixture
def training_folders(tmp_path: Path) -> list[Path]:
    """Write trajectories of two decoders and an encoder; the checkpoints of the first are not sorted by step."""
    return [
        write_trajectory(tmp_path / "a", "org/small", [1000, 0, 1, 143_000], 10),
        write_trajectory(tmp_path / "b", "org/encoder", [0, 500], 2, has_final_norm=False),
        write_trajectory(tmp_path / "c", "org/large", [0, 1, 2], 3),
    ]


def test_bands_are_95_percent_intervals(tmp_path: Path) -> None:
    folder = write_trajectory(tmp_path / "a", "org/small", [0, 1], 2)
    rows = pd.read_csv(folder / "trajectory.csv").assign(inter_sim_error=0.01, two_nn_error=0.1)
    rows.to_csv(folder / "trajectory.csv", index=False)
    measurements = Measurements({"name": "m", "revision": None}, "", {"groups": 4}, {"wiki": {}}, {}, {}, None)
    (folder / "step1").mkdir()
    for groups, degrees in ((None, 9), (4, 3)):
        if groups:
            write_measures(measurements, folder / "step1")
        [training] = read_trainings_of(folder)
        half_width = scipy.stats.t.ppf(0.975, degrees) * 0.01
        assert training.half_widths_by_step("layer_2", "inter_sim") == pytest.approx([half_width] * 2)
        two_nn_half_width = scipy.stats.norm.ppf(0.975) * 0.1
        assert training.half_widths_by_step("layer_2", "two_nn") == pytest.approx([two_nn_half_width] * 2)
        page = trajectory_comparison.write_page([training], tmp_path / "out").read_text(encoding="utf-8")
        assert ("10 groups of documents are assumed" in page) == (groups is None)
        assert f"± {half_width:.2g}" in re.sub(r"<[^>]*>", "", page)


def test_every_line_has_the_numbers_of_its_table(training_folders: list[Path]) -> None:
    plots = {plot.name: plot for plot in trajectory_comparison.make_plots(read_trainings(*training_folders))}
    last_layer_by_model = {"org/small": "layer_10", "org/encoder": "layer_2", "org/large": "layer_3"}
    steps_by_model = {"org/small": [0, 1, 1000, 143_000], "org/encoder": [0, 500], "org/large": [0, 1, 2]}
    decoders = ["org/small", "org/large"]
    expected = [
        *(
            (plot, name, title, [*steps_by_model] if fixed_layer is None else decoders, fixed_layer, measure)
            for plot, name, measure in (
                ("directions", "InterSim", "inter_sim"),
                ("directions", "IntraSim", "intra_sim"),
                ("isotropy", "IsoScore", "isoscore"),
                ("isotropy", "TwoNN dimension", "two_nn"),
            )
            for title, fixed_layer in (("last layer", None), ("final normalization", "final_norm"))
        ),
        *(
            (
                "partition",
                "I(W)",
                f"{side} embeddings, {signs}",
                models,
                f"{side}_embeddings",
                f"partition_isotropy_{suffix}",
            )
            for side, models in (("input", [*steps_by_model]), ("output", decoders))
            for signs, suffix in (("signs as computed", "as_computed"), ("both signs", "both"))
        ),
        *(
            ("final_norm", "norm", name, decoders, "final_norm_parameters", f"layer_norm_{name}")
            for name in ("gain", "bias")
        ),
    ]
    assert sum(len(plot.panels) for plot in plots.values()) == len(expected)
    for plot, y_label, title, models, fixed_layer, measure in expected:
        [panel] = [panel for panel in plots[plot].panels if (panel.y_label, panel.task) == (y_label, title)]
        assert [line.label for line in panel.lines] == [model.removeprefix("org/") for model in models]
        for line, model in zip(panel.lines, models, strict=True):
            assert line.x == tuple(steps_by_model[model])
            layer = fixed_layer or last_layer_by_model[model]
            assert line.y == pytest.approx(
                [compute_value(model, step, layer, measure) for step in steps_by_model[model]], rel=1e-12
            )
        assert plots[plot].log_x


def test_a_model_has_the_same_colour_in_all_figures(training_folders: list[Path]) -> None:
    """The encoder, which stands between the decoders, has no line in the figure of the final normalization."""
    colours = []
    for plot in trajectory_comparison.make_plots(read_trainings(*training_folders)):
        styles = rendering._assign_line_styles(plot)
        colours.append({label: styles[label]["color"] for label in ("small", "encoder", "large")})
        assert len(set(colours[-1].values())) == 3
    assert all(colour == colours[0] for colour in colours)


def test_the_axis_shows_step_0_and_the_legend_is_there_once(training_folders: list[Path]) -> None:
    plots = {plot.name: plot for plot in trajectory_comparison.make_plots(read_trainings(*training_folders))}
    svg = rendering.render(plots["directions"], ["svg"])["svg"].decode()
    texts = re.findall(r">([^<>]+)</text>", svg)
    assert {"0", "1", "1000"} <= set(texts)
    assert [texts.count(label) for label in ("small", "encoder", "large")] == [1, 1, 1]
    texts = re.findall(r">([^<>]+)</text>", rendering.render(plots["final_norm"], ["svg"])["svg"].decode())
    assert [texts.count(label) for label in ("small", "encoder", "large")] == [1, 0, 1]


def test_panels_of_the_same_measure_share_their_y_axis(training_folders: list[Path]) -> None:
    for plot in trajectory_comparison.make_plots(read_trainings(*training_folders)):
        y_limits = [axes.get_ylim() for axes in rendering._draw_figure(plot).axes]
        limits_by_label: dict[str, set[tuple[float, float]]] = {}
        for panel, limits in zip(plot.panels, y_limits, strict=True):
            limits_by_label.setdefault(panel.y_label, set()).add(limits)
        # The norms of gain and bias are separate quantities.
        num_limits = 2 if plot.name == "final_norm" else 1
        assert all(len(limits) == num_limits for limits in limits_by_label.values())


def test_all_texts_together_count(tmp_path: Path) -> None:
    """The rows of a single text are not mixed with those of all texts."""
    folder = write_trajectory(tmp_path / "a", "m", [0, 1], 1, source="wiki")
    combined_folder = write_trajectory(tmp_path / "b", "m", [0, 1], 1, source="combined")
    lines = (combined_folder / "trajectory.csv").read_text().splitlines()[1:]
    changed_lines = [re.sub(r"0\.\d+", "0.5", line) for line in lines if ",combined," in line]
    table = folder / "trajectory.csv"
    table.write_text(table.read_text() + "\n".join(changed_lines) + "\n")
    [training, _] = read_trainings(f"x={folder}", f"y={combined_folder}")
    assert training.values_by_step("layer_1", "inter_sim") == [0.5, 0.5]
    assert training.values_by_step("layer_1", "kurtosis") == pytest.approx([math.nan] * 2, nan_ok=True)
    assert training.values_by_step("input_embeddings", "partition_isotropy_both")[0] == compute_value(
        "m", 0, "input_embeddings", "partition_isotropy_both"
    )


@pytest.mark.slow
def test_the_command_writes_a_page(
    training_folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page"
    assert (
        main(
            [
                "compare",
                f"first={training_folders[0]}",
                str(training_folders[1]),
                str(training_folders[2]),
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert "At the last checkpoint of each training" in capsys.readouterr().out
    page = parsed(out / "index.html")
    assert "Geometry of first, encoder and large over their training" in page.text
    assert "first step" in page.text
    for name in ("directions", "isotropy", "partition", "final_norm"):
        assert {f"figures/{name}.{suffix}" for suffix in ("svg", "pdf", "png")} <= {
            path.relative_to(out).as_posix() for path in (out / "figures").iterdir()
        }
    with (out / "trajectories.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == {"first", "encoder", "large"}
    with (training_folders[2] / "trajectory.csv").open(newline="") as file:
        expected_rows = list(csv.DictReader(file))
    for row, expected_row in zip([row for row in rows if row["model"] == "large"], expected_rows, strict=True):
        assert {**row, "model": "org/large"} == expected_row
    with (out / "tables" / "models.csv").open(newline="") as file:
        [summary] = [row for row in csv.DictReader(file) if row["model"] == "first"]
    assert (summary["checkpoints"], summary["first step"], summary["last step"]) == ("4", "0", "143000")
    assert float(summary["InterSim"]) == compute_value("org/small", 143_000, "layer_10", "inter_sim")
    # The command does not write its page into a folder of measures.
    assert main(["compare", *map(str, training_folders), "--out", str(training_folders[0])]) == 2


def test_names_and_headers_of_the_terminal_table_stay_whole(training_folders: list[Path]) -> None:
    """A terminal of 80 columns has room for names of up to 16 characters and numbers of four digits."""
    long_name = "a-long-name-1234"
    trainings = read_trainings(f"{long_name}={training_folders[0]}", *training_folders[1:])
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(trajectory_comparison.make_terminal_table(trainings))
    table = capture.get()
    words = re.findall(r"[^\s│┃]+", table)
    assert {long_name, "InterSim", "IntraSim", "IsoScore", "TwoNN", "I(W),", "input", "output"} <= set(words)
    summary = trajectory_comparison.summarize_trainings(trainings).set_index("model")
    for header in ("InterSim", "I(W), input", "I(W), output"):
        assert f"{summary.loc[long_name, header]:.4g}" in words


def write_known_trajectory(folder: Path, isoscores: tuple[float, float], error: float, **settings: object) -> Path:
    """Write a trajectory with the IsoScore of the last layer at steps 0 and 10, and 1 - IsoScore as its InterSim."""
    write_trajectory(folder, folder.name, [0, 10], 1)
    rows = pd.read_csv(folder / "trajectory.csv")
    for step, isoscore in zip((0, 10), isoscores, strict=True):
        is_last_layer = (rows["step"] == step) & (rows["layer"] == "layer_1")
        rows.loc[is_last_layer, ["isoscore", "inter_sim"]] = [isoscore, 1 - isoscore]
    rows.assign(isoscore_error=error).to_csv(folder / "trajectory.csv", index=False)
    (folder / "step10").mkdir()
    all_settings = {"groups": 10, "texts": {"wiki": "wiki.txt"}, **settings}
    model = {"name": folder.name, "revision": None}
    measurements = Measurements(model, "", all_settings, {"wiki": {}}, {}, {}, None, text_hashes={"wiki": "01"})
    write_measures(measurements, folder / "step10")
    return folder


def test_the_largest_change_and_the_last_values_stand_out(tmp_path: Path) -> None:
    rising = write_known_trajectory(tmp_path / "rising", (0.1, 0.5), 0.01)
    steady = write_known_trajectory(tmp_path / "steady", (0.3, 0.31), 0.01)
    half_width = scipy.stats.t.ppf(0.975, 9) * math.sqrt(2) * 0.01
    assert describe_trainings(read_trainings(rising, steady)) == [
        "IsoScore of the last layer changes most in rising: from 0.1 at step 0 to 0.5 at step 10. The 95% interval "
        f"of the change, 0.4 ± {half_width:.2g}, does not contain 0, so that the choice of the documents does not "
        "explain it.",
        "At the last checkpoint, IsoScore of the last layer is larger in rising (0.5) and smaller in steady (0.31). "
        f"The 95% interval of the difference, 0.19 ± {half_width:.2g}, does not contain 0, so that the choice of the "
        "documents does not explain it.",
        "InterSim of the last layer changes most in rising: from 0.9 at step 0 to 0.5 at step 10. The change has no "
        "interval.",
        "At the last checkpoint, InterSim of the last layer is larger in steady (0.69) and smaller in rising (0.5). "
        "The difference has no interval.",
    ]
    [change, _] = describe_trainings(read_trainings_of(steady))
    assert change.endswith(
        f"The 95% interval of the change, 0.01 ± {half_width:.2g}, contains 0, so that the choice of the documents may "
        "explain it."
    )


def test_the_change_of_a_training_has_a_paired_interval(tmp_path: Path) -> None:
    """With the folders of the first and the last checkpoint, the change has the interval of the training's own page."""
    training_folder = write_known_trajectory(tmp_path / "rising", (0.25, 0.45), 0.01)
    checkpoints = [make_checkpoint("step 0", 0.2, 0.3, 0.25), make_checkpoint("step 10", 0.2, 0.3, 0.45)]
    for checkpoint in checkpoints:
        folder = training_folder / checkpoint.label.replace(" ", "")
        folder.mkdir(exist_ok=True)
        write_measures(checkpoint.measurements, folder)
    interval = f"The 95% interval of the change, 0.2 ± {compute_half_width('step 0', 'step 10'):.2g}, does not"
    assert interval in describe_trainings(read_trainings_of(training_folder))[0]
    assert interval in describe_training(checkpoints)[0]


def test_trainings_over_other_tokens_are_not_ranked(tmp_path: Path) -> None:
    rising = write_known_trajectory(tmp_path / "rising", (0.1, 0.5), 0.01)
    shorter = write_known_trajectory(tmp_path / "shorter", (0.3, 0.31), 0.01, limit=100)
    sentences = describe_trainings(read_trainings(rising, shorter))
    assert ["changes most in rising" in sentence for sentence in sentences] == [True, True]
    # Without the settings of the last checkpoint, it is not known which tokens were measured.
    for path in (shorter / "step10").iterdir():
        path.unlink()
    assert describe_trainings(read_trainings(rising, shorter)) == sentences


def test_equal_names_get_their_folders(tmp_path: Path) -> None:
    folders = [write_trajectory(tmp_path / name, "m", [0], 1) for name in ("first", "second")]
    assert [training.label for training in read_trainings(*folders)] == ["m (first)", "m (second)"]
    with pytest.raises(UserError, match="several trainings are called a; give them names"):
        read_trainings(*(f"a={folder}" for folder in folders))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("step1,1,", "step1,,"), "step1 has no step; measure the training with --steps"),
        (lambda text: text.replace("m,step1,", "n,step1,"), "has several models"),
        (lambda text: text.replace("weights", "hash"), "has no column weights"),
        (lambda text: text.splitlines()[0], "has no rows"),
        (lambda text: "", "cannot be read"),
    ],
)
def test_a_damaged_table_is_one_line(
    change: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = (write_trajectory(tmp_path / name, "m", [0, 1], 1) for name in ("good", "bad"))
    assert callable(change)
    (bad / "trajectory.csv").write_text(change((bad / "trajectory.csv").read_text()))
    assert main(["compare", str(good), str(bad), "--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{bad}/trajectory.csv" in line
    assert message in line
    assert not (tmp_path / "out").exists()


def test_trainings_and_models_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training_folder = write_trajectory(tmp_path / "training", "m", [0, 1], 1)
    (tmp_path / "model").mkdir()
    assert main(["compare", str(training_folder), str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 2
    assert "model holds no trajectory.csv; expected folders of istar measure --revis" in capsys.readouterr().err
    other_folder = write_trajectory(tmp_path / "other", "n", [0, 1], 1)
    assert (
        main(["compare", str(training_folder), str(other_folder), "--text", "x.txt", "--out", str(tmp_path / "out")])
        == 2
    )
    assert "--text does not go with folders of trainings" in capsys.readouterr().err
