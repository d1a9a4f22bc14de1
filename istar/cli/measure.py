"""Implements `istar measure`: measures the geometry of a model's layers on texts, also at several checkpoints."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar.drawing.terminal import make_console
from istar.errors import UserError

if TYPE_CHECKING:
    from istar.geometry.collect.corpus_statistics import MeasureSettings
    from istar.inputs.corpus import Source

_DTYPES = ("float32", "float64", "bf16", "float16")


def add_parser(commands: Any) -> None:
    """Register `istar measure`."""
    parser = commands.add_parser("measure", help="measure the geometry of a model's layers on texts")
    add = parser.add_argument
    add("model", nargs="?", help="hub id, or a folder that save_pretrained wrote")
    text_help = "text: a file (one document per line, .jsonl or .parquet) or folder; name=<path> names it; repeatable"
    add("--text", action="append", help=f"{text_help}; at least one is required")
    add("--out", type=Path, default=Path("geometry"), help="output folder (default: geometry)")
    add("--revision", help="branch, tag or commit on the hub")
    add("--revisions", help="several revisions to measure one after another, separated by commas")
    add("--checkpoints", help="instead of a model: a pattern 'folder/*' of saved models, runs or .ckpt files")
    add("--steps", type=Path, help="CSV table with the columns checkpoint and step, for checkpoints that record none")
    add("--length", type=int, default=0, help="maximum tokens per block (default: the model's maximum, at most 512)")
    documents_help = "separate: each document alone, as in the papers; packed: documents joined into full blocks"
    add("--documents", choices=("separate", "packed"), default="separate", help=f"{documents_help} (default: separate)")
    special_tokens_help = (
        "whether statistics include the states of special tokens and separators, which the model always sees"
    )
    add(
        "--special-tokens",
        choices=("include", "exclude"),
        default="exclude",
        help=f"{special_tokens_help} (default: exclude)",
    )
    add("--batch-tokens", type=int, help="maximum tokens per batch (default: 2048 on a CPU, 16384 on a GPU)")
    add("--max-tokens", type=int, help="maximum number of tokens of each text")
    add("--sample", type=int, default=5_000, help="token types to keep for TwoNN; 0: no TwoNN (default: 5000)")
    add("--seed", type=int, default=0, help="seed of that sample (default: 0)")
    measures_help = (
        "basic, or all: also IsoScore by sentence, kurtosis of tokens, massive activations, Gride; see --list"
    )
    add("--measures", choices=("basic", "all"), default="basic", help=f"{measures_help} (default: basic)")
    add("--groups", type=int, default=10, help="groups of documents for standard errors; 0: none (default: 10)")
    add("--no-intra", action="store_true", help="leave out IntraSim, whose memory grows with the number of words")
    add("--dtype", choices=_DTYPES, default="float32", help="data type of the weights (default: float32)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    add("--list", action="store_true", help="print a table of all measures instead; needs no model and no text")
    minima = {"length": 0, "batch_tokens": 1, "sample": 0, "seed": 0, "max_tokens": 1, "groups": 0}
    parser.set_defaults(command=run, extra="train", minima=minima)


def run(options: argparse.Namespace) -> None:
    """Measure one model, or several revisions or checkpoints, and write pages, figures and tables."""
    if options.list:
        _list_measures()
        return
    if not options.text:
        raise UserError("--text is missing; expected a file or folder of text, or --list to see the measures")
    if options.groups == 1:
        raise UserError("--groups 1 gives no standard errors; expected at least 2, or 0 to compute none")
    from istar.geometry.collect.corpus_statistics import MeasureSettings
    from istar.geometry.collect.stream import join_process_group
    from istar.inputs import corpus

    settings = MeasureSettings(
        length=options.length,
        batch_tokens=options.batch_tokens,
        sample=options.sample,
        seed=options.seed,
        limit=options.max_tokens,
        intra=not options.no_intra,
        documents=options.documents,
        special_tokens=options.special_tokens,
        measures=options.measures,
        groups=options.groups,
    )
    sources = corpus.parse_sources(options.text)
    with join_process_group() as rank:
        if options.revisions is None and options.checkpoints is None:
            _measure_model(options, sources, settings, rank)
        elif rank == 0 and "WORLD_SIZE" not in os.environ:
            _measure_trajectory(options, sources, settings)
        else:
            raise UserError("--revisions and --checkpoints are measured by one process; call them without torchrun")


def _list_measures() -> None:
    """Print a table of measures for each subject, with a row for each measure."""
    from rich.table import Table
    from rich.text import Text

    from istar.measures.catalogue import MEASURES

    titles = {
        "layers": "hidden states of each layer",
        "matrices": "embedding matrices",
        "final_norm": "final normalization",
    }
    labels = {
        "formula": "what it is",
        "range": "range",
        "convention": "convention",
        "cost": "cost",
        "blind_to": "blind to",
    }
    for subject, title in titles.items():
        table = Table(title=title, title_justify="left", show_lines=True)
        table.add_column("name", no_wrap=True)
        table.add_column("description", overflow="fold")
        for measure in MEASURES:
            if measure.subject == subject:
                # Text, because rich would read an interval such as [0, 1] as markup.
                lines = [
                    Text.assemble((f"{label}: ", "bold"), getattr(measure, name)) for name, label in labels.items()
                ]
                table.add_row(Text(measure.name), Text("\n").join(lines))
        make_console().print(table)


def _measure_model(
    options: argparse.Namespace, sources: Sequence["Source"], settings: "MeasureSettings", rank: int
) -> None:
    """Measure one model; on rank 0, print the table of its layers and write its page."""
    from istar.geometry.collect import measure, measures_file, stream
    from istar.geometry.show import compare_page, terminal_tables

    if options.model is None:
        raise UserError("model is missing; expected a hub id or a folder, or --checkpoints")
    if options.steps is not None:
        raise UserError("--steps is for several checkpoints; expected --checkpoints or --revisions with it")
    compare_page.check_model_folder(options.out, options.model, options.revision, [source.path for source in sources])
    stream.wait_for_all_processes()  # a process that still checks the folder would remove another one's files
    progress_console = make_console(stderr=True) if rank == 0 else None
    hardware = options.dtype, options.device
    measurements = measure.measure_model(
        options.model, sources, settings, options.out, options.revision, *hardware, progress_console, options.typed
    )
    if rank > 0:
        return
    console = make_console()
    console.print(terminal_tables.make_model_table(measurements))
    page_path = compare_page.write_model(measurements, options.out)
    console.out(
        f"{page_path}, and figures, tables, {measures_file.CSV_FILE} and {measures_file.JSON_FILE} beside it",
        highlight=False,
    )


def _measure_trajectory(options: argparse.Namespace, sources: Sequence["Source"], settings: "MeasureSettings") -> None:
    """Measure several checkpoints of a training, print their table and write their page."""
    from istar.geometry.collect import measures_file, trajectory
    from istar.geometry.show import compare_page, terminal_tables
    from istar.inputs import saved_checkpoints

    given_options = [name for name in ("revision", "revisions", "checkpoints") if getattr(options, name) is not None]
    if len(given_options) > 1:
        raise UserError(f"--{given_options[0]} and --{given_options[1]} do not go together; give one of them")
    steps = None if options.steps is None else saved_checkpoints.read_steps(options.steps)
    if options.checkpoints is not None:
        checkpoints = saved_checkpoints.find_checkpoints(options.checkpoints, steps)
    elif options.model is None:
        raise UserError("--revisions are of a model, which is missing; expected a hub id")
    else:
        checkpoints = saved_checkpoints.parse_revisions(options.model, options.revisions, steps)
    model = options.model or saved_checkpoints.common_name(checkpoints)
    plan = trajectory.TrajectoryPlan(
        model, sources, settings, options.out, options.dtype, options.device, options.typed
    )
    compare_page.check_training_folder(plan, checkpoints)
    measured_trajectory = trajectory.measure_checkpoints(plan, checkpoints, make_console(stderr=True))
    if measured_trajectory.measurements:
        console = make_console()
        console.print(terminal_tables.make_checkpoint_table(plan, checkpoints, measured_trajectory))
        page_path = compare_page.write_training(plan, checkpoints, measured_trajectory)
        console.out(f"{page_path}, and figures, {measures_file.TRAJECTORY_FILE} beside it", highlight=False)
    trajectory.raise_on_failures(measured_trajectory)
