"""A password in `sweep.storage` is in no argument of a process, no record, no job of a launcher and no message."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from istar.errors import UserError, mask_secrets, shorten
from istar.finetune.config import SweepConfig
from istar.finetune.sweeps.study import Study
from istar.finetune.sweeps.trials import make_search_spaces
from istar.finetune.training.pruning import TrialReference

PASSWORD = "hunter2"


def make_study(folder: Path, storage: str) -> Study:
    folder.mkdir(parents=True, exist_ok=True)
    spaces = make_search_spaces(["optim.lr=interval(0,1)"], {}, {}, [])
    return Study(SweepConfig(search="optuna", storage=storage), spaces, folder, " ".join)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_trial_names_a_file_of_its_owner(tmp_path: Path) -> None:
    """SQLite ignores the parameter, which stands for a password."""
    url = f"sqlite:///file:{tmp_path}/optuna.db?uri=true&password={PASSWORD}"
    previous_umask = os.umask(0)
    try:
        study = make_study(tmp_path / "sweep", url)
    finally:
        os.umask(previous_umask)
    trial = study.ask()
    assert trial is not None
    address = study.trial_address(trial[0])
    assert PASSWORD not in address
    reference = TrialReference.parse(address)
    assert Path(reference.storage_file).read_text() == url
    assert Path(reference.storage_file).is_absolute()
    assert stat.S_IMODE(Path(reference.storage_file).stat().st_mode) == 0o600
    others = {path for path, content in contents(tmp_path).items() if PASSWORD.encode() in content}
    assert others == {Path(reference.storage_file)}
    study.close()


@pytest.mark.parametrize(
    "storage", [f"postgresql://me:{PASSWORD}@localhost/db", f"no url:{PASSWORD}@", f"nonsense://me:{PASSWORD}@x:y/db"]
)
def test_an_error_shows_no_password(tmp_path: Path, storage: str) -> None:
    with pytest.raises(UserError, match=r"sweep\.storage=") as error:
        make_study(tmp_path, storage)
    assert PASSWORD not in str(error.value) or "://" not in storage
    assert "\n" not in str(error.value)


def test_what_launchers_write(make_sweeper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    storage = f"sweep.storage=postgresql://me:{PASSWORD}@localhost/db"
    given: list[Any] = []
    monkeypatch.setattr(Plugins, "instantiate_launcher", lambda self, **arguments: given.append(arguments["config"]))
    sweeper = make_sweeper("task=demo", "hydra/launcher=local_jobs", "task.limit_train=8", storage)
    # The config of Hydra's singleton is pickled with the launcher.
    for config in (HydraConfig.instance().cfg, *given):
        assert PASSWORD not in OmegaConf.to_yaml(config)
    assert len(given) == 1
    request = sweeper.request([storage], "train.py -m")
    assert request.settings.storage == f"postgresql://me:{PASSWORD}@localhost/db"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://me:pa@s/s:w@host/db?x=1", "postgresql://me:***@host/db?x=1"),
        ("redis://:secret@host/0", "redis://:***@host/0"),
        ("'sweep.storage=mysql+pymysql://a:b@c/d' seed=1", "'sweep.storage=mysql+pymysql://a:***@c/d' seed=1"),
        ("mysql://host/db?user=me&password=secret&ssl=1", "mysql://host/db?user=me&password=***&ssl=1"),
        ("+hydra.job.env_set.WANDB_API_KEY=0123 seed=1", "+hydra.job.env_set.WANDB_API_KEY=*** seed=1"),
        ("HF_TOKEN=hf_0123", "HF_TOKEN=***"), ("sqlite:////home/me/optuna.db", "sqlite:////home/me/optuna.db"),
        ("model.tokenizer=bert task.max_tokens=3 http://localhost:8080/x", None), ("https://me@host/path", None),
    ],
)  # fmt: skip
def test_masks(text: str, masked: str | None) -> None:
    assert mask_secrets(text) == (masked or text)
    assert str(UserError(text)) == shorten(text) == (masked or text)
    assert mask_secrets(mask_secrets(text)) == mask_secrets(text)
