"""Implements `istar quantize`: scores saved models in float32 and quantized, beside the geometry of activations."""

import argparse
import math
from pathlib import Path
from typing import Any

from istar.cli.console import check_minima, make_console, make_folder
from istar.errors import UserError

_FORMS = "w8a8,w6a6,w4a4,int8"
_NOT_FOR_EMBEDDINGS = {
    "forms": _FORMS, "weights": "channel", "activations": "tensor", "control": "none", "outlier_factor": None
}  # fmt: skip
"""Options that `--embeddings` refuses, with their defaults."""


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `istar`."""
    parser = commands.add_parser(
        "quantize",
        help="score saved models in simulated low-bit forms, beside the geometry of their activations",
        description="Score models in float32 and in quantized forms on the validation set of their task, and compare "
        "what methods lose with what Base loses.",
    )
    add = parser.add_argument
    add("models", nargs="+", type=Path, metavar="folder", help="folders of runs, or of one run, of train.py; or one "
        "model that save_pretrained wrote, with --task")  # fmt: skip
    add("--out", type=Path, default=Path("quantization"), help="output folder (default: quantization)")
    forms = "forms, separated by commas: w<bits of weights>a<bits of activations>, or int8 for torch's dynamic int8"
    add("--forms", default=_FORMS, help=f"{forms} (default: {_FORMS})")
    weights = "scales of the weights: one for each output channel, or one for the matrix (default: channel)"
    add("--weights", choices=("channel", "tensor"), default="channel", help=weights)
    activations = "scales of the activations: one for the tensor, calibrated, or one for each token (default: tensor)"
    add("--activations", choices=("tensor", "token"), default="tensor", help=activations)
    calibration = "number of training examples that calibrate static scales (default: 256)"
    add("--calibration", type=int, default=256, help=calibration)
    add("--seed", type=int, default=0, help="seed of the choice of these examples, and of a rotation (default: 0)")
    control = (
        "change the model in a way that float32 does not show: rotate the inputs of the linear layers at random, or"
    )
    add(
        "--control",
        choices=("none", "rotate", "outlier"),
        default="none",
        help=f"{control} make an outlier in the inputs of the output projection of attention (default: none)",
    )
    add(
        "--outlier-factor",
        type=float,
        help="factor of the outlier; a power of 2 changes no bit in float32 (default: 128)",
    )
    add("--task", help="task of a single model, such as rte; runs know theirs")
    add("--data-dir", type=Path, help="folder of the task's data, if it is not where the runs had it")
    embeddings = "instead: sentence embeddings of encoders in float32, int8 and one bit, on the pairs of --task (stsb)"
    add("--embeddings", action="store_true", help=embeddings)
    parser.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Score models or sentence embeddings, print the tables and write the page."""
    check_minima(options, calibration=1, seed=0)
    if options.embeddings:
        _score_embeddings(options)
    else:
        _score_models(options)


def _score_embeddings(options: argparse.Namespace) -> None:
    """Score the sentence embeddings of encoders in float32, int8 and one bit, print the table and write the page."""
    from istar.geometry.embed_tables import make_terminal_table
    from istar.quantization import embedding_scores

    for name, default in _NOT_FOR_EMBEDDINGS.items():
        if getattr(options, name) != default:
            raise UserError(f"--{name.replace('_', '-')} does not go together with --embeddings; leave one of them out")
    spec = embedding_scores.get_similarity_task(options.task or "stsb")
    embedding_scores.check_output_folder(options.out)
    progress = make_console(stderr=True)
    arguments = spec, options.data_dir, options.calibration, options.seed, progress
    scored = [embedding_scores.score_embeddings(encoder, *arguments) for encoder in dict.fromkeys(options.models)]
    table = embedding_scores.build_embedding_sheet(scored, spec)
    page = embedding_scores.write_page(table, options.out, options.typed)
    console = make_console()
    console.print(make_terminal_table(table))
    console.out(f"{page}, and the table beside it", highlight=False)


def _score_models(options: argparse.Namespace) -> None:
    """Score models in float32 and in each quantized form, print the tables and write the page."""
    from istar.geometry.embed_tables import make_terminal_table
    from istar.quantization import form_tables, quantize, quantize_page, saved_runs
    from istar.quantization.controls import FACTOR

    factor = FACTOR if options.outlier_factor is None else options.outlier_factor
    if options.outlier_factor is not None and options.control != "outlier":
        raise UserError("--outlier-factor is for --control outlier; leave it out, or add the control")
    if not 0 < factor < math.inf:
        raise UserError(f"--outlier-factor {factor:g} is out of range; expected a finite number above 0")
    forms = quantize.parse_schemes(options.forms, options.weights, options.activations)
    settings = quantize.QuantizationSettings(forms, options.calibration, options.seed, options.control, factor)
    single = [folder for folder in options.models if saved_runs.is_single_model(folder)]
    if single and len(options.models) > 1:
        raise UserError(f"{single[0]} is a single model, which is quantized alone; name one model, or folders of runs")
    if bool(single) != (options.task is not None):
        expected = "is missing; a single model needs one, such as --task rte" if single else "is for a single model"
        raise UserError(f"--task {expected}")
    quantize_page.check_output_folder(options.out)
    make_folder(options.out)
    progress = make_console(stderr=True)
    if single:
        arguments = single[0], options.task, settings, options.out, options.data_dir, progress
        quantized = quantize.quantize_model(*arguments)
    else:
        quantized = quantize.quantize_runs(options.models, settings, options.out, options.data_dir, progress)
    content = quantize_page.make_tables(quantized)
    page = quantize_page.write_page(quantized, content, options.out, options.typed)
    console = make_console()
    notes = [*content.sheets["methods"].notes] if "methods" in content.sheets else []
    for table in form_tables.build_terminal_sheets(quantized, content.comparisons):
        console.print(make_terminal_table(table))
        notes += table.notes
    reasons = [f"left out: {path}: {reason}" for path, reason in quantized.exclusion_reasons.items()]
    for line in (*notes, *content.conclusions, *reasons):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.out(f"{page}, and figures, tables and {quantize.SCORES_FILE} beside it", highlight=False)
