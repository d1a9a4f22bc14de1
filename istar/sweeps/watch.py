"""Implements `istar watch`: the live table of sweeps that other processes run, read from their state files."""

import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from istar.errors import UserError
from istar.sweeps import board
from istar.sweeps.board import FOLDER, STATE, SweepState, duration

_SILENT_SECONDS = 60.0
"""A sweep writes its state every ten seconds. After this time it has probably died, or the file system is slow."""


def watch(root: Path, console: Console, name: str | None = None, once: bool = False) -> None:
    """Show the sweeps of a folder of runs until all of them are over; Ctrl-C ends the display, not the sweeps.

    Without the name of a sweep, those that are not over are shown, or else the latest. With `once`, or if the console
    is no terminal, only the current state is shown. A `UserError` says if there is no such sweep.
    """
    states = find(root, name)
    if once or not console.is_terminal:
        console.print(render(states))
        return
    with Live(render(states), console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while not all(state.is_over for state in states):
            time.sleep(2)
            states = find(root, name)
            live.update(render(states), refresh=True)


def find(root: Path, name: str | None = None) -> list[SweepState]:
    """Read the states of the sweeps that `watch` shows; raises a `UserError` if there are none."""
    paths = sorted((root / FOLDER).glob(f"{name or '*'}/{STATE}"), key=lambda path: path.stat().st_mtime)
    if not paths:
        names = sorted(path.name for path in (root / FOLDER).glob("*") if (path / STATE).exists())
        contents = f"no sweep {name}; there are {', '.join(names)}" if name and names else "no sweep"
        raise UserError(f"{root / FOLDER} holds {contents}; name the folder that holds the runs, as run.root does")
    states = [board.read(path) for path in paths]
    selected = [state for state in states if not state.is_over] or states[-1:]
    for state in selected:
        board.update_epochs(state, root)
    return selected


def render(states: list[SweepState]) -> Group:
    """The tables of the sweeps, one below the other, with a note below those that seem to have died."""
    parts: list[Group | Text] = []
    for state in states:
        parts.append(board.render(state))
        silent = time.time() - state.seen
        if not state.is_over and silent > _SILENT_SECONDS:
            note = f"no update for {duration(silent)}; if the sweep was killed, this command resumes it:"
            parts.append(Text(f"{note} {state.command}"))
    return Group(*parts)
