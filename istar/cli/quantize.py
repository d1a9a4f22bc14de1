"""Implements `istar quantize`: scores saved models in float32 and quantized, beside the geometry of activations."""

import argparse
import math
from pathlib import Path
from typing import Any

from istar.cli.console import check_minima
from istar.drawing.terminal import make_console
from istar.errors import UserError

_DEFAULT_FORMS = "w8a8,w6a6,w4a4,int8"
_DEFAULT_BY_SCORING_OPTION = {
    "forms": _DEFAULT_FORMS, "weights": "channel", "activations": "tensor", "control": "none", "outlier_factor": None
}  # fmt: skip
"""Options for scoring models, which `--embeddings` refuses unless they have these default values."""


def add_parser(commands: Any) -> None:
    """Add the command `istar quantize` to `commands`, the subparsers of the parser of `istar`."""
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
    forms_help = (
        "forms, separated by commas: w<bits of weights>a<bits of activations>, or int8 for torch's dynamic int8"
    )
    add("--forms", default=_DEFAULT_FORMS, help=f"{forms_help} (default: {_DEFAULT_FORMS})")
    weights_help = "scales of the weights: one for each output channel, or one for the matrix (default: channel)"
    add("--weights", choices=("channel", "tensor"), default="channel", help=weights_help)
    activations_help = (
        "scales of the activations: one for the tensor, calibrated, or one for each token (default: tensor)"
    )
    add("--activations", choices=("tensor", "token"), default="tensor", help=activations_help)
    calibration_help = "number of training examples that calibrate static scales (default: 256)"
    add("--calibration", type=int, default=256, help=calibration_help)
    add("--seed", type=int, default=0, help="seed of the choice of these examples, and of a rotation (default: 0)")
    control_help = (
        "change the model in a way that float32 does not show: rotate the inputs of the linear layers at random, or"
    )
    add(
        "--control",
        choices=("none", "rotate", "outlier"),
        default="none",
        help=f"{control_help} make an outlier in the inputs of the output projection of attention (default: none)",
    )
    add(
        "--outlier-factor",
        type=float,
        help="factor of the outlier; a power of 2 changes no bit in float32 (default: 128)",
    )
    add("--task", help="task of a single model, such as rte; runs know theirs")
    add("--data-dir", type=Path, help="folder of the task's data, if it is not where the runs had it")
    embeddings_help = (
        "instead: sentence embeddings of encoders in float32, int8 and one bit, on the pairs of --task (stsb)"
    )
    add("--embeddings", action="store_true", help=embeddings_help)
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
    from istar.drawing import page_folder
    from istar.embeddings.embed_tables import make_terminal_table
    from istar.quantization import embedding_scores

    for name, default in _DEFAULT_BY_SCORING_OPTION.items():
        if getattr(options, name) != default:
            raise UserError(f"--{name.replace('_', '-')} does not go together with --embeddings; leave one of them out")
    spec = embedding_scores.get_similarity_task(options.task or "stsb")
    page_folder.check(options.out, embedding_scores.KIND, _list_inputs(options))
    progress_console = make_console(stderr=True)
    scoring_arguments = spec, options.data_dir, options.calibration, options.seed, progress_console
    encoder_scores = [
        embedding_scores.score_embeddings(encoder, *scoring_arguments) for encoder in dict.fromkeys(options.models)
    ]
    table = embedding_scores.build_embedding_sheet(encoder_scores, spec)
    page_path = embedding_scores.write_page(table, options.out, options.typed)
    console = make_console()
    console.print(make_terminal_table(table))
    console.out(f"{page_path}, and the table beside it", highlight=False)


def _list_inputs(options: argparse.Namespace) -> list[Path]:
    return [*options.models, *([] if options.data_dir is None else [options.data_dir])]


def _score_models(options: argparse.Namespace) -> None:
    """Score models in float32 and in each quantized form, print the tables and write the page."""
    from istar.drawing import page_folder
    from istar.embeddings.embed_tables import make_terminal_table
    from istar.quantization import form_tables, quantize, quantize_page, saved_runs
    from istar.quantization.equivalent_models import FACTOR

    factor = FACTOR if options.outlier_factor is None else options.outlier_factor
    if options.outlier_factor is not None and options.control != "outlier":
        raise UserError("--outlier-factor is for --control outlier; leave it out, or add the control")
    if not 0 < factor < math.inf:
        raise UserError(f"--outlier-factor {factor:g} is out of range; expected a finite number above 0")
    schemes = quantize.parse_schemes(options.forms, options.weights, options.activations)
    settings = quantize.QuantizationSettings(schemes, options.calibration, options.seed, options.control, factor)
    single_models = [folder for folder in options.models if saved_runs.is_single_model(folder)]
    if single_models and len(options.models) > 1:
        raise UserError(
            f"{single_models[0]} is a single model, which is quantized alone; name one model, or folders of runs"
        )
    if bool(single_models) != (options.task is not None):
        expected = (
            "is missing; a single model needs one, such as --task rte" if single_models else "is for a single model"
        )
        raise UserError(f"--task {expected}")
    page_folder.check(options.out, quantize_page.KIND, _list_inputs(options))
    progress_console = make_console(stderr=True)
    if single_models:
        scoring_arguments = single_models[0], options.task, settings, options.out, options.data_dir, progress_console
        quantized = quantize.quantize_model(*scoring_arguments)
    else:
        quantized = quantize.quantize_runs(options.models, settings, options.out, options.data_dir, progress_console)
    page_tables = quantize_page.make_tables(quantized)
    page_path = quantize_page.write_page(quantized, page_tables, options.out, options.typed)
    console = make_console()
    notes = [*page_tables.sheets["methods"].notes] if "methods" in page_tables.sheets else []
    for table in form_tables.build_terminal_sheets(quantized, page_tables.comparisons):
        console.print(make_terminal_table(table))
        notes += table.notes
    reasons = [f"left out: {path}: {reason}" for path, reason in quantized.exclusion_reasons.items()]
    for line in (*notes, *page_tables.conclusions, *reasons):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.out(f"{page_path}, and figures, tables and {quantize.SCORES_FILE} beside it", highlight=False)
