"""The steps whose models are kept, the contents of their folders, and the error for a finished run without them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from istar.errors import UserError
from istar.finetune.config import Config
from istar.finetune.execute.run import run
from istar.finetune.training.checkpoints import read_checkpoint
from istar.finetune.training.kept_models import is_kept
from istar.models import saved_checkpoints

Build = Callable[..., Config]
PYTHIA_STEPS = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, *range(1_000, 144_000, 1_000)]
"""The steps whose checkpoints Pythia publishes."""


def test_the_logarithmic_schedule_is_pythias() -> None:
    assert [step for step in range(143_001) if is_kept(step, "log")] == PYTHIA_STEPS


@pytest.mark.parametrize(("schedule", "steps"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (10, [0])])
def test_every_n_steps(schedule: int, steps: list[int]) -> None:
    assert [step for step in range(7) if is_kept(step, schedule)] == steps


def test_folders_hold_the_models_of_their_steps(small: Build) -> None:
    """Six steps; the checkpoint of the last one has the weights of that step."""
    config = small("reg=none", "trainer.keep_models=4", "task.limit_train=48", "run.save_model=false")
    folder = Path(config.run.root) / run(config).name
    assert sorted(path.name for path in (folder / "models").iterdir()) == ["step-0", "step-4", "step-6"]
    weights = {step: load_file(folder / "models" / f"step-{step}" / "model.safetensors") for step in (0, 4, 6)}
    last_state_dict = read_checkpoint(folder / "checkpoints" / "step-6.ckpt")["state_dict"]
    for name, values in weights[6].items():
        assert torch.equal(values, last_state_dict[f"model.{name}"])
    assert not torch.equal(weights[0]["classifier.weight"], weights[4]["classifier.weight"])
    assert not torch.equal(weights[4]["classifier.weight"], weights[6]["classifier.weight"])
    for step in weights:
        model = AutoModelForSequenceClassification.from_pretrained(folder / "models" / f"step-{step}")
        tokenizer = AutoTokenizer.from_pretrained(folder / "models" / f"step-{step}")
        assert model(**tokenizer("a lamp", return_tensors="pt")).logits.isfinite().all()
    # The step is recorded in the folder, and the checkpoint of the last step has the same step.
    assert [checkpoint.step for checkpoint in saved_checkpoints.find_checkpoints(str(folder))] == [0, 4, 6]
    [last_checkpoint] = saved_checkpoints.find_checkpoints(str(folder / "checkpoints" / "step-6.ckpt"))
    assert last_checkpoint.step == 6
    (folder / "models" / "step-4").rename(folder / "models" / "renamed")
    assert [checkpoint.step for checkpoint in saved_checkpoints.find_checkpoints(str(folder))] == [0, 4, 6]


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "linear", "true"])
def test_refusals(small: Build, value: str) -> None:
    with pytest.raises(UserError, match=rf"(?i)trainer\.keep_models={value} is not a schedule; expected log, a whole"):
        small(f"trainer.keep_models={value}")
