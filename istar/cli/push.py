"""Implements `istar push`: uploads the model of a finished run to the Hugging Face hub."""

import argparse

from istar.finetune.execute.model_card import push_to_hub
from istar.runs.record import read_result


def run(options: argparse.Namespace) -> None:
    """Upload the model and print its address."""
    read_result(options.run)  # refuses what is not a finished run
    print(push_to_hub(options.run / "model", options.repository, private=not options.public))
