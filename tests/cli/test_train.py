"""`train.py` on the command line. Few calls start a new interpreter, which takes seconds."""

import argparse
import io
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from istar import __version__
from istar.cli import train
from istar.cli.main import main, train_main
from istar.cli.train import move_overrides_to_end
from istar.drawing.robust_output import run_with_robust_output
from istar.drawing.terminal import make_console
from istar.errors import StoppedError, UserError
from istar.finetune.config.penalties import PENALTIES
from istar.runs.record import RESULT, read_result
from istar.runs.tasks import TASKS
from tests.finetune.sweeps.conftest import Call, call
from tests.waiting import SECONDS

__all__ = ["call"]  # a fixture

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ("task.limit_train=16", "task.limit_validation=8", "data.batch_size=8", "trainer.max_epochs=1",
        "trainer.accelerator=cpu", "trainer.progress_bar=false")  # fmt: skip


def run_train(*arguments: str, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    inherited_environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
    settings = {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    environment = inherited_environment | settings | environment
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "train.py"), *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def assert_refused_in_one_line(code: int, stdout: str, stderr: str, folder: Path, message: str) -> None:
    """Assert that a call ended with the exit code 2 and one line on stderr, and wrote no files of a run."""
    [line] = stderr.splitlines()
    assert code == 2
    assert line.startswith("error: ")
    assert message in line
    assert stdout == ""
    assert not list(folder.rglob(RESULT))
    assert not list(folder.glob("runs/demo*"))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("task=null", "must be a string or a list"),
        ("reg.lambda=-1,1", "reg.lambda=-1,1: several values need -m, for a sweep over them; a list is one"),
        ("reg.zeta=2", "reg.zeta=2 is outside [0, 1]"),
        ("task=rtee", "did you mean rte?"),
        ("task.data_dir=/nowhere", "task.data_dir=/nowhere does not exist"),
    ],
)
def test_a_mistake_is_one_line(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, message: str
) -> None:
    assert_refused_in_one_line(call(argument), *capsys.readouterr(), tmp_path, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "needs the first line `# @package _global_`"),
        ("# @package\nreg:\n  lambda: 0.5\n", "needs the first line `# @package _global_`"),
        ("reg: [1, 2\n", "{file}, line 3: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("reg:\n\tlambda: 0.5\n", "{file}, line 3: not YAML: found character '\\t' that cannot start any token"),
        ("reg:\n  lambda: 1\n  lambda: 2\n", "{file}, line 4: not YAML: found duplicate key lambda"),
        ("reg: \0\n", 'unacceptable character #x0000: special characters are not allowed in "{file}", position 25'),
        ("# caf\udce9\n", "{file}, line 2: not UTF-8: invalid continuation byte"),
        ("reg: cosreg\n", "to choose an option in a file, write `defaults: [override /reg: cosreg]`"),
        ("trainer: 3\n", "trainer=3 is not a mapping of keys; to choose an option in a file"),
    ],
)
def test_a_mistake_in_an_experiment_is_one_line(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    file = tmp_path / "own" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    header = "# mine\n" if "# @package" in message else "# @package _global_\n"
    file.write_bytes(f"{header}{content}".encode(errors="surrogateescape"))
    code = call("experiment=mine", "--config-dir", str(tmp_path / "own"))
    assert_refused_in_one_line(code, *capsys.readouterr(), tmp_path, message.format(file=file))


def test_a_mistake_is_one_line_in_a_new_interpreter(tmp_path: Path) -> None:
    result = run_train("reg.lamda=1", cwd=tmp_path)
    message = "did you mean reg.lambda?"
    assert_refused_in_one_line(result.returncode, result.stdout, result.stderr, tmp_path, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lambda=1",), "unexpected argument --lambda; did you mean reg.lambda=1?"),
        (("--max-epochs", "5"), "unexpected argument --max-epochs; did you mean trainer.max_epochs=5?"),
        (("--multirn",), "unexpected argument --multirn; did you mean --multirun?"),
    ],
)
def test_an_option_of_other_programs_names_the_key(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert_refused_in_one_line(call(*arguments), *capsys.readouterr(), tmp_path, message)


@pytest.mark.parametrize("argument", ["--dry-run", "++sweep.jobs=2"])
def test_options_of_sweeps_need_m(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    message = f"{argument} is for sweeps, and this command starts a single run; add -m, or leave it out"
    assert_refused_in_one_line(call("debug=smoke", argument), *capsys.readouterr(), tmp_path, message)


def test_help_fits_a_screen_and_a_half(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert train_main(["--help"], "python train.py") == main(["train", "task=rte", "-h"]) == 0
    text, text_of_istar = capsys.readouterr().out.split("Train or fine-tune")[1:]
    assert text.replace("python train.py", "istar train") == text_of_istar
    assert text.count("\n") <= 36
    assert max(map(len, text.splitlines())) <= 80
    assert "python train.py task=rte model=bert reg=istar reg.lambda=-1\n" in text
    options = dict(re.findall(r"^  (\S+) +(\w.*(?:\n {18}.*)*)", text.partition("sweep):")[2], re.MULTILINE))
    assert set(PENALTIES) | {"istar_paper_code"} <= set(re.split(r",\s+", options["reg"]))
    assert set(TASKS) <= set(re.split(r",\s+", options["task"]))
    assert {"model", "trainer", "logger", "experiment", "sweep", "debug"} <= set(options)
    assert "schema" not in text


def test_the_help_of_all_options_is_text(
    call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_argument = argparse.ArgumentParser.add_argument

    def add_argument_of_python_314(parser: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
        assert isinstance(options.get("help"), str | None)
        return add_argument(parser, *names, **options)

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", add_argument_of_python_314)
    assert call("--hydra-help") == 0
    assert "--shell-completion,-sc : Install or Uninstall shell completion:" in capsys.readouterr().out
    assert argparse.ArgumentParser.add_argument is add_argument_of_python_314


def test_ctrl_c_is_no_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: argparse.Namespace) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("istar.cli.power.run", interrupt)
    assert main(["power", "--sd", "2", "--pairs", "5"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("option", "is_shown"), [((), True), (("-m",), True), (("--cfg", "job"), False)])
def test_a_terminal_shows_a_line_before_the_libraries_are_loaded(
    call: Call,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: tuple[str, ...],
    is_shown: bool,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    call("task=rtee", *option)
    assert capsys.readouterr().out.startswith("loading the libraries") == is_shown


def test_windows_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (partial(train_main, []), partial(main, ["measure", "model"])):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", "win32")
            code = command()
        assert_refused_in_one_line(code, *capsys.readouterr(), tmp_path, "on Windows, use them in WSL")


def test_help_and_version_import_no_library_of_a_run() -> None:
    for argument, printed in (("--help", "Train or fine-tune"), ("--version", f"istar {__version__}")):
        code = f"import sys; sys.argv[1:] = ['{argument}']; import train; train.train_main(); print(*sys.modules)"
        process = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS, check=True
        )
        *_, modules = process.stdout.splitlines()
        assert process.stdout.startswith(printed)
        assert not {"torch", "hydra", "transformers", "lightning"}.intersection(modules.split())


def test_a_misspelt_key_is_refused_without_torch() -> None:
    """The other ranks of a run leave the message to rank 0, and refuse the key later."""
    code = "import sys; from istar.cli.main import main; print(main(['train', 'optim.lrate=1']), *sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    exit_code, *modules = process.stdout.split()
    assert (exit_code, "istar.finetune.config.groups" in modules) == ("2", True)
    assert not {"torch", "hydra", "transformers", "lightning"}.intersection(modules)
    assert process.stderr.startswith("error: optim.lrate: there is no such key; did you mean optim.lr?; `istar train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("mesure model", "istar mesure: unknown command; did you mean measure?"),
        ("measure model --measurs all", "unexpected argument --measurs; did you mean --measures?"),
        ("measure model --layers 3", "unexpected argument --layers; all layers are measured, each in a row"),
        ("compare a b --column x", "unexpected argument --column; a column is part of the text, as in --text dev"),
        ("measure model --length many", "argument --length: invalid int value: 'many'; `istar measure --help`"),
        ("embed", "the following arguments are required"),
        ("train --multrun", "unexpected argument --multrun; did you mean --multirun?; `istar train --help`"),
        ("train --shell-completion install=bash", 'eval "$(python train.py --shell-completion install=bash)"'),
    ],
)
def test_a_typo_is_one_line_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    try:
        code: object = main(arguments.split())
    except SystemExit as exit_error:
        code = exit_error.code
    [line] = capsys.readouterr().err.splitlines()
    assert code == 2
    assert message in line


@pytest.mark.slow
def test_the_trace_on_request(tmp_path: Path) -> None:
    result = run_train("reg.zeta=2", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert result.returncode != 0
    assert "Traceback (most recent call last)" in result.stderr


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    """The run has two processes, both of which are new interpreters."""
    two_processes = ("trainer.devices=2", "trainer.strategy=ddp")
    result = run_train(
        "debug=smoke", "trainer.accelerator=cpu", *two_processes, cwd=tmp_path, ISTAR_CACHE=str(tmp_path / "cache")
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "Warning" not in result.stderr
    assert "accuracy (epoch 1)" in result.stdout
    assert "IsoScore" in result.stdout
    [folder] = (tmp_path / "runs" / "smoke").glob("demo-*")
    assert f"runs/smoke/{folder.name}/" in result.stdout
    assert read_result(folder).status == "finished"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "runs"]


@pytest.mark.parametrize(
    ("arguments", "moved"),
    [
        ("task=rte -m seed=1,2", "-m task=rte seed=1,2"),
        ("task=rte --cfg job seed=1", "--cfg job task=rte seed=1"),
        ("task=rte --info defaults-tree seed=1 -m", "--info defaults-tree -m task=rte seed=1"),
        ("~logger --config-name other -m ++a=b", "--config-name other -m ~logger ++a=b"),
        ("seed=1 --dry-run -m task=rte", "-m seed=1 sweep.dry_run=true task=rte"),
    ],
)
def test_overrides_may_stand_on_both_sides_of_an_option(arguments: str, moved: str) -> None:
    assert move_overrides_to_end(arguments.split()) == moved.split()


def test_a_sweep_takes_overrides_on_both_sides_of_m(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("seed=3,4", "--dry-run", "-m", "reg=none") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "2 runs" in printed.out
    assert call("seed=7", "--cfg", "job", "reg=none") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "seed: 7" in printed.out


def test_help_may_be_cut_by_a_reader_that_ends_first() -> None:
    """`istar --help` loads no libraries; it and `train.py` write through the same function."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [sys.executable, "-m", "istar.cli.main", "--help"],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        cwd=REPOSITORY,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
    )
    os.close(write_end)
    assert (process.returncode, process.stderr) == (141, "")


def test_output_may_be_closed() -> None:
    command = ["sh", "-c", 'exec "$0" -m istar.cli.main --help >&-', sys.executable]
    process = subprocess.run(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, timeout=SECONDS)
    assert (process.returncode, process.stderr) == (0, "")


def test_a_log_file_has_a_line_for_each_epoch(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("debug=smoke", "trainer.max_epochs=2", "trainer.accelerator=cpu", "trainer.progress_bar=true")
    assert call(*arguments) == 0
    printed = capsys.readouterr()
    assert re.fullmatch(
        r"the shrinkage covariance uses all \d+ points \(tokens x layers\) of .+, fewer than reg\.\S+=20000\n",
        printed.err,
    )
    penalty_line, *epoch_lines = printed.out.splitlines()[:3]
    assert penalty_line == "penalty: I-STAR λ=0.2 ζ=0.4 (change with reg=, reg.lambda=, reg.zeta=)"
    assert [line.split()[1] for line in epoch_lines] == ["1/2", "2/2"]
    for line in epoch_lines:
        assert re.search(r" · loss \S+ · IsoScore\* \S+ · accuracy \d+\.\d\d($| · \d:\d\d left$)", line)
    # No other phase appears.
    assert not re.search("━|validating|Sigma_S|measuring", printed.out.partition("\n┏")[0])


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_characters_that_the_encoding_of_the_output_lacks_become_question_marks(
    monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors=errors))

    def show_bar() -> int:
        make_console().print("Epoch 0/2 • λ=1 ━━━")
        return 7

    assert run_with_robust_output(show_bar) == 7
    assert written.getvalue() == b"Epoch 0/2 ? ?=1 ???\n"


@pytest.mark.parametrize(
    ("error", "rank", "expected"),
    [
        (UserError("wrong"), "0", "error: wrong\n"),
        (UserError("wrong"), "3", "error in process 3: wrong\n"),
        (StoppedError("stopped", 15), "0", "stopped\n"),
        (StoppedError("stopped", 15), "3", ""),
    ],
)
def test_an_error_of_any_process_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: UserError, rank: str, expected: str
) -> None:
    """Rank 0 comes first, because torchrun stops all processes once one of them has ended."""
    monkeypatch.setattr(train, "SECONDS_FOR_RANK_ZERO", 0)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as exit_info:
        train.exit_with_error(error)
    assert exit_info.value.code == error.exit_code
    assert capsys.readouterr().err == expected
