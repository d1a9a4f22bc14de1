"""Implements `istar plan`: writes the plan of an experiment before its runs."""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar import __version__
from istar.drawing.terminal import make_console
from istar.errors import UserError, mask_secrets
from istar.statistics import ALPHA, POWER, TEST

if TYPE_CHECKING:
    from istar.finetune.sweeps.planned_runs import SweepRequest


def add_parser(commands: Any) -> None:
    """Register `istar plan`."""
    parser = commands.add_parser(
        "plan",
        help="write the plan of an experiment before its runs: istar plan sweep=table1 task=rte model=bert --out plan",
        description="Write the plan of a sweep before its runs: hypotheses, test, and the names of all runs. "
        "`istar report --plan` names the departures of the runs from it.",
    )
    add = parser.add_argument
    overrides_help = "sweep=<name>, and overrides as for istar train -m, before all options"
    add("overrides", nargs="+", metavar="override", help=overrides_help)
    add("--out", type=Path, default=Path("plan"), help="folder for plan.yaml (default: plan)")
    hypothesis_help = "a hypothesis, as a sentence; repeatable"
    add("--hypothesis", action="append", default=[], help=hypothesis_help)
    add("--test", choices=("t", "sign-flip"), default=TEST, help=f"paired test against Base (default: {TEST})")
    alpha_help = f"probability of any false difference among all comparisons, by Holm's correction (default: {ALPHA})"
    add("--alpha", type=float, default=ALPHA, help=alpha_help)
    sd_help = "standard deviation of the paired differences, in the metric's unit, for the smallest difference"
    add("--sd", type=float, help=sd_help)
    add("--power", type=float, default=POWER, help=f"probability of finding that difference (default: {POWER})")
    add("--force", action="store_true", help="write a new plan if there is one, which is kept under another name")
    parser.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """List the runs of the sweep, write the plan, and print its path and the number of runs."""
    for text in options.hypothesis:
        if not text.strip():
            raise UserError("--hypothesis is empty; expected a sentence, such as 'I-STAR raises the accuracy on RTE'")
    # Imported here so that `istar --help` does not wait for the libraries.
    from datetime import UTC, datetime

    from istar.finetune.sweeps.planned_runs import describe_sweep
    from istar.records.results import describe_code
    from istar.reports import plan_file

    plan_file.find_replaced_plan(options.out, options.force)
    test_options = options.test, options.alpha, options.sd, options.power
    plan_file.plan_test(*test_options)  # refuses wrong options before the runs are listed
    arguments = [f"+{text}" if text.startswith("sweep=") else text for text in options.overrides]
    command = mask_secrets(shlex.join(["istar", "train", "-m", *arguments]))
    error_console = make_console(stderr=True)
    with _compose_sweep(arguments, command) as request:
        sweep_fields = describe_sweep(request, error_console)
    new_plan = plan_file.Plan(
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        istar_version=__version__,
        **describe_code(),
        command=command,
        hypotheses=[" ".join(text.split()) for text in options.hypothesis],
        test=plan_file.plan_test(*test_options, sweep_fields["runs"], sweep_fields["repetitions"]),
        **sweep_fields,
    )
    path, num_runs = plan_file.write_plan(new_plan, options.out, options.force), new_plan.num_runs
    make_console().out(f"{path}: {num_runs} run{'s' * (num_runs != 1)}", highlight=False)
    num_comparisons, smallest_p = new_plan.test["comparisons"], new_plan.test["smallest_p"]
    if num_comparisons and smallest_p is not None and smallest_p >= options.alpha / num_comparisons:
        message = f"warning: with so few seeds, the sign-flip test gives no p-value below {smallest_p:g}; it cannot"
        error_console.out(f"{message} reach the level {options.alpha / num_comparisons:.3g}", highlight=False)


@contextmanager
def _compose_sweep(arguments: Sequence[str], command: str) -> Iterator["SweepRequest"]:
    """Yield the sweep that `istar train -m` would execute; its runs can be composed within the `with` block.

    Raises a `UserError` for overrides that Hydra refuses, even within the block.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException
    from hydra.types import HydraContext, RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from istar.finetune.sweeps.trials import allow_options_without_key
    from istar.records.config import schema
    from istar.records.options import config_folder

    schema.register()
    schema.register_sweeps()
    GlobalHydra.instance().clear()
    previous_config = HydraConfig.instance().cfg
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3", job_name="istar"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            all_arguments = [*allow_options_without_key(arguments), "hydra.mode=MULTIRUN"]
            config = hydra.compose_config("config", all_arguments, RunMode.MULTIRUN, with_log_configuration=False)
            # No callbacks, because nothing is started.
            no_callbacks: Any = None
            context = HydraContext(hydra.config_loader, no_callbacks)
            sweeper: Any = Plugins.instance().instantiate_sweeper(
                hydra_context=context, task_function=lambda config: None, config=config
            )
            # Unresolved, because an override may contain an interpolation of the run's config.
            overrides = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            yield sweeper.request(overrides, command)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(schema.explain(error)) from error
    finally:
        HydraConfig.instance().cfg = previous_config
