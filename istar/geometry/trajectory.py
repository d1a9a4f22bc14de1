"""`istar measure --revisions` and `--checkpoints`: a model at several points of its training, one after another."""

import glob
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from istar.config import ModelConfig
from istar.errors import UserError, shorten
from istar.files import write_text
from istar.geometry import measure, stream
from istar.geometry.corpus import Source
from istar.geometry.measure import COMBINED, DTYPES, Measured
from istar.geometry.stream import Pass
from istar.models import load_encoder, load_tokenizer

TABLE = "trajectory.csv"
KEYS = ("model", "revision", "step", "weights", "source", "layer")
"""Columns of the table that are no measures."""
_ASKED = ".asked"


class SomeFailed(UserError):  # noqa: N818
    """Some revisions could not be measured; the others were."""

    exit_code = 1


_NUMBERS = re.compile(r"(?<![A-Za-z0-9])(?![0-9a-f]{12}(?![A-Za-z0-9]))[A-Za-z]*(\d+)(?![A-Za-z0-9])")
"""A number, or one at a word's end, but not a piece of the hash that names a run."""


@dataclass(frozen=True)
class Stop:
    """A point of the training.

    Attributes:
        label: the revision, or what tells the checkpoint's path from the others'; its folder is named so.
        name: hub id, folder, or `.ckpt` file.
        revision: on the hub; None for a folder.
    """

    label: str
    name: str
    revision: str | None = None

    @property
    def step(self) -> int | None:
        """The number in the label, that behind `step` or `checkpoint` if there are several."""
        found = re.findall(r"(?:step|checkpoint)[-_=]?(\d+)", self.label) or _NUMBERS.findall(self.label)
        return int(found[-1]) if found else None

    @property
    def folder(self) -> str:
        return self.label.replace("/", "_")


@dataclass(frozen=True)
class Plan:
    """What is measured at each stop, and how; see `measure.measure`.

    Attributes:
        model: what the table calls the model.
    """

    model: str
    texts: Sequence[Source]
    how: Pass
    out: Path
    dtype: str = "float32"
    device: str = "auto"
    command: str = ""


@dataclass
class Trajectory:
    """What was found at each stop, by label, and what went wrong."""

    measured: dict[str, Measured] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)


# ---- stops


def revisions(model: str, names: str) -> list[Stop]:
    """Stops of a model on the hub from revisions with commas between them.

    Raises:
        UserError: if there are none, or the model is a folder.
    """
    if Path(model).is_dir():
        raise UserError(f"--revisions are of the hub, but {model} is a folder; for folders there is --checkpoints")
    labels = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not labels:
        raise UserError("--revisions is empty; expected names with commas between them, such as step1000,step2000")
    return _distinct([Stop(label, model, label) for label in labels])


def checkpoints(pattern: str) -> list[Stop]:
    """Stops from folders that `save_pretrained` wrote, runs of train.py, and their `.ckpt` files, by number.

    Raises:
        UserError: if the pattern matches none.
    """
    paths = [Path(path) for path in sorted(glob.glob(pattern))]  # noqa: PTH207 (an absolute pattern is as good)
    found = [path for path in paths if path.suffix == ".ckpt" or _model(path).joinpath("config.json").is_file()]
    if not found:
        raise UserError(
            f"--checkpoints {pattern} matches no model; expected folders that save_pretrained wrote, runs of "
            "train.py, or their checkpoints/*.ckpt"
        )
    common = Path(os.path.commonpath([path.parent for path in found]))
    stops = [Stop(path.relative_to(common).as_posix().removesuffix(".ckpt"), str(_model(path))) for path in found]
    return _distinct(sorted(stops, key=lambda stop: (stop.step is None, stop.step, stop.label)))


def common_name(stops: Sequence[Stop]) -> str:
    """What to call the model of checkpoints: the folder that they are in."""
    return Path(os.path.commonpath([Path(stop.name).absolute().parent for stop in stops])).name


def _model(path: Path) -> Path:
    """A run of train.py has its model in a folder."""
    return path / "model" if (path / "model" / "config.json").is_file() else path


def _distinct(stops: list[Stop]) -> list[Stop]:
    folders = [stop.folder for stop in stops]
    for stop in stops:
        if folders.count(stop.folder) > 1 or stop.folder in (".", "..", TABLE):
            raise UserError(f"{stop.label} cannot name a folder of its own; measure it by itself")
    return stops


# ---- measuring


def follow(plan: Plan, stops: Sequence[Stop], console: Console) -> Trajectory:
    """Measure at each stop into a folder of its own, and write the table after each.

    What is there from an earlier call with the same texts, settings and weights is not measured again. A stop with the
    weights of an earlier one gets its figures. One that fails does not stop the others.

    Args:
        plan: what to measure.
        stops: in the order of the table.
        console: for progress, warnings and errors.
    """
    trajectory = Trajectory()
    names = [source.name for source in plan.texts]
    asked = stream.identity(plan.how, plan.dtype, names, *(source.path for source in plan.texts))
    for number, stop in enumerate(stops, start=1):
        _tell(console, f"{number} of {len(stops)}: {stop.label}")
        try:
            found, remark = _at(stop, plan, asked, trajectory)
        # Memory that does not suffice is a RuntimeError; the next may be smaller.
        except (UserError, OSError, RuntimeError) as error:
            trajectory.troubles[stop.label] = shorten(error)
            _tell(console, f"not measured: {stop.label}: {shorten(error)}")
            continue
        _tell(console, remark)
        trajectory.measured[stop.label] = found
        write(plan, stops, trajectory)
    return trajectory


def _tell(console: Console, line: str) -> None:
    if line:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _at(stop: Stop, plan: Plan, asked: str, before: Trajectory) -> tuple[Measured, str]:
    """Figures of a stop, which are then in its folder, and what there is to say about them."""
    place = plan.out / stop.folder
    with _loadable(stop, place) as name:
        weights = _weights(name, stop.revision, plan.dtype)
        twin = next((label for label, own in before.measured.items() if own.weights == weights), None)
        warning = "" if twin is None else f"warning: {stop.label} has the same weights as {twin}"
        kept = _kept(place, asked, weights)
        if kept is not None:
            return kept, warning or "measured before"
        if twin is not None:
            found, warning = before.measured[twin], f"{warning}, whose figures it gets"
        else:
            found = measure.measure(
                name, plan.texts, plan.how, place, stop.revision, plan.dtype, plan.device, Console(stderr=True),
                plan.command,
            )  # fmt: skip
    found = replace(found, model={**found.model, "name": stop.name, "revision": stop.revision})
    # The mark last, so that a call that is killed in between measures again.
    (place / _ASKED).unlink(missing_ok=True)
    measure.write(found, place)
    write_text(place / _ASKED, asked)
    return found, warning


def _weights(name: str, revision: str | None, dtype: str) -> str:
    config = ModelConfig(name=name, revision=revision)
    return measure.weights_hash(load_encoder(config, load_tokenizer(config), DTYPES[dtype]))


def _kept(place: Path, asked: str, weights: str) -> Measured | None:
    """What an earlier call has left, if it was asked the same of the same weights."""
    try:
        if (place / _ASKED).read_text(encoding="utf-8") != asked:
            return None
        found = measure.read(place / "measures.json")
    except (OSError, ValueError, UserError):  # not there, or damaged
        return None
    return found if found.weights == weights else None


@contextmanager
def _loadable(stop: Stop, place: Path) -> Iterator[str]:
    """A name that from_pretrained takes; of a `.ckpt` a folder with its weights, for as long as the block runs."""
    path = Path(stop.name)
    if path.suffix != ".ckpt":
        yield stop.name
        return
    folder = place / ".weights"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _unpack(path, folder)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_PREFIX = "model."


def _unpack(path: Path, folder: Path) -> None:
    """A checkpoint of train.py as a folder of save_pretrained, with config and tokenizer of its run's model."""
    model = path.parent.parent / "model"
    if not (model / "config.json").is_file():
        raise UserError(f"{path}: its run has no model folder, whose config and tokenizer are needed")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        weights = {name.removeprefix(_PREFIX): values for name, values in state.items() if name.startswith(_PREFIX)}
    except Exception as error:  # any byte may be wrong, and with it any exception may come
        raise UserError(f"{path} is no checkpoint that can be read: {shorten(error)}") from error
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "*.bin"))
    # Tied weights are one tensor under two names, which the format does not have.
    save_file(
        {name: values.clone().contiguous() for name, values in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


# ---- the table


def write(plan: Plan, stops: Sequence[Stop], trajectory: Trajectory) -> None:
    """Write `trajectory.csv`: a row for each stop, source and layer, and for each stop and embedding matrix."""
    rows = [
        {"model": plan.model, "revision": stop.label, "step": stop.step, "weights": own.weights, **row}
        for stop in stops
        if (own := trajectory.measured.get(stop.label)) is not None
        for row in _rows(own)
    ]
    write_text(plan.out / TABLE, pd.DataFrame(rows).convert_dtypes().to_csv(index=False))


def _rows(found: Measured) -> Iterator[dict[str, Any]]:
    for source, taps in found.sources.items():
        for tap, own in taps.items():
            yield {"source": source, "layer": tap, **own}
    for which, forms in found.matrices.items():
        own = {
            name if form == "raw" else f"{form}_{name}": value
            for form, figures in forms.items()
            for name, value in figures.items()
            if isinstance(value, float)
        }
        yield {"source": None, "layer": f"{which}_embeddings", **own}
    if found.final_norm is not None:
        own = {f"layer_norm_{name}": found.final_norm[name] for name in ("gain", "bias", "ratio", "bias_over_gain")}
        yield {"source": None, "layer": "final_norm_parameters", **own}


def table(plan: Plan, stops: Sequence[Stop], trajectory: Trajectory) -> Table:
    """The last layer of all texts together, and I(W) of the matrix nearest to the output, by stop."""
    shown = ("isoscore", "inter_sim", "intra_sim", "two_nn", "effective_rank")
    found = Table(title=f"{plan.model}: the last layer, and I(W)", title_justify="left")
    for name in ("revision", *shown, "I(W)"):
        found.add_column(name.replace("_", " "), justify="left" if name == "revision" else "right", overflow="fold")
    for stop in stops:
        own = trajectory.measured.get(stop.label)
        if own is None:
            found.add_row(stop.label, *["-"] * (len(shown) + 1))
            continue
        taps = own.sources.get(COMBINED) or next(iter(own.sources.values()))
        last = list(taps.values())[-1]
        matrix = own.matrices.get("output") or own.matrices["input"]
        values = [*(last.get(name, math.nan) for name in shown), matrix["raw"]["partition_isotropy_as_computed"]]
        found.add_row(stop.label, *("-" if math.isnan(value) else f"{value:.4g}" for value in values))
    return found


def check(trajectory: Trajectory) -> None:
    """Say at the end what is missing.

    Raises:
        SomeFailed: if anything is.
    """
    if trajectory.troubles:
        told = "; ".join(f"{label} ({why})" for label, why in trajectory.troubles.items())
        every = len(trajectory.troubles) + len(trajectory.measured)
        raise SomeFailed(f"{len(trajectory.troubles)} of {every} not measured: {shorten(told, 500)}")
