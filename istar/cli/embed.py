"""Implements `istar embed`: the geometry and the word similarity of an embedding matrix, raw and post-processed."""

import argparse
from pathlib import Path
from typing import Any

from istar.cli.console import make_console, make_folder

_FORMS = ("raw", "centered", "scaled_centered", "all_but_the_top", "all_but_the_top_published")


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `istar`."""
    parser = commands.add_parser(
        "embed", help="measure an embedding matrix, raw and post-processed, and its word similarity"
    )
    add = parser.add_argument
    add("model", help="hub id, or a folder that save_pretrained wrote")
    add("--out", type=Path, default=Path("embeddings"), help="output folder (default: embeddings)")
    add("--revision", help="branch, tag or commit on the hub")
    add("--matrix", choices=("input", "output"), default="input", help="which embedding matrix (default: input)")
    add("--form", choices=_FORMS, default="raw", help="how to post-process the matrix (default: raw)")
    components = "number of directions that all_but_the_top removes (default: a hundredth of the dimensions)"
    add("--components", type=int, help=components)
    add("--save", choices=("matrix", "model"), help="write the processed matrix, alone or within its model")
    add("--wordsim", action="append", default=[], type=Path, help="word similarity benchmark file; repeatable")
    policy = "for words of several tokens: leave them out, or average their tokens (default: single_token)"
    add("--policy", choices=("single_token", "mean"), default="single_token", help=policy)
    text = "text in which tokens are counted, as for istar measure; repeatable"
    add("--text", action="append", default=[], help=text)
    parser.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Measure the matrix, write the results to the output folder and print them."""
    from istar.config import ModelConfig
    from istar.geometry import corpus, embed

    config = ModelConfig(name=options.model, revision=options.revision)
    choice = embed.Choice(options.matrix, options.form, options.components, options.policy)
    embedding = embed.embed(config, choice, options.wordsim, corpus.sources(options.text))
    make_folder(options.out)
    paths = embed.write(embedding, options.out)
    if options.save == "matrix":
        paths += embed.write_matrix(embedding, options.out)
    elif options.save == "model":
        paths.append(embed.write_model(embedding, config, options.out))
    console = make_console()
    for table in embed.tables(embedding):
        console.print(table)
    for line in (*embed.remarks(embedding), ", ".join(map(str, paths))):
        console.out(line, highlight=False)
