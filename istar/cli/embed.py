"""`istar embed`: an embedding matrix, raw and post-processed, and its word similarity."""

import argparse
from pathlib import Path
from typing import Any

from istar.cli.console import make_console, make_folder


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `istar`."""
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
    embed.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
    from istar.config import ModelConfig
    from istar.geometry import corpus, embed

    config = ModelConfig(name=options.model, revision=options.revision)
    choice = embed.Choice(options.matrix, options.form, options.components, options.policy)
    found = embed.embed(config, choice, options.wordsim, corpus.sources(options.text))
    make_folder(options.out)
    written = embed.write(found, options.out)
    if options.save == "matrix":
        written += embed.write_matrix(found, options.out)
    elif options.save == "model":
        written.append(embed.write_model(found, config, options.out))
    console = make_console()
    for table in embed.tables(found):
        console.print(table)
    for line in (*embed.remarks(found), ", ".join(map(str, written))):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
