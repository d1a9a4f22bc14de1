"""The command `istar`: trains, measures models, and looks at runs."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar import __version__, extras
from istar.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from istar.geometry.corpus import Source
    from istar.geometry.stream import Pass


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `istar`; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["train"]:
        # Its options are Hydra's, `--help` among them.
        return train(words[1:])
    options = _parser().parse_args(words)
    options.typed = shlex.join(["istar", *words])
    try:
        extras.require(f"istar {options.name}", options.extra)
        options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def train(arguments: Sequence[str] | None = None, command: str = "istar train") -> int:
    """`istar train`; returns its exit code, or leaves with that of a mistake.

    Args:
        arguments: as on the command line, which is the default.
        command: what was typed before them, for messages.
    """
    try:
        extras.require(command, "train")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    from istar import training_command

    training_command.main(sys.argv[1:] if arguments is None else arguments, command)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="istar", description="Train and measure models, and look at runs that a training has left."
    )
    parser.add_argument("--version", action="version", version=f"istar {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="name")
    commands.add_parser("train", help="fine-tune an encoder: istar train task=rte reg=istar reg.lambda=-1")
    results = commands.add_parser("results", help="every run below a folder as a row of a table")
    results.add_argument("folder", type=Path, help="that holds the runs, as run.root")
    results.add_argument("--out", type=Path, help="also write all columns to a .csv, .parquet or .json file")
    results.add_argument("--sort", default="name", help="column to sort by, best first (default: name)")
    results.set_defaults(command=_results, extra="report")
    report = commands.add_parser("report", help="the paper's tables and figures from these runs, as a page")
    report.add_argument("folder", type=Path, help="that holds the runs, as run.root")
    report.add_argument("--out", type=Path, default=Path("report"), help="folder to write (default: report)")
    report.set_defaults(command=_report, extra="report")
    watch = commands.add_parser("watch", help="the live table of the sweeps that run in a folder, here or elsewhere")
    watch.add_argument("folder", type=Path, help="that holds the runs, as run.root")
    watch.add_argument("--sweep", help="name of one; default: those that are not over, else the latest")
    watch.add_argument("--once", action="store_true", help="show it as it is now, and leave")
    watch.set_defaults(command=_watch, extra="train")
    _add_measure(commands)
    _add_embed(commands)
    _add_correlate(commands)
    return parser


def _add_measure(commands: Any) -> None:
    measure = commands.add_parser("measure", help="the geometry of a model, layer by layer, over texts")
    measure.add_argument("model", nargs="?", help="hub id, or a folder that save_pretrained wrote")
    measure.add_argument(
        "--text",
        action="append",
        required=True,
        help="text file, a document a line, or .jsonl; name=<file>; repeatable",
    )
    measure.add_argument("--out", type=Path, default=Path("geometry"), help="folder to write (default: geometry)")
    measure.add_argument("--revision", help="branch, tag or commit on the hub")
    measure.add_argument("--revisions", help="several, with commas between them, one after another")
    measure.add_argument("--checkpoints", help="instead of a model: 'folder/*' of saved models, runs or .ckpt files")
    measure.add_argument("--length", type=int, default=0, help="tokens of a block (default: the model's, 512 at most)")
    measure.add_argument("--batch-size", type=int, default=32, help="blocks at a time (default: 32)")
    measure.add_argument("--max-tokens", type=int, help="stop behind so many tokens of each text")
    measure.add_argument("--sample", type=int, default=5_000, help="tokens kept for TwoNN; 0 for none (default: 5000)")
    measure.add_argument("--seed", type=int, default=0, help="of that sample (default: 0)")
    measure.add_argument("--no-intra", action="store_true", help="without IntraSim, whose memory grows with the words")
    measure.add_argument("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32")
    measure.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    measure.set_defaults(command=_measure, extra="train")


def _add_embed(commands: Any) -> None:
    embed = commands.add_parser("embed", help="an embedding matrix, raw and post-processed, and its word similarity")
    embed.add_argument("model", help="hub id, or a folder that save_pretrained wrote")
    embed.add_argument("--out", type=Path, default=Path("embeddings"), help="folder to write (default: embeddings)")
    embed.add_argument("--revision", help="branch, tag or commit on the hub")
    embed.add_argument("--matrix", choices=("input", "output"), default="input")
    forms = ("raw", "centered", "scaled_centered", "all_but_the_top", "all_but_the_top_published")
    embed.add_argument("--form", choices=forms, default="raw", help="how it is processed (default: raw)")
    embed.add_argument("--components", type=int, help="directions that all_but_the_top removes (default: a hundredth)")
    embed.add_argument(
        "--save", choices=("matrix", "model"), help="write the processed matrix, alone or within its model"
    )
    embed.add_argument("--wordsim", action="append", default=[], type=Path, help="benchmark file; repeatable")
    embed.add_argument("--policy", choices=("single_token", "mean"), default="single_token", help="of long words")
    embed.add_argument("--text", action="append", default=[], help="in which tokens are counted; as of measure")
    embed.set_defaults(command=_embed, extra="train")


def _embed(options: argparse.Namespace) -> None:
    from istar.config import ModelConfig
    from istar.geometry import corpus, embed

    config = ModelConfig(name=options.model, revision=options.revision)
    choice = embed.Choice(options.matrix, options.form, options.components, options.policy)
    found = embed.embed(config, choice, options.wordsim, corpus.sources(options.text))
    _make_folder(options.out)
    written = embed.write(found, options.out)
    if options.save == "matrix":
        written += embed.write_matrix(found, options.out)
    elif options.save == "model":
        written.append(embed.write_model(found, config, options.out))
    console = _console()
    for table in embed.tables(found):
        console.print(table)
    for line in (*embed.remarks(found), ", ".join(map(str, written))):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _add_correlate(commands: Any) -> None:
    correlate = commands.add_parser("correlate", help="measures over a training with the scores of tasks over it")
    correlate.add_argument("geometry", type=Path, help="trajectory.csv, or another table by revision or step")
    correlate.add_argument("scores", type=Path, help="CSV: revision or step, and a column for each task")
    correlate.add_argument(
        "--out", type=Path, default=Path("correlation"), help="folder to write (default: correlation)"
    )
    correlate.add_argument("--by", choices=("revision", "step"), help="column to join by (default: what both have)")
    for name in ("measure", "layer", "source"):
        correlate.add_argument(f"--{name}", action="append", default=[], help="only this one; repeatable")
    correlate.add_argument("--omit", action="append", default=[], help="revision or step to leave out; repeatable")
    correlate.add_argument("--resamples", type=int, default=2_000, help="of the bootstrap (default: 2000)")
    correlate.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    correlate.set_defaults(command=_correlate, extra="train")


def _correlate(options: argparse.Namespace) -> None:
    for name, least in (("resamples", 100), ("seed", 0)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} {getattr(options, name)} is too small; expected {least} or more")
    from istar.geometry import correlate

    selection = correlate.Selection(
        options.by,
        tuple(options.measure),
        tuple(options.layer),
        tuple(options.source),
        tuple(options.omit),
        options.resamples,
        options.seed,
    )
    found = correlate.correlate(options.geometry, options.scores, selection)
    shown = correlate.sheet(found, selection)
    _make_folder(options.out)
    written = correlate.write(found, shown, options.out)
    console = _console()
    for table in correlate.tables(shown):
        console.print(table)
    for line in (*correlate.reasons(shown), *found.remarks, ", ".join(map(str, written))):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _measure(options: argparse.Namespace) -> None:
    for name, least in (("length", 0), ("batch_size", 1), ("sample", 0), ("seed", 0), ("max_tokens", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value} is too small; expected {least} or more")
    from istar.geometry import corpus, stream

    how = stream.Pass(
        options.length, options.batch_size, options.sample, options.seed, options.max_tokens, not options.no_intra
    )
    found = corpus.sources(options.text)
    with stream.processes() as rank:
        if options.revisions is None and options.checkpoints is None:
            _measure_one(options, found, how, rank)
        elif rank == 0 and "WORLD_SIZE" not in os.environ:
            _trajectory(options, found, how)
        else:
            raise UserError("--revisions and --checkpoints are measured by one process; call them without torchrun")


def _measure_one(options: argparse.Namespace, found: Sequence["Source"], how: "Pass", rank: int) -> None:
    from istar.geometry import measure, page

    if options.model is None:
        raise UserError("model is missing; expected a hub id or a folder, or --checkpoints")
    page.check(options.out)
    bar = _console(stderr=True) if rank == 0 else None
    measured = measure.measure(
        options.model, found, how, options.out, options.revision, options.dtype, options.device, bar, options.typed
    )
    if rank > 0:
        return
    console = _console()
    console.print(measure.table(measured))
    told = f"{page.write(measured, options.out)}, and figures, tables, {measure.CSV} and {measure.JSON} beside it"
    console.print(told, highlight=False, soft_wrap=True, markup=False)


def _trajectory(options: argparse.Namespace, found: Sequence["Source"], how: "Pass") -> None:
    from istar.geometry import trajectory, trajectory_page

    asked = [name for name in ("revision", "revisions", "checkpoints") if getattr(options, name) is not None]
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]} do not go together; give one of them")
    if options.checkpoints is not None:
        stops = trajectory.checkpoints(options.checkpoints)
    elif options.model is None:
        raise UserError("--revisions are of a model, which is missing; expected a hub id")
    else:
        stops = trajectory.revisions(options.model, options.revisions)
    model = options.model or trajectory.common_name(stops)
    _make_folder(options.out)
    plan = trajectory.Plan(model, found, how, options.out, options.dtype, options.device, options.typed)
    followed = trajectory.follow(plan, stops, _console(stderr=True))
    if followed.measured:
        console = _console()
        console.print(trajectory.table(plan, stops, followed))
        told = f"{trajectory_page.write(plan, stops, followed)}, and figures, {trajectory.TABLE} beside it"
        console.print(told, highlight=False, soft_wrap=True, markup=False)
    trajectory.check(followed)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made: {error.strerror or error}") from error


def _results(options: argparse.Namespace) -> None:
    # Only here, so that --help need not wait for the libraries.
    from istar.reports import runs, tables

    found = runs.load_runs(options.folder)
    if options.sort not in found.frame:
        raise UserError(
            f"--sort {options.sort}: there is no such column{did_you_mean(options.sort, map(str, found.frame))}"
        )
    is_number = found.frame[options.sort].dtype.kind in "if"
    frame = found.frame.sort_values(options.sort, ascending=not is_number, na_position="last", kind="stable")
    console = _console()
    console.print(tables.runs(frame))
    for trouble in found.troubles.values():
        console.print(f"not read: {trouble}", highlight=False, soft_wrap=True)
    if options.out is not None:
        runs.export(frame, options.out)
        console.print(str(options.out), highlight=False, soft_wrap=True)


def _report(options: argparse.Namespace) -> None:
    from istar.reports import report

    written = report.write(options.folder, options.out, _console(stderr=True))
    told = f"{written.page}: {written.runs} run{'s' * (written.runs != 1)}, {written.holes} rows of missing ones"
    _console().print(told, highlight=False, soft_wrap=True, markup=False)


def _watch(options: argparse.Namespace) -> None:
    from istar.sweeps.watch import watch

    watch(options.folder, _console(), options.sweep, options.once)


def _console(**options: Any) -> "Console":
    # Only here, so that --help needs nothing but Python.
    from rich.console import Console

    return Console(**options)


if __name__ == "__main__":
    sys.exit(main())
