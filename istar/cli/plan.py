"""Implements `istar plan`: writes the plan of an experiment before its runs."""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar import __version__
from istar.cli.console import make_console
from istar.errors import UserError

if TYPE_CHECKING:
    from istar.sweeps.sweep import SweepRequest


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `istar`."""
    parser = commands.add_parser(
        "plan",
        help="write the plan of an experiment before its runs: istar plan sweep=table1 task=rte model=bert --out plan",
        description="Write the plan of a sweep before its runs: hypotheses, methods, grids, seeds, test and budget. "
        "`istar report --plan` names the departures of the runs from it.",
    )
    add = parser.add_argument
    overrides = "sweep=<name>, and overrides as for istar train -m, before all options"
    add("overrides", nargs="+", metavar="override", help=overrides)
    add("--out", type=Path, default=Path("plan"), help="folder for plan.yaml and plan.md (default: plan)")
    hypothesis = "a hypothesis, as a sentence; repeatable (default: made from the methods)"
    add("--hypothesis", action="append", default=[], help=hypothesis)
    add("--test", choices=("t", "sign-flip"), default="t", help="paired test against Base (default: t)")
    alpha = "probability of any false difference among all comparisons, by Holm's correction (default: 0.05)"
    add("--alpha", type=float, default=0.05, help=alpha)
    sd = "standard deviation of the paired differences, in the metric's unit, for the smallest difference"
    add("--sd", type=float, help=sd)
    add("--power", type=float, default=0.8, help="probability of finding that difference (default: 0.8)")
    add("--force", action="store_true", help="write a new plan if there is one, which is kept under another name")
    parser.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """List the runs of the sweep, write the plan and print its path and its hash."""
    for text in options.hypothesis:
        if not text.strip():
            raise UserError("--hypothesis is empty; expected a sentence, such as 'I-STAR raises the accuracy on RTE'")
    # Imported here so that `istar --help` does not wait for the libraries.
    from datetime import UTC, datetime

    from istar.reports import plan_file
    from istar.runs.provenance import code_state
    from istar.sweeps import planned_runs
    from istar.sweeps.sweep import list_runs

    plan_file.check_plan_folder(options.out, options.force)
    # Refuses wrong options before the runs are listed.
    plan_file.build_test_fields(options.test, options.alpha, 1, 2, options.sd, options.power)
    arguments = [f"+{text}" if text.startswith("sweep=") else text for text in options.overrides]
    command = shlex.join(["istar", "train", "-m", *arguments])
    console = make_console(stderr=True)
    with _request(arguments, command) as request:
        runs = list_runs(request, console)
        planned = planned_runs.configurations(runs)
        fields = planned_runs.contents(planned, runs)
    metrics = {task["name"]: task["metric"] for task in fields["tasks"]}
    seeds = request.settings.seeds
    comparisons, pairs = planned_runs.comparisons(planned, seeds), planned_runs.pairs_of_seeds(planned, seeds)
    contents = {
        "kind": plan_file.KIND,
        "format": plan_file.FORMAT,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "istar_version": __version__,
        **code_state(),
        "command": options.typed,
        "train_command": command,
        "hypotheses": [" ".join(text.split()) for text in options.hypothesis]
        or planned_runs.hypotheses(planned, metrics),
        "hypotheses_generated": not options.hypothesis,
        "test": plan_file.build_test_fields(options.test, options.alpha, comparisons, pairs, options.sd, options.power),
        **fields,
    }
    path = plan_file.write(contents, options.out, options.force)
    count = fields["budget"]["runs"]
    text = f"{path}: {count} run{'s' * (count != 1)}, and {plan_file.TEXT} beside it"
    make_console().out(text, highlight=False)


@contextmanager
def _request(arguments: Sequence[str], command: str) -> Iterator["SweepRequest"]:
    """Compose the sweep as `istar train -m` does; within the `with` block, its runs can be composed, too.

    Raises:
        UserError: for overrides that Hydra refuses, also from within the block.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException
    from hydra.types import HydraContext, RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from istar.config import schema

    schema.register()
    schema.register_sweeps()
    GlobalHydra.instance().clear()
    earlier = HydraConfig.instance().cfg
    try:
        with initialize_config_dir(str(schema.config_folder()), version_base="1.3", job_name="istar"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            all_arguments = [*arguments, "hydra.mode=MULTIRUN"]
            config = hydra.compose_config("config", all_arguments, RunMode.MULTIRUN, with_log_configuration=False)
            # No callbacks, because nothing is started.
            no_callbacks: Any = None
            context = HydraContext(hydra.config_loader, no_callbacks)
            sweeper: Any = Plugins.instance().instantiate_sweeper(
                hydra_context=context, task_function=lambda config: None, config=config
            )
            # Unresolved, because an override may hold an interpolation of the run's config.
            overrides = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            yield sweeper.request(overrides, command)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(schema.explain(error)) from error
    finally:
        HydraConfig.instance().cfg = earlier
