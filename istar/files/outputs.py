"""Folders of results: a command replaces and removes only its own files, which are listed in a manifest."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict
from urllib.parse import quote

from istar.errors import UserError, shorten
from istar.files.parsing import is_missing, read_record
from istar.files.writing import is_temporary, remove_temporary_files, write_text

STATE_FOLDER = ".istar"
"""Hidden folder in a folder of results, with the manifest and unfinished files."""
_MANIFEST, _DRAFTS = "manifest.json", "new"

_Entries = dict[str, tuple[str, ...]]
"""The manifest. It lists for each file name the noun and the checksum, and for files in folders also size and time.

While a file is being replaced, the entry ends with the checksum, size and time of the new file.
"""


class _Manifest(TypedDict):
    files: dict[str, list[str]]


@dataclass(frozen=True)
class Output:
    """A folder of results, which may also contain other files. Those are never replaced, moved or removed.

    Each file is replaced atomically. The manifest lists a new file before it is written, and a removed one until it is
    gone. A process may therefore be killed at any time: each file is then the old or the new one, and the next call of
    `check` removes unfinished work. A folder that is being replaced is the old one, the new one or missing. Symbolic
    links in the folder are not followed.
    """

    folder: Path
    noun: str  # what the command writes, such as "report"; files of other nouns count as foreign
    setting: str = "--out"  # option that names the folder, for messages; empty for none
    advice: str = "name a new folder"  # what to do if the folder cannot be used

    def check(self, names: Iterable[str], inputs: Iterable[str | Path] = ()) -> None:
        """Refuse a folder into which the results cannot be written; call this before any work.

        Args:
            names: files and folders that will be written, relative to the folder.
            inputs: what the command reads; names of models on the hub are ignored.

        Raises a `UserError` if a name belongs to a foreign or edited file, or if an input would be replaced or is the
        folder itself.
        """
        names = list(names)
        with self._user_errors():
            self._recover()
            entries = self._read_manifest()
            own_names = [name for name, (noun, *_) in entries.items() if noun == self.noun]
            replaced_paths = [(self.folder / name).resolve() for name in names]
            for path in map(Path, filter(os.path.exists, inputs)):
                if not path.is_file() and not path.is_dir():
                    raise UserError(f"{path} is a pipe or a device; expected a file or a folder")
                is_replaced = any(path.resolve().is_relative_to(replaced_path) for replaced_path in replaced_paths)
                if is_replaced or path.resolve() == self.folder.resolve():
                    raise UserError(f"{self._label} would replace files of the input {path}; {self.advice}")
            for name in dict.fromkeys((*names, *own_names)):
                self._check_own(name, entries)
            absolute_folder = self.folder.absolute()
            existing_folder = next(path for path in (absolute_folder, *absolute_folder.parents) if not is_missing(path))
            if not existing_folder.is_dir() or not os.access(existing_folder, os.W_OK):
                raise UserError(f"{self._label} cannot be written; name a folder that you may write to")

    def list_names(self) -> list[str]:
        """List all files and folders in the folder except its hidden one."""
        return [path.name for path in self.folder.glob("*") if path.name != STATE_FOLDER]

    def open_state(self, name: str) -> Path:
        """Create the folder, and return a path for unfinished work in its hidden folder."""
        with self._user_errors():
            self._create()
        return self._state / name

    def make_draft(self) -> Path:
        """Create and return an empty folder for `write` to move to its place."""
        folder = self.open_state(_DRAFTS) / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def write(
        self,
        contents: Mapping[str, bytes],
        folders: Mapping[str, Path] | None = None,
        *,
        is_complete: bool = False,
    ) -> None:
        """Write files and folders, in this order, in place of earlier ones.

        Args:
            contents: content of each file by its name relative to the folder.
            folders: drafts of folders by name, see `make_draft`. Each replaces its earlier one as a whole.
            is_complete: remove earlier results of other names.

        Raises a `UserError` if a foreign or edited file would be replaced, or the folder cannot be written.
        """
        folders = folders or {}
        with self._user_errors():
            self._create()
            entries = self._read_manifest()
            identifiers: _Entries = {name: (hashlib.sha256(content).hexdigest(),) for name, content in contents.items()}
            for name, draft in folders.items():
                identifiers |= {
                    f"{name}/{path.relative_to(draft).as_posix()}": (hash_file(path), _format_size_and_time(path))
                    for path in _list_files(draft)
                }
            own_names = [name for name, (noun, *_) in entries.items() if noun == self.noun]
            stale_names = [
                name for name in own_names
                if name not in identifiers and (is_complete or name.startswith(tuple(f"{key}/" for key in folders)))
            ]  # fmt: skip
            for name in (*contents, *folders, *stale_names):
                self._check_own(name, entries)
            # All files are written before the first one is replaced, in case the disk is full.
            drafts = [(name, self._write_draft(str(number), contents[name])) for number, name in enumerate(contents)]
            unfinished_entries = {
                name: (*entries.get(name, (self.noun,)), *added) for name, added in identifiers.items()
            }
            self._write_manifest(entries | unfinished_entries)
            for name, draft in drafts:
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                draft.replace(self.folder / name)
            for name, draft in folders.items():
                self._discard_folder(name)
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                draft.rename(self.folder / name)
            for name in stale_names:
                self._remove_file(name)
            kept_entries = {name: entry for name, entry in entries.items() if name not in stale_names}
            self._write_manifest(kept_entries | {name: (self.noun, *added) for name, added in identifiers.items()})
            self._remove_drafts()

    def remove_folder(self, name: str) -> None:
        """Remove a folder of `write`, if it exists; raise a `UserError` if it contains a foreign or edited file."""
        with self._user_errors():
            entries = self._read_manifest()
            self._check_own(name, entries)
            self._discard_folder(name)
            self._write_manifest({key: entry for key, entry in entries.items() if not key.startswith(f"{name}/")})
            self._remove_drafts()

    @property
    def has_manifest(self) -> bool:
        """Whether a command has written results into the folder."""
        return (self._state / _MANIFEST).is_file()

    @property
    def _state(self) -> Path:
        return self.folder / STATE_FOLDER

    @property
    def _label(self) -> str:
        return f"{self.setting} {self.folder}".strip()

    @contextmanager
    def _user_errors(self) -> Iterator[None]:
        """After an OSError, remove unfinished work and raise a `UserError` that names the folder."""
        try:
            yield
        except OSError as error:
            with suppress(OSError, UserError):
                self._recover()
            raise UserError(f"{self._label} cannot be written: {shorten(error)}") from error

    def _create(self) -> None:
        self._refuse_links()
        self._state.mkdir(parents=True, exist_ok=True)
        if not self.has_manifest:
            self._write_manifest({})

    def _refuse_links(self) -> None:
        for path in (self.folder, self._state, self._state / _MANIFEST):
            is_expected = path.is_file() if path.name == _MANIFEST else path.is_dir()
            if path.is_symlink() or (path.exists() and not is_expected):
                place = "" if path == self.folder else f": {path}"
                kind = "file" if path.name == _MANIFEST else "folder"
                raise UserError(f"{self._label}{place} is not a {kind}; {self.advice}")
        if self._state.exists() and not self.has_manifest:
            for path in _list_files(self._state):
                if not is_temporary(path):
                    raise self._make_foreign_error(f"{STATE_FOLDER}/{path.relative_to(self._state).as_posix()}")

    def _recover(self) -> None:
        self._refuse_links()
        remove_temporary_files(self._state)
        self._remove_drafts()

    def _remove_drafts(self) -> None:
        shutil.rmtree(self._state / _DRAFTS, ignore_errors=True)

    def _discard_folder(self, name: str) -> None:
        """Move a folder, if it exists, to the drafts, which are removed at the end; it is thus never partly removed."""
        if (self.folder / name).exists():
            (self._state / _DRAFTS).mkdir(exist_ok=True)
            (self.folder / name).rename(self._state / _DRAFTS / f"old-{quote(name, safe='')}")

    def _write_draft(self, name: str, content: bytes) -> Path:
        draft = self._state / _DRAFTS / name
        draft.parent.mkdir(exist_ok=True)
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return draft

    def _remove_file(self, name: str) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        for parent in path.parents[: len(Path(name).parts) - 1]:
            if not parent.is_dir() or any(parent.iterdir()):
                break
            parent.rmdir()

    def _check_own(self, name: str, entries: _Entries) -> None:
        """Raise a `UserError` unless all files at a name are listed as ours and unchanged.

        A file in a folder of `write`, such as the weights of a model, is read only if its size or time has changed.
        """
        path = self.folder / name
        for parent in path.parents[: len(Path(name).parts) - 1]:
            if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
                raise self._make_foreign_error(parent.relative_to(self.folder).as_posix())
        for file in _list_files(path):
            file_name = file.relative_to(self.folder).as_posix()
            noun, *identifiers = entries.get(file_name, ("",))
            if noun != self.noun or not file.is_file() or file.is_symlink():
                raise self._make_foreign_error(file_name)
            if _format_size_and_time(file) not in identifiers and hash_file(file) not in identifiers:
                raise UserError(
                    f"{self._label}: {file_name} was changed after istar wrote it; move it away, or {self.advice}"
                )

    def _make_foreign_error(self, name: str) -> UserError:
        return UserError(f"{self._label} holds {name}, which is no part of a {self.noun}; {self.advice}")

    def _read_manifest(self) -> _Entries:
        path = self._state / _MANIFEST
        if not path.exists():
            return {}
        try:
            files = read_record(path, _Manifest, "a manifest")["files"]
        except UserError as error:
            raise UserError(f"{self._label}: {error}; {self.advice}") from error
        # A manifest may be hostile.
        return {name: tuple(entry) for name, entry in files.items() if entry and _is_within_folder(name)}

    def _write_manifest(self, entries: _Entries) -> None:
        write_text(self._state / _MANIFEST, json.dumps({"files": entries}, indent=1) + "\n")


def run_output(folder: Path) -> Output:
    """Return the folder of a training run."""
    return Output(folder, "run", "", "run.overwrite=true keeps the folder under another name")


def _is_within_folder(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def _list_files(path: Path) -> Iterator[Path]:
    """Yield a file, or all files below a folder; links are yielded, not followed. A missing path yields nothing."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        yield path
        return
    for folder, folder_names, file_names in os.walk(path):
        yield from (Path(folder) / name for name in file_names)
        yield from (Path(folder) / name for name in folder_names if (Path(folder) / name).is_symlink())


def hash_file(path: Path) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _format_size_and_time(path: Path) -> str:
    return f"{path.stat().st_size} bytes at {path.stat().st_mtime_ns} ns"
