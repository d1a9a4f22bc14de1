"""Readers of untrusted JSON and YAML files, and a check of their content against type annotations.

Any damaged or hostile file raises a `UserError` with one line.
"""

import functools
import json
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import yaml

from istar.errors import UserError, shorten

MAX_DEPTH = 50
"""Maximum depth of nested containers in a file."""
MAX_BYTES = 200_000_000
_MAX_INTEGER = 10**300
"""Greatest integer; larger ones cannot be converted to floats."""
_MAX_COUNT = 2**63 - 1
"""Greatest integer in a file that istar wrote."""
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
# PyYAML's C loader, if available, is ten times as fast.
_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class MissingFileError(UserError):
    """A file to be read does not exist."""


def read_json(path: Path, max_integer: int = _MAX_INTEGER) -> Any:
    """Return the content of a JSON file.

    Raises:
        MissingFileError: if the file is missing.
        UserError: if it cannot be read, is not JSON, is nested too deeply, or has an integer beyond `max_integer`.
    """
    return parse_json(_read_text(path), str(path), max_integer)


def read_yaml(path: Path, max_integer: int = _MAX_INTEGER) -> Any:
    """Return the content of a YAML file, which may contain only what JSON can contain, and no aliases.

    Raises:
        MissingFileError: if the file is missing.
        UserError: if it cannot be read, is not YAML, is nested too deeply, has an integer beyond `max_integer`, or
            contains aliases, dates or other objects.
    """
    text = _read_text(path)
    try:
        depth = 0
        # The loader is recursive and would crash the process on deep nesting; the parser of events is not.
        for event in yaml.parse(text, Loader=_YAML_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} lists and mappings within each other")
            if isinstance(event, yaml.AliasEvent):  # aliases of aliases can stand for any number of values
                raise ValueError(f"the alias *{event.anchor}; expected the values themselves")
        content = yaml.load(text, Loader=_YAML_LOADER)
        _check_values(content, max_integer)
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not YAML: {shorten(error)}") from error
    return content


def read_record(path: Path, expected: Any, what: str, version: int | None = None) -> Any:
    """Return the content of a JSON file, or of a YAML file with the suffix `.yaml`, after a check of its types.

    Args:
        path: path of the file.
        expected: type annotation of the content, as for `find_mismatch`.
        what: kind of file, for messages, such as `a result`.
        version: expected number in the field `format`; None if the content lacks this field.

    Raises:
        MissingFileError: if the file is missing.
        UserError: if it cannot be read, has another version, or differs from `expected`.
    """
    content = (read_yaml if path.suffix == ".yaml" else read_json)(path, _MAX_COUNT)
    file_version = content.get("format") if isinstance(content, dict) else None
    if version is not None and isinstance(file_version, int) and file_version != version:
        raise UserError(f"{path} has format {file_version}; this version reads {version}")
    if mismatch := find_mismatch(content, expected, "its content"):
        raise UserError(f"{path} is not {what}: {mismatch}")
    return content


def parse_json(text: str, location: str, max_integer: int = _MAX_INTEGER) -> Any:
    """Parse JSON; raise a `UserError` that names `location` if the text is not JSON or is nested too deeply."""
    try:
        content = json.loads(text)
        _check_values(content, max_integer)
    except RecursionError as error:
        raise UserError(f"{location}: not JSON: more than {MAX_DEPTH} lists and objects within each other") from error
    except ValueError as error:
        raise UserError(f"{location}: not JSON: {shorten(error)}") from error
    return content


def is_missing(path: Path) -> bool:
    """Return whether there is neither a file nor a folder at a path.

    Raises:
        OSError: if this is unknown, for example because the name is too long. From Python 3.14 on, `Path.exists`
            returns False instead.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    return False


def _read_text(path: Path) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a FIFO would wait forever
            raise UserError(f"{path} is a folder, a pipe or a device; expected a file")
        if status.st_size > MAX_BYTES:
            raise UserError(f"{path}: larger than {MAX_BYTES // 10**6} MB")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: there is no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or shorten(error)}") from error
    except ValueError as error:
        raise UserError(f"{path}: not UTF-8 text: {shorten(error)}") from error


def _check_values(content: Any, max_integer: int) -> None:
    """Raise a ValueError if nested data are too deep, have too large integers, or are impossible in JSON and UTF-8."""
    containers: list[Iterator[Any]] = [iter((content,))]
    while containers:
        for value in containers[-1]:
            if isinstance(value, float):  # most values are
                continue
            if isinstance(value, str):
                if not value.isascii() and _LONE_SURROGATE.search(value):
                    raise ValueError(f"the text {value!r} has half of a surrogate pair")
            elif isinstance(value, dict | list):
                containers.append(iter([*value, *value.values()] if isinstance(value, dict) else value))
                break
            elif isinstance(value, int):
                if abs(value) > max_integer:
                    raise ValueError(f"a number of {len(str(abs(value)))} digits is too large")
            elif value is not None:
                raise ValueError(f"a {type(value).__name__} where text or a number was expected")
        else:
            containers.pop()
        if len(containers) > MAX_DEPTH + 1:
            raise ValueError(f"more than {MAX_DEPTH} lists and objects within each other")


def find_mismatch(value: Any, expected: Any, name: str) -> str:
    """Return how a JSON value `value`, called `name`, differs from a type annotation, or "" if it agrees.

    Handles `Any`, None, bool, int, float, str, unions, `Literal`, `tuple[X, Y]`, `dict[str, X]`, `list[X]`,
    `Sequence[X]`, dataclasses and `TypedDict`s. `Annotated[X, 3]` demands a number of at least 3, and `Annotated[X, Y]`
    the more precise type Y. A float may be an int. A str may not contain control characters except tabs and line
    breaks. A `TypedDict` may have further keys, a dataclass may not.
    """
    origin, arguments = get_origin(expected), get_args(expected)
    if expected is Any:
        return ""
    if origin in (Required, NotRequired):
        return find_mismatch(value, arguments[0], name)
    if origin is Annotated:
        base, detail = arguments
        if not isinstance(detail, int):
            return find_mismatch(value, detail, name)
        mismatch = find_mismatch(value, base, name)
        return mismatch or ("" if value >= detail else f"{name} is {value}; expected {detail} or more")
    if origin in (Union, UnionType):
        if any(_is_scalar_of(value, option) for option in arguments):
            return ""
        mismatches = [find_mismatch(value, option, name) for option in arguments]
        return "" if "" in mismatches else mismatches[0]
    if is_dataclass(expected) or is_typeddict(expected):
        return _find_field_mismatch(value, expected, name)
    if origin is dict and isinstance(value, dict):
        items = ((key, item) for key, item in value.items() if not _is_scalar_of(item, arguments[1]))
        return _find_first((item, arguments[1], f"{name}.{key}") for key, item in items)
    if origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return _find_first((item, type_, name) for item, type_ in zip(value, arguments, strict=True))
    if origin not in (None, dict, tuple, Literal) and isinstance(value, list):
        items = ((index, item) for index, item in enumerate(value) if not _is_scalar_of(item, arguments[0]))
        return _find_first((item, arguments[0], f"{name}[{index}]") for index, item in items)
    if origin is Literal:
        fits = any(value is option or (isinstance(value, str) and value == option) for option in arguments)
    else:
        fits = origin is None and _is_scalar_of(value, expected)
    type_name = expected.__name__ if origin is None and expected else str(expected).removeprefix("typing.")
    return "" if fits else f"{name} is {shorten(repr(value), 60)}; expected {type_name}"


def _find_first(checks: Iterable[tuple[Any, Any, str]]) -> str:
    return next(filter(None, (find_mismatch(*arguments) for arguments in checks)), "")


def _find_field_mismatch(value: Any, expected: Any, name: str) -> str:
    if not isinstance(value, dict):
        return f"{name} is {shorten(repr(value), 60)}; expected named values"
    types, required = _list_fields(expected)
    if missing := required - value.keys():
        return f"{name} lacks {min(missing)}"
    if is_dataclass(expected) and (unknown := value.keys() - types.keys()):
        return f"{name} has the unknown field {shorten(min(unknown), 60)}"
    items = ((key, type_) for key, type_ in types.items() if key in value and not _is_scalar_of(value[key], type_))
    return _find_first((value[key], type_, f"{name}.{key}") for key, type_ in items)


@functools.cache
def _list_fields(expected: Any) -> tuple[dict[str, Any], frozenset[str]]:
    types = get_type_hints(expected, include_extras=True)
    if is_typeddict(expected):
        return types, expected.__required_keys__
    required = [field.name for field in fields(expected) if field.default is field.default_factory is MISSING]
    return types, frozenset(required)


def _is_scalar_of(value: Any, expected: Any) -> bool:
    if type(value) is str and _CONTROL_CHARACTER.search(value):
        return False
    return type(value) is (expected or NoneType) or (expected is float and type(value) is int)
