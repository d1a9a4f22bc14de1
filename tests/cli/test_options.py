"""The options that commands share, the notation of models and texts, the list of measures, and JSON."""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from safetensors.torch import load_file, save_file

from istar.cli.main import main
from istar.cli.options import make_parser
from istar.errors import UserError
from istar.measures.catalogue import MEASURES
from istar.models.saved_checkpoints import parse_models
from istar.texts import corpus
from tests.embeddings.builders import save_model
from tests.mock_hub import Repository, glue_files, serving, use

COMMANDS = ("measure", "compare", "embed", "correlate")


def find_parsers() -> dict[str, argparse.ArgumentParser]:
    [subparsers] = [action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(subparsers.choices)


def test_an_option_means_the_same_in_each_command() -> None:
    variants = defaultdict(set)
    for command in COMMANDS:
        for action in find_parsers()[command]._actions:
            # The output folder, and the use of the texts, differ between commands.
            text = "" if action.dest in ("out", "text") else action.help
            default = "" if action.dest == "out" else str(action.default)
            for name in action.option_strings:
                variants[name].add((default, str(action.choices), str(action.nargs), text))
    assert {name for name, found in variants.items() if len(found) > 1} == set()
    assert variants.keys() >= {"--text", "--documents", "--length", "--device", "--dtype", "--measures", "--json"}
    assert "--revision" not in variants


def test_lists_are_separated_by_commas_or_repeated(tmp_path: Path) -> None:
    (tmp_path / "a,b.txt").touch()
    paths = [f"{tmp_path}/a,b.txt", f"name={tmp_path}/a,b.txt"]
    options = ["--text", f"x=1.txt, y=2.txt,{tmp_path}/c", *(part for path in paths for part in ("--text", path))]
    parsed = find_parsers()["measure"].parse_args(["model", *options])
    assert parsed.text == ["x=1.txt", "y=2.txt", f"{tmp_path}/c", *paths]
    assert find_parsers()["measure"].parse_args(["model"]).text == []


def test_models_are_parsed(tmp_path: Path) -> None:
    for folder in ("run/model", "a@b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").touch()
    models = parse_models(["org/name@refs/pr/1", f"mine={tmp_path}/run", f"{tmp_path}/a@b", "other"])
    assert [(model.default_label, model.source.name, model.source.revision) for model in models] == [
        ("name-refs_pr_1", "org/name", "refs/pr/1"),
        ("mine", str(tmp_path / "run" / "model"), None),
        ("a@b", str(tmp_path / "a@b"), None),
        ("other", "other", None),
    ]
    with pytest.raises(UserError, match="is given twice"):
        parse_models(["a", "again=a"])


def test_several_models_and_a_run_are_measured_in_one_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], blank_figures: None
) -> None:
    save_model(tmp_path / "run" / "model")
    models = [f"first={tmp_path}/run", str(save_model(tmp_path / "second", "neox"))]
    (tmp_path / "text.txt").write_text("the cat sees the dog\nthe dog sees the house\n" * 10)
    options = ["--text", str(tmp_path / "text.txt"), "--device", "cpu", "--json", "--out", str(tmp_path / "out")]
    assert main(["measure", *models, *options]) == 0
    captured = capsys.readouterr()
    rows_by_model = json.loads(captured.out)
    assert list(rows_by_model) == ["first", "second"]
    assert rows_by_model["first"][0]["layer"] == "embeddings"
    assert "Geometry of first" in (tmp_path / "out" / "first" / "index.html").read_text()
    assert (tmp_path / "out" / "second" / "measures.json").is_file()
    assert "second/index.html" in captured.err
    assert "━" not in captured.err  # bars are for terminals
    assert main(["measure", models[0], f"first={models[1]}", *options]) == 2
    assert "several models are called first" in capsys.readouterr().err
    assert main(["embed", models[0], "--json", "--out", str(tmp_path / "page")]) == 0
    assert json.loads(capsys.readouterr().out)["table1"][0]["model"] == "first"


def change_output_embeddings(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["embed_out.weight"][0] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"cat"', '"cow"'))


def test_what_is_measured_is_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], blank_figures: None
) -> None:
    """The same weights, texts, settings and dtype are read from the folder, whatever the model's folder is called."""
    model = save_model(tmp_path / "model", "neox")
    text = tmp_path / "text.txt"
    text.write_text("the cat sees the dog\nthe dog sees the house\n" * 10)

    def measure(*options: str) -> tuple[Any, bool]:
        """Return the printed measures, and whether an earlier call has taken them."""
        command = ["measure", str(model), "--text", f"text={text}", "--device", "cpu", "--json"]
        assert main([*command, "--out", str(tmp_path / "out"), *options]) == 0
        captured = capsys.readouterr()
        [measures] = json.loads(captured.out).values()
        return measures, "measured before" in captured.err

    first, is_earlier = measure()
    assert not is_earlier
    model, text = model.rename(tmp_path / "renamed"), text.rename(tmp_path / "moved.txt")
    assert measure() == (first, True)
    assert json.loads((tmp_path / "out" / "measures.json").read_text())["model"]["name"] == str(model)
    text.write_text("the dog sees the house\n" * 20)
    measures, is_earlier = measure("--max-tokens", "20")
    assert not is_earlier
    assert measures != first
    # The output embeddings and the tokenizer count, too.
    for change in (change_output_embeddings, change_tokenizer):
        change(model)
        assert not measure("--max-tokens", "20")[1], change
        assert measure("--max-tokens", "20")[1], change
    # A printed table has the label of the model.
    assert main(["measure", f"mine={model}", "--text", f"text={text}", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("mine · ")


def test_a_comparison_needs_two_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a"]) == 2
    assert "a comparison needs two models or more" in capsys.readouterr().err


def test_files_of_vectors_are_measured_before_they_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.npy").touch()
    assert main(["compare", f"{tmp_path}/a.npy", "b", "--out", f"{tmp_path}/out"]) == 2
    expected = f"{tmp_path}/a.npy is a file; expected what `istar measure {tmp_path}/a.npy --out <folder>` wrote"
    assert expected in capsys.readouterr().err


def test_texts_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = glue_files({"notes": ("train", "test")}, {"text": "the {split} lamp number {row}"}, ("no", "yes"), rows=6)
    with serving() as hub:
        use(hub, tmp_path / "cache", monkeypatch)
        commit = hub.repositories.setdefault("datasets/org/notes", Repository()).push(files)
        train, named = corpus.parse_sources(["org/notes:notes", "held=org/notes:notes:test@main"])
        with pytest.raises(UserError, match=r"there is no file or folder org/none, and .*the hub has no"):
            corpus.parse_sources(["org/none"])
        with pytest.raises(UserError, match=r"there is no org/none\.txt; expected a file or folder"):
            corpus.parse_sources(["org/none.txt"])
    assert (train.name, named.name) == ("notes", "held")
    assert train.identify() == ("org/notes:notes", commit)
    assert [text.split()[1] for text in train.read_documents()] == ["train"] * 6
    assert next(named.read_documents()).startswith("the test lamp")


def test_blank_documents_of_the_hub_are_left_out(tmp_path: Path) -> None:
    source = corpus.Source("a", tmp_path, Dataset.from_dict({"text": ["one", "", " ", None, "two"]}))
    assert list(source.read_documents()) == ["one", "two"]


def test_the_list_of_measures_has_a_line_for_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["measure", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [measure.name for measure in MEASURES if not measure.name.endswith("_error")]
    assert [line.split()[0] for line in lines if line.startswith("  ")] == names
    assert max(map(len, lines)) <= 80
    assert main(["measure", "--list", "isoscore"]) == 0
    assert "\nrange: [0, 1]\n" in capsys.readouterr().out
    assert main(["measure", "--list", "isoscor"]) == 2
    assert "did you mean isoscore?" in capsys.readouterr().err
