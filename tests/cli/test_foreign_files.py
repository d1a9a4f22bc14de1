"""Every command leaves files that istar has not written as they are, and never replaces its own input."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from istar.cli.main import main
from istar.cli.options import make_parser
from istar.errors import UserError
from istar.finetune.config import Config
from istar.finetune.execute import execute  # noqa: F401, before its modules see the blank figures of these tests
from istar.finetune.execute.run import run
from istar.models.saved_checkpoints import record_step
from tests.embeddings.builders import save_model
from tests.files.test_outputs import Tree, read_tree

pytestmark = pytest.mark.usefixtures("blank_figures")

CASES: dict[str, list[str]] = {
    "measure": [
        "{model} --text {text} --device cpu --out {out}",
        "--checkpoints {saved}/* --text {text} --device cpu --out {out}",
    ],
    "compare": ["{model} {saved}/step1 --text {text} --out {out}", "{training} {second} --out {out}"],
    "embed": [
        "{model} --out {out}",
        "{model} --form centered --save model --out {out}",
        "{model} --form centered --save matrix --wordsim {words} --text {text} --out {out}",
        "{model} {saved}/step1 --out {out}",
    ],
    "correlate": ["{tables}/correlation.csv {tables}/table.csv --out {out}"],
    "report": ["{runs} --out {out}"],
    "results": ["{runs} --out {out}/runs.csv"],
}
"""Arguments of each command that writes results, by command."""
ARGUMENTS = [f"{command} {arguments}" for command, lists in CASES.items() for arguments in lists]
FOREIGN_FILES = (
    "index.html", "measures.json", "measures.csv", "trajectory.csv", "comparison.csv", "trajectories.csv",
    "embeddings.json", "embeddings.csv", "wordsim.csv", "unused.csv", "frequency.csv", "words.csv",
    "embeddings.safetensors", "tokens.txt", "model/config.json", "model/model.safetensors", "model/notes.txt",
    "correlation.csv", "table.csv", "table.md", "figures/scores.svg", "figures/mine.png", "figures/isotropy.svg",
    "tables/mine.csv", "tables/layers.csv", "runs.csv",
    "step1/measures.json", ".pass.0.0-1", "..pass", ".model/mine", "notes.txt", ".istar/mine",
)  # fmt: skip


def test_all_commands_are_tested() -> None:
    [subparsers] = [action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    assert {name for name, parser in subparsers.choices.items() if "--out" in parser.format_help()} == set(CASES)


def write_files(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"my {name}")


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an input of each kind that commands have; read it only."""
    folder = tmp_path_factory.mktemp("inputs")
    save_model(folder / "model")
    for step in (1, 2):
        record_step(save_model(folder / "saved" / f"step{step}"), step)
    tables = ("training/trajectory.csv", "second/trajectory.csv", "tables/correlation.csv", "tables/table.csv")
    write_files(folder, (*tables, "data/train.tsv", "runs/one/config.yaml", "runs/one/predictions.jsonl"))
    (folder / "text").mkdir()
    (folder / "text" / "text.txt").write_text("the cat sees the dog\nthe dog sees the house\n" * 20)
    (folder / "words").write_text("cat dog 3\nthe house 4\ngarden sees 1\n")
    return folder


@pytest.fixture
def world(inputs: Path, tmp_path: Path) -> Path:
    """Return a copy of the inputs."""
    return shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)


def call(world: Path, arguments: str, out: Path) -> int:
    names = ("model", "saved", "training", "second", "tables", "data", "runs", "text", "words")
    return main(arguments.format(**{name: world / name for name in names}, out=out).split())


def assert_kept(world: Path, tree: Tree) -> None:
    tree_now = read_tree(world)
    assert {name: tree_now.get(name) for name in tree} == tree


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_foreign_files_are_neither_replaced_nor_removed(
    world: Path, capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    write_files(world / "out", FOREIGN_FILES)
    tree = read_tree(world)
    assert call(world, arguments, world / "out") == 2
    assert read_tree(world) == tree
    [line] = capsys.readouterr().err.splitlines()
    assert "out" in line
    assert "another folder" in line or "a new folder" in line


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_single_foreign_file_is_enough(world: Path, capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    """Each file alone, without the hidden folder that is refused first, and with the pictures of other programs."""
    names = {
        "measure": ("figures/mine.png", "index.html", "tables/x"), "compare": ("figures/mine.png", "index.html"),
        "embed": ("embeddings.csv",), "correlate": ("tables/correlations.csv", "figures/scores.png"),
        "report": ("figures/mine.png", "index.html"), "results": ("runs.csv",),
    }[arguments.split()[0]]  # fmt: skip
    if arguments.startswith("embed") and "--save model" in arguments:
        names = (*names, "wordsim.csv", "tokens.txt", "model/notes.txt")
    for position, name in enumerate(names):
        write_files(world / f"out{position}", (name, "other.txt"))
        tree = read_tree(world)
        assert call(world, arguments, world / f"out{position}") == 2
        assert read_tree(world) == tree
        assert name in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_links_are_not_followed(world: Path, arguments: str) -> None:
    write_files(world / "elsewhere", FOREIGN_FILES)
    (world / "out").mkdir()
    for name in ("figures", "tables", "model", "runs.csv", "embeddings.json", "index.html"):
        (world / "out" / name).symlink_to(world / "elsewhere" / name)
    tree = read_tree(world)
    assert call(world, arguments, world / "out") == 2
    assert read_tree(world) == tree


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_an_input_is_never_replaced(world: Path, arguments: str) -> None:
    """The output folder is an input, or the folder that holds it."""
    tree = read_tree(world)
    for name in ("model", "saved/step1", "training", "tables", "data", "runs", "text", "words"):
        if f"{{{name.split('/')[0]}}}" in arguments:
            code = call(world, arguments, world / name)
            assert code == 2 or arguments.startswith("results")
            assert_kept(world, tree)


def test_the_model_that_embed_has_saved_is_no_input_for_the_same_folder(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "embed {model} --form centered --save model --out {out}"
    assert call(world, arguments, world / "out") == 0
    assert (world / "out" / "model" / "config.json").exists()
    tree = read_tree(world)
    capsys.readouterr()
    assert call(world, arguments.replace("{model}", "{out}/model"), world / "out") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "would replace files of the input" in line
    assert read_tree(world) == tree
    # A second call replaces the results of the first.
    assert call(world, arguments.replace("--save model", "--save matrix"), world / "out") == 0
    assert not (world / "out" / "model").exists()


def test_training_leaves_a_foreign_folder_of_its_name(small: Callable[..., Config], tmp_path: Path) -> None:
    config = small("reg=none", "task.limit_train=8", "trainer.keep_models=4")
    record = run(config)
    folder = Path(config.run.root) / record.name
    folder.rename(tmp_path / "finished")
    for name in ("config.yaml", "model/notes.txt", "models/step-0/mine", "checkpoints/step-1.ckpt"):
        write_files(folder, (name, "notes.txt"))
        tree = read_tree(folder)
        with pytest.raises(UserError, match=r"which is no part of a run; run\.overwrite=true keeps"):
            run(config)
        assert read_tree(folder) == tree
        shutil.rmtree(folder)
    # The folder of a run that istar has begun, with a foreign file in a model.
    (tmp_path / "finished").rename(folder)
    (folder / "result.json").unlink()
    for model_folder in ("model", "models/step-0"):
        write_files(folder, (f"{model_folder}/notes.txt",))
        tree = read_tree(folder)
        with pytest.raises(UserError, match=f"holds {model_folder}/notes.txt"):
            run(config)
        assert read_tree(folder) == tree
        (folder / model_folder / "notes.txt").unlink()
    assert run(config).status == "finished"
