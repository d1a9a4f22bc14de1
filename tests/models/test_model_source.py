from pathlib import Path

import pytest

from istar.errors import UserError
from istar.models import tiny
from istar.models.model_source import ModelSource, split_revision
from istar.models.pretrained import load_tokenizer


@pytest.mark.parametrize("name", ["", "  "])
def test_a_model_has_a_name(name: str) -> None:
    with pytest.raises(UserError, match="the name of the model is empty; expected a hub id or a folder"):
        ModelSource(name)


def test_the_tiny_model_has_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    for source in ({"name": "tiny"}, {"name": "tiny", "revision": "main"}):
        with pytest.raises(UserError, match=r"without pretrained weights; .* write ./tiny for a folder of that name"):
            ModelSource(**source)
    assert ModelSource("./tiny").label == "model ./tiny"


def test_only_models_of_the_hub_have_revisions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^revision step10 needs a model of the hub, but {tmp_path} is a folder$"):
        ModelSource(str(tmp_path), "step10")
    with pytest.raises(UserError, match=r"^revision step10 needs a model of the hub"):
        _ = ModelSource("org/model", tokenizer=f"{tmp_path}@step10").tokenizer_source


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/model", ("org/model", None)), ("org/model@step10", ("org/model", "step10")),
        ("org/model@", ("org/model", None)), ("org/model@refs/pr/1@x", ("org/model", "refs/pr/1@x")),
        ("me@home/model", ("me@home/model", None)), ("x" * 5_000, ("x" * 5_000, None)),
    ],
)  # fmt: skip
def test_a_revision_follows_the_name_of_a_hub_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: tuple[str, str | None]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me@home" / "model").mkdir(parents=True)
    assert split_revision(name) == expected


def test_a_tokenizer_in_a_folder_with_an_at_sign_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "me@home"
    tokenizer = tiny.make_tokenizer(["zeugma"])
    tokenizer.save_pretrained(folder)
    source = ModelSource("org/model", "step10", tokenizer=str(folder))
    assert source.tokenizer_source == ModelSource(str(folder))
    assert load_tokenizer(source).get_vocab() == tokenizer.get_vocab()
    assert ModelSource("org/model", "step10").tokenizer_source == ModelSource("org/model", "step10")
