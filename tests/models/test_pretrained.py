import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AlbertConfig, AutoModel, BertConfig, DistilBertConfig, RobertaConfig

from istar.errors import UserError
from istar.models import model_files, pretrained, tiny
from istar.models.model_source import ModelSource
from istar.texts import demo

VOCABULARY_SIZE = len(tiny.make_tokenizer(demo.vocabulary()))


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 80,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "bert": lambda: BertConfig(**SHAPE),
    "albert": lambda: AlbertConfig(**SHAPE, embedding_size=8),
    "roberta": lambda: RobertaConfig(**SHAPE, pad_token_id=0, bos_token_id=2, eos_token_id=3),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=VOCABULARY_SIZE, dim=16, n_layers=3, n_heads=2, hidden_dim=24, max_position_embeddings=80
    ),
}


def save_encoder(folder: Path, family: str = "bert", dtype: torch.dtype = torch.float32, words: Any = ()) -> Path:
    """Save a random encoder without a head in place of a pretrained one, with its tokenizer; return the folder."""
    torch.manual_seed(0)
    AutoModel.from_config(FAMILIES[family]()).to(dtype).save_pretrained(folder)
    tokenizer = tiny.make_tokenizer([*demo.vocabulary(), *words])
    if family in ("distilbert", "roberta"):
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path | str) -> Any:
    source = ModelSource(str(folder))
    return pretrained.load_encoder(source, pretrained.load_tokenizer(source))


def get_load_error(folder: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_overflow_of_float16_is_not_called_damage(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["encoder.layer.2.output.LayerNorm.bias"].fill_(1e5)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    source = ModelSource(str(tmp_path))
    tokenizer = pretrained.load_tokenizer(source)
    with pytest.raises(UserError, match=r"they overflow float16, which ends at 65,504: choose float32 or bf16"):
        pretrained.load_encoder(source, tokenizer, "float16")
    assert pretrained.load_encoder(source, tokenizer, "bf16").dtype == torch.bfloat16
    weights["encoder.layer.2.output.LayerNorm.bias"].fill_(torch.nan)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="its weights are damaged: some are NaN"):
        pretrained.load_encoder(source, tokenizer, "float16")


def test_loading_is_quiet_and_leaves_verbosity_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save_encoder(tmp_path)
    capfd.readouterr()
    settings_before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    load(folder)
    assert capfd.readouterr() == ("", "")
    assert (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()) == settings_before


def test_a_hub_model_that_is_not_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "find_hub_problem", lambda: "the hub cannot be reached")
    message = get_load_error("nobody/no-such-model")
    assert "the hub cannot be reached" in message
    assert message.startswith("model nobody/no-such-model: ")
    # Commands without the key `model.name` print this message, too.
    assert "model.name" not in message


def truncate(folder: Path, num_bytes: int) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:num_bytes])


def leave_out(folder: Path, part: str) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if part not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "there is no such folder"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], ""),
        (lambda folder: (folder / "config.json").unlink(), ""),
        (lambda folder: (folder / "model.safetensors").unlink(), "not a folder that can be loaded"),
        *((partial(truncate, num_bytes=num_bytes), "") for num_bytes in (0, 100, 5000)),
        *((lambda folder, name=name: (folder / f"{name}.json").write_text('{"model_type": "be'), "")
          for name in ("config", "tokenizer", "tokenizer_config")),
        (partial(change_config, model_type="no_such_architecture"), ""),
        (partial(leave_out, part="layer.1.attention"), "lacks 10 of its weights, e.g. encoder.layer.1.attention"),
        (partial(change_config, num_hidden_layers=4), "of its weights, e.g."),
        (partial(change_config, hidden_size=32), "(16,) in the weights and (32,) by config.json"),
    ],
)  # fmt: skip
def test_damaged_folders_are_refused_in_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    folder = save_encoder(tmp_path / "model")
    damage(folder)
    assert message in get_load_error(folder)


def test_a_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, words=["wholly", "foreign", "vocabulary"])
    message = get_load_error(folder)
    assert f"{VOCABULARY_SIZE + 3} tokens" in message
    assert f"{VOCABULARY_SIZE} rows" in message


def test_pickled_weights_do_not_run_code(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "saved")
    (folder / "model.safetensors").unlink()

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    assert "its pickled weights hold more than tensors" in get_load_error(folder)
    assert not (tmp_path / "ran").exists()


def test_a_slow_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowTokenizer:
        is_fast = False

    monkeypatch.setattr(pretrained.AutoTokenizer, "from_pretrained", lambda *args, **options: SlowTokenizer())
    assert "no fast tokenizer" in get_load_error(save_encoder(tmp_path))


def test_code_that_a_model_brings_along_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is refused at once, without a question at the terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", null]}}'
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(UserError, match="is not a folder that can be loaded"):
        model_files.load_checkpoint_config(ModelSource(str(tmp_path)))
    assert not (tmp_path / "ran").exists()
