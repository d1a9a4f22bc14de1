"""A local HTTP server that answers huggingface_hub, transformers and datasets as the Hugging Face hub does."""

import base64
import hashlib
import http.server
import io
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import huggingface_hub
import pytest
import transformers
import yaml
from datasets import ClassLabel, Dataset, Features, Value
from transformers import BertModel

from istar.models import tiny
from istar.texts import demo

ADDRESS = re.compile(
    r"/(?:api/)?(?P<kind>models/|datasets/|)(?P<name>[^/]+/[^/]+?)"
    r"(?:/(?P<action>resolve|revision|tree|paths-info|preupload|commit)/(?P<revision>[^/]+)(?:/(?P<path>.*))?)?"
)

UPLOADS = ("/api/whoami-v2", "/api/repos/create", "/api/validate-yaml")


@dataclass
class Repository:
    """Files by commit, commits by branch, and the HTTP status and error code with which the hub refuses its files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    status: int = 200
    error: str = ""

    def push(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch and return its name, forty hexadecimal digits."""
        commit = sha1(b"".join([*files.values(), str(len(self.commits)).encode()]))
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit


class MockHub:
    """Repositories by `models/<name>` and `datasets/<name>`, and the requests and bytes that the hub has answered.

    While `silent` is set, requests for anything but the home page are not answered.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.bytes_sent = 0
        self.silent = False
        self.refuses_uploads = False
        self.closed = threading.Event()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
                hub.requests.append(f"{self.command} {self.path}")
                if hub.silent and self.path != "/":
                    hub.closed.wait()
                status, headers, content = hub.answer(urlsplit(self.path).path, body)
                byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
                if byte_range is not None and status == 200:
                    first, last = int(byte_range[1]), min(int(byte_range[2] or len(content)), len(content) - 1)
                    headers = {**headers, "content-range": f"bytes {first}-{last}/{len(content)}"}
                    status, content = 206, content[first : last + 1]
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    # A reader of the beginning of a file closes the connection.
                    with suppress(ConnectionError):
                        self.wfile.write(content)
                        hub.bytes_sent += len(content)

            do_HEAD = do_POST = do_GET  # noqa: N815

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, address: str, body: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content of the answer to a request."""
        if address in UPLOADS:
            return self.answer_upload(address, body)
        match = ADDRESS.fullmatch(address)
        if match is None:
            return 200, {}, b""
        repository = self.repositories.get(f"{match['kind'] or 'models/'}{match['name']}")
        if repository is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        revision = unquote(match["revision"] or "main")
        commit = repository.branches.get(revision, revision)
        files = repository.commits.get(commit)
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if match["action"] == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            return as_json(
                {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
            )
        if match["action"] == "commit":
            operations = [json.loads(line) for line in body.splitlines()]
            added = [operation["value"] for operation in operations if operation["key"] == "file"]
            new_files = {file["path"]: base64.b64decode(file["content"]) for file in added}
            commit = repository.push({**files, **new_files})
            return as_json({"commitUrl": f"{self.url}/{match['name']}/commit/{commit}", "commitOid": commit})
        if match["action"] in (None, "revision"):
            return as_json({"id": match["name"], "sha": commit})
        if match["action"] == "tree":
            return as_json(entries_below(files, unquote(match["path"] or "")))
        if match["action"] == "paths-info":
            requested_paths = parse_qs(body).get("paths", [])
            return as_json(
                [entry for path in requested_paths for entry in entries_below(files, path) if entry["path"] == path]
            )
        if repository.status != 200:
            return repository.status, {"X-Error-Code": repository.error}, b""
        content = files.get(unquote(match["path"]))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{sha1(content)}"'}, content

    def answer_upload(self, address: str, body: str) -> tuple[int, dict[str, str], bytes]:
        """Return the answer to a request of `UPLOADS`: who asks, a new repository, or a check of a model card."""
        if self.refuses_uploads:
            return 401, {}, b""
        if address == "/api/repos/create":
            name = "/".join(json.loads(body)[key] for key in ("organization", "name"))
            repository = self.repositories.setdefault(f"models/{name}", Repository())
            if not repository.commits:
                repository.push({})
            return as_json({"url": f"{self.url}/{name}"})
        return as_json({"name": "user", "errors": [], "warnings": []})


def entries_below(files: Mapping[str, bytes], folder: str) -> list[dict[str, Any]]:
    """Describe, as the hub does, the files and subfolders of a folder, all levels down, or a single file."""
    paths = [path for path in sorted(files) if path == folder or path.startswith(f"{folder}/" if folder else "")]
    folders = sorted({parent.as_posix() for path in paths for parent in PurePosixPath(path).parents[:-1]} - {folder})
    return [
        *({"type": "directory", "path": path, "oid": sha1(path.encode())} for path in folders),
        *({"type": "file", "path": path, "size": len(files[path]), "oid": sha1(files[path])} for path in paths),
    ]


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def as_json(value: Any) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and content of an answer in JSON."""
    return 200, {"content-type": "application/json"}, json.dumps(value).encode()


@contextmanager
def serving() -> Iterator[MockHub]:
    hub = MockHub()
    try:
        yield hub
    finally:
        hub.close()


def use(hub: MockHub, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Make the hub's libraries send their requests to this hub, although they read their environment only on import."""
    constants = huggingface_hub.constants
    patch.setattr(constants, "ENDPOINT", hub.url)
    # These clients are shared by all calls, and keep the address with which they were created.
    clients = [huggingface_hub.hf_api.api]
    if hasattr(transformers.utils.hub, "hf_api"):
        clients.append(transformers.utils.hub.hf_api())
    for client in clients:
        patch.setattr(client, "endpoint", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    patch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
    patch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", cache / "datasets" / "downloads")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        patch.delenv(name, raising=False)
        patch.delenv(name.upper(), raising=False)
    set_offline(False, patch)


def set_offline(offline: bool, patch: pytest.MonkeyPatch) -> None:
    """Switch offline mode on or off, as `HF_HUB_OFFLINE` does in a new process."""
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)


def model_files(folder: Path, seed: int) -> dict[str, bytes]:
    """The files of a tiny BERT with the random weights of a seed, as `save_pretrained` writes them to a new folder."""
    import torch

    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        BertModel(tiny.make_tiny_config(len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rte_files(rows: int = 16) -> dict[str, bytes]:
    """The files of RTE as they lie in the repository of GLUE on the hub."""
    texts = {"sentence1": "the {split} lamp number {row} is old", "sentence2": "a lamp is old"}
    return glue_files({"rte": ("train", "validation", "test")}, texts, ["entailment", "not_entailment"], rows)


def mnli_files() -> dict[str, bytes]:
    """The files of MNLI and of GLUE's diagnostic set, which is a configuration of its own on the hub."""
    splits = [f"{name}_{kind}" for name in ("validation", "test") for kind in ("matched", "mismatched")]
    texts = {"premise": "the {split} lamp number {row} is old", "hypothesis": "a lamp is old"}
    labels = ["entailment", "neutral", "contradiction"]
    return glue_files({"mnli": ("train", *splits), "ax": ("test",)}, texts, labels, rows=4)


def wikitext_files(rows: int = 12) -> dict[str, bytes]:
    """The files of WikiText-2 on the hub, in which empty lines are rows, too."""
    files, name = {}, "wikitext-2-raw-v1"
    card = ["---", "configs:", f"- config_name: {name}", "  data_files:"]
    for split in ("train", "validation", "test"):
        lines = [(" = Lamps = \n", "", f" The {split} lamp number {row} is old . \n") for row in range(rows)]
        file = io.BytesIO()
        Dataset.from_dict({"text": list(chain(*lines))}).to_parquet(file)
        files[f"{name}/{split}-00000-of-00001.parquet"] = file.getvalue()
        card += [f"  - split: {split}", f"    path: {name}/{split}-*"]
    files["README.md"] = "\n".join([*card, "---", ""]).encode()
    return files


def glue_files(
    splits: Mapping[str, Sequence[str]], texts: Mapping[str, str], labels: Sequence[str], rows: int
) -> dict[str, bytes]:
    """The files of configurations of GLUE, each with some splits, and the card that lists them.

    The texts of a column are made from a template with the fields `split` and `row`.
    """
    features = Features(
        {**dict.fromkeys(texts, Value("string")), "label": ClassLabel(names=list(labels)), "idx": Value("int32")}
    )
    files, card = {}, ["---", "configs:"]
    for configuration, names in splits.items():
        card += [f"- config_name: {configuration}", "  data_files:"]
        for split in names:
            columns: dict[str, Any] = {
                name: [template.format(split=split, row=row) for row in range(rows)] for name, template in texts.items()
            }
            columns |= {
                "label": [-1 if split.startswith("test") else row % len(labels) for row in range(rows)],
                "idx": list(range(rows)),
            }
            file = io.BytesIO()
            Dataset.from_dict(columns, features=features).to_parquet(file)
            files[f"{configuration}/{split}-00000-of-00001.parquet"] = file.getvalue()
            card += [f"  - split: {split}", f"    path: {configuration}/{split}-*"]
    files["README.md"] = "\n".join([*card, "---", ""]).encode()
    return files


def join_files(*data_sets: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of several results of `glue_files` with different configurations, as a single repository."""
    cards = [yaml.safe_load(files["README.md"].decode().strip("-\n")) for files in data_sets]
    card = yaml.safe_dump({"configs": [configuration for card in cards for configuration in card["configs"]]})
    joined = {path: content for files in data_sets for path, content in files.items()}
    return {**joined, "README.md": f"---\n{card}---\n".encode()}
