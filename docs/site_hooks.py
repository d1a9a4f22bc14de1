"""MkDocs hooks: pages that are generated at build time, and mathematics as MathML.

- `reference/config.md` comes from the dataclasses in `istar.finetune.config`, `reference/commands.md` from the
  commands' own `--help`, the table of `reference/istar.md` from `istar.__all__`, and the table of `measures.md` from
  `istar.measures.catalogue`. None of them can be out of date.
- Each notebook in `tutorials/` becomes a page with its stored outputs; nothing is executed.
- The scripts in `examples/` follow the text of their README on one page.
- Formulas become MathML, which browsers display without a script.
- Differences are copied as the code that they lead to.
- The search ranks guides above tutorials and benchmarks, and these above the reference of Python names.
"""

import ast
import base64
import dataclasses
import html
import importlib
import inspect
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import latex2mathml.converter
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
# So that the reference describes this checkout, also where another one is installed.
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "docs")]

from docstring_extension import to_markdown  # noqa: E402

REPOSITORY_PAGES = {
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/NOTES.md": "benchmarks_notes.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "examples/README.md": "examples.md",
}
"""Pages of the site that are files of the repository outside docs/."""
BOOSTS = {"reference/config": 1, "reference/commands": 1, "reference/": 0.2, "tutorials/": 0.5, "benchmarks": 0.5,
          "changelog": 0.5}  # fmt: skip
"""Weights of pages in the search, by the start of their path; the first one that fits counts, and others have 1."""
LINK = re.compile(r"\]\(([\w./-]+\.(?:md|ipynb|py))(#[\w-]+)?\)(?!\{)")
MEMBERS = re.compile(r"<!-- members of ([\w.]+) -->")
DIFFERENCE = re.compile(r'<div class="language-diff highlight">(?=.*?<code>(.*?)</code>)', re.DOTALL)
MATH = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, "reference/config.md", content=config_page()))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    for source, page in REPOSITORY_PAGES.items():
        content = (REPOSITORY / source).read_text(encoding="utf-8") + (scripts() if page == "examples.md" else "")
        files.append(File.generated(config, page, content=content))
    for notebook in sorted(REPOSITORY.glob("docs/tutorials/*.ipynb")):
        content = notebook_page(notebook)
        files.append(File.generated(config, f"tutorials/{notebook.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the table of public names; lead links to files of the repository to their pages."""
    boost = next((boost for start, boost in BOOSTS.items() if page.file.src_uri.startswith(start)), 1)
    page.meta["search"] = {"boost": boost}
    if "<!-- public names -->" in markdown:
        markdown = markdown.replace("<!-- public names -->", public_names())
    if "<!-- table of measures -->" in markdown:
        markdown = markdown.replace("<!-- table of measures -->", table_of_measures())
    markdown = MEMBERS.sub(lambda match: members(match[1]), markdown)
    here = page.file.src_uri
    folder = posixpath.dirname(here)
    sources = {target: source for source, target in REPOSITORY_PAGES.items()}
    # Links are written for a reader of the repository, relative to the file that they stand in.
    base = posixpath.dirname(sources[here]) if here in sources else posixpath.join("docs", folder)

    def to_page(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(base, link[1]))
        if target.endswith(".py"):
            return f"]({posixpath.relpath('examples.md', folder or '.')}#{posixpath.basename(target).replace('.', '')})"
        name = REPOSITORY_PAGES.get(target, target.removeprefix("docs/"))
        if name.endswith(".ipynb"):
            name = name.removesuffix(".ipynb") + ".md"
        return f"]({posixpath.relpath(name, folder or '.')}{link[2] or ''})"

    return LINK.sub(to_page, markdown).replace('"docs/images/', '"images/').replace("(docs/images/", "(images/")


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace LaTeX by MathML, and let the copy button of a difference copy its new code."""
    return DIFFERENCE.sub(_copyable_difference, MATH.sub(_mathml, content))


def _copyable_difference(match: re.Match[str]) -> str:
    lines = html.unescape(re.sub("<[^>]+>", "", match[1])).splitlines()
    code = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    return match[0].replace("<div", f'<div data-copy="{html.escape(code)}"')


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    formula = html.unescape(match[2]).strip().removeprefix("\\(").removesuffix("\\)")
    formula = formula.removeprefix("\\[").removesuffix("\\]").strip()
    return latex2mathml.converter.convert(formula, display=display)


# ---- the config keys


def config_page() -> str:
    """Every key of every group, with type, default and meaning."""
    from istar.finetune.config import fields, groups

    documented: dict[tuple[str, str], str] = {}
    for path in Path(groups.__file__).parent.glob("*.py"):
        documented |= field_docstrings(path)
    parts = [
        "# Configuration keys",
        "Any key is set on the command line as `group.key=value`. The defaults below are those of the dataclasses in "
        "`istar/finetune/config/`; the files of a group in `conf/` may replace them. `istar train --cfg job` prints "
        "the values that a command line results in. The options of each group (`task=rte`, `reg=istar`) are listed by "
        "[`istar train --help`](commands.md#istar-train).",
    ]
    for title, prefix, kind in _config_classes():
        parts += [f"## {title}", inspect.cleandoc(kind.__doc__ or "")]
        rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for field in dataclasses.fields(kind):
            if kind is groups.Config and field.name != "seed":
                continue
            meaning = _cell(_documentation(kind, field.name, documented))
            rows.append(
                f"| `{prefix}{fields.key_of(field)}` | {_code(_type(field.type))} | {_default(field)} | {meaning} |"
            )
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _config_classes() -> Iterator[tuple[str, str, Any]]:
    from istar.finetune.config import groups, optim_config, output_config, penalties, sweep_config

    yield "Top level", "", groups.Config
    options_by_group = {
        "optim": {
            "adamw`, `coupled_adam`, `muon": optim_config.AdamWConfig,
            "sgd`, `adafactor`, `torch": optim_config.TorchOptimConfig,
        },
        "reg": penalties.PENALTIES,
        "logger": {"csv": output_config.LoggerConfig, "wandb": output_config.WandbConfig},
    }
    for field in dataclasses.fields(groups.Config):
        if field.name in options_by_group:
            for name, kind in options_by_group[field.name].items():
                yield f"`{field.name}`: `{name}`", f"{field.name}.", kind
        elif dataclasses.is_dataclass(field.type):
            yield f"`{field.name}`", f"{field.name}.", field.type
    yield "`sweep`", "sweep.", sweep_config.SweepConfig


def _type(kind: Any) -> str:
    is_plain = isinstance(kind, type) and not hasattr(kind, "__args__")
    return kind.__name__ if is_plain else str(kind).replace("typing.", "")


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()}`"
    if field.default is dataclasses.MISSING or field.default == "???":
        return "required"
    # As YAML and the command line write them.
    words = {"None": "null", "True": "true", "False": "false"}
    return f"`{words.get(str(field.default), field.default)}`"


def _code(text: str) -> str:
    return "<code>" + html.escape(text).replace("|", "&#124;") + "</code>"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _documentation(kind: type, name: str, documented: dict[tuple[str, str], str]) -> str:
    for owner in kind.__mro__:
        if (owner.__name__, name) in documented:
            return documented[owner.__name__, name]
    return "Name of the option that was chosen." if name == "name" else ""


def field_docstrings(path: Path) -> dict[tuple[str, str], str]:
    """The string below each field of each class of a module, by the names of class and field."""
    docstrings = {}
    for owner in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(owner, ast.ClassDef):
            for field, text in zip(owner.body, owner.body[1:], strict=False):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                    docstrings[owner.name, field.target.id] = str(text.value.value)  # type: ignore[attr-defined]
    return docstrings


# ---- the commands


def commands_page() -> str:
    """The help of `istar` and of each of its commands."""
    overview = command_help()
    commands = re.findall(r"^    (\w+)(?: |$)", overview.partition("options:")[0], re.MULTILINE)
    parts = [
        "# Commands",
        "`istar train` is the same command as `python train.py` in a checkout. A mistake in a command is one line on "
        "stderr and exit code 2.",
        f"```text\n{overview}\n```",
    ]
    for command in commands:
        parts += [f"## istar {command}", f"```text\n{command_help(command)}\n```"]
    return "\n\n".join(parts) + "\n"


def command_help(*command: str) -> str:
    """What `istar <command> --help` prints."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100", "NO_COLOR": "1"}
    line = [sys.executable, "-m", "istar", *command, "--help"]
    done = subprocess.run(line, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


# ---- the public names


def path_of(value: Any) -> str:
    """Where a class or function is defined. A submodule may have the same name in the package that exports it."""
    return f"{value.__module__}.{value.__qualname__}"


def members(package: str) -> str:
    """An entry for each name in a package's `__all__`, in order."""
    module = importlib.import_module(package)
    return "\n\n".join(f"::: {path_of(getattr(module, name))}" for name in sorted(module.__all__, key=str.lower))


def public_names() -> str:
    """A table of `istar.__all__`, each name with the first line of its docstring and a link to its entry."""
    import istar

    pages = {f"istar.{name}": f"{name}.md" for name in ("measures", "regularizers", "hidden_states")}
    for module in pages:
        importlib.import_module(module)
    rows = ["| name | what it is |", "| --- | --- |"]
    for name in istar.__all__:
        value = getattr(istar, name)
        if name == "__version__":
            rows.append(f"| `istar.{name}` | Version of the package. |")
            continue
        owner = next((module for module in pages if name in getattr(sys.modules.get(module), "__all__", ())), None)
        link = f"[`istar.{name}`]({pages[owner] if owner else ''}#{path_of(value)})"
        summary = to_markdown((inspect.getdoc(value) or "").partition("\n\n")[0])
        rows.append(f"| {link} | {_cell(summary)} |")
    return "\n".join(rows)


def table_of_measures() -> str:
    """The table of all measures, without their standard errors."""
    from istar.measures.catalogue import MEASURES

    subjects = {"layers": "a layer", "matrices": "an embedding matrix", "final_norm": "the final normalization"}
    rows = ["| measure | of | what it is | range | computed by | blind to |", "| --- | --- | --- | --- | --- | --- |"]
    for measure in MEASURES:
        if not measure.name.endswith("_error"):
            function = f"`{measure.function.rpartition('.')[2]}`"
            cells = [measure.title, subjects[measure.subject], measure.formula, measure.range, function]
            cells.append(measure.blind_to)
            rows.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(rows)


# ---- the examples


def scripts() -> str:
    """A section with the code of each script in `examples/`."""
    paths = sorted(REPOSITORY.glob("examples/*.py"))
    return "".join(f"\n## {path.name}\n\n{_fence('python', path.read_text(encoding='utf-8'))}\n" for path in paths)


# ---- the notebooks


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: text as it is, code and stored outputs as blocks."""
    notebook = nbformat.read(path, as_version=4)
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(_fence("python", cell.source))
            parts += [shown for output in cell.outputs if (shown := _output(output))]
    download = f"[Download this notebook]({path.name}){{ .md-button download }}"
    return "\n\n".join([*parts, download]) + "\n"


def _output(output: Any) -> str:
    if output.output_type == "stream":
        return _block(output.text)
    data = output.get("data", {})
    if "image/png" in data:
        # Checked here, because a browser shows a broken image without a word.
        base64.b64decode(data["image/png"], validate=False)
        encoded = "".join(data["image/png"].split())
        return f'<img alt="Output of the cell above" src="data:image/png;base64,{encoded}">'
    if "text/html" in data:
        return f'<div class="notebook-output">{data["text/html"]}</div>'
    return _block(data["text/plain"]) if "text/plain" in data else ""


def _block(text: str) -> str:
    return f'<div class="notebook-output" markdown>\n\n{_fence("text", text)}\n\n</div>'


def _fence(language: str, text: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"
