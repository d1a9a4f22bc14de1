"""Quick check whether the Hugging Face hub or another server can be reached, without retries."""

import queue
import threading
from collections.abc import Callable

import datasets
from huggingface_hub import get_session

from istar.errors import shorten

PROBE_SECONDS = 5.0
"""Default timeout of a probe. The retries of the hub's libraries would take about 23 s."""


def hub_problem(seconds: float = PROBE_SECONDS) -> str:
    """Return why the hub cannot be used, or "" if it responds within `seconds`."""
    if datasets.config.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids asking the hub"
    endpoint = datasets.config.HF_ENDPOINT
    # The hub library's session applies the user's proxies and certificates.
    status, error = probe(lambda: get_session().head(endpoint, timeout=seconds).status_code, seconds)
    if status >= 500:
        error = f"HTTP status {status}"
    return f"the hub {endpoint} cannot be reached ({error})" if error else ""


def probe(request: Callable[[], int], seconds: float = PROBE_SECONDS) -> tuple[int, str]:
    """Send a request in a thread and return its HTTP status, or 0 and the reason for the failure.

    The thread bounds the total time: the timeouts of HTTP libraries cover neither name resolution nor attempts at
    several addresses.
    """
    results: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def send() -> None:
        try:
            results.put((request(), ""))
        except Exception as error:  # the types depend on library and version
            results.put((0, shorten(f"{type(error).__name__}: {error}")))

    threading.Thread(target=send, daemon=True).start()
    try:
        return results.get(timeout=seconds + 1)
    except queue.Empty:
        return 0, f"no answer within {seconds:g} s"
