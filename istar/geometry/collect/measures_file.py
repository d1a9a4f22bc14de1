"""The measures of a model: their files `measures.json` and `measures.csv`, and the 95% intervals of the measures."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import pandas as pd
from scipy import special

from istar.errors import UserError
from istar.files.outputs import STATE_FOLDER
from istar.files.parsing import MissingFileError, find_mismatch, read_record
from istar.files.writing import replace_nested, to_csv, to_json
from istar.measures.catalogue import MEASURES_WITH_ERROR
from istar.runs.names import COMBINED

T = TypeVar("T")
PointKind = Literal["tokens", "places", "points"]
"""What is measured; see `Measurements.kind`."""
BySourceAndTap = dict[str, dict[str, T]]
MEASUREMENT_FORMAT = 3
"""Version of `measures.json`; files of other versions are refused."""
JSON_FILE, CSV_FILE = "measures.json", "measures.csv"
EXAMPLES_FILE = "examples.safetensors"
"""Mean states of examples; see `istar.geometry.collect.mean_states.Examples`."""
TRAJECTORY_FILE = "trajectory.csv"
"""Table of the measures at all checkpoints of a training."""
SOURCE_FIELDS = (
    *("sources", "spectra", "norms", "extremes", "by_position", "by_frequency", "massive", "gride", "replicates"),
)
"""Fields of `Measurements` by source and tap."""
_NUMBER_FIELDS = (*SOURCE_FIELDS, "matrices", "final_norm", "gaps")
"""Fields where a nested null means an undefined number."""
NORMAL_QUANTILE = float(special.ndtri(0.975))
"""Half-width of a 95% interval in standard errors, if the standard error itself is known well."""


class ModelName(NamedTuple):
    """A model as the user names it."""

    name: str  # hub id, folder, or name in a table
    revision: str | None = None  # branch, tag or commit on the hub

    def __str__(self) -> str:
        return f"{self.name} at revision {self.revision}" if self.revision else self.name


class OtherModelError(UserError):
    """Raised for an output folder that contains the measures of another model."""

    def __init__(self, out: Path, earlier: ModelName, new: ModelName) -> None:
        super().__init__(f"{out} holds the measures of {earlier}, not of {new}; expected another folder")


@dataclass(frozen=True)
class Measurements:
    """The contents of `measures.json`."""

    model: dict[str, Any]  # name and revision as given, dtype, model type and device
    weights: str  # hash of all weights; equal weights have equal hashes, whatever their revision is called
    identity: str  # hash of the weights, the configuration and the tokenizer; see `model_identity.hash_model`
    settings: dict[str, Any]  # settings of the pass, and the paths of the texts
    # Measures by source and tap. With several sources, `combined` is all of them together.
    sources: BySourceAndTap[dict[str, float]]
    spectra: BySourceAndTap[dict[str, list[float]]]  # singular values of the hidden states, raw and centered
    # Measures of the `input` embeddings and, if they are not tied, of the `output` embeddings, by form: `raw`,
    # `centered` and `post_processed`.
    matrices: dict[str, dict[str, dict[str, Any]]]
    final_norm: dict[str, Any] | None  # gain and bias of the final normalization; None without a gain
    norms: BySourceAndTap[dict[str, list[float]]] = field(default_factory=dict)  # see `summaries.trim_norm_histogram`
    # See `summaries.find_extreme_dimensions`.
    extremes: BySourceAndTap[list[dict[str, float]]] = field(default_factory=dict)
    # Norm and InterSim of the tokens by position in the model's input, and by how often their type occurs in the texts;
    # see `Layer.summarize_by_position` and `Layer.summarize_by_frequency`.
    by_position: BySourceAndTap[dict[str, list[float]]] = field(default_factory=dict)
    by_frequency: BySourceAndTap[dict[str, list[float]]] = field(default_factory=dict)
    # The largest massive activations: value, dimension, token id, position, the token's text, and `ratio`, the
    # magnitude divided by the median magnitude.
    massive: BySourceAndTap[list[dict[str, Any]]] = field(default_factory=dict)
    # Intrinsic dimension by scale: fields of `ScaleDimension`.
    gride: BySourceAndTap[list[dict[str, float]]] = field(default_factory=dict)
    # Measures without each group of documents, for jackknife errors of differences; see `compute_replicates`.
    replicates: BySourceAndTap[dict[str, list[float]]] = field(default_factory=dict)
    text_hashes: dict[str, str] = field(default_factory=dict)  # hash of each text's content by its name
    # `matrices.summarize_rows` of each embedding matrix, and `counts`, how often each token occurs in the texts.
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    # How much of each text, and of `combined`, was read and how long that took: fields of `corpus.ReadCounts`.
    readings: dict[str, dict[str, float]] = field(default_factory=dict)
    # Time from loading the model to the last measure, including interrupted calls; None for unknown.
    seconds: float | None = None
    processes: int = 1  # number of processes that shared the pass
    command: str = ""  # command line that took these measures
    # What was measured: `tokens` of texts, `places` of the states of a batch, or `points` that existed before. Points
    # have no model, matrices, final norm or texts, and their states are clouds in no order.
    kind: PointKind = "tokens"
    # By state, the number of groups of rows that do not depend on each other, such as images, users or speakers; the
    # number of points if each row is its own group. Empty for tokens, whose documents `readings` counts.
    groups: dict[str, int] = field(default_factory=dict)
    # For each pair of clouds, the names `first` and `second`, and the `distance` and the `cosine` of their means; of
    # clouds whose rows are pairs also the `alignment`.
    gaps: list[dict[str, Any]] = field(default_factory=list)
    format: int = MEASUREMENT_FORMAT

    @property
    def combined_key(self) -> str:
        """Key of all texts together in `sources`: `combined`, or the name of the only source."""
        return COMBINED if COMBINED in self.sources else next(iter(self.sources))

    @property
    def width(self) -> int:
        """Largest number of dimensions of the hidden states; the embedding matrices may have another one."""
        return max(map(self.width_of, self.all_texts))

    def width_of(self, state: str) -> int:
        """Return the number of dimensions of a state."""
        if spectra := self.spectra.get(self.combined_key, {}).get(state):
            return len(spectra["raw"])
        return int(self.matrices["input"]["raw"]["dimensions"]) if self.matrices else 0

    @property
    def all_texts(self) -> dict[str, dict[str, float]]:
        """Measures by tap over all texts together."""
        return self.sources[self.combined_key]


def arrange_by_source(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `SOURCE_FIELDS` of `Measurements` from the results of `summarize_source` by source."""
    return {field: {source: summary[field] for source, summary in summaries.items()} for field in SOURCE_FIELDS}


def describe_model(
    name: str, dtypes: Iterable[object], devices: Iterable[object], model_type: str | None = None
) -> dict[str, Any]:
    """Return `Measurements.model` of a model in memory or of points."""
    return {
        **ModelName(name)._asdict(),
        "dtype": ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
        "type": model_type,
        "device": ", ".join(sorted(map(str, devices))),
    }


def file_contents(measured: Measurements) -> dict[str, str]:
    """Return the contents of `measures.json` and `measures.csv` by file name."""
    json_text = to_json(asdict(measured))
    # Put each list of numbers on one line. JSON strings contain no line breaks, so the pattern matches no string.
    json_text = re.sub(r"\[\n[-+\d.enul,\s]+\]", lambda match: " ".join(match[0].split()), json_text)
    csv_frame = layer_frame(measured)
    csv_frame.insert(0, "model", measured.model["name"])
    csv_frame.insert(1, "revision", measured.model["revision"])
    return {JSON_FILE: json_text + "\n", CSV_FILE: to_csv(csv_frame)}


def layer_frame(measured: Measurements) -> pd.DataFrame:
    """Return a data frame with a row for each source and layer, and a column for each measure."""
    return pd.DataFrame(
        {"source": source, "layer": tap, **measures}
        for source, taps in measured.sources.items()
        for tap, measures in taps.items()
    )


def read_measurement(path: Path) -> Measurements:
    """Read the measures of a model from `measures.json`; undefined numbers, null in the file, become NaN.

    Raises a `UserError` if the file cannot be read, is damaged, or has another version of the format.
    """
    try:
        contents = read_record(path, dict[str, Any], "a file of measures", MEASUREMENT_FORMAT)
        for name in _NUMBER_FIELDS:
            if contents.get(name) is not None:
                contents[name] = replace_nested(contents[name], lambda value: value is None, math.nan)
        if mismatch := find_mismatch(contents, Measurements, "its content"):
            raise UserError(f"{path} is not a file of measures that istar wrote: {mismatch}")
    except MissingFileError as error:
        raise UserError(f"{error}; measure a model or vectors: istar measure NAME --out {path.parent}") from error
    except UserError as error:
        raise UserError(f"{error}; delete the file and measure the model again") from error
    return Measurements(**contents)


def read_earlier(out: Path, model: ModelName, identity: str) -> Measurements | None:
    """Return the measures of a model in an output folder, or None if it has none.

    Two models are the same if their names (as absolute paths) and revisions are equal, or else if their identities
    are. Points have no identity.

    Raises an `OtherModelError` for the measures of another model, and a `UserError` as `read_measurement` does.
    """
    if not (out / JSON_FILE).exists():
        return None
    earlier = read_measurement(out / JSON_FILE)
    earlier_model = ModelName(earlier.model["name"], earlier.model["revision"])
    first, other = ((Path(name).absolute(), revision) for name, revision in (earlier_model, model))
    if first != other and (earlier.identity != identity or not identity):
        raise OtherModelError(out, earlier_model, model)
    return earlier


def discard_state(out: Path) -> None:
    """Delete the state of the pass of `measure_texts` in an output folder; call this once the result is on disk."""
    for path in (out / STATE_FOLDER).glob("pass.*"):
        path.unlink(missing_ok=True)


def t_quantile(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t distribution: the half-width of a 95% interval in standard errors.

    It is NaN for less than 1 degree of freedom.

    >>> round(t_quantile(9), 2)
    2.26
    """
    return float(special.stdtrit(degrees, 0.975)) if degrees >= 1 else math.nan


def interval_half_width(name: str, error: float, num_groups: int) -> float:
    """Return the half-width of the 95% interval of a measure from its standard error; NaN if the error is NaN.

    It is the error times a quantile: of Student's t distribution with `num_groups - 1` degrees of freedom for jackknife
    errors, and of the normal distribution for others, such as the error of TwoNN.
    """
    return error * (t_quantile(num_groups - 1) if name in MEASURES_WITH_ERROR else NORMAL_QUANTILE)
