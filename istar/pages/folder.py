"""The folder of a page: the files of its figures and tables, what of it may be replaced, and how."""

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from istar.errors import UserError, shorten
from istar.figures import drawing
from istar.figures.plot import Plot
from istar.pages import page, sheets
from istar.pages.page import Page, Picture
from istar.pages.sheets import Sheet

INDEX, TABLES, FIGURES = "index.html", "tables", "figures"
_SUFFIXES = {TABLES: (".csv", ".md", ".tex"), FIGURES: (".svg", ".png")}


@dataclass(frozen=True)
class Kind:
    """Whose folder it is.

    Attributes:
        noun: what messages call it.
        generator: in the `meta` of its page, by which it is known.
        beside: names of further files of its own.
        kept: patterns of names of files that are no part of the page, and outlive its replacement.
    """

    noun: str
    generator: str
    beside: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """A picture: what it shows, and its files by suffix."""

    plot: Plot
    files: Mapping[str, bytes]


def draw(plot: Plot) -> dict[str, Drawn]:
    """A picture for each model of a plot, by the name of its files."""
    by_model = list(dict.fromkeys(panel.model for panel in plot.panels))
    pictures = {}
    for model in by_model:
        own = replace(plot, panels=tuple(panel for panel in plot.panels if panel.model == model))
        name = f"{plot.name}-{_file_name(model, by_model)}" if model else plot.name
        pictures[name] = Drawn(own, drawing.render(own))
    return pictures


def of_plot(plot: Plot, pictures: Mapping[str, Drawn]) -> list[Picture]:
    """Those of the pictures that show a plot, to stand in the page."""
    return [
        Picture(
            name,
            drawn.plot.panels[0].model,
            drawing.inline(
                drawn.files["svg"],
                name,
                f"{plot.title} {drawn.plot.panels[0].model}".strip(),
                drawing.describe(drawn.plot),
            ),
            drawn.plot.panels,
        )
        for name, drawn in pictures.items()
        if drawn.plot.name == plot.name
    ]


def files(shown: Page, tables: Mapping[str, Sheet], pictures: Mapping[str, Drawn]) -> dict[str, bytes]:
    """All files of a page by their paths in its folder."""
    return {INDEX: page.html(shown).encode(), **_table_files(tables), **_picture_files(pictures)}


def refuse_foreign(out: Path, kind: Kind) -> None:
    """Only a folder of this kind is replaced, and only if nobody has put anything into it.

    Raises:
        UserError: if it is something else.
    """
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        raise UserError(f"--out {out} is not a folder; name a new one, or an earlier {kind.noun}")
    strange = next(_strange(out, kind), None)
    if strange is not None:
        raise UserError(f"--out {out} holds {strange}, which is no part of a {kind.noun}; name a new folder")
    inside = {path.name for path in out.iterdir() if not _is_kept(path.name, kind)}
    if inside - set(kind.beside) and not _is_ours(out / INDEX, kind):
        raise UserError(f"--out {out} is not an earlier {kind.noun}; name a new folder")


def replace_folder(out: Path, contents: Mapping[str, bytes], kind: Kind) -> None:
    """Write a folder beside `out` and let it take its place.

    Raises:
        UserError: if `out` is no folder of this kind, or cannot be written; it is then as it was.
    """
    draft = out.absolute().with_name(f".{out.absolute().name}.{uuid.uuid4().hex}")
    aside = draft.with_name(f"{draft.name}-old")
    try:
        for name, content in contents.items():
            path = draft / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        refuse_foreign(out, kind)
        if out.exists():
            out.rename(aside)
        draft.rename(out)
        for path in aside.iterdir() if aside.exists() else ():
            if _is_kept(path.name, kind):
                path.rename(out / path.name)
    except OSError as error:
        if aside.exists() and not out.exists():
            aside.rename(out)
        raise UserError(f"--out {out} cannot be written: {shorten(error)}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def _file_name(model: str, among: list[str]) -> str:
    """Fit for a file; two models whose names differ in nothing else are told apart by a number."""

    def plain(name: str) -> str:
        return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-.") else "-" for letter in name)

    same = [other for other in among if plain(other).lower() == plain(model).lower()]
    return plain(model) if len(same) == 1 else f"{plain(model)}-{same.index(model) + 1}"


def _table_files(tables: Mapping[str, Sheet]) -> dict[str, bytes]:
    writers: dict[str, Callable[[Sheet], str]] = {"csv": sheets.csv, "md": sheets.markdown, "tex": sheets.latex}
    return {
        f"{TABLES}/{name}.{suffix}": writer(sheet).encode()
        for name, sheet in tables.items()
        for suffix, writer in writers.items()
    }


def _picture_files(pictures: Mapping[str, Drawn]) -> dict[str, bytes]:
    return {
        f"{FIGURES}/{name}.{suffix}": content
        for name, drawn in pictures.items()
        for suffix, content in drawn.files.items()
    }


def _strange(out: Path, kind: Kind) -> Iterator[str]:
    for path in sorted(out.rglob("*")):
        parts = path.relative_to(out).parts
        ours = path.is_file() and len(parts) == 1 and (parts[0] in (INDEX, *kind.beside) or _is_kept(parts[0], kind))
        ours |= path.is_dir() and len(parts) == 1 and parts[0] in _SUFFIXES
        ours |= len(parts) == 2 and path.is_file() and path.suffix in _SUFFIXES.get(parts[0], ())
        if not ours or path.is_symlink():
            yield "/".join(parts)


def _is_kept(name: str, kind: Kind) -> bool:
    return any(fnmatch(name, pattern) for pattern in kind.kept)


def _is_ours(index: Path, kind: Kind) -> bool:
    try:
        with index.open(encoding="utf-8") as file:
            return f'<meta name="generator" content="{kind.generator}">' in file.read(2_000)
    except (OSError, ValueError):
        return False
