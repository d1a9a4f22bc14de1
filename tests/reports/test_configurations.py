from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from istar.drawing.terminal import format_duration
from istar.reports import configurations, paper, paper_tables
from istar.reports.run_frame import read_runs
from istar.runs.record import RunRecord
from tests.reports.synthetic import BASE, cosreg, istar, record, save

BERT = "google-bert/bert-base-cased"
Prepare = Callable[..., pd.DataFrame]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """Return a function that writes runs, reads them and returns the frame with the columns of the selection."""

    def write_and_load(*runs: RunRecord) -> pd.DataFrame:
        for index, run in enumerate(runs):
            save(run, tmp_path / f"{index:04d}")
        return configurations.add_selection_columns(read_runs(tmp_path, keep_records=True))

    return write_and_load


def test_table1_is_what_pandas_says(prepare: Prepare) -> None:
    """The runs are random. The oracle groups tuples of their values and uses no hashes of configurations."""
    random = np.random.default_rng(0)
    runs, oracle_rows = [], []
    regs: list[Any] = [BASE, istar(-1, 0.2), istar(-1, 0.4), istar(3, 0.4), cosreg(1), cosreg(2)]
    for task in ("rte", "squad"):
        for reg_index, reg in enumerate(regs):
            for lr in (1e-5, 3e-5):
                for run_seed in random.choice(np.arange(1, 9), size=random.integers(1, 6), replace=False):
                    value = float(random.uniform(0.4, 0.9))
                    runs.append(record(task, BERT, reg, int(run_seed), value, optim__lr=lr))
                    oracle_rows.append((task, reg["name"], reg_index, lr, int(run_seed), value))
    order = random.permutation(len(runs))
    frame = prepare(*(runs[index] for index in order))
    oracle = pd.DataFrame(oracle_rows, columns=["task", "reg", "number", "lr", "seed", "value"])
    sheet = paper_tables.build_table1_sheet(configurations.select_cells(frame))
    reg_name_by_method = {"Base": "none", "CosReg": "cosreg", "I-STAR": "istar"}
    for row in sheet.frame.to_dict("records"):
        matching = oracle[(oracle["task"] == row["task"]) & (oracle["reg"] == reg_name_by_method[row["method"]])]
        groups = matching.groupby(["number", "lr"])["value"].agg(["size", "mean", "std"])
        best = groups.sort_values(["size", "mean"], ascending=False).iloc[0]
        scale = 90 if row["metric"] == "exact_match" else 100
        assert row["mean"] == pytest.approx(scale * best["mean"], rel=1e-12)
        assert row["std"] == pytest.approx(scale * best["std"], rel=1e-9, nan_ok=True)
        assert row["seeds"] == best["size"]
        assert row["configurations"] == len(groups)
    assert [x["metric"] for x in sheet.frame.to_dict("records")] == ["accuracy"] * 3 + ["f1"] * 3 + ["exact_match"] * 3


def test_most_seeds_then_mean(prepare: Prepare) -> None:
    frame = prepare(
        *(record("rte", BERT, istar(-1), seed, 0.60) for seed in (1, 2, 3)),
        *(record("rte", BERT, istar(-3), seed, 0.62) for seed in (1, 2, 3)),
        *(record("rte", BERT, istar(-5), seed, 0.90) for seed in (1, 2)),
    )
    cell = configurations.select_cell(frame, "istar")
    assert cell.seeds == [1, 2, 3]
    assert not cell.runs.empty
    assert set(cell.runs["reg.lambda"]) == {-3.0}
    assert cell.num_configurations == 3


def test_the_lowest_loss_is_the_best(prepare: Prepare) -> None:
    """This holds for configurations and for the means of a table; a perplexity is not shown in percent."""
    frame = prepare(
        record("clm", BERT, BASE, 1, 31.5), record("clm", BERT, istar(-1), 1, 30.25),
        record("clm", BERT, istar(-3), 1, 29.75), record("clm", BERT, istar(-5), 1, 40.0),
        record("clm", BERT, cosreg(), 1, 33.0),
    )  # fmt: skip
    cell = configurations.select_cell(frame, "istar")
    assert set(cell.runs["reg.lambda"]) == {-3.0}
    assert cell.mean_and_std("perplexity").mean == 29.75
    rows = paper_tables.build_table1_sheet(configurations.select_cells(frame)).rows
    assert {row[1].text: (row[4].text, row[4].bold) for row in rows} == {
        "Base": ("31.50", False), "I-STAR": ("29.75", True), "CosReg": ("33.00", False)
    }  # fmt: skip


def test_a_model_with_a_longer_label_has_the_numbers_of_the_paper(prepare: Prepare) -> None:
    models = BERT, "elsewhere/bert-base-cased"
    frame = prepare(*(record("rte", model, istar(), 1, weights=model) for model in models))
    cells = configurations.select_cells(frame)
    table1 = paper_tables.build_table1_sheet(cells).frame.set_index("model")
    assert set(table1.index) == set(models)
    assert table1["paper_mean"].notna().all()
    assert paper_tables.build_table2_sheet(cells, frame).frame["paper_lambda"].notna().all()


def test_selection_sees_the_values_of_the_choosing_set_alone(prepare: Prepare) -> None:
    """The other columns do not change the selection, even if their values are better."""
    runs = [record("squad", BERT, istar(weight), 1, value) for weight, value in ((-1, 0.5), (-3, 0.6), (-5, 0.4))]
    frame = prepare(*runs)
    [chosen_weight] = configurations.select_cell(frame, "istar").runs["reg.lambda"]
    assert chosen_weight == -3
    tempting_values = {-1.0: 0.99, -3.0: 0.01, -5.0: 0.5}
    irrelevant_columns = [name for name in frame if name.startswith("validation.") or name.startswith("isoscore")]
    for name in [*irrelevant_columns, "value", "selection", "test.f1", "constant", "seconds", "epoch"]:
        frame[name] = frame["reg.lambda"].map(tempting_values)
    [same_weight] = configurations.select_cell(frame, "istar").runs["reg.lambda"]
    assert same_weight == -3
    frame["selection_merit"] = frame["reg.lambda"].map(tempting_values)
    [other_weight] = configurations.select_cell(frame, "istar").runs["reg.lambda"]
    assert other_weight == -1


def test_the_files_of_a_model_count_and_not_its_path(prepare: Prepare) -> None:
    """After new weights were saved to a folder, a run with them used to count as a repetition of the earlier run."""
    frame = prepare(
        record("rte", "mine/model", BASE, 1, name="old", weights="1234"),
        record("rte", "mine/model", BASE, 1, name="new", weights="5678"),
        record("rte", "a/copy/model", BASE, 2, name="copy", weights="5678"),
    ).set_index("name")
    assert not frame["repeated"].any()
    assert frame.loc["new", "configuration"] == frame.loc["copy", "configuration"] != frame.loc["old", "configuration"]


def test_a_seed_counts_once(prepare: Prepare) -> None:
    frame = prepare(*(record("rte", BERT, BASE, 1, 0.5) for _ in range(3)), record("rte", BERT, BASE, 2, 0.7))
    cell = configurations.select_cell(frame, "base")
    assert cell.seeds == [1, 2]
    assert cell.mean_and_std("accuracy").mean == pytest.approx(60)
    assert frame["repeated"].sum() == 2


def test_collapsed_failed_and_pruned_are_told(prepare: Prepare) -> None:
    frame = prepare(
        record("rte", BERT, istar(), 1, 0.6),
        record("rte", BERT, istar(), 2, 0.5, changes={"collapsed": {"validation": True}}),
        record("rte", BERT, istar(), 3, status="failed"), record("rte", BERT, istar(-5), 3, status="failed"),
        record("rte", BERT, istar(-5), 4, 0.99, status="pruned"),
        record("rte", BERT, istar(-5), 5, status="unfinished"), record("rte", BERT, cosreg(), 5, status="failed"),
    )  # fmt: skip
    cell = configurations.select_cell(frame, "istar")
    assert (cell.seeds, cell.num_failed, cell.num_pruned) == ([1, 2], 1, 1)
    assert cell.mean_and_std("accuracy").mean == pytest.approx(55)
    cosreg_cell = configurations.select_cell(frame, "cosreg")
    assert (cosreg_cell.runs.empty, cosreg_cell.seeds, cosreg_cell.num_failed) == (True, [], 1)
    remarks = {x[1].text: x[-1].text for x in paper_tables.build_table1_sheet(configurations.select_cells(frame)).rows}
    assert remarks["I-STAR"].startswith("1 collapsed; 1 failed; 1 pruned")
    assert remarks["CosReg"] == "no finished run; 1 failed"
    sheet = paper_tables.build_excluded_runs_sheet(frame, {"x/y": "x/y holds no run"}, "x")
    assert sorted(row[1].text for row in sheet.rows) == ["failed"] * 3 + ["not read", "pruned", "unfinished"]


def test_ablations_do_not_fill_table1(prepare: Prepare) -> None:
    frame = prepare(
        record("rte", BERT, istar(-1), 1, 0.5), record("rte", BERT, istar(-1, layers=[1]), 1, 0.9),
        record("rte", BERT, cosreg(1), 1, 0.5), record("rte", BERT, cosreg(-1), 1, 0.9),
        record("rte", BERT, cosreg(1, "all"), 1, 0.9), record("rte", BERT, istar(0.0), 1, 0.4),
    )  # fmt: skip
    means = {cell.family: cell.mean_and_std("accuracy").mean for cell in configurations.select_cells(frame)}
    # A penalty with a weight of 0 counts as Base.
    assert means == {"istar": pytest.approx(50), "cosreg": pytest.approx(50), "base": pytest.approx(40)}


def test_a_value_that_is_no_number_is_not_averaged(prepare: Prepare) -> None:
    frame = prepare(record("rte", BERT, BASE, 1, 0.5), record("rte", BERT, BASE, 2, float("nan")))
    assert configurations.select_cell(frame, "base").seeds == [1]
    [row] = paper_tables.build_excluded_runs_sheet(frame, {}, "").rows
    assert row[1].text == "without a value"


def test_beside_the_paper_and_base(prepare: Prepare) -> None:
    frame = prepare(
        *(record("rte", BERT, BASE, seed, 0.60 + 0.01 * seed) for seed in (1, 2, 3)),
        *(record("rte", BERT, istar(-1, 0.8), seed, 0.62 + 0.01 * seed**2, optim__lr=1e-5) for seed in (2, 3, 4)),
    )
    rows = paper_tables.build_table1_sheet(configurations.select_cells(frame)).frame.set_index("method")
    assert rows.loc["Base", "paper_mean"] == 62.24
    assert rows.loc["Base", "minus_paper"] == pytest.approx(62 - 62.24)
    assert rows.loc["I-STAR", ["paper_mean", "paper_std"]].tolist() == [62.53, 0.70]
    assert rows.loc["I-STAR", "pairs"] == 2
    assert rows.loc["I-STAR", "minus_base"] == pytest.approx((66 - 62 + 71 - 63) / 2)
    assert rows.loc["I-STAR", "differs_from_base"] == "optim.lr"
    assert rows["split"].unique().tolist() == ["validation"]
    table2_rows = paper_tables.build_table2_sheet(configurations.select_cells(frame), frame).rows
    texts = [entry.text for entry in table2_rows[0]]
    assert texts == ["rte", "-1 | 0.8", "3", "71.67", "1", "-1 | 0.8", "same", "validation"]
    assert len(table2_rows) == 1


# The last column of the paper, with a further digit. The paper has 0.36 for ALBERT, whose nine zetas sum to 3.4.
PAPER_AVERAGES = {
    "albert/albert-base-v2": "-1.44 | 0.378",
    BERT: "-2.11 | 0.444",
    "distilbert/distilbert-base-cased": "-2.33 | 0.4",
}


@pytest.mark.parametrize(("model", "average"), PAPER_AVERAGES.items())
def test_the_tuned_penalties_of_the_paper_have_its_averages(model: str, average: str) -> None:
    pairs = [paper.look_up_tuned_penalty(model.partition("/")[2], task) for task in paper.PAPER_TASKS]
    weight, zeta = np.mean([pair for pair in pairs if pair], axis=0)
    assert f"{weight:.3g} | {zeta:.3g}" == average


def test_the_averages_of_table_2(prepare: Prepare) -> None:
    model, average = BERT, PAPER_AVERAGES[BERT]
    pairs = {task: paper.look_up_tuned_penalty(model.partition("/")[2], task) for task in paper.PAPER_TASKS}
    frame = prepare(*(record(task, model, istar(*pair), 1) for task, pair in pairs.items() if pair))
    sheet = paper_tables.build_table2_sheet(configurations.select_cells(frame), frame)
    assert [entry.text for entry in sheet.rows[-1]] == [
        "average of 9 tasks", average, "-", "-", "-", average, "same", "-"
    ]  # fmt: skip
    assert sheet.frame["seeds"].tolist() == [1] * 9 + [None]


@pytest.mark.parametrize(("model", "paper_average"), [(BERT, "-1 | 0.8"), ("org/mine", "-")])
def test_the_papers_average_is_over_the_tasks_with_runs(prepare: Prepare, model: str, paper_average: str) -> None:
    frame = prepare(record("rte", model, istar(-1, 0.2), 1), record("cola", model, istar(-2, 0.6), 1))
    rows = paper_tables.build_table2_sheet(configurations.select_cells(frame), frame).rows
    texts = [entry.text for entry in rows[-1]]
    assert (texts[0], texts[1], texts[5]) == ("average of 2 tasks", "-1.5 | 0.4", paper_average)


def test_the_best_mean_is_bold(prepare: Prepare) -> None:
    frame = prepare(
        record("rte", BERT, BASE, 1, 0.61234),
        record("rte", BERT, istar(), 1, 0.612341),
        record("rte", BERT, cosreg(), 1, 0.60),
    )
    bold = {x[1].text: x[4].bold for x in paper_tables.build_table1_sheet(configurations.select_cells(frame)).rows}
    assert bold == {"Base": True, "I-STAR": True, "CosReg": False}


def test_fewer_seeds_are_marked_and_not_bold(prepare: Prepare) -> None:
    frame = prepare(
        *(record("rte", BERT, BASE, seed, 0.60) for seed in range(1, 6)),
        *(record("rte", BERT, cosreg(), seed, 0.58) for seed in range(1, 6)),
        record("rte", BERT, istar(), 1, 0.70),
    )
    rows = {row[1].text: row for row in paper_tables.build_table1_sheet(configurations.select_cells(frame)).rows}
    assert {name: row[4].bold for name, row in rows.items()} == {"Base": True, "I-STAR": False, "CosReg": False}
    assert "1 of 5 seeds" in rows["I-STAR"][-1].text
    assert not any("seeds" in rows[name][-1].text for name in ("Base", "CosReg"))


CONSTANT = {"collapsed": {"validation": True}}


@pytest.mark.parametrize("changes", [CONSTANT, {"collapsed": {}}, {"collapsed": {"validation": False}}])
def test_a_collapsed_cell_is_marked_and_never_bold(prepare: Prepare, changes: dict[str, Any]) -> None:
    """A cell is collapsed if its predictions are constant, or if every seed has the score of a constant prediction."""
    frame = prepare(
        *(record("rte", BERT, istar(), seed, 0.5, changes=changes) for seed in (1, 2, 3)),
        *(record("rte", BERT, BASE, seed, 0.4 + seed / 100) for seed in (1, 2)),
    )
    rows = {row[1].text: row for row in paper_tables.build_table1_sheet(configurations.select_cells(frame)).rows}
    assert (rows["I-STAR"][4].text, rows["I-STAR"][4].bold) == ("50.00 ± 0.00 (collapsed)", False)
    assert (rows["Base"][4].text, rows["Base"][4].bold) == ("41.50 ± 0.71", True)
    [row] = paper_tables.build_table2_sheet(configurations.select_cells(frame), frame).rows
    assert row[3].text == "50.00 (collapsed)"


def test_costs(prepare: Prepare) -> None:
    frame = prepare(*(record("rte", BERT, istar(), seed) for seed in (1, 2, 3)), record("rte", BERT, BASE, 9))
    refreshes = {folder: [1.0, 2.0] for folder in frame["folder"]}
    rows = paper_tables.build_cost_sheet(frame, refreshes).frame.set_index("method")
    assert rows.loc["I-STAR", ["runs", "seconds_mean", "seconds_std", "seconds_sum"]].tolist() == [3, 62, 1, 186]
    assert rows.loc["I-STAR", "shrinkage_seconds_mean"] == 3
    assert rows.loc["I-STAR", "shrinkage_share"] == pytest.approx(9 / 186)
    assert rows.loc["Base", "seconds_sum"] == 69


def test_totals_do_not_repeat_a_column(prepare: Prepare) -> None:
    rte_records = [record("rte", BERT, istar(), 1), record("rte", BERT, BASE, 9)]
    assert paper_tables.build_cost_sheet(prepare(*rte_records), {}).notes == ()
    sheet = paper_tables.build_cost_sheet(prepare(*rte_records, record("cola", BERT, BASE, 7)), {})
    base_seconds = sheet.frame.set_index("method").loc["Base", "seconds_sum"]
    assert len(base_seconds) == 2
    total = format_duration(base_seconds.sum())
    assert sheet.notes == (f"All rows of a method together: Base {total}.",)


@pytest.mark.parametrize(
    ("key", "value", "label"),
    [
        ("target", "output_embeddings", "CosReg λ=1 on output embeddings"),
        ("points", "content", "CosReg λ=1 content tokens"),
    ],
)
def test_penalties_of_other_points_are_methods_of_their_own(prepare: Prepare, key: str, value: str, label: str) -> None:
    """Table 1 compares penalties of hidden states, as the paper does; other penalties are not its configurations."""
    last_layer = record("clm", "new", cosreg(), 1, 20.0)
    other_run = record("clm", "new", {**cosreg(), key: value}, 1, 10.0)
    frame = prepare(last_layer, other_run)
    assert set(frame["method"]) == {"CosReg λ=1", label}
    cell = configurations.select_cell(frame, "cosreg")
    assert (cell.num_configurations, cell.first_run["value"]) == (1, 20.0)


def test_a_training_is_described_by_its_steps_or_its_epochs(prepare: Prepare) -> None:
    frame = prepare(
        record("rte", BERT, BASE, 1, trainer__max_steps=-1), record("rte", BERT, BASE, 2, trainer__max_steps=600)
    )
    by_epochs, by_steps = map(
        configurations.describe_hyperparameters, configurations.row_dicts(frame.sort_values("seed"))
    )
    assert ("epochs 3" in by_epochs, "steps" in by_epochs) == (True, False)
    assert ("steps 600" in by_steps, "epochs" in by_steps) == (True, False)


def test_one_collapsed_seed_does_not_make_a_collapsed_cell(prepare: Prepare) -> None:
    frame = prepare(
        record("rte", BERT, istar(), 1, 0.5, changes=CONSTANT),
        record("rte", BERT, istar(), 2, 0.6),
        # A single run may have the score of a constant prediction by chance.
        record("rte", BERT, BASE, 1, 0.5),
    )
    rows = {row[1].text: row for row in paper_tables.build_table1_sheet(configurations.select_cells(frame)).rows}
    assert (rows["I-STAR"][4].text, rows["I-STAR"][4].bold) == ("55.0 ± 7.1", True)
    assert rows["Base"][4].text == "50.00"


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(-0.001, "+.2f", "+0.00"), (0.004, "+.2f", "+0.00"), (-0.01, "+.2f", "-0.01"), (-1e-9, ".4f", "0.0000"),
     (0, "d", "0"), (None, "g", "-"), (-0.5, "g", "-0.5")],
)  # fmt: skip
def test_format_number(value: float | None, form: str, text: str) -> None:
    assert paper_tables.format_number(value, form) == text


def test_a_method_is_named_with_its_set_point(prepare: Prepare) -> None:
    target_reg = istar(10.0, target_score=0.15, side="below")
    keep_reg = {**cosreg(10.0), "target_score": "keep", "side": "both"}
    frame = prepare(record("rte", BERT, target_reg, 1), record("rte", BERT, keep_reg, 1))
    assert set(frame["method"]) == {"I-STAR λ=10 ζ=0.4 target=0.15 side=below", "CosReg λ=10 target=keep"}
