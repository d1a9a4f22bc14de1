"""The entry point of the command `istar`."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from istar import __version__
from istar.cli import compare, correlate, embed, measure, plan, power, quantize, report, results, watch
from istar.drawing.terminal import run_with_robust_output
from istar.errors import SHOW_TRACE, UserError, explain_system_error, mask_secrets
from istar.finetune.runs import extras


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the command `istar` with these arguments, by default the process's, and return the exit code."""
    typed_arguments = list(sys.argv[1:] if arguments is None else arguments)
    return run_with_robust_output(lambda: _run_command(typed_arguments))


def _run_command(arguments: list[str]) -> int:
    if arguments[:1] == ["train"]:
        # Hydra parses the options of `istar train`, including `--help`.
        return _run_train(arguments[1:], "istar train")
    options = _make_parser().parse_args(arguments)
    options.typed = mask_secrets(shlex.join(["istar", *arguments]))
    try:
        extras.require(f"istar {options.name}", options.extra)
        _check_minima(options)
        options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if SHOW_TRACE or not explain_system_error(error):
            raise
        print(f"error: {explain_system_error(error)}", file=sys.stderr)
        return UserError.exit_code
    return 0


def _check_minima(options: argparse.Namespace) -> None:
    """Raise a `UserError` if an option is below the minimum that its command declares in `minima`."""
    for name, minimum in options.minima.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} {value} is too small; expected {minimum} or more")


def train_main(arguments: Sequence[str] | None = None, command: str = "istar train") -> int:
    """Execute `istar train` as `main` does; `command` is what was typed before the arguments, for messages."""
    typed_arguments = list(sys.argv[1:] if arguments is None else arguments)
    return run_with_robust_output(lambda: _run_train(typed_arguments, command))


def _run_train(arguments: Sequence[str], command: str) -> int:
    """Execute `istar train`, and return the exit code, or exit the process if the run fails."""
    try:
        extras.require(command, "train")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    from istar.cli import train

    train.run_train(arguments, command)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="istar", description="Train models, measure their geometry, and compare and report runs."
    )
    parser.add_argument("--version", action="version", version=f"istar {__version__}")
    parser.set_defaults(minima={})
    subparsers = parser.add_subparsers(required=True, metavar="command", dest="name")
    subparsers.add_parser("train", help="train or fine-tune a model: istar train task=rte reg=istar reg.lambda=-1")
    for subcommand_module in (results, report, watch, measure, compare, embed, correlate, power, plan, quantize):
        subcommand_module.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
