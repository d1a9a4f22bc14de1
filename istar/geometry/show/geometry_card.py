"""The measures of a model as Markdown, to paste into its page on the hub: `card.md`."""

import math
from importlib.metadata import version

from istar.drawing.page_tables import make_markdown_table
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.show.terminal_tables import HEADERS


def make_geometry_card(label: str, measured: Measurements) -> str:
    """Return a section with the main measures of each layer over all texts together, and how they were measured."""
    measures_by_tap, settings = measured.all_texts, measured.settings
    names = [name for name in HEADERS if any(name in measures for measures in measures_by_tap.values())]
    rows = [
        [tap, *("-" if math.isnan(value := measures.get(name, math.nan)) else f"{value:.4g}" for name in names)]
        for tap, measures in measures_by_tap.items()
    ]
    num_tokens = next(iter(measures_by_tap.values()))["tokens"]
    return (
        f"## Geometry of the hidden states\n\n"
        f"{label} over {num_tokens:,.0f} tokens of {', '.join(settings['texts'])}: {settings['documents']} documents "
        f"of at most {settings['length']} tokens, special tokens {settings['special_tokens']}d, weights in "
        f"{measured.model['dtype']}. Measured by istar {version('istar')}.\n\n"
        f"{make_markdown_table([['layer', *(HEADERS[name] for name in names)], *rows])}\n\n"
        "IsoScore is 1 if the hidden states vary equally in all directions, and 0 if they vary in one. InterSim is the "
        "average cosine of different tokens, IntraSim of the same token in different places, TwoNN an intrinsic "
        "dimension, the rank an effective rank.\n"
    )
