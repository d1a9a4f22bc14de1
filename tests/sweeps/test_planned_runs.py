from collections.abc import Callable
from pathlib import Path

import pytest

from istar.errors import UserError
from istar.reports.plan_file import flatten_settings
from istar.sweeps import planned_runs
from istar.sweeps.planned_runs import PlannedConfiguration
from istar.sweeps.sweep import SweepRuns
from tests.sweeps.conftest import TINY, with_all_runs, with_grids

MakeRuns = Callable[..., SweepRuns]
SMALL = TINY[1:]


def list_configurations(runs: SweepRuns) -> list[PlannedConfiguration]:
    if runs.request.settings.search == "grid":
        with_all_runs(runs)
    return planned_runs.list_planned_configurations(runs)


def test_configurations_are_the_runs_without_their_seeds(make_runs: MakeRuns) -> None:
    sweep = make_runs("reg=none,cosreg", "optim.lr=1e-3,1e-4", "seed=1,2", *SMALL)
    configurations = list_configurations(sweep)
    assert [entry.method for entry in configurations] == ["Base", "Base", "CosReg λ=1", "CosReg λ=1"]
    assert all(entry.seeds == [1, 2] for entry in configurations)
    assert {name for entry in configurations for name in entry.names} == set(sweep.trial_by_name)
    assert {entry.group for entry in configurations} == {("demo", "tiny", "Base"), ("demo", "tiny", "CosReg")}
    assert all(entry.examples == 32 for entry in configurations)
    fields = planned_runs.make_plan_fields(configurations, sweep)
    # All settings of a run are either common to all runs or those of its configuration.
    for entry, configuration in zip(configurations, fields["configurations"], strict=True):
        assert fields["settings"] | configuration["settings"] == entry.settings
    base, cosreg = fields["methods"]
    assert (base["configurations"], cosreg["configurations"]) == (2, 2)
    assert cosreg["grid"] == {"optim.lr": [1e-3, 1e-4]}
    assert cosreg["settings"]["reg.lambda"] == 1.0
    assert "optim.lr" not in fields["settings"]


@pytest.mark.parametrize(
    ("arguments", "seeds", "comparisons", "pairs"),
    [
        (("reg=none,cosreg", "seed=1,2,3"), [], 1, 3),
        (("reg=cosreg", "seed=1,2,3"), [], 0, 3),
        (("reg=none,cosreg,istar", "task=demo,demo_sentence", "seed=1"), [], 4, 1),
        (("reg=none,istar", "optim.lr=1e-3,1e-4", "seed=1"), [1, 2, 3], 1, 3),
        (("reg=none,istar", "optim.lr=1e-3,1e-4", "seed=1"), [2, 3], 1, 3),
    ],
)
def test_the_comparisons(
    make_runs: MakeRuns, arguments: tuple[str, ...], seeds: list[int], comparisons: int, pairs: int
) -> None:
    configurations = list_configurations(make_runs(*arguments, *SMALL))
    assert planned_runs.count_comparisons(configurations, seeds) == comparisons
    assert planned_runs.count_seed_pairs(configurations, seeds) == pairs


def test_without_base_there_is_no_comparison(make_runs: MakeRuns) -> None:
    configurations = list_configurations(make_runs("reg=istar", "reg.lambda=-1,0,1", "seed=1", *SMALL))
    # Without runs of Base, there is nothing to compare with; a run with λ = 0 has the method name I-STAR.
    assert planned_runs.count_comparisons(configurations, []) == 0


GRIDS = {
    "base": {"reg": "none"},
    "down": {"reg": "istar", "reg.lambda": -1},
    "up": {"reg": "istar", "reg.lambda": 1},
    "placebo": {"reg": "random_direction", "reg.lambda": 1},
}
LABELS = ["Base (grid base)", "I-STAR (grid down)", "I-STAR (grid up)", "random direction (grid placebo)"]


class TestNamedGrids:
    """Each grid is a method, because `sweep.seeds` repeats the best run of each."""

    @pytest.fixture
    def sweep(self, make_runs: MakeRuns) -> SweepRuns:
        arguments = ("task=demo,demo_sentence", "optim.lr=1e-3,1e-4", "seed=1", *SMALL)
        return with_grids(make_runs(*arguments), GRIDS, seeds=[1, 2, 3])

    def test_the_groups_are_those_of_the_sweep(self, sweep: SweepRuns) -> None:
        configurations = list_configurations(sweep)
        group_by_run = {name: entry.group for entry in configurations for name in entry.names}
        pairs = {(group_by_run[entry.name], sweep.selection_group(entry)) for entry in sweep.state.entries}
        assert (
            len(pairs)
            == len({plan_group for plan_group, _ in pairs})
            == len({sweep_group for _, sweep_group in pairs})
            == 2 * 4
        )
        assert {entry.group for entry in configurations if entry.grid == "up"} == {
            ("demo", "tiny", "I-STAR (grid up)"), ("demo_sentence", "tiny", "I-STAR (grid up)"),
        }  # fmt: skip

    def test_the_fields(self, sweep: SweepRuns) -> None:
        configurations = list_configurations(sweep)
        fields = planned_runs.make_plan_fields(configurations, sweep)
        assert [entry["method"] for entry in fields["methods"]] == LABELS
        assert [entry["configurations"] for entry in fields["methods"]] == [2] * 4
        assert [entry["settings"].get("reg.lambda") for entry in fields["methods"]] == [None, -1, 1, 1]
        assert all(entry["grid"] == {"optim.lr": [1e-3, 1e-4]} for entry in fields["methods"])
        assert [entry["grid"] for entry in fields["configurations"]] == [entry.grid for entry in configurations]
        assert (
            "Of each task, model, method and grid, the run with the best such value is repeated" in fields["selection"]
        )
        # On two tasks, each grid has two learning rates, and the better one is repeated with two more seeds.
        assert fields["budget"]["runs"] == 2 * 4 * (2 + 2)

    def test_the_comparisons(self, sweep: SweepRuns) -> None:
        configurations = list_configurations(sweep)
        assert planned_runs.count_comparisons(configurations, [1, 2, 3]) == 2 * 3
        # Without repetitions, a report compares each method with the settings in its name.
        assert planned_runs.count_comparisons(configurations, []) == 2 * 3
        assert (
            planned_runs.count_comparisons([entry for entry in configurations if entry.grid != "base"], [1, 2, 3]) == 0
        )

    def test_the_hypotheses(self, sweep: SweepRuns) -> None:
        configurations = list_configurations(sweep)
        metrics = {"demo": "accuracy", "demo_sentence": "accuracy"}
        hypotheses = planned_runs.make_hypotheses(configurations, metrics)
        assert [text.split(" changes ")[0] for text in hypotheses] == LABELS[1:]
        [hypothesis] = planned_runs.make_hypotheses(
            [entry for entry in configurations if entry.grid == "base"], metrics
        )
        assert hypothesis.startswith("Base has, with each of its configurations")

    def test_one_grid_may_have_several_methods(self, make_runs: MakeRuns) -> None:
        grids = {"small": {"reg": "none,istar", "optim.lr": "1e-5,1e-4"}, "large": {"reg": "none,istar", "optim.lr": 1}}
        sweep = with_grids(make_runs("seed=1", *SMALL), grids, seeds=[1, 2])
        configurations = list_configurations(sweep)
        assert (
            len({entry.group for entry in configurations})
            == len({*map(sweep.selection_group, sweep.state.entries)})
            == 4
        )
        assert planned_runs.count_comparisons(configurations, [1, 2]) == 2

    def test_of_a_search(self, make_runs: MakeRuns) -> None:
        arguments = ("optim.lr=1e-3,1e-4", "seed=1", "sweep.search=optuna", "sweep.trials=6", *SMALL)
        sweep = with_grids(make_runs(*arguments), GRIDS, seeds=[1, 2])
        configurations = list_configurations(sweep)
        assert [entry.grid for entry in configurations] == list(GRIDS)
        fields = planned_runs.make_plan_fields(configurations, sweep)
        assert [entry["method"] for entry in fields["methods"]] == LABELS
        assert fields["budget"]["runs"] == 6 + 4
        assert planned_runs.count_comparisons(configurations, [1, 2]) == 3


def test_the_budget(make_runs: MakeRuns) -> None:
    arguments = [argument for argument in SMALL if not argument.startswith("trainer.max_epochs")]
    configurations = list_configurations(make_runs("reg=none,cosreg", "trainer.max_epochs=2,5", "seed=1", *arguments))
    grid_budget = {"runs": 4, "epochs": 2 * (2 + 5), "training_examples": 32 * 2 * (2 + 5), "finished_before": 1}
    assert planned_runs.compute_budget(configurations, [], None, 1) == grid_budget
    # The best run of each method, which may be the one with five epochs, is repeated with two more seeds.
    repeated_budget = planned_runs.compute_budget(configurations, [1, 2, 3], None, 0)
    assert (repeated_budget["runs"], repeated_budget["epochs"]) == (4 + 4, 14 + 4 * 5)
    assert repeated_budget["training_examples"] == 32 * (14 + 4 * 5)
    step_configurations = list_configurations(
        make_runs("seed=1", *SMALL, "trainer.max_steps=3", "trainer.accumulate_grad_batches=2")
    )
    # Three steps of two micro-batches of eight examples are fewer examples than two epochs have.
    assert planned_runs.compute_budget(step_configurations, [], None, 0)["training_examples"] == 3 * 2 * 8


def test_a_search_has_ranges(make_runs: MakeRuns) -> None:
    arguments = [argument for argument in TINY if not argument.startswith("trainer.max_epochs")]
    sweep = make_runs("reg=istar_scratch", "reg.lambda=interval(-1,1)", "optim.lr=1e-3,1e-4", "seed=1",
                      "trainer.max_epochs=int(interval(1,4))", "sweep.search=optuna", "sweep.trials=7",
                      *arguments)  # fmt: skip
    [entry] = list_configurations(sweep)
    epochs_range = {"low": 1, "high": 4}
    assert entry.ranges == {
        "reg.lambda": {"low": -1.0, "high": 1.0}, "optim.lr": [1e-3, 1e-4], "trainer.max_epochs": epochs_range,
    }  # fmt: skip
    assert (entry.seeds, entry.names) == ([1], [])
    fields = planned_runs.make_plan_fields([entry], sweep)
    assert fields["sweep"]["trials"] == 7
    assert fields["budget"] == {"runs": 7, "epochs": 28, "training_examples": 7 * 4 * 32, "finished_before": 0}
    [configuration] = fields["configurations"]
    assert not entry.ranges.keys() & (fields["settings"].keys() | configuration["settings"].keys())
    assert sweep.state.entries == []


def test_a_search_ends_when_all_runs_are_tried(make_runs: MakeRuns) -> None:
    sweep = make_runs(
        "reg=none,cosreg", "optim.lr=1e-3,1e-4", "seed=1,2", "sweep.search=optuna", "sweep.trials=100", *SMALL
    )
    configurations = list_configurations(sweep)
    assert [entry.method for entry in configurations] == ["Base", "CosReg λ=1"]
    assert planned_runs.make_plan_fields(configurations, sweep)["sweep"]["trials"] == 8


def test_the_rule_of_selection(make_runs: MakeRuns) -> None:
    arguments = ("seed=1", *SMALL)
    fields_of_one_set = planned_runs.make_plan_fields(list_configurations(sweep := make_runs(*arguments)), sweep)
    assert "accuracy on the set validation" in fields_of_one_set["selection"]
    assert "looks better than it is" in fields_of_one_set["selection"]
    fields_of_two_sets = planned_runs.make_plan_fields(
        list_configurations(sweep := make_runs("task.validation_fraction=0.25", *arguments)), sweep
    )
    assert "on the set held_out" in fields_of_two_sets["selection"]
    assert "looks better than it is" not in fields_of_two_sets["selection"]
    assert fields_of_two_sets["tasks"][0]["reported_set"] == "validation"


def test_hypotheses_from_methods(make_runs: MakeRuns) -> None:
    configurations = list_configurations(make_runs("reg=none,cosreg,istar", "seed=1", *SMALL))
    first, second = planned_runs.make_hypotheses(configurations, {"demo": "accuracy"})
    assert first.startswith("CosReg changes the accuracy on demo")
    assert second.startswith("I-STAR changes")
    [hypothesis] = planned_runs.make_hypotheses([configurations[1], configurations[2]], {"demo": "accuracy"})
    assert hypothesis.startswith("The configurations of CosReg, I-STAR differ in the accuracy")


def test_runs_without_data_cannot_be_planned(make_runs: MakeRuns, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist.*\(a plan identifies its runs by their data and models\)"):
        list_configurations(make_runs("task=rte", "model=tiny", f"task.data_dir={tmp_path / 'nowhere'}", "seed=1,2"))


def test_settings_without_a_value_are_left_out(make_runs: MakeRuns) -> None:
    [entry] = list_configurations(make_runs("seed=1", *SMALL))
    assert None not in entry.settings.values()
    assert entry.settings == flatten_settings({"task": {}, **nest_settings(entry.settings)})


def nest_settings(settings: dict) -> dict:
    groups: dict[str, dict] = {}
    for key, value in settings.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return groups
