"""The command `istar`: trains, measures models, and looks at runs."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from istar import __version__
from istar.cli import correlate, embed, measure, report, results, watch
from istar.errors import UserError
from istar.runs import extras


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the command `istar`; returns its exit code.

    Args:
        arguments: as on the command line, which is the default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["train"]:
        # Its options are Hydra's, `--help` among them.
        return main_of_train(words[1:])
    options = _parser().parse_args(words)
    options.typed = shlex.join(["istar", *words])
    try:
        extras.require(f"istar {options.name}", options.extra)
        options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def main_of_train(arguments: Sequence[str] | None = None, command: str = "istar train") -> int:
    """Carry out `istar train`; returns its exit code, or leaves with that of a mistake.

    Args:
        arguments: as on the command line, which is the default.
        command: what was typed before them, for messages.
    """
    try:
        extras.require(command, "train")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    from istar.cli import train

    train.main(sys.argv[1:] if arguments is None else arguments, command)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="istar", description="Train and measure models, and look at runs that a training has left."
    )
    parser.add_argument("--version", action="version", version=f"istar {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="name")
    commands.add_parser("train", help="fine-tune an encoder: istar train task=rte reg=istar reg.lambda=-1")
    for command in (results, report, watch, measure, embed, correlate):
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
