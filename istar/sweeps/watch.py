"""`istar watch runs/`: the live table of sweeps that run elsewhere, from what they have written."""

import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from istar.errors import UserError
from istar.sweeps import board
from istar.sweeps.board import FOLDER, STATE, State, duration

_SILENT_SECONDS = 60.0
"""A sweep writes every ten seconds; one that has not for so long is dead, or its disk is slow to reach this machine."""


def watch(root: Path, console: Console, name: str | None = None, once: bool = False, interval: float = 2.0) -> None:
    """Show the sweeps of a folder until all of them are over; Ctrl-C leaves them alone.

    Args:
        root: that holds the runs.
        console: where they are shown.
        name: of one sweep; None shows those that are not over, or the latest one.
        once: show the state now and return.
        interval: seconds between two looks.

    Raises:
        UserError: if there is no sweep, or none of that name.
    """
    if once or not console.is_terminal:
        console.print(render(find(root, name)))
        return
    with Live(render(find(root, name)), console=console, auto_refresh=False) as live:
        try:
            while True:
                found = find(root, name)
                live.update(render(found), refresh=True)
                if all(state.is_over for state in found):
                    return
                time.sleep(interval)
        except KeyboardInterrupt:
            return


def find(root: Path, name: str | None = None) -> list[State]:
    """The sweeps to show; see `watch`.

    Raises:
        UserError: if there are none.
    """
    paths = sorted((root / FOLDER).glob(f"{name or '*'}/{STATE}"), key=lambda path: path.stat().st_mtime)
    if not paths:
        known = sorted(path.name for path in (root / FOLDER).glob("*") if (path / STATE).exists())
        named = f"no sweep {name}; there are {', '.join(known)}" if name and known else "no sweep"
        raise UserError(f"{root / FOLDER} holds {named}; name the folder that holds the runs, as run.root does")
    states = [board.read(path) for path in paths]
    shown = [state for state in states if not state.is_over] or states[-1:]
    for state in shown:
        board.look(state, root)
    return shown


def render(states: list[State]) -> Group:
    """Their tables, one below the other."""
    parts = []
    for state in states:
        parts.append(board.render(state))
        silent = time.time() - state.seen
        if not state.is_over and silent > _SILENT_SECONDS:
            told = (
                f"nothing heard of it for {duration(silent)}; if it was killed, this goes on with it: {state.command}"
            )
            parts.append(Group(Text(told)))
    return Group(*parts)
