"""Whether the Hugging Face hub or another server can be asked, found out at once and not after retries."""

import queue
import threading
from collections.abc import Callable

import datasets
from huggingface_hub import get_session

from istar.errors import shorten

PROBE_SECONDS = 5.0
"""How long a server may take to answer at all; the retries of the hub's libraries would take about 23 s."""


def hub_obstacle(seconds: float = PROBE_SECONDS) -> str:
    """Why the hub cannot be used; empty if it answers."""
    if datasets.config.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids asking the hub"
    endpoint = datasets.config.HF_ENDPOINT
    # By the hub library's own session, so that its proxies and certificates count.
    status, reason = answer(lambda: get_session().head(endpoint, timeout=seconds).status_code, seconds)
    if status >= 500:
        reason = f"HTTP status {status}"
    return f"the hub {endpoint} cannot be reached ({reason})" if reason else ""


def answer(ask: Callable[[], int], seconds: float = PROBE_SECONDS) -> tuple[int, str]:
    """The HTTP status that a server answers with, or 0 and why there is none.

    The request has its own thread because the libraries' timeouts cover neither name resolution nor the tries of
    several addresses.

    Args:
        ask: sends the request and gives the status.
        seconds: how long it may take.
    """
    outcome: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def probe() -> None:
        try:
            outcome.put((ask(), ""))
        except Exception as error:  # another class for each library and version
            outcome.put((0, shorten(f"{type(error).__name__}: {error}")))

    threading.Thread(target=probe, daemon=True).start()
    try:
        return outcome.get(timeout=seconds + 1)
    except queue.Empty:
        return 0, f"no answer within {seconds:g} s"
