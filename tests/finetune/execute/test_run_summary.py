"""The table of a run, its picture of IsoScore by layer, and what both say about lambda."""

from typing import Any

import pytest

from istar.drawing.rendering import render
from istar.finetune.execute.run_summary import build_isotropy_plot, build_run_table
from istar.finetune.execute.train import advise_on_lambda
from tests.reports.synthetic import BASE, cosreg, istar, record


def test_the_heading_names_the_model_as_all_tables():
    run = record("rte", "/models/all_minilm/model", istar(), 1)
    assert str(build_run_table(run).title).endswith(" · all_minilm")


@pytest.mark.parametrize(
    ("reg", "after", "expected"),
    [
        (istar(-1), 0.3, "IsoScore rose, although λ < 0 lowers it"),
        (istar(1), 0.1, "IsoScore fell, although λ > 0 raises it"),
        (istar(-1), 0.1, ""),
        (istar(1), 0.3, ""),
        (BASE, 0.1, ""),
        (istar(1) | {"target_score": 0.1}, 0.1, ""),
    ],
)
def test_a_score_that_moves_against_lambda_is_named(reg: dict[str, Any], after: float, expected: str) -> None:
    run = record("rte", "bert", reg, 1)
    run.isotropy["before"]["union"], run.isotropy["after"]["union"] = 0.2, after
    caption = str(build_run_table(run).caption)
    assert expected in caption
    assert ("although" in caption) == bool(expected)


@pytest.mark.parametrize("value", [20.0, 40.0])
def test_a_perplexity_above_that_of_token_frequencies_is_named(value: float) -> None:
    run = record("clm", "gpt2", istar(), 1)
    run.headline.update(metric="perplexity", value=value)
    run.baseline["perplexity"] = 30.0
    assert ("The model is worse than that" in str(build_run_table(run).caption)) == (value > 30)


@pytest.mark.parametrize(
    ("reg", "isoscore", "is_advised"),
    [
        (istar(-1), 0.23, True),
        (istar(-3), 0.21, True),
        (istar(-1), 0.072, False),
        (istar(-0.1), 0.23, False),
        (istar(1), 0.23, False),
        (istar(-1) | {"target_score": "keep"}, 0.23, False),
        (cosreg(-1), 0.23, False),
        (BASE, 0.23, False),
    ],
)
def test_a_lambda_that_is_known_to_harm_is_named(reg: dict[str, Any], isoscore: float, is_advised: bool) -> None:
    advice = advise_on_lambda(record("rte", "bert", reg, 1).key, isoscore)
    assert advice.startswith(f"IsoScore of layers 1 to L is {isoscore:.3f} before training") == is_advised
    assert bool(advice) == is_advised


def test_it_shows_every_layer_before_and_after_training():
    run = record("rte", "bert", istar(), 1)
    run.isotropy["before"] = {"0": 0.1, "1": 0.2, "10": 0.3, "2": 0.4, "union": 0.5}
    run.isotropy["after"] = {"0": 0.5, "1": 0.6, "10": 0.7, "2": 0.8, "union": 0.9}
    plot = build_isotropy_plot(run)
    [panel] = plot.panels
    before, after = panel.lines
    assert before.x == after.x == (0.0, 1.0, 2.0, 10.0)
    assert (before.label, before.y) == ("before training", (0.1, 0.2, 0.4, 0.3))
    assert (after.label, after.y) == ("after training", (0.5, 0.6, 0.8, 0.7))
    assert plot.x_names[0.0] == "emb."
    assert render(plot, ["png"])["png"].startswith(b"\x89PNG")
