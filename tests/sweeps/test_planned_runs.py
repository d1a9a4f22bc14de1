from collections.abc import Callable
from pathlib import Path

import pytest

from istar.errors import UserError
from istar.reports.plan_file import flatten_settings
from istar.sweeps import planned_runs
from istar.sweeps.planned_runs import PlannedConfiguration
from istar.sweeps.sweep import SweepRuns
from tests.sweeps.conftest import TINY, with_all_runs, with_grids

Make = Callable[..., SweepRuns]
SMALL = TINY[1:]


def planned(runs: SweepRuns) -> list[PlannedConfiguration]:
    if runs.request.settings.search == "grid":
        with_all_runs(runs)
    return planned_runs.list_planned_configurations(runs)


def test_configurations_are_the_runs_without_their_seeds(runs: Make) -> None:
    sweep = runs("reg=none,cosreg", "optim.lr=1e-3,1e-4", "seed=1,2", *SMALL)
    found = planned(sweep)
    assert [entry.method for entry in found] == ["Base", "Base", "CosReg λ=1", "CosReg λ=1"]
    assert all(entry.seeds == [1, 2] for entry in found)
    assert {name for entry in found for name in entry.names} == set(sweep.trial_by_name)
    assert {entry.group for entry in found} == {("demo", "tiny", "Base"), ("demo", "tiny", "CosReg")}
    assert all(entry.examples == 32 for entry in found)
    fields = planned_runs.make_plan_fields(found, sweep)
    # All settings of a run are either common to all runs or those of its configuration.
    for entry, configuration in zip(found, fields["configurations"], strict=True):
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
    runs: Make, arguments: tuple[str, ...], seeds: list[int], comparisons: int, pairs: int
) -> None:
    found = planned(runs(*arguments, *SMALL))
    assert planned_runs.count_comparisons(found, seeds) == comparisons
    assert planned_runs.count_seed_pairs(found, seeds) == pairs


def test_each_setting_of_a_method_is_a_comparison(runs: Make) -> None:
    found = planned(runs("reg=istar", "reg.lambda=-1,0,1", "seed=1", *SMALL))
    # Without the grid of Base, there is nothing to compare with; λ = 0 has the name I-STAR.
    assert planned_runs.count_comparisons(found, []) == 0


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
    def sweep(self, runs: Make) -> SweepRuns:
        arguments = ("task=demo,demo_sentence", "optim.lr=1e-3,1e-4", "seed=1", *SMALL)
        return with_grids(runs(*arguments), GRIDS, seeds=[1, 2, 3])

    def test_the_groups_are_those_of_the_sweep(self, sweep: SweepRuns) -> None:
        found = planned(sweep)
        names = {name: entry.group for entry in found for name in entry.names}
        pairs = {(names[entry.name], sweep.selection_group(entry)) for entry in sweep.state.entries}
        assert len(pairs) == len({ours for ours, _ in pairs}) == len({theirs for _, theirs in pairs}) == 2 * 4
        assert {entry.group for entry in found if entry.grid == "up"} == {
            ("demo", "tiny", "I-STAR (grid up)"), ("demo_sentence", "tiny", "I-STAR (grid up)"),
        }  # fmt: skip

    def test_the_fields(self, sweep: SweepRuns) -> None:
        found = planned(sweep)
        fields = planned_runs.make_plan_fields(found, sweep)
        assert [entry["method"] for entry in fields["methods"]] == LABELS
        assert [entry["configurations"] for entry in fields["methods"]] == [2] * 4
        assert [entry["settings"].get("reg.lambda") for entry in fields["methods"]] == [None, -1, 1, 1]
        assert all(entry["grid"] == {"optim.lr": [1e-3, 1e-4]} for entry in fields["methods"])
        assert [entry["grid"] for entry in fields["configurations"]] == [entry.grid for entry in found]
        assert (
            "Of each task, model, method and grid, the run with the best such value is repeated" in fields["selection"]
        )
        # Of each grid, two learning rates, and two more seeds of the better one, on two tasks.
        assert fields["budget"]["runs"] == 2 * 4 * (2 + 2)

    def test_the_comparisons(self, sweep: SweepRuns) -> None:
        found = planned(sweep)
        assert planned_runs.count_comparisons(found, [1, 2, 3]) == 2 * 3
        # Without repetitions, a report compares each method with the settings in its name.
        assert planned_runs.count_comparisons(found, []) == 2 * 3
        assert planned_runs.count_comparisons([entry for entry in found if entry.grid != "base"], [1, 2, 3]) == 0

    def test_the_hypotheses(self, sweep: SweepRuns) -> None:
        found = planned(sweep)
        metrics = {"demo": "accuracy", "demo_sentence": "accuracy"}
        sentences = planned_runs.make_hypotheses(found, metrics)
        assert [text.split(" changes ")[0] for text in sentences] == LABELS[1:]
        [alone] = planned_runs.make_hypotheses([entry for entry in found if entry.grid == "base"], metrics)
        assert alone.startswith("Base has, with each of its configurations")

    def test_one_grid_may_have_several_methods(self, runs: Make) -> None:
        grids = {"small": {"reg": "none,istar", "optim.lr": "1e-5,1e-4"}, "large": {"reg": "none,istar", "optim.lr": 1}}
        sweep = with_grids(runs("seed=1", *SMALL), grids, seeds=[1, 2])
        found = planned(sweep)
        assert len({entry.group for entry in found}) == len({*map(sweep.selection_group, sweep.state.entries)}) == 4
        assert planned_runs.count_comparisons(found, [1, 2]) == 2

    def test_of_a_search(self, runs: Make) -> None:
        arguments = ("optim.lr=1e-3,1e-4", "seed=1", "sweep.search=optuna", "sweep.trials=6", *SMALL)
        sweep = with_grids(runs(*arguments), GRIDS, seeds=[1, 2])
        found = planned(sweep)
        assert [entry.grid for entry in found] == list(GRIDS)
        fields = planned_runs.make_plan_fields(found, sweep)
        assert [entry["method"] for entry in fields["methods"]] == LABELS
        assert fields["budget"]["runs"] == 6 + 4
        assert planned_runs.count_comparisons(found, [1, 2]) == 3


def test_the_budget(runs: Make) -> None:
    small = [argument for argument in SMALL if not argument.startswith("trainer.max_epochs")]
    found = planned(runs("reg=none,cosreg", "trainer.max_epochs=2,5", "seed=1", *small))
    grid = {"runs": 4, "epochs": 2 * (2 + 5), "training_examples": 32 * 2 * (2 + 5), "finished_before": 1}
    assert planned_runs.compute_budget(found, [], None, 1) == grid
    # Two more seeds of the best of each method, which may be the one with five epochs.
    repeated = planned_runs.compute_budget(found, [1, 2, 3], None, 0)
    assert (repeated["runs"], repeated["epochs"]) == (4 + 4, 14 + 4 * 5)
    assert repeated["training_examples"] == 32 * (14 + 4 * 5)
    steps = planned(runs("seed=1", *SMALL, "trainer.max_steps=3", "trainer.accumulate_grad_batches=2"))
    # Three steps of two micro-batches of eight examples, fewer than two epochs have.
    assert planned_runs.compute_budget(steps, [], None, 0)["training_examples"] == 3 * 2 * 8


def test_a_search_has_ranges(runs: Make) -> None:
    small = [argument for argument in TINY if not argument.startswith("trainer.max_epochs")]
    sweep = runs("reg=istar_scratch", "reg.lambda=interval(-1,1)", "optim.lr=1e-3,1e-4", "seed=1",
                 "trainer.max_epochs=int(interval(1,4))", "sweep.search=optuna", "sweep.trials=7", *small)  # fmt: skip
    [entry] = planned(sweep)
    epochs = {"low": 1, "high": 4}
    assert entry.ranges == {
        "reg.lambda": {"low": -1.0, "high": 1.0}, "optim.lr": [1e-3, 1e-4], "trainer.max_epochs": epochs,
    }  # fmt: skip
    assert (entry.seeds, entry.names) == ([1], [])
    fields = planned_runs.make_plan_fields([entry], sweep)
    assert fields["sweep"]["trials"] == 7
    assert fields["budget"] == {"runs": 7, "epochs": 28, "training_examples": 7 * 4 * 32, "finished_before": 0}
    [configuration] = fields["configurations"]
    assert not entry.ranges.keys() & (fields["settings"].keys() | configuration["settings"].keys())
    assert sweep.state.entries == []


def test_a_search_ends_when_all_runs_are_tried(runs: Make) -> None:
    sweep = runs("reg=none,cosreg", "optim.lr=1e-3,1e-4", "seed=1,2", "sweep.search=optuna", "sweep.trials=100", *SMALL)
    found = planned(sweep)
    assert [entry.method for entry in found] == ["Base", "CosReg λ=1"]
    assert planned_runs.make_plan_fields(found, sweep)["sweep"]["trials"] == 8


def test_the_rule_of_selection(runs: Make) -> None:
    arguments = ("seed=1", *SMALL)
    same = planned_runs.make_plan_fields(planned(sweep := runs(*arguments)), sweep)
    assert "accuracy on the set validation" in same["selection"]
    assert "looks better than it is" in same["selection"]
    apart = planned_runs.make_plan_fields(planned(sweep := runs("task.validation_fraction=0.25", *arguments)), sweep)
    assert "on the set held_out" in apart["selection"]
    assert "looks better than it is" not in apart["selection"]
    assert apart["tasks"][0]["reported_set"] == "validation"


def test_hypotheses_from_methods(runs: Make) -> None:
    found = planned(runs("reg=none,cosreg,istar", "seed=1", *SMALL))
    first, second = planned_runs.make_hypotheses(found, {"demo": "accuracy"})
    assert first.startswith("CosReg changes the accuracy on demo")
    assert second.startswith("I-STAR changes")
    [alone] = planned_runs.make_hypotheses([found[1], found[2]], {"demo": "accuracy"})
    assert alone.startswith("The configurations of CosReg, I-STAR differ in the accuracy")


def test_runs_without_data_cannot_be_planned(runs: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist.*\(a plan identifies its runs by their data and models\)"):
        planned(runs("task=rte", "model=tiny", f"task.data_dir={tmp_path / 'nowhere'}", "seed=1,2"))


def test_settings_without_a_value_are_left_out(runs: Make) -> None:
    [entry] = planned(runs("seed=1", *SMALL))
    assert None not in entry.settings.values()
    assert entry.settings == flatten_settings({"task": {}, **nested(entry.settings)})


def nested(settings: dict) -> dict:
    groups: dict[str, dict] = {}
    for key, value in settings.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return groups
