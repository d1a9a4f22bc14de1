"""`istar measure`: all figures of a model, and the folder that holds them."""

import csv
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from istar.config import ModelConfig
from istar.errors import UserError, shorten
from istar.files import write_text
from istar.geometry import arrays, stream
from istar.geometry.corpus import COMBINED, Source
from istar.geometry.layers import Layer
from istar.geometry.matrix import Matrix, untied_output
from istar.geometry.stream import Pass, Statistics, Stream
from istar.geometry.taps import Taps
from istar.measures import (
    all_but_the_top,
    centered,
    layer_norm_summary,
    norm_summary,
    partition_isotropy,
    singular_values,
)
from istar.models import load_encoder, load_tokenizer

FORMAT = 1
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Measured:
    """What `measure` finds, as `measures.json` has it.

    Attributes:
        model: name and revision as given.
        weights: hash of all weights: equal for equal weights, whatever their revision is called.
        settings: how the corpus was read.
        sources: figures by source and tap; `combined` for several sources together.
        spectra: singular values of the hidden states, raw and centered, by source and tap.
        matrices: figures of the `input` embeddings, and of the `output` embeddings where they are others: raw,
            centered and post-processed, with the convention of I(W)'s signs.
        final_norm: gain and bias of the final normalization; None where there is none.
        norms: histograms of the hidden states' norms, by source and tap.
        extremes: dimensions with the most extreme means, by source and tap.
        rows: of the embedding matrices: norms, and some rows in two dimensions; see `arrays.rows`.
        command: that measured this.
    """

    model: dict[str, Any]
    weights: str
    settings: dict[str, Any]
    sources: dict[str, dict[str, dict[str, float]]]
    spectra: dict[str, dict[str, dict[str, list[float]]]]
    matrices: dict[str, dict[str, dict[str, Any]]]
    final_norm: dict[str, Any] | None
    norms: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    extremes: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    command: str = ""
    format: int = FORMAT


def measure(
    name: str,
    found: Sequence[Source],
    how: Pass,
    out: Path,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    console: Console | None = None,
    command: str = "",
) -> Measured:
    """Measure a model over texts in one pass, and its embedding matrices and final normalization.

    A pass that was broken off goes on from what it has left in `out`.

    Args:
        name: hub id or folder.
        found: texts.
        how: see `Pass`; a length of 0 is the model's own, 512 at most.
        out: folder for what is found.
        revision: branch, tag or commit on the hub.
        dtype: of the weights: float32, float64, bfloat16 or float16; statistics are wider.
        device: auto, cpu, cuda, cuda:1, mps.
        console: for a progress bar.
        command: to be told with what is found.

    Raises:
        UserError: for anything that the user can mend.
    """
    config = ModelConfig(name=name, revision=revision)
    tokenizer = load_tokenizer(config)
    model: Any = load_encoder(config, tokenizer, DTYPES[dtype])
    model = model.to(_device(device))
    # An encoder has no head, so that it is read for itself; and before the pass, which may take hours.
    output = untied_output(config)
    how = _with_length(how, model)
    weights = weights_hash(model)
    identity = stream.identity(weights, how, [source.path for source in found], *(source.path for source in found))
    read = Stream(model, tokenizer, how, out / ".pass", identity)(found, console)
    embedded = matrices(model, output)
    return Measured(
        {
            "name": name,
            "revision": revision,
            "dtype": dtype,
            "type": model.config.model_type,
            "device": str(model.device),
        },
        weights,
        {**asdict(how), "texts": {source.name: str(source.path) for source in found}},
        {source: statistics.measures() for source, statistics in read.items()},
        {source: _spectra(statistics) for source, statistics in read.items()},
        {which: embedding_measures(values) for which, values in embedded.items()},
        _final_norm(model),
        norms={source: _by_tap(statistics, arrays.norms) for source, statistics in read.items()},
        extremes={source: _by_tap(statistics, arrays.extremes) for source, statistics in read.items()},
        rows={which: arrays.rows(values, _counts(read)) for which, values in embedded.items()},
        command=command,
    )


def weights_hash(model: PreTrainedModel) -> str:
    """Sixteen hexadecimal digits of all weights in their order; buffers do not count, nor does a pooler.

    A pooler that pretraining had no use for is random at each loading, and no hidden state depends on it.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        if "pooler" in name:
            continue
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def matrices(model: PreTrainedModel, output: Matrix | None) -> dict[str, Tensor]:
    """The embedding matrices: `input` and, where it is another one, `output`."""
    weight: Any = model.get_input_embeddings().weight
    found = {"input": weight.detach()}
    return found if output is None else {**found, "output": output.values.to(weight.device)}


def embedding_measures(matrix: Tensor) -> dict[str, dict[str, Any]]:
    """Figures of a matrix `(n, d)` as it is (`raw`), `centered`, and without its top directions (`post_processed`)."""
    forms = {"raw": matrix, "centered": centered(matrix), "post_processed": all_but_the_top(matrix)}
    return {form: matrix_measures(values) for form, values in forms.items()}


def matrix_measures(matrix: Tensor) -> dict[str, Any]:
    """Figures of one matrix `(n, d)` as it is."""
    norms = norm_summary(matrix)
    papers, both = (partition_isotropy(matrix, signs) for signs in ("as_computed", "both"))
    return {
        "rows": matrix.shape[0],
        "dimensions": matrix.shape[1],
        "partition_isotropy_as_computed": papers.value,
        "partition_isotropy_both": both.value,
        "average_norm": norms.average,
        "mean_vector_norm": norms.mean_vector,
        "norm_ratio": norms.ratio,
        "singular_values": arrays.short(singular_values(matrix, centered=False).tolist()),
    }


JSON, CSV = "measures.json", "measures.csv"


def files(measured: Measured) -> dict[str, str]:
    """`measures.json`, and `measures.csv` with a row for each source and tap."""
    text = json.dumps(asdict(measured), indent=1)
    # A line for each list of numbers, not for each number.
    return {JSON: _NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n", CSV: as_csv(measured)}


# Strings hold no line breaks, so none of them matches.
_NUMBERS = re.compile(r"\[\n[-+\d.eNaInfity,\s]+\]")


def write(measured: Measured, out: Path) -> None:
    """Write these files."""
    for name, text in files(measured).items():
        write_text(out / name, text)


def as_csv(measured: Measured) -> str:
    """Figures of the layers: model, revision, source, layer, and a column for each measure."""
    rows = [
        {"model": measured.model["name"], "revision": measured.model["revision"], "source": source, "layer": tap, **own}
        for source, taps in measured.sources.items()
        for tap, own in taps.items()
    ]
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    # Nothing rather than a nan for what is not defined.
    table.writerows({key: "" if _is_nan(value) else value for key, value in row.items()} for row in rows)
    return text.getvalue()


def _is_nan(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def read(path: Path) -> Measured:
    """Read `measures.json`.

    Raises:
        UserError: if it is none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise UserError(f"{path} has format {values['format']}; this version reads {FORMAT}")
        return Measured(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} holds no measures that istar wrote: {shorten(error)}") from error


def _spectra(statistics: Statistics) -> dict[str, dict[str, list[float]]]:
    return {
        tap: {
            form: arrays.short(singular_values(layer.moments, centered=form == "centered").tolist())
            for form in ("raw", "centered")
        }
        for tap, layer in statistics.layers.items()
    }


def _by_tap(statistics: Statistics, of: Callable[[Layer], Any]) -> dict[str, Any]:
    return {tap: of(layer) for tap, layer in statistics.layers.items()}


def _counts(read: Mapping[str, Statistics]) -> Tensor | None:
    """How often each token is in all texts, which IntraSim knows."""
    statistics = read.get(COMBINED) or next(iter(read.values()))
    intra = next(iter(statistics.layers.values())).intra
    return None if intra is None else intra.count


def _final_norm(model: PreTrainedModel) -> dict[str, Any] | None:
    norm = Taps(model).norm
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None:
        return None
    return asdict(layer_norm_summary(weight, getattr(norm, "bias", None)))


def _device(name: str) -> torch.device:
    if name == "auto":
        # torchrun gives each of its processes a GPU by this number.
        own = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", own) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device {name} cannot be used here; expected auto, cpu, or a device such as cuda:0"
        ) from error
    return device


_LONGEST = 512


def _with_length(how: Pass, model: PreTrainedModel) -> Pass:
    """The length asked for, which must fit the model; the model's own, up to 512, where none is."""
    text = model.config.get_text_config()
    # RoBERTa's positions begin behind the number of the padding.
    offset = (text.pad_token_id or 0) + 1 if "roberta" in text.model_type else 0
    longest = getattr(text, "max_position_embeddings", None) or _LONGEST
    longest -= offset
    if how.length > longest:
        raise UserError(f"--length {how.length} is more than the {longest} tokens that the model takes")
    return Pass(**{**asdict(how), "length": how.length or min(longest, _LONGEST)})


_SHOWN = {
    "isoscore": "IsoScore*",
    "isoscore_unbiased": "unbiased",
    "inter_sim": "InterSim",
    "intra_sim": "IntraSim",
    "two_nn": "TwoNN",
    "average_norm": "norm",
    "effective_rank": "rank",
}


def table(measured: Measured) -> Table:
    """The figures that a reader looks at first, by layer, of all texts together."""
    taps = measured.sources.get(COMBINED) or next(iter(measured.sources.values()))
    tokens = next(iter(taps.values()))["tokens"]
    title = f"{measured.model['name']} · {tokens:,.0f} tokens"
    found = Table(title=title, title_justify="left", caption=_matrix_caption(measured), caption_justify="left")
    shown = [name for name in _SHOWN if any(name in own for own in taps.values())]
    found.add_column("layer")
    for name in shown:
        found.add_column(_SHOWN[name], justify="right")
    for tap, own in taps.items():
        found.add_row(tap, *("-" if _is_nan(own.get(name)) else f"{own[name]:.4g}" for name in shown))
    return found


def _matrix_caption(measured: Measured) -> str:
    parts = [
        f"{which} embeddings {form.replace('_', '-')} {own['partition_isotropy_as_computed']:.4g}"
        for which, forms in measured.matrices.items()
        for form, own in forms.items()
    ]
    return f"I(W), signs as computed: {'; '.join(parts)}."
