"""`istar measure`: the geometry of a model, layer by layer, over texts, at one or several points of its training."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar.cli.console import make_console, make_folder
from istar.errors import UserError

if TYPE_CHECKING:
    from istar.geometry.corpus import Source
    from istar.geometry.stream import Pass


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `istar`."""
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
    measure.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
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
    from istar.geometry import measure, model_page

    if options.model is None:
        raise UserError("model is missing; expected a hub id or a folder, or --checkpoints")
    model_page.check(options.out)
    bar = make_console(stderr=True) if rank == 0 else None
    measured = measure.measure(
        options.model, found, how, options.out, options.revision, options.dtype, options.device, bar, options.typed
    )
    if rank > 0:
        return
    console = make_console()
    console.print(measure.table(measured))
    told = f"{model_page.write(measured, options.out)}, and figures, tables, {measure.CSV} and {measure.JSON} beside it"
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
    make_folder(options.out)
    plan = trajectory.Plan(model, found, how, options.out, options.dtype, options.device, options.typed)
    followed = trajectory.follow(plan, stops, make_console(stderr=True))
    if followed.measured:
        console = make_console()
        console.print(trajectory.table(plan, stops, followed))
        told = f"{trajectory_page.write(plan, stops, followed)}, and figures, {trajectory.TABLE} beside it"
        console.print(told, highlight=False, soft_wrap=True, markup=False)
    trajectory.check(followed)
