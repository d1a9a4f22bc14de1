"""Whether the Hugging Face hub or another server can be asked, found out at once and not after retries."""

import queue
import threading

import datasets
from huggingface_hub import get_session

from istar.errors import shorten

PROBE_SECONDS = 5.0
"""How long the hub may take to answer at all; the retries of its libraries would take about 23 s."""


def hub_obstacle(seconds: float = PROBE_SECONDS) -> str:
    """Why the hub cannot be used; empty if it answers."""
    if datasets.config.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids asking the hub"
    endpoint = datasets.config.HF_ENDPOINT
    reason = obstacle(endpoint, seconds)
    return f"the hub {endpoint} cannot be reached ({reason})" if reason else ""


def obstacle(url: str, seconds: float = PROBE_SECONDS) -> str:
    """Why a server cannot be used; empty if it answers.

    The probe uses the hub library's own session, so that proxies and certificates count. It has its own thread
    because the timeout covers neither name resolution nor the tries of several addresses.
    """
    outcome: queue.SimpleQueue[str] = queue.SimpleQueue()

    def probe() -> None:
        try:
            status = get_session().head(url, timeout=seconds).status_code
            outcome.put(f"HTTP status {status}" if status >= 500 else "")
        except Exception as error:  # another class for each version of the hub library
            outcome.put(shorten(f"{type(error).__name__}: {error}"))

    threading.Thread(target=probe, daemon=True).start()
    try:
        return outcome.get(timeout=seconds + 1)
    except queue.Empty:
        return f"no answer within {seconds:g} s"
