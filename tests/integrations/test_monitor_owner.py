"""What the monitor callbacks share: their options are those of `istar.Monitor`, and their line shows a reading."""

import inspect
import math

import istar
from istar.integrations.monitor_owner import MonitorOptions, MonitorOwner, describe_reading
from istar.monitoring.monitor import Reading


def test_the_options_are_those_of_the_monitor_that_no_trainer_sets() -> None:
    parameters = set(inspect.signature(istar.Monitor).parameters)
    assert parameters - {"model", "optimizer", "process_group"} == set(MonitorOptions.__annotations__)


def test_a_line_has_the_first_three_measures_and_leaves_out_what_is_not_finite() -> None:
    measures = ["inter_sim", "average_norm", "isoscore", "largest_activation"]
    values = {
        "layer_1": dict(zip(measures, (0.31, math.nan, math.nan, 1.0), strict=True)),
        "layer_2": dict(zip(measures, (-0.12345, 1234.5, math.nan, 2.0), strict=True)),
    }
    line = (
        "step 7, probe: inter_sim -0.123 to 0.31, average_norm 1.23e+03 to 1.23e+03, isoscore nan to nan over 2 states"
    )
    assert describe_reading(Reading(7, "probe", values), measures) == line
    assert describe_reading(Reading(7, "training", {"head": {"inter_sim": 1.0}}), measures[:1]) == (
        "step 7: inter_sim 1 to 1 over 1 state"
    )


def test_means_are_over_the_layers_alone() -> None:
    values = {
        state: {"inter_sim": number} for state, number in (("embeddings", 9.0), ("layer_1", 1.0), ("layer_2", 2.0))
    }
    owner = MonitorOwner(None, measures=["inter_sim"])
    assert owner.name_values(Reading(0, "probe", values), "/") == {
        "embeddings/inter_sim": 9.0, "layer_1/inter_sim": 1.0, "layer_2/inter_sim": 2.0, "inter_sim": 1.5
    }  # fmt: skip
    assert owner.name_values(Reading(0, "probe", {"head": {"inter_sim": 1.0}}), "_") == {"head_inter_sim": 1.0}
