"""The entry point of the command `istar`."""

import argparse
import gc
import importlib
import os
import shlex
import shutil
import signal
import string
import sys
import textwrap
from collections.abc import Sequence
from contextvars import copy_context

from istar import __version__
from istar.cli.options import COMMANDS, make_parser
from istar.drawing.robust_output import run_with_robust_output
from istar.errors import (
    SHOW_TRACE,
    StoppedError,
    UserError,
    check_one_of,
    describe_stop,
    did_you_mean,
    explain_system_error,
    mask_secrets,
)
from istar.finetune.execute import extras
from istar.finetune.processes.openmp import let_threads_sleep


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the command `istar` with these arguments, by default the process's, and return the exit code."""
    # The libraries create a million objects that are never freed. By default, the garbage collector would traverse them
    # again and again, which takes up to a fifth of the time.
    gc.set_threshold(100_000, 50, 100)
    typed_arguments = list(sys.argv[1:] if arguments is None else arguments)
    # The formats of figures that a command sets end with its context.
    return run_with_robust_output(lambda: copy_context().run(_run_command, typed_arguments))


def _run_command(arguments: list[str], train_command: str = "istar train") -> int:
    let_threads_sleep(os.environ)
    try:
        if sys.platform == "win32":
            raise UserError("the commands of istar need Linux or macOS; on Windows, use them in WSL")
        if arguments[:1] == ["train"]:
            _run_train(arguments[1:], train_command)
            return 0
        if arguments[:1] == ["--print-completion"]:
            _print_completion(arguments[1:])
            return 0
        if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            hint = did_you_mean(arguments[0], ["train", *COMMANDS])
            raise UserError(f"istar {arguments[0]}: unknown command{hint}; `istar --help` lists all")
        options = make_parser().parse_args(arguments)
        options.typed = mask_secrets(shlex.join(["istar", *arguments]))
        extras.require(f"istar {options.name}", options.extra)
        _check_minima(options)
        if getattr(options, "figures", ()):
            _set_figure_formats(options.figures)
        # The list of measures needs neither torch nor what else `istar.cli.measure` imports.
        module = "list_measures" if getattr(options, "list", None) is not None else options.name
        importlib.import_module(f"istar.cli.{module}").run(options)
    except UserError as error:
        if SHOW_TRACE:
            raise
        print(error if isinstance(error, StoppedError) else f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if SHOW_TRACE:
            raise
        print(describe_stop(signal.SIGINT), file=sys.stderr)
        return StoppedError.exit_code + signal.SIGINT
    except Exception as error:
        if SHOW_TRACE or not explain_system_error(error):
            raise
        print(f"error: {explain_system_error(error)}", file=sys.stderr)
        return UserError.exit_code
    return 0


def _print_completion(shells: Sequence[str]) -> None:
    extras.require("istar --print-completion", "completion")
    import shtab

    if len(shells) != 1 or shells[0] not in shtab.SUPPORTED_SHELLS:
        raise UserError(f"--print-completion: expected one of {', '.join(shtab.SUPPORTED_SHELLS)}")
    print(shtab.complete(make_parser(), shells[0]))


def _check_minima(options: argparse.Namespace) -> None:
    for name, minimum in options.minima.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} {value} is too small; expected {minimum} or more")


def _set_figure_formats(formats: Sequence[str]) -> None:
    from istar.drawing.plot import FIGURE_FORMATS, SUFFIXES

    for name in formats:
        check_one_of("--figures", name, SUFFIXES)
    FIGURE_FORMATS.set(tuple(dict.fromkeys(("svg", *formats))))


def train_main(arguments: Sequence[str] | None = None, command: str = "istar train") -> int:
    """Execute `istar train` as `main` does; `command` is what was typed before the arguments, for messages."""
    typed_arguments = list(sys.argv[1:] if arguments is None else arguments)
    return run_with_robust_output(lambda: _run_command(["train", *typed_arguments], command))


def _run_train(arguments: Sequence[str], command: str) -> None:
    """Execute `istar train`, or exit the process if the run fails."""
    if "--version" in arguments:
        print(f"istar {__version__}")
        return
    extras.require(command, "train")
    if not {"--help", "-h"}.isdisjoint(arguments):
        print(_format_train_help(command))
        return
    from istar.finetune.config.groups import check_keys

    # Under torchrun or srun, only rank 0 prints an error.
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        check_keys(arguments)
    # torch alone takes seconds to import.
    with extras.fast_imports():
        from istar.cli import train

    train.run_train(arguments, command)


def _format_train_help(command: str) -> str:
    import yaml

    from istar.finetune.config.options import config_folder, list_options

    width = min(shutil.get_terminal_size().columns, 100)
    groups = [
        textwrap.fill(", ".join(options), width, initial_indent=f"  {group:16}", subsequent_indent=" " * 18)
        for group, options in list_options().items()
    ]
    config = yaml.safe_load((config_folder() / "config.yaml").read_text(encoding="utf-8"))
    template = string.Template(config["hydra"]["help"]["template"])
    return template.substitute(command=command, groups="\n".join(groups)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
