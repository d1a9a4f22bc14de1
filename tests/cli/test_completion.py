"""The script of `istar --print-completion` completes commands and options in a real shell."""

import subprocess

import pytest

from istar.cli.main import main

COMPLETE = """
source /dev/stdin
[[ $(complete -p istar) =~ -F\\ ([^ ]+) ]] && function=${BASH_REMATCH[1]}
complete_words() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    "$function" istar "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    echo "${COMPREPLY[@]}"
}
complete_words istar me
complete_words istar measure --shuffle
"""


def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["--print-completion", "bash"]) == 0
    script = capsys.readouterr().out
    completed = subprocess.run(["bash", "-c", COMPLETE], input=script, capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["measure", "--shuffle-buffer"]


def test_another_shell_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["--print-completion", "sh"]) == 2
    assert capsys.readouterr().err.startswith("error: --print-completion: expected one of bash, zsh")
