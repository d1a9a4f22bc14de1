"""The Hugging Face hub: whether it can be reached, which commit a branch points to, and why it refuses access."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import datasets
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import HfApi, errors, get_session

from istar.errors import UserError, mask_secrets, shorten

T = TypeVar("T")
RepositoryKind = Literal["model", "dataset"]

PROBE_TIMEOUT_SECONDS = 5.0
"""Default timeout of `request_status`. The retries of the hub's libraries would take about 23 s."""
SECONDS_BETWEEN_PROBES = 60.0
"""How long `find_hub_problem` repeats its last answer before it asks again."""
COMMIT_TIMEOUT_SECONDS = 30.0
"""Timeout of the request for a commit, once the hub has answered."""
COMMIT_PATTERN = re.compile("[0-9a-f]{40}")
"""Pattern of a complete commit hash."""
LOCAL_COPY_HINTS: dict[RepositoryKind, str] = {
    "model": "name the folder of a local copy instead, as save_pretrained writes it",
    "dataset": "name a local copy instead: task.data_dir=<folder> to train, --text <file or folder> to measure",
}
"""What error messages advise users to do if the hub cannot be used, by kind of repository."""
_TITLES: dict[RepositoryKind, str] = {"model": "model", "dataset": "data set"}

last_probes: dict[str, tuple[float, str]] = {}
"""By the address of a hub, its last answer in this process, after the time until which the answer is repeated."""

log = logging.getLogger(__name__)


def find_hub_problem(timeout: float = PROBE_TIMEOUT_SECONDS) -> str:
    """Return why the Hugging Face hub cannot be used, or "" if it responds within `timeout` seconds.

    The hub is asked once a minute. In between, the function returns the last answer.
    """
    if datasets.config.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids asking the hub"
    endpoint = datasets.config.HF_ENDPOINT
    repeated_until, problem = last_probes.get(endpoint, (0.0, ""))
    if time.monotonic() < repeated_until:
        return problem
    # The hub library's session applies the user's proxies and certificates.
    status, error = request_status(lambda: get_session().head(endpoint, timeout=timeout).status_code, timeout)
    if status >= 500:
        error = f"HTTP status {status}"
    problem = mask_secrets(f"the hub {endpoint} cannot be reached ({error})") if error else ""
    last_probes[endpoint] = time.monotonic() + SECONDS_BETWEEN_PROBES, problem
    return problem


def request_status(send_request: Callable[[], int], timeout: float = PROBE_TIMEOUT_SECONDS) -> tuple[int, str]:
    """Call `send_request` in a thread and return the HTTP status and "", or 0 and the reason for the failure.

    Gives up one second after `timeout`, so that the request's own timeout takes effect first.
    """
    try:
        return _call_with_timeout(send_request, timeout + 1), ""
    except TimeoutError:
        return 0, f"no answer within {timeout:g} s"
    except Exception as error:  # the types depend on library and version
        return 0, shorten(f"{type(error).__name__}: {error}")


def is_hub_id(name: str) -> bool:
    """Return whether a model's name looks like a hub id, `name` or `owner/name`, and is not a path on disk."""
    # Path.exists raises an error if the name is too long.
    is_path = os.path.exists(name) or name.startswith(("/", ".", "~"))  # noqa: PTH110
    return not is_path and name.count("/") <= 1


def find_commit(name: str, revision: str | None, kind: RepositoryKind) -> str:
    """Return the commit hash of a branch or tag of a hub repository; `revision=None` means the branch `main`.

    If the hub cannot be reached, returns the latest commit in the hub library's cache, with a warning. A complete
    commit hash is returned unchanged. Raises a `UserError` if the hub refuses access or lacks the revision, or if it
    cannot be reached and the cache lacks the revision.
    """
    if revision is not None and COMMIT_PATTERN.fullmatch(revision):
        return revision
    title = f"{_TITLES[kind]} {name}" + (f" at revision {revision}" if revision is not None else "")
    resolve_revision = partial(HfApi().resolve_revision, name, repo_type=kind, revision=revision)
    problem = find_hub_problem()
    if not problem:
        try:
            return str(_call_with_timeout(resolve_revision, COMMIT_TIMEOUT_SECONDS).resolved)
        except TimeoutError:
            problem = f"the hub {datasets.config.HF_ENDPOINT} gave no answer within {COMMIT_TIMEOUT_SECONDS:g} s"
        except Exception as error:  # the types depend on library and version
            reason = explain_refusal(error, name, kind) or shorten(f"{type(error).__name__}: {error}")
            raise UserError(f"{title}: {reason}; {LOCAL_COPY_HINTS[kind]}") from error
    try:
        commit = str(resolve_revision(local_files_only=True).resolved)
    except errors.RevisionResolutionError as error:
        raise UserError(f"{title}: not in the local cache, and {problem}; {LOCAL_COPY_HINTS[kind]}") from error
    except (OSError, ValueError) as error:  # the name cannot be a hub id, for example because it is too long
        raise UserError(f"{title}: {shorten(error)}; {LOCAL_COPY_HINTS[kind]}") from error
    if not datasets.config.HF_HUB_OFFLINE:
        log.warning("%s: %s; using commit %s, the latest that is known", title, problem, commit)
    return commit


def explain_refusal(error: BaseException, name: str, kind: RepositoryKind) -> str:
    """Return why the hub refuses access to a repository and what the user can do, or "" if it does not refuse.

    The causes of `error`, an exception of a library that loads from the hub, are searched for the hub's answer.
    """
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    page = f"{datasets.config.HF_ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    for cause in causes:
        # `datasets` drops the hub's answer and keeps only a message.
        if isinstance(cause, errors.GatedRepoError) or (
            isinstance(cause, DatasetNotFoundError) and "gated" in str(cause)
        ):
            return (
                f"access needs consent to its conditions: accept them at {page}, then log in with `hf auth login` or "
                "set HF_TOKEN"
            )
        if isinstance(cause, errors.RepositoryNotFoundError):
            return (
                f"the hub has no {_TITLES[kind]} of this name, or a private one: check the name, or log in with "
                "`hf auth login` or set HF_TOKEN"
            )
        if isinstance(cause, errors.RevisionNotFoundError):
            return f"the hub has no such revision; expected a branch, a tag or a commit, which are listed at {page}"
        if isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code in (401, 403):
            return (
                f"the hub refuses access (HTTP status {cause.response.status_code}): log in with `hf auth login`, or "
                "set HF_TOKEN to a token that may read it"
            )
    return ""


def load_dataset(
    name: str,
    configuration: str | None,
    revision: str | None,
    problem: str,
    split: str | None = None,
    streaming: bool = False,
) -> Any:
    """Load all splits of a data set of the hub, or one; from the local cache if there is a `problem` with the hub.

    With `streaming`, only the beginning of a file is read until the data set is iterated. Raises a `UserError` if the
    data set cannot be loaded.
    """
    was_offline = datasets.config.HF_HUB_OFFLINE
    try:
        # Offline, `datasets` does not retry its connections.
        datasets.config.HF_HUB_OFFLINE = was_offline or bool(problem)
        return datasets.load_dataset(name, configuration, split=split, revision=revision, streaming=streaming)
    except Exception as error:  # `datasets` and the libraries below it raise many types
        failure = f"the hub did not deliver it ({shorten(f'{type(error).__name__}: {error}')})"
        reason = explain_refusal(error, name, "dataset") or failure
        reason = f"not in the local cache, and {problem}" if problem else reason
        title = " ".join(filter(None, (name, configuration)))
        raise UserError(f"{title}: {reason}; {LOCAL_COPY_HINTS['dataset']}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def load_dataset_split(
    name: str, configuration: str | None, split: str, revision: str | None
) -> tuple[datasets.Dataset, str]:
    """Load one split of a data set of the hub at a branch, tag or commit, and return it with its commit.

    Raises a `UserError` if the data set or its commit cannot be loaded.
    """
    problem = find_hub_problem()
    commit = None if problem else find_commit(name, revision, "dataset")
    dataset = load_dataset(name, configuration, commit or revision, problem, split)
    return dataset, commit or find_cached_commit([dataset]) or ""


def open_dataset_stream(
    name: str, configuration: str | None, split: str, revision: str | None
) -> tuple[datasets.IterableDataset, str]:
    """Open one split of a data set of the hub at a branch, tag or commit, and return it with its commit.

    Its rows are read from the hub as they are iterated, and not cached. Raises a `UserError` if the hub cannot be
    reached, or the data set, its commit or the split does not exist.
    """
    if problem := find_hub_problem():
        raise UserError(f"{name}: a stream is read from the hub, and {problem}; {LOCAL_COPY_HINTS['dataset']}")
    commit = find_commit(name, revision, "dataset")
    return load_dataset(name, configuration, commit, "", split, streaming=True), commit


def find_cached_commit(splits: Iterable[datasets.Dataset]) -> str | None:
    """Return the commit of a data set that `datasets` has loaded from its cache, or None if it is unknown.

    Without the hub, `datasets` loads its latest cached data set from a folder named by the commit.
    """
    folders = {Path(file["filename"]).parent.name for split in splits for file in split.cache_files}
    commit = folders.pop() if len(folders) == 1 else ""
    return commit if COMMIT_PATTERN.fullmatch(commit) else None


def _call_with_timeout(function: Callable[[], T], timeout: float) -> T:
    """Call a function in a thread and return its result; raise its exception, or a TimeoutError after `timeout` s.

    HTTP libraries' own timeouts cover neither name resolution nor attempts at several addresses.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(timeout=timeout)
