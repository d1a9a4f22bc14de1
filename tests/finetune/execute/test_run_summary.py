"""The picture of a run: IsoScore of every layer before and after training."""

from istar.drawing.rendering import render
from istar.finetune.execute.run_summary import build_isotropy_plot
from tests.reports.synthetic import istar, record


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
