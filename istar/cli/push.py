"""Implements `istar push`: uploads the model of a finished run to the Hugging Face hub."""

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Register `istar push`."""
    parser = commands.add_parser("push", help="upload the model of a finished run, with its model card, to the hub")
    parser.add_argument("run", type=Path, metavar="folder", help="folder of a run with run.save_model=true")
    parser.add_argument("repository", help="name on the hub, <user>/<model>; created if absent")
    parser.add_argument("--public", action="store_true", help="create the repository as public instead of private")
    parser.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Upload the model and print its address."""
    # Imported here so that `istar --help` does not wait for the libraries.
    from istar.finetune.execute.model_card import push_to_hub
    from istar.runs.record import read_result

    read_result(options.run)  # refuses what is not a finished run
    print(push_to_hub(options.run / "model", options.repository, private=not options.public))
