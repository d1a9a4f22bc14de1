"""Options that several commands share: each has one name, one meaning and one default."""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar.drawing.terminal import make_console
from istar.errors import UserError
from istar.finetune.execute import extras
from istar.models.model_source import DTYPES

if TYPE_CHECKING:
    import pandas as pd

    from istar.geometry.collect.corpus_statistics import MeasureSettings

MODEL_HELP = "[label=]<hub id, folder or run>[@revision]"
MEASURING_MINIMA = {
    "length": 0, "batch_tokens": 1, "sample": 0, "seed": 0, "max_tokens": 1, "shuffle_buffer": 0, "groups": 0
}  # fmt: skip
"""Minima of the options of `add_measuring_options`."""


def add_runs_folder(parser: argparse.ArgumentParser) -> None:
    """Add the folder of the runs, by default `runs`."""
    folder_help = "folder of the runs, the run.root of istar train (default: runs)"
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help=folder_help)


def add_list(parser: argparse.ArgumentParser, name: str, help_text: str) -> None:
    """Add an option with a list of values, which is empty by default: separated by commas, or the option repeated."""
    parser.add_argument(name, action="extend", type=_split_list, default=[], help=f"{help_text}, separated by commas")


def _split_list(text: str) -> list[str]:
    # The name of an existing file, perhaps with a label before it, may contain a comma.
    is_path = any(map(os.path.exists, (text, text.partition("=")[2])))
    return [text] if is_path else [part.strip() for part in text.split(",")]


def add_texts(parser: argparse.ArgumentParser, use: str) -> None:
    """Add `--text`; `use` says what the command does with the texts."""
    place = "file (a document per line, .jsonl or .parquet), folder, or hub data set as owner/name:configuration:split"
    add_list(parser, "--text", f"{use}: [name=]<{place}>; hf://owner/name:... is not downloaded first")


def add_output(parser: argparse.ArgumentParser, folder: str) -> None:
    """Add `--out` with this default, and `--json`."""
    parser.add_argument("--out", type=Path, default=Path(folder), help=f"output folder (default: {folder})")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")


def add_figures(parser: argparse.ArgumentParser) -> None:
    """Add `--figures`."""
    add_list(parser, "--figures", "further formats of the page's figures, besides SVG: pdf, png")


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """Add the texts to measure models over, and how to read and measure them; see `MeasureSettings`."""
    add_texts(parser, "texts to measure over")
    add = parser.add_argument
    add("--length", type=int, default=0, help="maximum tokens per block (default: the model's maximum, at most 512)")
    documents_help = "separate: one by one, as in the papers; packed: joined into full blocks (default: separate)"
    add("--documents", choices=("separate", "packed"), default="separate", help=documents_help)
    special_tokens_help = "whether statistics include the states of special tokens (default: exclude)"
    add("--special-tokens", choices=("include", "exclude"), default="exclude", help=special_tokens_help)
    add("--batch-tokens", type=int, help="maximum tokens per batch (default: 2048 on a CPU, 16384 on a GPU)")
    add("--max-tokens", type=int, help="maximum number of tokens of each text")
    buffer_help = "shuffle each text with --seed by a buffer of this many documents (default: 0, not shuffled)"
    add("--shuffle-buffer", type=int, default=0, help=buffer_help)
    add("--sample", type=int, default=5_000, help="token types to keep for TwoNN; 0: no TwoNN (default: 5000)")
    add("--seed", type=int, default=0, help="seed of random samples (default: 0)")
    measures_help = "basic, or all: also the slow ones, such as massive activations and Gride (default: basic)"
    add("--measures", choices=("basic", "all"), default="basic", help=measures_help)
    add("--groups", type=int, default=10, help="groups of documents for standard errors; 0: none (default: 10)")
    add("--no-intra", action="store_true", help="leave out IntraSim; its memory grows with the number of words")
    dtype_help = "data type of the weights, bf16 also as bfloat16 (default: float32)"
    short_names = {full_name: name for name, full_name in DTYPES.items()}
    add(
        "--dtype",
        type=lambda name: short_names.get(name, name),
        choices=tuple(DTYPES),
        default="float32",
        help=dtype_help,
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    maps = ("auto", "balanced", "balanced_low_0", "sequential")
    add("--device-map", choices=maps, help="instead of --device: place layers on GPUs, CPU and disk, by accelerate")
    add_list(parser, "--max-memory", "with --device-map: most memory for weights by device, such as cpu=200GB,0=20GB")
    add("--offload-folder", type=Path, help="with --device-map: folder for weights that fit into no memory")


def find_placement(options: argparse.Namespace) -> str | dict[str, Any]:
    """Return the device to put a model on, or the arguments of `from_pretrained` that place it by `--device-map`.

    Raises a `UserError` if the options contradict each other, or accelerate is not installed.
    """
    if options.device_map is None:
        if options.max_memory or options.offload_folder:
            raise UserError("--max-memory and --offload-folder need --device-map, such as --device-map auto")
        return str(options.device)
    if options.device != "auto":
        raise UserError(f"--device {options.device} does not go with --device-map, which chooses the devices")
    extras.require("--device-map", "large")
    memory = dict(map(_parse_memory, options.max_memory)) or None
    return {"device_map": options.device_map, "max_memory": memory, "offload_folder": options.offload_folder}


def _parse_memory(text: str) -> tuple[str | int, int]:
    import torch
    from accelerate.utils import convert_file_size_to_int

    name, _, size = text.partition("=")
    try:
        device = name if name == "cpu" else range(torch.cuda.device_count()).index(int(name))
        return device, convert_file_size_to_int(size.upper())  # accelerate takes a small b for bits
    except ValueError as error:
        raise UserError(f"--max-memory {text}: expected cpu or a GPU of this machine, and a size: 0=20GB") from error


def make_measure_settings(options: argparse.Namespace) -> "MeasureSettings":
    """Return the settings that `add_measuring_options` has parsed."""
    from istar.geometry.collect.corpus_statistics import MeasureSettings

    if options.groups == 1:
        raise UserError("--groups 1 gives no standard errors; expected at least 2, or 0 to compute none")
    same_names = {field.name for field in fields(MeasureSettings)} - {"limit", "intra"}
    settings = {name: getattr(options, name) for name in same_names}
    return MeasureSettings(limit=options.max_tokens, intra=not options.no_intra, **settings)


def print_json(frames: "Mapping[str, pd.DataFrame]") -> None:
    """Print the rows of each table as an array of objects, by the name of the table, as JSON."""
    rows = {name: json.loads(frame.to_json(orient="records", double_precision=15)) for name, frame in frames.items()}
    make_console().out(json.dumps(rows, indent=1, ensure_ascii=False), highlight=False)
