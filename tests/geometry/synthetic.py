"""Synthetic measurements with known numbers, for the tests of pages, figures, tables and flags."""

import html
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from istar.geometry.collect import measures_file
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.show.compare import MeasuredModel
from istar.geometry.show.model_figures import MEASURE_TITLES

TAPS = ("embeddings", "layer_1", "layer_2", "final_norm")
WIDTH = 24
SETTINGS = {
    "texts": {"news": "news.txt", "talk": "talk.txt"}, "groups": 10, "measures": "all", "length": 512,
    "documents": "separate", "special_tokens": "exclude",
}  # fmt: skip


def make_value(name: str, index: int = 0) -> float:
    """Return a value of a measure at a layer, which differs between measures and layers."""
    return 0.1 + list(MEASURE_TITLES).index(name) / 1e3 + index / 10


def make_measurements(
    taps: Iterable[str] = TAPS, texts: Iterable[str] = ("news", "talk", "combined"), **fields: Any
) -> Measurements:
    """Return measurements of a model in which nothing is missing: a different number for each layer and measure."""
    taps, texts = list(taps), list(texts)
    layers = {
        tap: {name: make_value(name, index) for name in MEASURE_TITLES}
        | {"points": 500.0, "isoscore_error": 0.01, "inter_sim_error": 0.02, "two_nn_error": 0.3}
        for index, tap in enumerate(taps)
    }
    columns = {"first": [0, 1, 2], "points": [5, 5, 9], "norm": [3.0, 2.0, 1.0], "inter_sim": [0.9, 0.2, math.nan]}
    scales = [{"n1": n, "value": 10.0 - n, "error": 0.1 * n, "distance": float(n)} for n in (1, 2)]
    form = {
        "rows": 3, "dimensions": WIDTH, "partition_isotropy_as_computed": 0.9, "partition_isotropy_both": 0.8,
        "average_norm": 1.0, "mean_vector_norm": 0.5, "norm_ratio": 0.5, "singular_values": [3.0, 2.0, 1.0],
    }  # fmt: skip
    rows = {"ids": [0, 1, 2], "norms": {"edges": [0.0, 1.0, 2.0], "counts": [1, 2]}, "raw": [[1.0, 2.0, 3.0]] * 2,
            "centered": [[0.0, 1.0, -1.0]] * 2}  # fmt: skip
    activation = {"dimension": 1415, "value": -3e3, "ratio": 2e3, "token": 7, "position": 0, "text": "the"}
    extreme = {"dimension": 3, "mean": 9.0, "deviation": 1.0, "mean_by_typical_deviation": 6.0, "variance_share": 0.05}
    sides = ("input", "output")
    defaults: dict[str, Any] = {
        "model": {"name": "model", "revision": None, "type": "gpt2", "dtype": "float32", "device": "cpu"},
        "weights": "0123",
        "identity": "89ab",
        "settings": SETTINGS,
        "sources": {text: {tap: dict(measures) for tap, measures in layers.items()} for text in texts},
        "spectra": {text: {tap: {"raw": [3.0] * WIDTH, "centered": [2.0] * WIDTH} for tap in taps} for text in texts},
        "matrices": {side: dict.fromkeys(("raw", "centered", "post_processed"), form) for side in sides},
        "final_norm": {"gain": 1.0, "bias": 0.5, "ratio": 0.5, "bias_over_gain": 2.0, "zero_gains": 0,
                       "outlier_gains": [3], "outlier_biases": []},
        "norms": {texts[-1]: {tap: {"edges": [1.0, 2.0, 4.0], "counts": [1, 3], "outside": [0, 1]} for tap in taps}},
        "extremes": {text: {tap: [extreme] * 3 for tap in taps} for text in texts},
        "by_position": {texts[-1]: dict.fromkeys(taps, columns)},
        "by_frequency": {texts[-1]: dict.fromkeys(taps, columns)},
        "massive": {text: {tap: [activation] * 4 for tap in taps} for text in texts},
        "gride": {texts[-1]: dict.fromkeys(taps, scales)},
        "rows": dict.fromkeys(sides, rows),
        "readings": {text: {"documents": 2, "sentences": 3, "characters": 90, "bytes": 100, "tokens": 50,
                            "seconds": 2.0, "forward_seconds": 1.0} for text in texts},
        "text_hashes": {"news": "01", "talk": "02"},
        "seconds": 3.0,
        "command": "istar measure x",
    }  # fmt: skip
    return Measurements(**{**defaults, **fields})


def make_points(clouds: Iterable[str] = ("queries", "corpus"), kind: str = "points", **fields: Any) -> Measurements:
    """Return measurements of clouds of vectors, or of states of a model on batches with `kind` places."""
    source = "points" if kind == "points" else "batches"
    measured = make_measurements(clouds, [source])
    for measures in measured.all_texts.values():
        measures.pop("intra_sim")
        measures.pop("adjusted_intra_sim")
    settings = {"source": source, "measures": "all", "sample": 5_000, "seed": 0, "groups": 10, "texts": {}}
    absent: dict[str, Any] = dict.fromkeys(("weights", "identity", "command"), "")
    absent |= {name: {} for name in ("matrices", "rows", "readings", "text_hashes", "massive", "by_position")}
    defaults = {"final_norm": None, "seconds": None, "by_frequency": {}, "settings": settings, "kind": kind,
                "model": {"name": "points", "revision": None, "dtype": "float32", "type": None, "device": "cpu"},
                "groups": dict.fromkeys(clouds, 500)}  # fmt: skip
    return replace(measured, **{**absent, **defaults, **fields})


def make_model(label: str = "model", **options: Any) -> MeasuredModel:
    """Return a model with these measurements and this label."""
    return MeasuredModel(label, make_measurements(**options))


def read_sections(page: Path) -> str:
    """Return the text of a page without its style, its script, tags and the definitions at its end."""
    body = re.sub(r"<(style|script).*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    body = body.partition('id="measures"')[0]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def write_measures(measurements: Measurements, folder: Path) -> None:
    """Write `measures.json` and `measures.csv` to a folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in measures_file.file_contents(measurements).items():
        (folder / name).write_text(text, encoding="utf-8")
