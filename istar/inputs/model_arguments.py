"""Models as a command line names them: `[label=]<folder, run or hub id>[@revision]`."""

from dataclasses import dataclass
from pathlib import Path, PurePath


@dataclass(frozen=True)
class ModelArgument:
    """A model that the command line names: a folder, a run of train.py, or a model of the hub."""

    label: str  # label given on the command line; empty for none
    name: str  # folder or hub id
    revision: str | None = None  # revision on the hub

    @property
    def model_name(self) -> str:
        """Hub id or folder of the model; for a run of train.py, its folder `model`."""
        model_folder = Path(self.name) / "model"
        return str(model_folder) if (model_folder / "config.json").is_file() else self.name

    @property
    def default_label(self) -> str:
        """The given label, or else the last part of the name with the revision, which can also name a folder."""
        return self.label or "-".join(filter(None, (PurePath(self.name).name, self.revision)))


def parse_model_argument(argument: str) -> ModelArgument:
    """Parse a model, written as `[label=]<folder, run or hub id>[@revision]`; a folder has no revision."""
    label, _, name = argument.rpartition("=")
    revision = ""
    if not Path(name).exists():
        name, _, revision = name.partition("@")
    return ModelArgument(label, name, revision or None)
