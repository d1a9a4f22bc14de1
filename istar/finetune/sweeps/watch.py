"""Implements `istar watch`: a live table of the sweeps that other processes run, read from their state files."""

import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from istar.drawing.terminal import format_duration
from istar.errors import UserError
from istar.finetune.sweeps import live_table
from istar.finetune.sweeps.live_table import STATE_FILE, SWEEPS_FOLDER, SweepState

_MAX_SILENT_SECONDS = 60.0
"""A sweep writes its state every ten seconds; after this time without an update, it has probably died."""


def watch_sweeps(root: Path, console: Console, name: str | None = None, once: bool = False) -> None:
    """Show the sweeps in a folder of runs until all of them are over; Ctrl-C ends the display, not the sweeps.

    Args:
        root: folder that holds the runs.
        console: console to print to.
        name: name of the sweep to show; None shows all sweeps that are not over, or else the latest.
        once: whether to show only the current state, as is always done if the console is no terminal.

    Raises:
        UserError: if there is no such sweep.
    """
    states, errors = find_sweeps(root, name)
    if once or not console.is_terminal:
        console.print(render_sweeps(states, errors))
        return
    with Live(render_sweeps(states, errors), console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while not all(state.is_over for state in states):
            time.sleep(2)
            states, errors = find_sweeps(root, name)
            live.update(render_sweeps(states, errors), refresh=True)


def find_sweeps(root: Path, name: str | None = None) -> tuple[list[SweepState], list[str]]:
    """Read the sweeps that `watch_sweeps` shows: the sweep `name`, or if it is None those not over.

    If `name` is None and all sweeps are over, only the latest one is read.

    Returns:
        The states of the sweeps, and a message for each sweep that cannot be read.

    Raises:
        UserError: if there is no such sweep.
    """
    state_paths = sorted(
        (root / SWEEPS_FOLDER).glob(f"{name or '*'}/{STATE_FILE}"), key=lambda path: path.stat().st_mtime
    )
    if not state_paths:
        sweep_names = sorted(path.name for path in (root / SWEEPS_FOLDER).glob("*") if (path / STATE_FILE).exists())
        finding = f"no sweep {name}; there are {', '.join(sweep_names)}" if name and sweep_names else "no sweep"
        raise UserError(
            f"{root / SWEEPS_FOLDER} holds {finding}; name the folder that holds the runs, as run.root does"
        )
    states, errors = [], []
    for path in state_paths:
        try:
            states.append(live_table.read_state(path))
        except UserError as error:
            errors.append(str(error))
    selected_states = [state for state in states if not state.is_over] or states[-1:]
    for state in selected_states:
        live_table.update_epochs(state, root)
    return selected_states, errors


def render_sweeps(states: list[SweepState], errors: list[str]) -> Group:
    """Render the tables of several sweeps, a note below each sweep that seems to have died, and the errors."""
    renderables: list[Group | Text] = []
    for state in states:
        renderables.append(live_table.render_sweep(state))
        silent_seconds = time.time() - state.seen
        if not state.is_over and silent_seconds > _MAX_SILENT_SECONDS:
            note = f"no update for {format_duration(silent_seconds)}; if the sweep was killed, this command resumes it:"
            renderables.append(Text(f"{note} {state.command}"))
    return Group(*renderables, *(Text(f"not read: {error}") for error in errors))
