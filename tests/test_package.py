"""The wheel and the sdist: their files and requirements, and that the wheel works away from the repository."""

import ast
import functools
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from istar import __version__
from istar.cli.main import main
from istar.finetune.execute import extras
from istar.runs.record import read_result
from tests.waiting import SECONDS

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
SOURCES = (
    "istar",
    "hydra_plugins",
    "conf",
    "sweep",
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
)
DISTRIBUTIONS = {"hydra": "hydra-core", "sklearn": "scikit-learn", "yaml": "PyYAML",
                 "hydra_plugins.hydra_ray_launcher": "hydra-ray-launcher",
                 "hydra_plugins.hydra_joblib_launcher": "hydra-joblib-launcher"}  # fmt: skip
"""Distributions by module, where their names differ."""
TORCH_MODULES = {"torch", "torchgen", "functorch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx",
                 "setuptools", "sympy", "typing_extensions"}  # fmt: skip
"""The modules that `pip install torch` installs."""
TORCH_ONLY = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {TORCH_MODULES | {"istar"}!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist and the wheel, and return their folder. They are built from its `source/`, a copy of the sources.

    Setuptools leaves folders in the sources, and would add tests to the sdist.
    """
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("distributions")
    (folder / "source").mkdir()
    for name in SOURCES:
        source, target = REPOSITORY / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    (folder / "source" / "tests").mkdir()
    shutil.copy(__file__, folder / "source" / "tests")
    # This is what pip calls, too, in one of several processes.
    code = "from setuptools import build_meta as b; b.build_sdist({0!r}); b.build_wheel({0!r})".format(str(folder))
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=folder / "source", check=True, capture_output=True, text=True, timeout=SECONDS)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    [path] = distributions.glob("istar-*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the wheel."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_python(*arguments: str, cwd: Path, path: Path) -> "subprocess.CompletedProcess[str]":
    """Run Python in a folder, with another folder as `PYTHONPATH`."""
    inherited = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    environment = {**inherited, "PYTHONPATH": str(path), "COLUMNS": "200", "ISTAR_CACHE": str(cwd / "cache")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


def test_the_wheel_holds_what_is_no_module_too(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        file_names = set(archive.namelist())
    modules = [path.relative_to(REPOSITORY) for top in SOURCES[:2] for path in (REPOSITORY / top).rglob("*.py")]
    data_files = [path.relative_to(REPOSITORY) for path in (REPOSITORY / "istar").rglob("*.csv")]
    assert {str(path) for path in [*modules, *data_files]} - file_names == set()
    configs = {"istar" / path.relative_to(REPOSITORY) for path in (REPOSITORY / "conf").rglob("*.yaml")}
    sweeps = {"istar/conf" / path.relative_to(REPOSITORY) for path in (REPOSITORY / "sweep").glob("*.yaml")}
    assert {str(path) for path in configs | sweeps} - file_names == set()
    templates = {f"istar/drawing/templates/report.{suffix}" for suffix in ("html", "css", "js")}
    assert {"istar/conf/sweep/table1.yaml", *templates, "istar/reports/paper/table1.csv",
            "istar/geometry/correlation/paper/correlations.csv", "istar/measures/catalogue.toml",
            "hydra_plugins/istar_sweeper.py"} <= file_names  # fmt: skip
    assert [name for name in file_names if name.endswith("licenses/LICENSE")]
    assert {name.partition("/")[0].partition("-")[0] for name in file_names} == {"istar", "hydra_plugins"}


def test_the_sdist_has_the_sources_of_the_wheel_and_nothing_else(distributions: Path) -> None:
    [path] = distributions.glob("istar-*.tar.gz")
    with tarfile.open(path) as archive:
        file_names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    sources = [path for name in SOURCES for path in (REPOSITORY / name, *(REPOSITORY / name).rglob("*"))]
    source_names = {
        str(path.relative_to(REPOSITORY)) for path in sources if path.is_file() and "__pycache__" not in path.parts
    }
    generated_names = {name for name in file_names if name.startswith("istar.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert file_names - generated_names == source_names


def test_the_links_of_the_readme_lead_to_the_repository(wheel: Path) -> None:
    """The page of the package index shows the README without the rest of the repository."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"istar-{__version__}.dist-info/METADATA").decode()
    targets = re.findall(r'(?:\]\(|src=")([^)"]+)', metadata)
    assert len(targets) > 20
    repository = PROJECT["urls"]["Repository"]
    for target in targets:
        if target.startswith(f"{repository}/actions/"):  # the badge
            continue
        assert re.match(rf"{re.escape(repository)}/(blob|raw)/HEAD/", target), target
        assert ("/raw/" in target) == target.endswith(".png")
        assert (REPOSITORY / target.partition("/HEAD/")[2].partition("#")[0]).is_file()


def test_the_citation_has_the_version_and_the_named_versions_of_python_are_tested() -> None:
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))["version"] == __version__
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: Python ::" in text]
    assert named == workflow["jobs"]["linux"]["strategy"]["matrix"]["python"]


def test_it_has_the_configs_and_the_sweeper_of_the_package(unpacked: Path, tmp_path: Path) -> None:
    code = "from hydra_plugins import istar_sweeper; from istar.finetune.config.options import config_folder"
    code = f"{code}; print(config_folder())"
    completed = run_python("-c", f"{code}; print(istar_sweeper.__file__)", cwd=tmp_path, path=unpacked)
    assert completed.stdout.split() == [
        str(unpacked / name) for name in ("istar/conf", "hydra_plugins/istar_sweeper.py")
    ]
    assert not (unpacked / "istar" / "conf" / "sweep").is_symlink()


@pytest.mark.slow
def test_it_trains_in_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    # Python executes this file first. It makes the libraries of other extras than `train` impossible to import.
    hidden_modules = ("optuna", "accelerate", "peft", "sentence_transformers", "trl", "psutil", "wandb_workspaces")
    (unpacked / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden_modules}))\n")
    # A sweep of one run, which is trained in a separate process.
    arguments = ("-m", "debug=smoke", "seed=1", "trainer.accelerator=cpu")
    completed = run_python("-m", "istar.cli.main", "train", *arguments, cwd=tmp_path, path=unpacked)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "[1/1] demo · tiny · " in completed.stdout
    assert "1 smoke run is not counted" in completed.stdout
    [folder] = (tmp_path / "runs" / "smoke").glob("demo-*")
    assert read_result(folder).status == "finished"
    sweep_state = next((tmp_path / "runs" / "smoke" / "sweeps").glob("*/sweep.json")).read_text()
    assert '"istar train -m debug=smoke seed=1 trainer.accelerator=cpu"' in sweep_state


def test_torch_is_enough_for_measures_and_penalties(tmp_path: Path) -> None:
    code = """
import istar, istar.measures, istar.regularizers
import torch
print(istar.__version__, float(istar.measures.isoscore(torch.randn(300, 5))) > 0)
from istar.cli.main import main
for command in (["train"], ["report", "runs"], ["measure", "model", "--text", "text"]):
    print(main(command))
"""
    # torch warns that NumPy is missing.
    code = TORCH_ONLY + "import warnings; warnings.filterwarnings('ignore', 'Failed to initialize NumPy')\n" + code
    completed = run_python("-c", code, cwd=tmp_path, path=REPOSITORY)
    assert completed.stdout.split() == [__version__, "True", "2", "2", "2"], completed.stderr
    errors = completed.stderr.splitlines()
    for line, command, extra in zip(errors, ("train", "report", "measure"), ("train", "report", "train"), strict=True):
        assert re.fullmatch(rf"error: istar {command} needs [\w, ]+; pip install 'istar\[{extra}\]'", line)


def test_subpackages_of_the_library_need_no_import(tmp_path: Path) -> None:
    code = "import istar; print(istar.measures.isoscore.__name__, istar.regularizers.__name__)"
    completed = run_python("-c", code, cwd=tmp_path, path=REPOSITORY)
    assert completed.stdout.split() == ["isoscore", "istar.regularizers"], completed.stderr


def test_a_missing_feature_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    extras.require("sweep.search=optuna", "sweep")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(extras.UserError) as error:
        extras.require("sweep.search=optuna", "sweep")
    assert str(error.value) == "sweep.search=optuna needs optuna; pip install 'istar[sweep]'"


def test_help_and_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for argument in ("--help", "--version"):
        with pytest.raises(SystemExit) as exit_error:
            main([argument])
        assert exit_error.value.code == 0
    output = capsys.readouterr().out
    assert re.search(r"^ +train +train or fine-tune", output, re.MULTILINE)
    assert output.endswith(f"istar {__version__}\n")
    monkeypatch.setattr("sys.argv", ["istar", "--version"])
    with pytest.raises(SystemExit) as exit_error:
        runpy.run_module("istar", run_name="__main__")
    assert exit_error.value.code == 0
    assert capsys.readouterr().out == f"istar {__version__}\n"


# ---- imports and pyproject.toml


@functools.cache
def imported_libraries() -> frozenset[str]:
    """Return the libraries that istar imports, at the top of a module or within a function."""
    names: set[str] = set()
    for folder in ("istar", "hydra_plugins"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names.add((node.module or "").partition(".")[0])
    return frozenset(names - set(sys.stdlib_module_names) - {"istar", "hydra_plugins"})


def distribution(module: str) -> str:
    """Return the normalized name of the distribution that a module belongs to."""
    return normalize_name(DISTRIBUTIONS.get(module, module))


def normalize_name(name: str) -> str:
    """Return the name of a distribution in the normal form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared_distributions(requirements: list[str]) -> Iterator[str]:
    """Yield the normalized names of the required distributions; for an extra of istar, those that it requires."""
    for requirement in requirements:
        if match := re.match(r"istar\[([\w,]+)\]", requirement):
            for extra in match[1].split(","):
                yield from declared_distributions(PROJECT["optional-dependencies"][extra])
        else:
            yield normalize_name(re.split(r"[<>=!~\[; ]", requirement)[0])


def test_torch_is_the_only_dependency() -> None:
    assert list(declared_distributions(PROJECT["dependencies"])) == ["torch"]


def test_everything_imported_is_declared() -> None:
    distributions = {
        name for extra in PROJECT["optional-dependencies"].values() for name in declared_distributions(extra)
    }
    assert {module for module in imported_libraries() if distribution(module) not in distributions} == set()


@pytest.mark.parametrize("extra", extras.MODULES_BY_EXTRA)
def test_messages_know_the_extras(extra: str) -> None:
    distributions = set(declared_distributions(PROJECT["optional-dependencies"][extra])) - {"torch"}
    assert {distribution(module) for module in extras.MODULES_BY_EXTRA[extra]} <= distributions
    if extra == "train":
        assert set(extras.MODULES_BY_EXTRA[extra]) == {
            module for module in imported_libraries() if distribution(module) in distributions
        }
