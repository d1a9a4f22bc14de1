"""The wheel: what it holds, what it asks for, and that it works where there is nothing else of the repository."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from istar import __version__, results
from istar.cli.main import main
from istar.runs import extras, fork_server
from tests.waiting import SECONDS

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
SOURCES = ("istar", "hydra_plugins", "conf", "sweep", "pyproject.toml", "setup.py", "README.md", "LICENSE")
DISTRIBUTIONS = {"hydra": "hydra-core", "sklearn": "scikit-learn", "yaml": "PyYAML"}
"""Where they have another name than the module."""
OF_TORCH = {"torch", "torchgen", "functorch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx",
            "setuptools", "sympy", "typing_extensions"}  # fmt: skip
"""What `pip install torch` brings."""
TORCH_ALONE = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {OF_TORCH | {"istar"}!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as setuptools leaves folders behind where it works."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in SOURCES:
        there, here = REPOSITORY / name, folder / "source" / name
        if there.is_dir():
            shutil.copytree(there, here, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(there, here)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
               "--wheel-dir", str(folder), str(folder / "source")]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    [built] = folder.glob("istar-*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def python(*arguments: str, cwd: Path, path: Path) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    environment = {**kept, "PYTHONPATH": str(path), "COLUMNS": "200", "ISTAR_CACHE": str(cwd / "cache")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_the_wheel_holds_what_is_no_module_too(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    modules = [path.relative_to(REPOSITORY) for top in SOURCES[:2] for path in (REPOSITORY / top).rglob("*.py")]
    data = [path.relative_to(REPOSITORY) for path in (REPOSITORY / "istar" / "reports").glob("*/*.*")]
    assert {str(path) for path in [*modules, *data]} - held == set()
    configs = {"istar" / path.relative_to(REPOSITORY) for path in (REPOSITORY / "conf").rglob("*.yaml")}
    sweeps = {"istar/conf" / path.relative_to(REPOSITORY) for path in (REPOSITORY / "sweep").glob("*.yaml")}
    assert {str(path) for path in configs | sweeps} - held == set()
    templates = {f"istar/pages/templates/report.{suffix}" for suffix in ("html", "css", "js")}
    assert {"istar/conf/sweep/table1.yaml", *templates, "istar/reports/paper/table1.csv",
            "istar/geometry/paper/table1.csv",
            "hydra_plugins/istar_sweeper.py"} <= held  # fmt: skip
    assert [name for name in held if name.endswith("licenses/LICENSE")]
    assert {name.partition("/")[0].partition("-")[0] for name in held} == {"istar", "hydra_plugins"}


def test_the_repository_holds_no_symbolic_links() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    assert "120000" not in {line.split()[0] for line in tracked.stdout.splitlines()}


def test_it_has_the_configs_and_the_sweeper_of_the_package(unpacked: Path, tmp_path: Path) -> None:
    code = "from hydra_plugins import istar_sweeper; from istar.config import schema; print(schema.config_folder())"
    places = python("-c", f"{code}; print(istar_sweeper.__file__)", cwd=tmp_path, path=unpacked)
    assert places.stdout.split() == [str(unpacked / name) for name in ("istar/conf", "hydra_plugins/istar_sweeper.py")]
    assert not (unpacked / "istar" / "conf" / "sweep").is_symlink()


@pytest.mark.slow
def test_it_trains_in_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    # Python reads this file before anything else: what other extras bring than `train` cannot be imported.
    hidden = ("optuna", "accelerate", "peft", "sentence_transformers", "trl", "psutil", "wandb_workspaces")
    (unpacked / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n")
    # A sweep of one run, which is a process of its own.
    wanted = ("-m", "debug=smoke", "seed=1", "trainer.accelerator=cpu")
    done = python("-m", "istar.cli.main", "train", *wanted, cwd=tmp_path, path=unpacked)
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo, accuracy · tiny" in done.stdout
    [folder] = (tmp_path / "runs" / "smoke").glob("demo-*")
    assert results.read(folder).status == "finished"
    state = next((tmp_path / "runs" / "smoke" / "sweeps").glob("*/sweep.json")).read_text()
    assert '"istar train -m debug=smoke seed=1 trainer.accelerator=cpu"' in state


def test_torch_is_enough_for_measures_and_penalties(tmp_path: Path) -> None:
    code = """
import istar, istar.measures, istar.regularizers
import torch
print(istar.__version__, float(istar.measures.isoscore(torch.randn(300, 5))) > 0)
from istar.cli.main import main
for command in (["train"], ["report", "runs"], ["measure", "model", "--text", "text"]):
    print(main(command))
"""
    # Said by torch, which would like to have NumPy.
    code = TORCH_ALONE + "import warnings; warnings.filterwarnings('ignore', 'Failed to initialize NumPy')\n" + code
    done = python("-c", code, cwd=tmp_path, path=REPOSITORY)
    assert done.stdout.split() == [__version__, "True", "2", "2", "2"], done.stderr
    train, report, measure = done.stderr.splitlines()
    for line, command, extra in (
        (train, "train", "train"),
        (report, "report", "report"),
        (measure, "measure", "train"),
    ):
        assert re.fullmatch(rf"error: istar {command} needs [\w, ]+; pip install 'istar\[{extra}\]'", line)


def test_a_missing_feature_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    extras.require("sweep.search=optuna", "sweep")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(extras.UserError) as refused:
        extras.require("sweep.search=optuna", "sweep")
    assert str(refused.value) == "sweep.search=optuna needs optuna; pip install 'istar[sweep]'"


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for argument in ("--help", "--version"):
        with pytest.raises(SystemExit) as leaving:
            main([argument])
        assert leaving.value.code == 0
    told = capsys.readouterr().out
    assert re.search(r"^ +train +train or fine-tune", told, re.MULTILINE)
    assert told.endswith(f"istar {__version__}\n")


# ---- imports and pyproject.toml


def imported() -> set[str]:
    """Libraries that istar imports anywhere, at the top of a module or later."""
    names = {name.partition(".")[0] for name in fork_server.PRELOADED_MODULES}
    for folder in ("istar", "hydra_plugins"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names.add((node.module or "").partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"istar", "hydra_plugins"}


def distribution(module: str) -> str:
    return normal(DISTRIBUTIONS.get(module, module))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> Iterator[str]:
    """Names of distributions; istar's own extras are opened."""
    for requirement in requirements:
        if own := re.match(r"istar\[([\w,]+)\]", requirement):
            for extra in own[1].split(","):
                yield from declared(PROJECT["optional-dependencies"][extra])
        else:
            yield normal(re.split(r"[<>=!~\[; ]", requirement)[0])


def test_torch_is_the_only_dependency() -> None:
    assert list(declared(PROJECT["dependencies"])) == ["torch"]


def test_everything_imported_is_declared() -> None:
    anywhere = {name for extra in PROJECT["optional-dependencies"].values() for name in declared(extra)}
    assert {module for module in imported() if distribution(module) not in anywhere} == set()


@pytest.mark.parametrize("extra", extras.MODULES_BY_EXTRA)
def test_messages_know_the_extras(extra: str) -> None:
    brought = set(declared(PROJECT["optional-dependencies"][extra])) - {"torch"}
    assert {distribution(module) for module in extras.MODULES_BY_EXTRA[extra]} <= brought
    if extra == "train":
        assert set(extras.MODULES_BY_EXTRA[extra]) == {
            module for module in imported() if distribution(module) in brought
        }


def test_dev_brings_every_extra_and_nightly_adds_to_it() -> None:
    extras_of_the_project = PROJECT["optional-dependencies"]
    every = {
        name for extra, required in extras_of_the_project.items() if extra != "nightly" for name in declared(required)
    }
    assert every == set(declared(extras_of_the_project["dev"]))
    assert set(declared(extras_of_the_project["nightly"])) - every == {"scikit-dimension"}
