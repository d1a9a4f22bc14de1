"""The options of all commands of `istar`; an option of several commands has one name, one meaning and one default.

`main` needs this module for `--help`. It imports the module of a command, with what that needs, only to execute it.
"""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from istar import __version__
from istar.errors import UserError, did_you_mean
from istar.finetune.execute import extras
from istar.models.model_source import DTYPES
from istar.statistics import ALPHA, POWER

EMBEDDING_FORMS = ("raw", "centered", "scaled_centered", "all_but_the_top", "all_but_the_top_published")
_MODEL_HELP = "[label=]<hub id, folder or run>[@revision]"
_MEASURING_MINIMA = {
    "length": 0, "batch_tokens": 1, "sample": 0, "seed": 0, "max_tokens": 1, "shuffle_buffer": 0, "groups": 0,
}  # fmt: skip
"""Minima of the options of `_add_measuring_options`."""


def _add_runs_folder(parser: argparse.ArgumentParser) -> None:
    folder_help = "folder of the runs, the run.root of istar train (default: runs)"
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help=folder_help)


def _add_exclude(parser: argparse.ArgumentParser) -> None:
    _add_list(parser, "--exclude", "names of runs to leave out, or patterns such as 'rte-*-dropout-*'")


def _add_list(parser: argparse.ArgumentParser, name: str, help_text: str) -> None:
    """Add an option with a list of values, which is empty by default: separated by commas, or the option repeated."""
    parser.add_argument(name, action="extend", type=_split_list, default=[], help=f"{help_text}, separated by commas")


def _split_list(text: str) -> list[str]:
    # The name of an existing file, perhaps with a label before it, may contain a comma.
    is_path = any(map(os.path.exists, (text, text.partition("=")[2])))
    return [text] if is_path else [part.strip() for part in text.split(",")]


def _add_texts(parser: argparse.ArgumentParser, use: str) -> None:
    """Add `--text`; `use` says what the command does with the texts."""
    place = "file (a document per line, .jsonl, .tsv, .csv or .parquet) or folder, dev.tsv:sentence1 for a column"
    hub = "a hub data set owner/name[:configuration[:split[:column]]]; hf://owner/name is not downloaded first"
    _add_list(parser, "--text", f"{use}: [name=]<{place}>, or {hub}")


def _add_output(parser: argparse.ArgumentParser, folder: str) -> None:
    parser.add_argument("--out", type=Path, default=Path(folder), help=f"output folder (default: {folder})")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")


def _add_figures(parser: argparse.ArgumentParser) -> None:
    _add_list(parser, "--figures", "further formats of the page's figures, besides SVG: pdf, png")


def _add_measuring_options(parser: argparse.ArgumentParser) -> None:
    _add_texts(parser, "texts to measure over")
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
    dtype: dict[str, Any] = {"type": lambda name: short_names.get(name, name), "choices": tuple(DTYPES)}
    add("--dtype", default="float32", help=dtype_help, **dtype)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    maps = ("auto", "balanced", "balanced_low_0", "sequential")
    add("--device-map", choices=maps, help="instead of --device: place layers on GPUs, CPU and disk, by accelerate")
    _add_list(parser, "--max-memory", "with --device-map: most memory for weights by device, such as cpu=200GB,0=20GB")
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


def _add_results_options(parser: argparse.ArgumentParser) -> None:
    _add_runs_folder(parser)
    _add_exclude(parser)
    parser.add_argument("--out", type=Path, help="also write all columns to a .csv, .parquet or .json file")
    parser.add_argument("--sort", default="name", help="column to sort by, best first (default: name)")
    _add_list(parser, "--columns", "columns to print, such as name,value,optim.lr")
    parser.add_argument("--json", action="store_true", help="print the columns as JSON, with fractions, not percent")


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    _add_runs_folder(parser)
    _add_exclude(parser)
    parser.add_argument("--out", type=Path, default=Path("report"), help="output folder (default: report)")
    _add_figures(parser)
    reference_help = (
        "method with which the others are compared, such as a placebo, by its name in the table of all methods; "
        "settings at its end may be left out if that is unique (default: Base)"
    )
    parser.add_argument("--reference", default="Base", metavar="METHOD", help=reference_help)


def _add_watch_options(parser: argparse.ArgumentParser) -> None:
    _add_runs_folder(parser)
    parser.add_argument("--sweep", help="name of a sweep (default: all that are not over, or else the latest)")
    parser.add_argument("--once", action="store_true", help="show the current state and exit")


def _add_measure_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    models_help = f"{_MODEL_HELP}; or [name=]<file of vectors>[:key], .npy, .npz, .safetensors, .pt, .parquet or .jsonl"
    add("models", nargs="*", metavar="model", help=models_help)
    _add_measuring_options(parser)
    _add_output(parser, "geometry")
    _add_figures(parser)
    examples_help = "keep the mean states of this many documents, for CKA in istar compare (default: 0)"
    add("--examples", type=int, default=0, help=examples_help)
    _add_list(parser, "--revisions", "instead of a model's revision: several, to measure one by one")
    add("--checkpoints", help="instead of a model: a pattern 'folder/*' of saved models, runs or .ckpt files")
    add("--steps", type=Path, help="CSV table with the columns checkpoint and step, for checkpoints that record none")
    check_help = (
        "YAML file of bounds, such as layer_*: {isoscore: [0.05, null]}; exit code 1 if an interval is beyond one"
    )
    add("--check", type=Path, help=check_help)
    add("--list", nargs="?", const="", metavar="measure", help="list all measures, or describe one, and exit")
    parser.set_defaults(minima={**_MEASURING_MINIMA, "examples": 0})


def _add_compare_options(parser: argparse.ArgumentParser) -> None:
    models_help = (
        f"{_MODEL_HELP}, or a folder of istar measure; two or more; or only folders of istar measure "
        "--revisions or --checkpoints and files of istar.Monitor, which are compared over their training"
    )
    parser.add_argument("models", nargs="+", metavar="model", help=models_help)
    _add_measuring_options(parser)
    _add_output(parser, "comparison")
    _add_figures(parser)
    cka_help = "documents of the texts for CKA, the similarity of layers; 0: none (default: 1000)"
    parser.add_argument("--cka-documents", type=int, default=1_000, help=cka_help)
    parser.set_defaults(minima={**_MEASURING_MINIMA, "cka_documents": 0})


def _add_embed_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="model", help=_MODEL_HELP)
    _add_texts(parser, "texts in which tokens are counted")
    _add_output(parser, "embeddings")
    _add_figures(parser)
    add("--matrix", choices=("input", "output"), default="input", help="which embedding matrix (default: input)")
    add("--form", choices=EMBEDDING_FORMS, help="post-processing of a single model's matrix, for --save (default: raw)")
    forms_help = "forms for word similarity (default: --form, or all but the last form of --form)"
    _add_list(parser, "--forms", forms_help)
    components_help = "number of directions that all_but_the_top removes (default: a hundredth of the dimensions)"
    add("--components", type=int, help=components_help)
    add("--save", choices=("matrix", "model"), help="write a single processed matrix, alone or within its model")
    _add_list(parser, "--wordsim", "files of word similarity benchmarks, each [name=]<file>")
    policy_help = "for words of several tokens: leave them out, or average their tokens (default: single_token)"
    add("--policy", choices=("single_token", "mean"), default="single_token", help=policy_help)


def _add_correlate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("geometry", type=Path, help="trajectory.csv, or another table with a row per revision or step")
    scores_help = (
        "CSV with a column revision or step, and a column for each task; or results of lm-evaluation-harness or MTEB"
    )
    add("scores", type=Path, help=f"{scores_help}, as a .json file or a folder of such files")
    _add_output(parser, "correlation")
    _add_figures(parser)
    _add_list(parser, "--measure", "measures to use")
    _add_list(parser, "--task", "tasks to use, or beginnings of their names")
    _add_list(parser, "--omit", "revisions or steps to leave out")
    add("--model", default="", help="model of all scores, if they name it differently from the measures, or not at all")


def _add_power_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say how many seeds two methods need for a difference to be found by the paired t-test, or, with "
        "--pairs, the smallest difference that so many seeds can find."
    )
    parser.add_argument("--sd", type=float, help="standard deviation of the paired differences, in the metric's unit")
    parser.add_argument("--runs", type=Path, help="folder of runs from which the standard deviations are estimated")
    _add_exclude(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument("--difference", type=float, help="difference that is to be found, in the metric's unit")
    parser.add_argument("--pairs", type=int, help="number of seeds that both methods have")
    parser.add_argument("--alpha", type=float, default=ALPHA, help=f"two-sided significance level (default: {ALPHA})")
    power_help = f"probability of finding the difference (default: {POWER})"
    parser.add_argument("--power", type=float, default=POWER, help=power_help)


def _add_push_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="folder", help="folder of a run with run.save_model=true")
    parser.add_argument("repository", help="name on the hub, <user>/<model>; created if absent")
    parser.add_argument("--public", action="store_true", help="create the repository as public instead of private")


class Command(NamedTuple):
    """A command of `istar`: its line in `istar --help`, the extra that it needs, and what adds its options."""

    help: str
    extra: str
    add_options: Callable[[argparse.ArgumentParser], None]


COMMANDS = {
    "results": Command("show the runs in a folder as a table", "report", _add_results_options),
    "report": Command("make a page with the papers' tables and figures from runs", "report", _add_report_options),
    "watch": Command(
        "show a live table of the sweeps in a folder, also of other machines", "train", _add_watch_options
    ),
    "measure": Command(
        "measure the geometry of models' layers on texts, or of vectors in files", "train", _add_measure_options
    ),
    "compare": Command("compare the geometry of several models on one page", "train", _add_compare_options),
    "embed": Command(
        "measure embedding matrices, raw and post-processed, and their word similarity", "train", _add_embed_options
    ),
    "correlate": Command(
        "correlate measures of the geometry with task scores over the course of a training",
        "train",
        _add_correlate_options,
    ),
    "power": Command(
        "how many seeds a comparison needs: istar power --sd 2.1 --difference 1.0", "report", _add_power_options
    ),
    "push": Command("upload the model of a finished run, with its model card, to the hub", "train", _add_push_options),
}
"""The commands by name. Each is a module of `istar.cli` with `run`. Hydra parses the arguments of `train`."""


_HINTS = {
    **dict.fromkeys(("--layer", "--layers"), "all layers are measured, each in a row of measures.csv"),
    **dict.fromkeys(("--column", "--text-column"), "a column is part of the text, as in --text dev.tsv:sentence1"),
}
"""What to do instead, by options that commands with `--text` lack."""


class _Parser(argparse.ArgumentParser):
    """A parser that explains a mistake in one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known_options = re.findall(r"--[\w-]+", self.format_usage())
            name = unknown[0].partition("=")[0]
            hint = _HINTS.get(name) if "--text" in known_options else None
            hint = f"; {hint}" if hint else did_you_mean(name, known_options, cutoff=0.6)
            self.error(f"unexpected argument {unknown[0]}{hint}")
        return options, unknown

    def error(self, message: str) -> Any:
        raise UserError(f"{message}; `{self.prog} --help` shows how to call it")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `istar`. Parsed options also have `extra`, and `minima`, their smallest values by name."""
    parser = _Parser(prog="istar", description="Train models, measure their geometry, and compare and report runs.")
    parser.add_argument("--version", action="version", version=f"istar {__version__}")
    # `main` executes it; here for `--help`.
    parser.add_argument("--print-completion", metavar="shell", help="print the completions of bash, zsh, tcsh or fish")
    parser.set_defaults(minima={})
    subparsers = parser.add_subparsers(required=True, metavar="command", dest="name")
    subparsers.add_parser("train", help="train or fine-tune a model: istar train task=rte reg=istar reg.lambda=-1")
    for name, command in COMMANDS.items():
        command_parser = subparsers.add_parser(name, help=command.help)
        command_parser.set_defaults(extra=command.extra)
        command.add_options(command_parser)
    return parser
