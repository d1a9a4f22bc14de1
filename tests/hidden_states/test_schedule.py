"""Lambda as a function of the step."""

import math

import pytest
import torch
from transformers import get_scheduler

from istar.errors import UserError
from istar.hidden_states.attached_penalty import weight_at


@pytest.mark.parametrize(
    ("schedule", "name", "warmup"),
    [
        *(("linear", "linear", warmup) for warmup in (0.0, 0.1, 0.25, 0.52)),
        *(("cosine", "cosine", warmup) for warmup in (0.0, 0.1, 0.25, 0.52)),
        *(("warmup", "constant_with_warmup", warmup) for warmup in (0.1, 0.25, 0.52)),
    ],
)
def test_schedules_are_those_of_learning_rates(schedule, name, warmup):
    steps, weight = 23, -0.7
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=round(warmup * steps), num_training_steps=steps)
    for step in range(steps):
        expected = weight * optimizer.param_groups[0]["lr"]
        assert weight_at(step, steps, weight, schedule, warmup) == pytest.approx(expected, rel=1e-12, abs=1e-15)
        optimizer.step()
        scheduler.step()


def test_a_constant_weight_is_exact_and_needs_no_steps():
    assert {weight_at(step, 0, 0.1 + 0.2) for step in range(3)} == {0.1 + 0.2}


@pytest.mark.parametrize(("schedule", "end"), [("warmup", 2.0), ("linear", 0.0), ("cosine", 0.0)])
def test_behind_the_last_step_the_weight_stays_as_at_the_end(schedule, end):
    assert weight_at(10, 10, 2.0, schedule, 0.5) == weight_at(17, 10, 2.0, schedule, 0.5) == pytest.approx(end)
    assert weight_at(0, 10, 2.0, schedule, 0.5) == 0


def test_a_warmup_over_all_steps_ends_below_the_weight():
    assert [weight_at(step, 4, 1.0, "warmup", 1.0) for step in range(4)] == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("schedule", "warmup", "message"),
    [
        ("linaer", 0.0, "schedule=linaer is not known; did you mean linear"),
        ("linear", 1.5, r"warmup=1\.5 is outside \[0, 1\]"),
        ("linear", math.nan, "warmup=nan is outside"),
        ("constant", 0.1, r"warmup=0\.1 has no effect with schedule=constant"),
        ("warmup", 0.0, "schedule=warmup needs a warmup above 0"),
    ],
)
def test_what_is_no_schedule_is_refused_in_one_line(schedule, warmup, message):
    with pytest.raises(UserError, match=message) as error:
        weight_at(0, 10, 1.0, schedule, warmup)
    assert "\n" not in str(error.value)
