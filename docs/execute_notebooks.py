"""Execute the tutorials and keep their outputs: `python docs/execute_notebooks.py [notebook ...]`.

Each notebook runs from the first cell to the last in an empty temporary folder, without a network. Its outputs replace
the stored ones only if no cell fails and no output names a place on this machine.
"""

import getpass
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

REPOSITORY = Path(__file__).resolve().parents[1]
TUTORIALS = REPOSITORY / "docs" / "tutorials"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TIMEOUT = 1800
"""Maximum run time of a cell, in seconds."""


def execute(path: Path) -> None:
    """Execute a notebook and write it back.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
        ValueError: if an output contains a path of this machine or the user's name.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # Each run gets its own cache, so that the outputs do not depend on earlier runs.
        os.environ["ISTAR_CACHE"] = str(Path(folder) / "cache")
        NotebookClient(
            notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": folder}}
        ).execute()
        clean(notebook)
        refuse_private(nbformat.writes(notebook), folder)
    nbformat.write(notebook, path)


def clean(notebook: nbformat.NotebookNode) -> None:
    """Remove what differs from one execution to the next without meaning anything."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            # Libraries write progress and advice to stderr.
            cell.outputs = merged([output for output in cell.outputs if output.get("name") != "stderr"])


def merged(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Join the pieces in which a process's output arrives, and remove escape sequences of terminals."""
    result: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and result and result[-1].output_type == "stream":
            result[-1].text += output.text
        else:
            result.append(output)
    for output in result:
        if output.output_type == "stream":
            lines = ESCAPE.sub("", output.text).splitlines()
            output.text = "\n".join(line.rstrip() for line in lines)
    return result


def refuse_private(text: str, folder: str) -> None:
    """Refuse outputs that name a place on this machine."""
    places = [folder, str(REPOSITORY), str(Path.home()), sys.prefix, tempfile.gettempdir() + "/"]
    user = getpass.getuser()
    private = [place for place in places if place in text] + ([user] if f"/{user}/" in text else [])
    if private:
        raise ValueError(f"the outputs contain {', '.join(private)}")


def make_command(folder: Path) -> None:
    """Write the command `istar` of this checkout, which may not be the one that is installed."""
    command = folder / "istar"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m istar "$@"\n')
    command.chmod(0o755)


def main(arguments: list[str]) -> None:
    """Execute the notebooks given, or all."""
    with tempfile.TemporaryDirectory() as commands:
        make_command(Path(commands))
        prepare(commands)
        for path in [Path(argument) for argument in arguments] or sorted(TUTORIALS.glob("*.ipynb")):
            print(path.name, flush=True)
            execute(path)


def prepare(commands: str) -> None:
    """Set the environment that the kernels inherit."""
    os.environ.update(
        PATH=os.pathsep.join([commands, os.environ.get("PATH", "")]),
        PYTHONPATH=os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        HF_HUB_OFFLINE="1",
        COLUMNS="120",
        NO_COLOR="1",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
