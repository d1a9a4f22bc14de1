"""The Hugging Face hub: whether it can be reached, which commit a branch stands for, and why it refuses access."""

import logging
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Literal, TypeVar

import datasets
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import HfApi, get_session
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from istar.errors import UserError, shorten

T = TypeVar("T")
Kind = Literal["model", "dataset"]

PROBE_SECONDS = 5.0
"""Default timeout of a probe. The retries of the hub's libraries would take about 23 s."""
COMMIT_SECONDS = 30.0
"""Timeout for finding a commit on a hub that has answered a probe."""
COMMIT = re.compile("[0-9a-f]{40}")
"""A complete commit hash."""
LOCAL_COPY: dict[Kind, str] = {
    "model": "name a local copy with model=auto model.name=<folder from save_pretrained>",
    "dataset": "name a local copy with task.data_dir=<folder>",
}
"""How to do without the hub."""
_TITLES: dict[Kind, str] = {"model": "model", "dataset": "data set"}

log = logging.getLogger(__name__)

# The HTTP clients of the hub's libraries log every request at INFO, which is the level of the root logger in a run.
for _client in ("httpx", "httpx2"):
    if logging.getLogger(_client).level == logging.NOTSET:
        logging.getLogger(_client).setLevel(logging.WARNING)


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
    """Send a request in a thread and return its HTTP status, or 0 and the reason for the failure."""
    try:
        return _within(seconds + 1, request), ""
    except TimeoutError:
        return 0, f"no answer within {seconds:g} s"
    except Exception as error:  # the types depend on library and version
        return 0, shorten(f"{type(error).__name__}: {error}")


def is_hub_id(name: str) -> bool:
    """Return whether the name of a model has the form of a hub id, `name` or `owner/name`, and is no path on disk."""
    # Path.exists raises an error if the name is too long.
    is_path = os.path.exists(name) or name.startswith(("/", ".", "~"))  # noqa: PTH110
    return not is_path and name.count("/") <= 1


def find_commit(name: str, revision: str | None, kind: Kind) -> str:
    """Return the commit on the hub that a branch or tag stands for; None stands for the branch `main`.

    If the hub cannot be reached, the commit is the one that it named when it was last asked, which the hub library's
    cache records. A complete commit hash is returned as it is.

    Raises:
        UserError: if the hub refuses access or has no such revision, or if it cannot be reached and the cache has no
            record of the revision.
    """
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    title = f"{_TITLES[kind]} {name}" + (f" at revision {revision}" if revision is not None else "")
    ask = partial(HfApi().resolve_revision, name, repo_type=kind, revision=revision)
    problem = hub_problem()
    if not problem:
        try:
            return str(_within(COMMIT_SECONDS, ask).resolved)
        except TimeoutError:
            problem = f"the hub {datasets.config.HF_ENDPOINT} gave no answer within {COMMIT_SECONDS:g} s"
        except Exception as error:  # the types depend on library and version
            reason = refusal(error, name, kind) or shorten(f"{type(error).__name__}: {error}")
            raise UserError(f"{title}: {reason}; {LOCAL_COPY[kind]}") from error
    try:
        commit = str(ask(local_files_only=True).resolved)
    except RevisionResolutionError as error:
        raise UserError(f"{title}: not in the local cache, and {problem}; {LOCAL_COPY[kind]}") from error
    except (OSError, ValueError) as error:  # the name cannot be a hub id, for example because it is too long
        raise UserError(f"{title}: {shorten(error)}; {LOCAL_COPY[kind]}") from error
    if not datasets.config.HF_HUB_OFFLINE:
        log.warning("%s: %s; using commit %s, the latest that is known", title, problem, commit)
    return commit


def refusal(error: BaseException, name: str, kind: Kind) -> str:
    """Return why the hub refuses access to a repository and what to do, or "" if it does not.

    Args:
        error: raised by a library that loads from the hub; its causes are searched for the hub's answer.
        name: id of the repository.
        kind: kind of the repository.
    """
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    page = f"{datasets.config.HF_ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    for cause in causes:
        # `datasets` drops the hub's answer and keeps only a message.
        if isinstance(cause, GatedRepoError) or (isinstance(cause, DatasetNotFoundError) and "gated" in str(cause)):
            return (
                f"access needs consent to its conditions: accept them at {page}, then log in with `hf auth login` or "
                "set HF_TOKEN"
            )
        if isinstance(cause, RepositoryNotFoundError):
            return (
                f"the hub has no {_TITLES[kind]} of this name, or a private one: check the name, or log in with "
                "`hf auth login` or set HF_TOKEN"
            )
        if isinstance(cause, RevisionNotFoundError):
            return f"the hub has no such revision; expected a branch, a tag or a commit, which are listed at {page}"
        if isinstance(cause, HfHubHTTPError) and cause.response.status_code in (401, 403):
            return (
                f"the hub refuses access (HTTP status {cause.response.status_code}): log in with `hf auth login`, or "
                "set HF_TOKEN to a token that may read it"
            )
    return ""


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Call a function in a thread and return its result; raises its exception, or a TimeoutError after `seconds`.

    The timeouts of HTTP libraries cover neither name resolution nor attempts at several addresses.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(timeout=seconds)
