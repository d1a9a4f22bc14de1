"""Implements `istar quantize`: scores the models of finished runs in float32 and in simulated low-bit forms."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar.cli import shared_options
from istar.drawing.terminal import make_console
from istar.errors import UserError

if TYPE_CHECKING:
    from istar.records.results import RunRecord


def add_parser(commands: Any) -> None:
    """Register `istar quantize`."""
    parser = commands.add_parser(
        "quantize",
        help="score the models of finished runs in simulated low-bit forms, with the geometry of their activations",
        description="Score the models of finished runs in float32 and in simulated low-bit forms on the validation set "
        "of their task. Prints what each configuration loses, and writes a row for each run as CSV.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="folder", help="folders of runs with run.save_model=true")
    shared_options.add_output(parser, "quantization")
    forms_help = "forms w<bits of weights>a<bits of activations> (default: w8a8,w6a6,w4a4)"
    shared_options.add_list(parser, "--forms", forms_help)
    weights_help = "scales of the weights: one for each output channel, or one for the matrix (default: channel)"
    add("--weights", choices=("channel", "tensor"), default="channel", help=weights_help)
    activations_help = (
        "scales of the activations: one for the tensor, calibrated, or one for each token (default: tensor)"
    )
    add("--activations", choices=("tensor", "token"), default="tensor", help=activations_help)
    calibration_help = "number of training examples that calibrate the scales of tensors (default: 256)"
    add("--calibration", type=int, default=256, help=calibration_help)
    add("--seed", type=int, default=0, help="seed of random samples (default: 0)")
    add("--data-dir", type=Path, help="folder of the task's data, if it is not where the runs had it")
    parser.set_defaults(command=run, extra="train", minima={"calibration": 1, "seed": 0})


def run(options: argparse.Namespace) -> None:
    """Score the runs, print the table of configurations, and write it as LaTeX and the scores of the runs as CSV."""
    # Imported here so that `istar --help` does not wait for the libraries.
    from istar.files.outputs import Output
    from istar.files.writing import to_csv
    from istar.finetune.quantization import form_scores
    from istar.finetune.quantization.linear_layers import parse_form
    from istar.reports.run_frame import read_runs

    names = options.forms or ["w8a8", "w6a6", "w4a4"]
    forms = tuple(parse_form(name, options.weights, options.activations) for name in names)
    settings = form_scores.QuantizationSettings(forms, options.calibration, options.seed, options.data_dir)
    output = Output(options.out, "table of quantized runs")
    output.check(("quantization.csv", "quantization.tex"), options.runs)
    records: dict[Path, RunRecord] = {}
    for folder in options.runs:
        runs = read_runs(folder, keep_records=True, excluded=options.out)
        if not runs.records:
            raise UserError(f"{folder} holds no runs of train.py; name the folder of a run, or one that holds runs")
        records |= {Path(path): record for path, record in runs.records.items()}
    scores = form_scores.score_runs(records, settings, make_console(stderr=True))
    summary = form_scores.summarize_configurations(scores, forms)
    files = {"quantization.csv": to_csv(scores), "quantization.tex": form_scores.format_latex(summary)}
    output.write({name: text.encode() for name, text in files.items()}, is_complete=True)
    if options.json:
        shared_options.print_json({"runs": scores})
    else:
        make_console().print(form_scores.build_terminal_table(summary))
    make_console(stderr=options.json).out(f"{options.out / 'quantization.csv'} and .tex", highlight=False)
