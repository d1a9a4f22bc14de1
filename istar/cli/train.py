"""Implements `istar train` and `python train.py`: composes a config with Hydra and executes a run or a sweep."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from istar.drawing.terminal import make_console
from istar.errors import SHOW_TRACE, StoppedError, UserError, describe_stop, did_you_mean, explain_system_error
from istar.finetune.config import Config, schema
from istar.finetune.config.options import config_folder
from istar.finetune.execute import extras
from istar.finetune.processes import launch, ranks
from istar.finetune.processes.ranks import processes_to_start
from istar.finetune.sweeps.trials import allow_options_without_key

SECONDS_FOR_RANK_ZERO = 10.0
"""How long other processes under torchrun or srun wait before they print an error and exit."""
DRY_RUN_OPTION = "--dry-run"
_DRY_RUN_OVERRIDE = "sweep.dry_run=true"
_OPTIONS_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn",
                       "--config-dir", "-cd", "--experimental-rerun", "--info", "-i")  # fmt: skip
"""Options of Hydra that the next argument may belong to."""
_OPTIONS = (*_OPTIONS_WITH_VALUE, DRY_RUN_OPTION, "--multirun", "-m", "--run", "-r", "--resolve", "--help", "-h",
            "--hydra-help", "--version", "--shell-completion", "-sc")  # fmt: skip


def run_train(arguments: Sequence[str], command: str) -> None:
    """Execute a run, or a sweep with `-m`; print an error in one line and exit the process.

    `arguments` are overrides and options of Hydra. `command` is what was typed before them, for messages.
    """
    # Hydra raises its errors instead of printing them over many lines.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    schema.register()
    schema.register_sweeps()
    try:
        # Hydra and the sweeper read the arguments from sys.argv.
        check_arguments(arguments, command)
        sys.argv = [command, *allow_options_without_key(move_overrides_to_end(arguments))]
        if sys.stdout.isatty() and not any(argument.startswith("-") for argument in sys.argv[1:] if argument != "-m"):
            print("loading the libraries, the data and the model ...", flush=True)
        with _help_as_text():
            hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(compose_and_run)()
    except (UserError, HydraException, OmegaConfBaseException, YAMLError, ValueError, KeyboardInterrupt) as error:
        if SHOW_TRACE:
            raise
        exit_with_error(error)
    except Exception as error:
        if SHOW_TRACE or not explain_system_error(error):
            raise
        exit_with_error(UserError(explain_system_error(error)))


@contextmanager
def _help_as_text() -> Iterator[None]:
    """Pass argparse the help of all options as text; Hydra passes an object, which Python 3.14 refuses.

    See https://github.com/facebookresearch/hydra/issues/3121.
    """
    parser_class: Any = argparse.ArgumentParser
    add_argument = parser_class.add_argument

    def add_argument_with_text(parser: argparse.ArgumentParser, *names: str, **options: Any) -> Any:
        if options.get("help") is not None:
            options["help"] = str(options["help"])
        return add_argument(parser, *names, **options)

    parser_class.add_argument = add_argument_with_text
    try:
        yield
    finally:
        parser_class.add_argument = add_argument


def move_overrides_to_end(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with Hydra's options first and all overrides after them, `--dry-run` as an override.

    Hydra's parser accepts overrides either before an option such as `-m` or after it, but not on both sides.
    """
    options: list[str] = []
    overrides: list[str] = []
    for previous_argument, argument in zip(["", *arguments], arguments, strict=False):
        if argument == DRY_RUN_OPTION:
            overrides.append(_DRY_RUN_OVERRIDE)
        elif argument.startswith("-") or previous_argument in _OPTIONS_WITH_VALUE:
            options.append(argument)
        else:
            overrides.append(argument)
    return [*options, *overrides]


def check_arguments(arguments: Sequence[str], command: str) -> None:
    """Raise a `UserError` for an unknown option, shell completion without a shell, or an output folder of Hydra."""
    for argument, following in zip(arguments, [*arguments[1:], "-"], strict=True):
        key, _, value = argument.lstrip("+").partition("=")
        if key.startswith("-") and not any(option.startswith(key) for option in _OPTIONS):
            value = value or ("<value>" if following.startswith("-") else following)
            known = [f"{name}={value}" for name in schema.find_keys_named(key.strip("-").replace("-", "_"))]
            hint = f"; did you mean {' or '.join(known[:3])}?" if known else did_you_mean(key, _OPTIONS)
            raise UserError(f"unexpected argument {key}{hint}; `{command} --help` shows how to call it")
        if key in ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"):
            raise UserError(
                f"{key} has no effect, because the folder of a run is named after its config; set run.root=<folder>"
            )
    has_shell = any(argument.startswith(("install=", "uninstall=", "query=")) for argument in arguments)
    if {"--shell-completion", "-sc"}.intersection(arguments) and not (has_shell and command.endswith(".py")):
        usage = 'eval "$(python train.py --shell-completion install=bash)", where bash may be zsh or fish'
        raise UserError(f"--shell-completion is for python train.py, with the name of a shell: {usage}")


def compose_and_run(config: DictConfig) -> object:
    """Execute the run that a composed config describes, and return its record.

    Hydra calls this function for a single run. For a sweep, Hydra's launchers call it once for each run.
    """
    try:
        _refuse_sweep_options()
        return start_run(schema.load(config), config.sweep.trial)
    except UserError as error:
        if SHOW_TRACE:
            raise
        # Exit here, because Hydra would catch the exception and print comments on it.
        exit_with_error(error)


def _refuse_sweep_options() -> None:
    """Raise a `UserError` if a single run is started with `--dry-run` or `sweep.` keys, which it would ignore."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return
    # Unresolved, because an override may contain an interpolation of a key that does not exist.
    overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    for override in overrides:
        if override.lstrip("+").startswith("sweep."):
            name = DRY_RUN_OPTION if override == _DRY_RUN_OVERRIDE else override
            raise UserError(f"{name} is for sweeps, and this command starts a single run; add -m, or leave it out")


def start_run(settings: Config, trial: str | None) -> object:
    """Train in this process, or in new processes for a run of a sweep or with several devices; return the record."""
    if trial is not None:
        extras.require("sweep.trial", "sweep")
    ranks.fix_slurm_detection()
    num_processes = processes_to_start(settings.trainer)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return run_launched_job(settings, num_processes, trial)
    if num_processes > 1:
        return launch.launch(settings, num_processes, trial)
    # The libraries are imported only now, so that `--help` and config errors do not wait for them.
    with extras.fast_imports():
        from istar.finetune.execute.run import run

    return run(settings, make_console(), trial)


def run_launched_job(settings: Config, num_processes: int, trial: str | None) -> object:
    """Execute one run for a Hydra launcher, and return the record, or the error for the sweep to report."""
    try:
        return launch.launch(settings, num_processes, trial)
    except StoppedError as error:
        executor = os.environ.get("SUBMITIT_EXECUTOR")
        if executor is None:
            raise
        # SLURM requeues a preempted job only if SLURM kills it before it exits.
        while executor == "slurm" and error.exit_code == StoppedError.exit_code + signal.SIGTERM:
            time.sleep(1)
        return error
    except UserError as error:
        return error


def find_mistake_in_files(error: Exception) -> str:
    """Return a line about the file below `--config-dir` with an error of Hydra that names no file, or ""."""
    arguments = [part for argument in sys.argv for part in argument.split("=", 1)]
    folders = [Path(value) for option, value in pairwise(arguments) if option in ("--config-dir", "-cd")]
    for path in sorted(path for folder in folders for path in folder.rglob("*.yaml")):
        content = path.read_bytes()
        if isinstance(error, UnicodeDecodeError):
            try:
                content.decode()
            except UnicodeDecodeError as mistake:
                line = content.count(b"\n", 0, mistake.start) + 1
                return f"{path}, line {line}: not UTF-8: {mistake.reason}"
        elif "header format" in str(error) and content.partition(b"\n")[0].split() == [b"#", b"@package"]:
            return f"{path} needs the first line `{schema.PACKAGE_LINE}`"
    return ""


def exit_with_error(error: Exception | KeyboardInterrupt) -> NoReturn:
    """Print an error in one line and exit with the exit code of the error, which is 2 for mistakes in the config."""
    if isinstance(error, UserError):
        message, code = str(error), error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        message = describe_stop(signal.SIGINT)
        code = StoppedError.exit_code + signal.SIGINT
    else:
        message, code = schema.explain(error), 2
        # Hydra raises a plain ValueError for mistakes such as `task=null` on the command line, and for some in files.
        if not isinstance(error, HydraException | OmegaConfBaseException | YAMLError):
            message = find_mistake_in_files(error) or f"{message} (HYDRA_FULL_ERROR=1 shows where)"
    rank = ranks.find_rank(os.environ)
    is_stopped = isinstance(error, StoppedError | KeyboardInterrupt)
    if rank == 0:
        # To stop a run is not a mistake.
        print(message if is_stopped else f"error: {message}", file=sys.stderr)
    elif not is_stopped:
        # Rank 0 usually has the same error. Once it has printed that, torchrun stops the other processes.
        time.sleep(SECONDS_FOR_RANK_ZERO)
        print(f"error in process {rank}: {message}", file=sys.stderr)
    sys.exit(code)
