"""Opening clouds of points: in memory, or from .npy, .npz, .safetensors, .pt, .pth, .parquet and .jsonl files."""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from zipfile import ZipFile

import torch
from torch import Tensor

from istar.errors import UserError, did_you_mean, shorten
from istar.files.writing import refuse_special_file
from istar.measures.numerics import spread_indices
from istar.vectors.clouds import MIN_CLOUD_POINTS, Cloud, check_count, check_matrix_of_points, cloud_in_memory

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

PointSource: TypeAlias = "Tensor | np.ndarray[Any, Any] | pd.DataFrame | Sequence[Any] | Mapping[str, Any] | str | Path"
"""Tensor, array, data frame of floating columns, list of rows, file of vectors, or several of these by name."""
_SPREAD_GROUPS = 16
"""Most row groups of a .parquet file of which `read_spread_rows` reads the beginning."""


class _Matrix(NamedTuple):
    """A tensor or a column of a file. It is a matrix of points if it has two dimensions and is floating."""

    shape: Sequence[int | None]  # None where only reading tells
    dtype: str
    is_floating: bool
    open: Callable[[str], Cloud]  # makes the cloud with this name


def open_clouds(points: PointSource, key: str | Sequence[str] | None = None) -> list[Cloud]:
    """Return the clouds of a source of points, or of several sources by name.

    Sources are tensors on any device, arrays (also memory-mapped), data frames, lists of rows, whatever NumPy converts,
    and files. Those are mapped into memory or read in blocks, except that a matrix of a .npz file is loaded whole. A
    single source is called `points`, and a matrix of a file has the name of its key, or of the file if there are no
    keys. Values of .jsonl are float64.

    Args:
        points: floating numbers, `(n, d)`, with n of 4 or more and d of 2 or more. `vectors.parquet:column` names a
            file with a key.
        key: the key of a matrix in a file, or several. Needed if the file has more than one matrix.

    Raises:
        UserError: for another shape or dtype, an empty mapping, an unknown key, or a file that cannot be read. Points
            that are not finite are not noticed: see `istar.vectors.clouds.check_finite_rows`.
    """
    if isinstance(points, str | Path):
        return _open_file(points, key)
    if key is not None:
        raise UserError(f"key={key!r} needs a file; expected no key for points in memory")
    sources = points if isinstance(points, Mapping) else {"points": points}
    if not sources:
        raise UserError("the mapping has no clouds; expected at least one name with points")
    clouds = []
    for name, source in sources.items():
        if isinstance(source, str | Path):
            [cloud] = _open_file(source)
        else:
            cloud = cloud_in_memory(str(name), source)
            check_count(cloud.name, cloud.num_points)
        clouds.append(replace(cloud, name=str(name)))
    return clouds


def is_vector_file(source: str | Path) -> bool:
    """Return whether a path ends with the suffix of a file of vectors, perhaps with `:key` after it.

    >>> is_vector_file("vectors.parquet:embedding"), is_vector_file("bert-base-cased")
    (True, False)
    """
    return split_key(source)[0].suffix.lower() in _LISTERS


def split_key(source: str | Path) -> tuple[Path, str | None]:
    """Split `<file of vectors>:<key>` into the path and the key; None without a key. What exists is never split.

    >>> split_key("folder/vectors.npz:train")
    (PosixPath('folder/vectors.npz'), 'train')
    """
    suffixes = "|".join(map(re.escape, _LISTERS))
    match = re.fullmatch(rf"(.+?(?:{suffixes})):(.+)", str(source), re.IGNORECASE | re.DOTALL)
    if match is None or Path(source).exists():
        return Path(source), None
    return Path(match[1]), match[2]


def _open_file(source: str | Path, key: str | Sequence[str] | None = None) -> list[Cloud]:
    path, key_of_source = split_key(source)
    if key is not None and key_of_source is not None:
        raise UserError(f"{source} names a key, and key={key!r} too; expected one of them")
    key = key_of_source if key is None else key
    if path.suffix.lower() not in _LISTERS:
        raise UserError(f"{path} is not a file of vectors; expected one of {', '.join(_LISTERS)}")
    with explain_file_errors(path):
        refuse_special_file(path)
        matrices = _LISTERS[path.suffix.lower()](path)
        keys = [_find_only_key(path, matrices)] if key is None else [key] if isinstance(key, str) else list(key)
        return [_open_matrix(path, name, matrices) for name in keys]


@contextmanager
def explain_file_errors(path: Path) -> Iterator[None]:
    """Convert whatever a library raises about a file into a `UserError` of one line that begins with the path."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except ModuleNotFoundError as error:
        raise UserError(f"{path} needs {error.name}; pip install 'istar[train]'") from error
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except UnpicklingError as error:
        raise UserError(f"{path} has pickled objects, which could execute code; expected only tensors") from error
    except Exception as error:  # the libraries have no common class of errors
        expected = f"expected a complete {path.suffix} file ({shorten(error, 120)})"
        raise UserError(f"{path} cannot be read; {expected}") from error


def _open_matrix(path: Path, name: str, matrices: Mapping[str, _Matrix]) -> Cloud:
    if name not in matrices:
        known_keys = f"its keys are {_join(matrices)}" if "" not in matrices else "its only matrix has no name"
        raise UserError(f"{path} has no key {name}{did_you_mean(name, matrices)}; {known_keys}")
    matrix, label = matrices[name], f"{path}:{name}" if name else str(path)
    shape = [MIN_CLOUD_POINTS if size is None else size for size in matrix.shape]
    cast = ".astype before they are saved"
    check_matrix_of_points(label, shape, matrix.dtype, matrix.is_floating, cast)
    check_count(label, shape[0])
    cloud = matrix.open(name or path.stem)
    check_matrix_of_points(label, (shape[0], cloud.dim), matrix.dtype, True, cast)

    def read_blocks(max_points: int) -> Iterator[Tensor]:
        with explain_file_errors(path):
            yield from cloud.read_blocks(max_points)

    return replace(cloud, read_blocks=read_blocks, read_spread_rows=explain_file_errors(path)(cloud.read_spread_rows))


def _find_only_key(path: Path, matrices: Mapping[str, _Matrix]) -> str:
    if "" in matrices:
        return ""
    candidates = {name: matrix for name, matrix in matrices.items() if matrix.is_floating and len(matrix.shape) == 2}
    if not candidates:
        raise UserError(f"{path} has no matrix of floating numbers (n, d); its keys are {_join(matrices)}")
    first, *others = candidates
    if others:
        raise UserError(f"{path} has several matrices: {_join(candidates)}; name one, as in {path}:{first}")
    return first


def _join(matrices: Mapping[str, _Matrix]) -> str:
    texts = [
        f"{name} {matrix.dtype} ({', '.join('?' if size is None else str(size) for size in matrix.shape)})"
        for name, matrix in matrices.items()
    ]
    return shorten(", ".join(texts)) if texts else "none"


# ---- formats with arrays


def _list_npy(path: Path) -> dict[str, _Matrix]:
    import numpy as np

    array = np.lib.format.open_memmap(path, mode="r")
    is_floating = array.dtype.kind == "f"
    return {"": _Matrix(array.shape, str(array.dtype), is_floating, partial(cloud_in_memory, points=array))}


def _list_npz(path: Path) -> dict[str, _Matrix]:
    import numpy as np
    from numpy.lib import format as npy

    def list_member(archive: ZipFile, member: str) -> _Matrix:
        with archive.open(member) as file:
            read_header = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read_header(file)
        return _Matrix(shape, str(dtype), dtype.kind == "f", lambda name: cloud_in_memory(name, np.load(path)[member]))

    with ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
        return {member.removesuffix(".npy"): list_member(archive, member) for member in members}


def _list_safetensors(path: Path) -> dict[str, _Matrix]:
    from safetensors import safe_open

    def list_tensor(key: str) -> _Matrix:
        part = file.get_slice(key)
        is_floating = part.get_dtype().startswith(("F", "BF"))
        return _Matrix(
            part.get_shape(), part.get_dtype(), is_floating, lambda name: cloud_in_memory(name, file.get_tensor(key))
        )

    file = safe_open(path, "pt")
    return {key: list_tensor(key) for key in file.keys()}  # noqa: SIM118


def _list_pt(path: Path) -> dict[str, _Matrix]:
    def list_tensor(tensor: Tensor) -> _Matrix:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _Matrix(tensor.shape, dtype, tensor.is_floating_point(), partial(cloud_in_memory, points=tensor))

    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if isinstance(content, Tensor):
        return {"": list_tensor(content)}
    if not isinstance(content, Mapping):
        raise UserError(f"{path} has a {type(content).__name__}; expected a tensor or a dictionary of tensors")
    matrices = {str(name): list_tensor(value) for name, value in content.items() if isinstance(value, Tensor)}
    if content and not matrices:
        kinds = ", ".join(f"{name}: {type(value).__name__}" for name, value in content.items())
        raise UserError(f"{path} has no tensors, but {shorten(kinds)}; expected a tensor or a dictionary of tensors")
    return matrices


# ---- .parquet


def _list_parquet(path: Path) -> dict[str, _Matrix]:
    """List the columns, or one matrix without a name of all columns, if none has lists."""
    from pyarrow import parquet, types

    with parquet.ParquetFile(path) as file:
        schema, num_rows = file.schema_arrow, file.metadata.num_rows

    def list_column(field: Any) -> _Matrix:
        # A list of a fixed size has its size as an attribute.
        shape = (num_rows, getattr(field.type, "list_size", None)) if _is_list(field.type) else (num_rows,)
        number_type = field.type.value_type if _is_list(field.type) else field.type
        open_column = partial(_open_parquet, path, [field.name])
        return _Matrix(shape, str(number_type), types.is_floating(number_type), open_column)

    if any(_is_list(field.type) for field in schema):
        return {field.name: list_column(field) for field in schema}
    if others := [field.name for field in schema if not types.is_floating(field.type)]:
        raise UserError(
            f"{path}: {len(others)} of {len(schema)} columns are neither floating nor lists: "
            f"{shorten(', '.join(others), 60)}; expected a column of lists, or floating columns alone"
        )
    return {"": _Matrix((num_rows, len(schema)), "floating", True, partial(_open_parquet, path, schema.names))}


def _is_list(column_type: Any) -> bool:
    from pyarrow import types

    return any(is_kind(column_type) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def _open_parquet(path: Path, columns: Sequence[str], name: str) -> Cloud:
    from pyarrow import parquet

    def read(max_points: int, row_groups: Sequence[int] | None = None, dim: int | None = None) -> Iterator[Tensor]:
        # Without buffers of whole row groups.
        with parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            for batch in file.iter_batches(max_points, row_groups=row_groups, columns=columns, use_threads=False):
                yield _to_rows(path, batch, dim)

    def read_spread_rows(max_points: int) -> Tensor:
        groups = spread_indices(min(_SPREAD_GROUPS, max_points), num_groups)
        first_blocks = (itertools.islice(read(max_points // len(groups), [group], dim), 1) for group in groups)
        return torch.cat([*itertools.chain.from_iterable(first_blocks)])

    with parquet.ParquetFile(path) as file:
        num_points, num_groups = file.metadata.num_rows, file.num_row_groups
    dim = next(read(1)).shape[1]
    return Cloud(name, num_points, dim, partial(read, dim=dim), read_spread_rows)


def _to_rows(path: Path, batch: Any, dim: int | None) -> Tensor:
    """Convert a batch of one column of lists, or of floating columns, to rows `(n, dim)`."""
    import numpy as np
    from pyarrow import compute

    names, columns = batch.schema.names, batch.columns
    if _is_list(columns[0].type):
        lengths = compute.list_value_length(columns[0]).to_numpy(zero_copy_only=False)  # NaN for a null
        dim = lengths[0] if dim is None else dim
        if (lengths != dim).any():
            raise UserError(f"{path}: column {names[0]} has nulls or rows of different lengths; expected equal lengths")
        columns = [columns[0].flatten()]
    if null_names := [name for name, values in zip(names, columns, strict=True) if values.null_count]:
        raise UserError(f"{path}: column {null_names[0]} has nulls; expected numbers")
    arrays = [values.to_numpy(zero_copy_only=False) for values in columns]
    return torch.from_numpy(np.stack(arrays, 1).reshape(len(batch), -1))


# ---- .jsonl


def _list_jsonl(path: Path) -> dict[str, _Matrix]:
    """List the keys of the first objects, or one matrix without a name if the lines are lists."""
    rows = [row for _, row in itertools.islice(_read_json_lines(path), MIN_CLOUD_POINTS)]
    check_count(str(path), len(rows))
    first_values = {"": rows}
    if isinstance(rows[0], dict):
        first_values = {key: [row.get(key) for row in rows if isinstance(row, dict)] for key in rows[0]}
    matrices = {}
    for key, values in first_values.items():
        size = (len(values[0]),) if isinstance(values[0], list) else ()
        numbers = [number for value in values if isinstance(value, list) for number in value]
        is_floating = {float} <= set(map(type, numbers)) <= {float, int}
        dtype = "float" if is_floating else type((numbers or values)[0]).__name__
        matrices[key] = _Matrix((None, *size), dtype, is_floating, partial(_open_jsonl, path, key, *size))
    return matrices


def _open_jsonl(path: Path, key: str, dim: int, name: str) -> Cloud:
    def read_points() -> Iterator[Tensor]:
        for number, value in _read_json_lines(path):
            row = value if key == "" else value.get(key) if isinstance(value, dict) else None
            if not isinstance(row, list) or len(row) != dim or not set(map(type, row)) <= {float, int}:
                found = f"a list of {len(row)} values" if isinstance(row, list) else f"a {type(row).__name__}"
                raise UserError(
                    f"{path}, line {number}: {found}; expected a list of {dim} numbers, as in the first line"
                )
            yield torch.tensor(row, dtype=torch.float64, device="cpu")

    def read_blocks(max_points: int) -> Iterator[Tensor]:
        points = read_points()
        while block := list(itertools.islice(points, max_points)):
            yield torch.stack(block)

    return Cloud(name, None, dim, read_blocks, lambda max_points: next(read_blocks(max_points)))


def _read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line that is not empty."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise UserError(f"{path}, line {number}: not JSON: {shorten(error)}") from error


_LISTERS: dict[str, Callable[[Path], dict[str, _Matrix]]] = {
    ".npy": _list_npy,
    ".npz": _list_npz,
    ".safetensors": _list_safetensors,
    ".pt": _list_pt,
    ".pth": _list_pt,
    ".parquet": _list_parquet,
    ".jsonl": _list_jsonl,
}
"""Functions that list the tensors or columns of a file, by suffix. The name is empty if there is only one matrix."""
