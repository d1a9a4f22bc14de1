"""The folder of an HTML page: the files of its figures and tables, and the safe replacement of an earlier page."""

import re
import shutil
import uuid
from collections.abc import Mapping
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
_SUFFIXES = {TABLES: (".csv", ".md", ".tex"), FIGURES: tuple(f".{suffix}" for suffix in drawing.SUFFIXES)}


@dataclass(frozen=True)
class PageKind:
    """A kind of page folder, such as that of `istar report`."""

    noun: str  # name of the folder in error messages
    generator: str  # content of the `generator` meta tag that identifies the page
    extra_files: tuple[str, ...] = ()  # names of further files that belong to the page
    kept_patterns: tuple[str, ...] = ()  # name patterns of files that are kept when the page is replaced


def render_pictures(plot: Plot) -> list[Picture]:
    """Render a plot as pictures, one for each model whose runs it shows."""
    models = list(dict.fromkeys(panel.model for panel in plot.panels))
    pictures = []
    for model in models:
        model_plot = replace(plot, panels=tuple(panel for panel in plot.panels if panel.model == model))
        name = f"{plot.name}-{_make_unique_file_name(model, models)}" if model else plot.name
        files, spots = drawing.render_with_spots(model_plot)
        pictures.append(Picture(name, model, drawing.describe(model_plot), model_plot.panels, files, spots))
    return pictures


def page_files(content: Page, tables: Mapping[str, Sheet]) -> dict[str, bytes]:
    """Return the contents of all files of a page, its tables and its figures, by their paths in the page's folder."""
    contents = {INDEX: page.render_html(content).encode()}
    for name, sheet in tables.items():
        texts = {"csv": sheets.to_csv(sheet), "md": sheets.to_markdown(sheet), "tex": sheets.to_latex(sheet)}
        contents |= {f"{TABLES}/{name}.{suffix}": text.encode() for suffix, text in texts.items()}
    for section in content.sections:
        for picture in section.pictures:
            contents |= {f"{FIGURES}/{picture.name}.{suffix}": image for suffix, image in picture.files.items()}
    return contents


def check_replaceable(out: Path, kind: PageKind) -> None:
    """Raise an error unless `out` does not exist, or is an earlier page of this kind without foreign files.

    Raises:
        UserError: if `out` is not a folder, is not an earlier page of this kind, or holds other files too.
    """
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        raise UserError(f"--out {out} is not a folder; name a new one, or an earlier {kind.noun}")
    for path in sorted(out.rglob("*")):
        if not _is_part_of_page(path, out, kind):
            name = path.relative_to(out).as_posix()
            raise UserError(f"--out {out} holds {name}, which is no part of a {kind.noun}; name a new folder")
    names = {path.name for path in out.iterdir() if not _is_kept(path.name, kind)}
    if names - set(kind.extra_files) and not has_generator(out / INDEX, kind):
        raise UserError(f"--out {out} is not an earlier {kind.noun}; name a new folder")


def replace_folder(out: Path, contents: Mapping[str, bytes], kind: PageKind) -> None:
    """Create or replace a folder as a whole: write a temporary folder next to it, then rename that to `out`.

    Files that match the kind's `kept_patterns` are moved from the old folder to the new one.

    Args:
        out: the folder.
        contents: content of each file by its path in the folder.
        kind: kind of the page.

    Raises:
        UserError: if `out` is not a folder of this kind, or cannot be written. It is then left as it was.
    """
    temporary_folder = out.absolute().with_name(f".{out.absolute().name}.{uuid.uuid4().hex}")
    old_folder = temporary_folder.with_name(f"{temporary_folder.name}-old")
    try:
        for name, content in contents.items():
            path = temporary_folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        check_replaceable(out, kind)
        if out.exists():
            out.rename(old_folder)
        temporary_folder.rename(out)
        if old_folder.exists():
            for path in old_folder.iterdir():
                if _is_kept(path.name, kind):
                    path.rename(out / path.name)
    except OSError as error:
        if old_folder.exists() and not out.exists():
            old_folder.rename(out)
        raise UserError(f"--out {out} cannot be written: {shorten(error)}") from error
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)
        shutil.rmtree(old_folder, ignore_errors=True)


def _make_unique_file_name(model: str, models: list[str]) -> str:
    """Return a model's name as a safe file name, with a number if another of the models would get the same name."""
    safe_names = {name: re.sub(r"[^A-Za-z0-9.-]", "-", name) for name in models}
    namesakes = [name for name in models if safe_names[name].lower() == safe_names[model].lower()]
    return safe_names[model] if len(namesakes) == 1 else f"{safe_names[model]}-{namesakes.index(model) + 1}"


def _is_part_of_page(path: Path, out: Path, kind: PageKind) -> bool:
    """Return whether a file or folder within `out` is part of a page of this kind; symbolic links never are."""
    if path.is_symlink():
        return False
    if path.parent != out:
        suffixes = _SUFFIXES.get(path.parent.relative_to(out).as_posix(), ())
        return path.is_file() and path.suffix in suffixes
    if path.is_dir():
        return path.name in _SUFFIXES
    return path.is_file() and (path.name in (INDEX, *kind.extra_files) or _is_kept(path.name, kind))


def _is_kept(name: str, kind: PageKind) -> bool:
    """Return whether a file of this name is kept when a page of this kind is replaced."""
    return any(fnmatch(name, pattern) for pattern in kind.kept_patterns)


def has_generator(index: Path, kind: PageKind) -> bool:
    """Return whether a file is an HTML page of this kind, by its `generator` meta tag."""
    try:
        with index.open(encoding="utf-8") as file:
            # The meta tags are at the beginning of a page.
            return f'<meta name="generator" content="{kind.generator}">' in file.read(2_000)
    except (OSError, ValueError):  # missing, not readable or not UTF-8
        return False
