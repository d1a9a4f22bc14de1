"""Lay out a W&B workspace for the project's runs: `python sweep/wandb/workspace.py <entity> [--project istar]`.

    --dry-run   print the workspace as JSON and ask no server

Needs the extra `dashboards`. The panels read what istar logs: see docs/training.md.
"""

import argparse
import json
import sys
import warnings
from typing import Any

from istar.runs.names import isotropy_key

try:
    with warnings.catch_warnings():
        # The package still uses pydantic's old validators.
        warnings.simplefilter("ignore", DeprecationWarning)
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "wandb_workspaces":
        raise
    print("error: this needs wandb-workspaces: pip install -e '.[dashboards]'", file=sys.stderr)
    sys.exit(2)

UNION = isotropy_key("union")
METHOD = wr.Config("reg.name")


def summary(name: str) -> Any:
    """What a run's summary holds, which is of the epoch that counts."""
    return wr.SummaryMetric(name)


def scatter(title: str, x: Any, y: Any, **settings: Any) -> Any:
    """A point for each run."""
    return wr.ScatterPlot(title=title, x=x, y=y, **settings)


def by_step(title: str, *names: str, **settings: Any) -> Any:
    """Curves over the optimizer's steps."""
    return wr.LinePlot(title=title, x="trainer/global_step", y=list(names), **settings)


def by_method(title: str, *names: str) -> Any:
    """Means over the runs of each method."""
    return wr.BarPlot(title=title, metrics=list(names), groupby=METHOD, groupby_aggfunc="mean")


def workspace(entity: str, project: str) -> Any:
    """Four sections: what the paper plots, the layers, the training, its cost."""
    isotropy = summary(UNION)
    return ws.Workspace(
        entity=entity,
        project=project,
        name="istar",
        sections=[
            ws.Section(
                name="Performance and isotropy",
                is_open=True,
                panels=[
                    scatter("Performance against IsoScore", isotropy, summary("headline/value"), regression=True),
                    scatter("IsoScore against lambda", wr.Config("reg.lambda"), isotropy),
                    scatter("Performance against lambda", wr.Config("reg.lambda"), summary("headline/value")),
                    by_method(
                        "Performance by method, beside a constant prediction", "headline/value", "constant/accuracy"
                    ),
                ],
            ),
            ws.Section(
                name="IsoScore by layer",
                is_open=True,
                panels=[
                    by_step("IsoScore of layers 1 to L together", UNION),
                    wr.LinePlot(
                        title="IsoScore of each layer",
                        x="trainer/global_step",
                        metric_regex="isotropy/.+/isoscore",
                    ),
                ],
            ),
            ws.Section(
                name="Training",
                is_open=True,
                panels=[
                    by_step("Task loss", "train/task_loss"),
                    by_step("Penalty, weighed by lambda", "train/penalty"),
                    by_step("Validation", "val/accuracy", "val/f1", "val/matthews_correlation", "val/pearson"),
                    by_step("Norm of the gradient", "train/grad_norm"),
                ],
            ),
            ws.Section(
                name="Cost",
                panels=[
                    by_method("Seconds of a run", "seconds/total"),
                    by_step("Seconds of each shrinkage covariance", "shrinkage/seconds"),
                    scatter("Performance against seconds", summary("seconds/total"), summary("headline/value")),
                ],
            ),
        ],
    )


def main() -> None:
    """Save it, or print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("entity", help="W&B user or team")
    parser.add_argument("--project", default="istar")
    parser.add_argument("--dry-run", action="store_true", help="print the workspace as JSON and ask no server")
    options = parser.parse_args()
    made = workspace(options.entity, options.project)
    if options.dry_run:
        print(json.dumps(made._to_model().spec.model_dump(by_alias=True, exclude_none=True), indent=2))
    else:
        print(made.save().url)


if __name__ == "__main__":
    main()
