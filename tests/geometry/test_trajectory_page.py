"""The page of a training, checked against its table."""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from istar.cli.main import main
from istar.drawing.plot import Line, Panel, Plot
from istar.drawing.rendering import render
from istar.drawing.spacing import are_log_spaced
from istar.geometry.collect import trajectory
from istar.geometry.collect.stream import Pass
from istar.geometry.show import trajectory_page
from istar.geometry.show.compare import MeasuredModel
from istar.inputs import saved_checkpoints
from tests.geometry.test_stream import SENTENCES, TOKENIZER, gpt2
from tests.geometry.test_training_findings import make_checkpoint
from tests.reports.test_report import parsed

STEPS = (10, 200, 3000)


@pytest.fixture(scope="module")
def training_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    for step in STEPS:
        model = gpt2().float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += step / 1e5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        model.save_pretrained(folder / f"step{step}")
        TOKENIZER.save_pretrained(folder / f"step{step}")
        saved_checkpoints.record_step(folder / f"step{step}", step)
    (folder / "text.txt").write_text("\n".join(SENTENCES * 10))
    options = ["--checkpoints", str(folder / "step*"), "--text", str(folder / "text.txt"), "--length", "16"]
    assert main(["measure", *options, "--sample", "50", "--out", str(folder / "out")]) == 0
    return folder


def test_the_page_is_complete(training_folder: Path) -> None:
    text = (training_folder / "out" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)="(?:https?:)?//', text)
    for name in ("isotropy", "partition", "final_norm"):
        for suffix in ("svg", "pdf", "png"):
            assert (training_folder / "out" / "figures" / f"{name}.{suffix}").stat().st_size > 1_000
    assert "--checkpoints" in text
    page_text = " ".join(" ".join(parsed(training_folder / "out" / "index.html").text).split())
    # The step is that of the checkpoints, not their position.
    assert re.search(r"What stands out IsoScore of the last layer (rises|falls) from [\d.]+ at step 10 to ", page_text)
    assert page_text.index("What stands out") < page_text.index("How to read this")
    assert "All checkpoints read the same documents in the same groups. The interval of a change" in page_text


def make_checkpoints(training_folder: Path, steps: dict[str, int | None]) -> list[MeasuredModel]:
    """Label checkpoints of these names and steps; the measures of each are those of the next checkpoint of the run."""
    measurements_by_label = {
        label: trajectory.measures_file.read(training_folder / "out" / f"step{step}" / "measures.json")
        for label, step in zip(steps, STEPS, strict=True)
    }
    checkpoints = [saved_checkpoints.Checkpoint(label, "", step=step) for label, step in steps.items()]
    unmeasured = saved_checkpoints.Checkpoint("unmeasured", "", step=5)
    return trajectory_page.label_checkpoints([unmeasured, *checkpoints], measurements_by_label)


def test_sentences_name_checkpoints_by_step_or_by_position(training_folder: Path) -> None:
    checkpoints = make_checkpoints(training_folder, {"late": 2000, "early": 0, "middle": 10})
    assert [checkpoint.label for checkpoint in checkpoints] == ["step 0", "step 10", "step 2,000"]
    # Each label has the measures of its own checkpoint.
    names = [Path(checkpoint.measurements.model["name"]).name for checkpoint in checkpoints]
    assert names == ["step200", "step3000", "step10"]
    repeated = make_checkpoints(training_folder, {"late": 2000, "best": 10, "epoch-1": 10})
    assert [checkpoint.label for checkpoint in repeated] == [
        "checkpoint best (step 10)", "checkpoint epoch-1 (step 10)", "step 2,000",
    ]  # fmt: skip
    without_steps = make_checkpoints(training_folder, {"late": 2000, "base": None, "tuned": 10})
    assert [checkpoint.label for checkpoint in without_steps] == [
        "checkpoint late (1 of 3)", "checkpoint base (2 of 3)", "checkpoint tuned (3 of 3)",
    ]  # fmt: skip
    [only] = trajectory_page.label_checkpoints(
        [saved_checkpoints.Checkpoint("base", "")], {"base": without_steps[0].measurements}
    )
    assert only.label == "checkpoint base"


def test_figures_equal_the_table(training_folder: Path) -> None:
    checkpoints = saved_checkpoints.find_checkpoints(str(training_folder / "step*"))
    measurements_by_label = {
        checkpoint.label: trajectory.measures_file.read(training_folder / "out" / checkpoint.folder / "measures.json")
        for checkpoint in checkpoints
    }
    isotropy, partition, norms = trajectory_page.make_plots(checkpoints, measurements_by_label)
    with (training_folder / "out" / "trajectory.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    def read_column(layer: str, name: str) -> list[float]:
        return [float(row[name]) for row in rows if row["layer"] == layer]

    assert isotropy.x_label == "step"
    for panel, name in zip(isotropy.panels, ("isoscore", "inter_sim", "intra_sim", "two_nn"), strict=True):
        lines = {line.label: line for line in panel.lines}
        for label, layer in (("layer 1", "layer_1"), ("final norm", "final_norm")):
            assert lines[label].x == tuple(map(float, STEPS))
            assert lines[label].y == pytest.approx(read_column(layer, name))
    [line] = partition.panels[0].lines
    # Matrices of different checkpoints are compared by the convention that does not depend on the eigensolver.
    assert line.y == pytest.approx(read_column("input_embeddings", "partition_isotropy_both"))
    assert partition.panels[0].y_label == "I(W), both signs"
    gain_line = next(line for line in norms.panels[0].lines if line.label == "gain")
    assert gain_line.y == pytest.approx(read_column("final_norm_parameters", "layer_norm_gain"))


@pytest.mark.slow
def test_trajectories_are_compared_on_one_page(training_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning names a folder of the same training that was measured with other settings."""
    copied_folder = training_folder / "copy"
    shutil.copytree(training_folder / "out", copied_folder)
    folders = [f"first={training_folder / 'out'}", f"second={copied_folder}"]
    assert main(["compare", *folders, "--out", str(training_folder / "both")]) == 0
    assert "warning" not in capsys.readouterr().out
    last_file = copied_folder / "step3000" / "measures.json"
    last_file.write_text(last_file.read_text().replace('"length": 16', '"length": 8'))
    assert main(["compare", *folders, "--out", str(training_folder / "both")]) == 0
    assert "second was measured with other settings than first: length 8 instead of 16" in capsys.readouterr().out
    with (training_folder / "both" / "trajectories.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["first"] * (len(rows) // 2) + ["second"] * (len(rows) // 2)


def test_the_page_says_how_intervals_of_changes_are_computed(tmp_path: Path) -> None:
    plan = trajectory.TrajectoryPlan("model", [], Pass(16), tmp_path)
    labels = ("step 0", "step 9")
    steps = [saved_checkpoints.Checkpoint(label, "", step=step) for step, label in enumerate(labels)]
    matrices = {"input": {key: {"partition_isotropy_both": 0.6, "dimensions": 16} for key in ("raw", "centered")}}
    for has_errors, with_replicates, text in (
        (True, True, "is that of the paired jackknife"),
        (True, False, "is the root of the sum of the squares of both values' errors"),
        (False, False, "Changes have no intervals without standard errors"),
    ):
        measurements = {}
        for label in labels:
            measured = make_checkpoint(label, 0.2, 0.3, 0.4, has_errors=has_errors).measurements
            replicates = measured.replicates if with_replicates else {}
            measurements[label] = replace(measured, replicates=replicates, matrices=matrices)
        page = trajectory_page.write_page(plan, steps, trajectory.Trajectory(measurements))
        assert text in " ".join(" ".join(parsed(page).text).split())
    page = trajectory_page.write_page(plan, steps[:1], trajectory.Trajectory({"step 0": measurements["step 0"]}))
    assert "Changes have no intervals" not in page.read_text(encoding="utf-8")


def test_checkpoints_without_steps_keep_their_order(training_folder: Path) -> None:
    checkpoints = [saved_checkpoints.Checkpoint(name, "") for name in ("last", "first")]
    measurements = [
        trajectory.measures_file.read(training_folder / "out" / f"step{step}" / "measures.json") for step in STEPS[:2]
    ]
    plots = trajectory_page.make_plots(checkpoints, dict(zip(("last", "first"), measurements, strict=True)))
    assert plots[0].x_label == "checkpoint, in the given order"
    assert plots[0].panels[0].lines[0].x == (1.0, 2.0)
    plan = trajectory.TrajectoryPlan("<b>", [], Pass(16), training_folder / "escaped", command="istar")
    page = trajectory_page.write_page(
        plan, checkpoints, trajectory.Trajectory(dict(zip(("last", "first"), measurements, strict=True)))
    )
    assert "<b>" not in page.read_text(encoding="utf-8")
    assert "at checkpoint last (1 of 2)" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("steps", "is_logarithmic"),
    [
        ([0, 1, 2, 4, 8, 16, 50], True),
        ([0, *(2**n for n in range(10)), *range(1_000, 144_000, 1_000)], True),
        ([1000, 4000, 16_000, 143_000], True),
        ([256, 512, 1000, 2000], True),
        (range(0, 1001, 100), False),
        ([*range(0, 20_001, 100), 20_007], False),
        ([0, 1, 2, 4], False),
        ([], False),
    ],
)
def test_when_the_axis_is_logarithmic(steps: list[int], is_logarithmic: bool) -> None:
    assert are_log_spaced(steps) == is_logarithmic


def test_a_logarithmic_axis_shows_step_0() -> None:
    line = Line("layer 1", (0, 1, 10, 100), (0.1, 0.2, 0.3, 0.4))
    plot = Plot("name", "title", "caption", "line", "step", (Panel("", "", (line,), "", "InterSim"),), log_x=True)
    svg = render(plot, ["svg"])["svg"].decode()
    labels = re.findall(r">([\d.]+)</text>", svg)
    assert [label for label in labels if label in ("0", "1", "10", "100")] == ["0", "1", "10", "100"]
