import base64
import hashlib
import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from istar.cli.main import main
from istar.drawing import panel_drawing, rendering
from istar.drawing.plot import Plot
from istar.errors import UserError
from istar.measures import isoscore_from_covariance
from istar.reports import (
    configurations,
    geometry_file,
    method_comparisons,
    paper_figures,
    paper_tables,
    report,
    run_frame,
    sweep_commands,
    training_figures,
)
from istar.reports.method_comparisons import compare_methods
from istar.reports.report import compute_sections
from istar.reports.run_frame import read_runs
from istar.runs.record import RunRecord
from tests.reports.simulated_stability import BATCH_SIZES, SCORES, ZETAS, compute_stability_scores, make_variances
from tests.reports.synthetic import BASE, cosreg, istar, make_geometry, record, save, write_fifty_runs

BERT = "google-bert/bert-base-cased"
VOID = {"meta", "source", "link", "br", "hr", "img", "input"}


RENDER = rendering.render


@pytest.fixture(scope="module", autouse=True)
def quick_pages(blank_figures: None) -> None:
    """Leave the figures blank; the test that looks at figures restores `RENDER`."""


@pytest.fixture(scope="module")
def report_folder(tmp_path_factory: pytest.TempPathFactory, quick_pages: None) -> Path:
    folder = tmp_path_factory.mktemp("fifty")
    write_fifty_runs(folder / "runs")
    written = report.write_report(folder / "runs", folder / "report")
    assert written == (folder / "report" / "index.html", 50)
    return folder / "report"


class Reader(HTMLParser):
    """Checks that tags are nested correctly, and collects the tags, ids, references and text of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[tuple[str, str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.references += [
            (name, value or "")
            for name, value in attrs
            if name in ("href", "src", "srcset", "xlink:href", "action", "data")
            and not (value or "").startswith("data:")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop() if tag not in VOID else None

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    return reader


def inline_parts(path: Path) -> dict[str, str]:
    """Return the texts of a page's only style and its only script, checked against its Content-Security-Policy.

    Nothing else of the page is executed or may refer to a network.
    """
    page, text = parsed(path), path.read_text(encoding="utf-8")
    [policy] = [attributes["content"] or "" for _, attributes in page.tags if "http-equiv" in attributes]
    directives = dict(directive.split(" ", 1) for directive in policy.split("; "))
    assert directives.pop("default-src") == directives.pop("base-uri") == directives.pop("form-action") == "'none'"
    assert directives.pop("img-src") == "data:"
    parts = {}
    for tag in ("style", "script"):
        [(attributes, content)] = re.findall(rf"<{tag}([^>]*)>(.*?)</{tag}>", text, re.DOTALL)
        assert attributes == ""
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert directives.pop(f"{tag}-src") == f"'sha256-{digest}'"
        assert [page_tag for page_tag, _ in page.tags].count(tag) == 1
        parts[tag] = content
    assert directives == {}
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base", "form")]
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    assert not re.search(r"@import|url\((?!#)", text)
    assert not re.search(r"fetch\(|XMLHttpRequest|innerHTML|eval\(|document\.write", parts["script"])
    return parts


def test_page_is_whole_and_needs_nothing_else(report_folder: Path) -> None:
    page = parsed(report_folder / "index.html")
    assert len(page.ids) == len(set(page.ids))
    for _, target in page.references:
        assert not re.match(r"(https?:)?//", target)
        if target.startswith("#"):
            assert target[1:] in page.ids
        elif target.endswith((".svg", ".csv", ".md", ".tex")):
            assert (report_folder / target).is_file()
    inline_parts(report_folder / "index.html")


def test_page_can_be_read_by_everyone(report_folder: Path) -> None:
    page = parsed(report_folder / "index.html")
    text = (report_folder / "index.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert ("html", {"lang": "en"}) in page.tags
    tags = [tag for tag, _ in page.tags]
    assert [bool(attributes.get("aria-label")) for tag, attributes in page.tags if tag == "table"] == [True] * 6
    assert tags.count("h1") == 1
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(next_level - previous_level <= 1 for previous_level, next_level in itertools.pairwise(levels))
    descriptions = [attributes["alt"] or "" for tag, attributes in page.tags if tag == "img"]
    assert len(descriptions) == tags.count("figure") >= 10
    assert all(len(text) > 20 for text in descriptions)
    linked_ids = [target[1:] for _, target in page.references if target.startswith("#") and target != "#content"]
    assert {"table1", "table2", *(f"figure{number}" for number in range(2, 9)), "cost", "missing"} <= set(linked_ids)
    # Own comparisons are first, and the paper's tables and figures follow.
    own_and_paper = ["conclusions", "methods", "missing", "table1", "table2", "figure2", "figure8"]
    assert sorted(own_and_paper, key=page.ids.index) == own_and_paper


def test_every_file(report_folder: Path) -> None:
    names = {"table1", "table2", "conclusions", "methods", "over_tasks", "cost", "left_out"}
    assert {path.name for path in (report_folder / "tables").iterdir()} == {
        f"{name}.{suffix}" for name in names for suffix in ("csv", "md", "tex")
    }
    for name in names:
        # The comparison over tasks needs three tasks of a model, so its table is empty.
        assert (len(pd.read_csv(report_folder / "tables" / f"{name}.csv")) > 0) == (name != "over_tasks")
        balanced((report_folder / "tables" / f"{name}.tex").read_text(encoding="utf-8"))
    pictures = {path.stem for path in (report_folder / "figures").iterdir()}
    assert {f"figure{number}-bert-base-cased" for number in range(3, 9)} | {"figure2"} <= pictures


def test_methods_are_called_better_or_worse_by_the_rules_alone(report_folder: Path) -> None:
    page_text = " ".join(" ".join(parsed(report_folder / "index.html").text).split())
    summary, sentences = page_text.split("In all 13 comparisons, ")[1].split(".", 1)
    assert summary == "nothing can be concluded"
    for sentence in pd.read_csv(report_folder / "tables" / "conclusions.csv")["conclusion"]:
        assert " ".join(sentence.split()) in page_text
        sentences = sentences.replace(" ".join(sentence.split()), "")
    assert not re.search(r"\b(better|worse|outperforms?|improves?|significant(ly)?)\b", sentences)
    assert "Base and another method have finished on 2 tasks." in page_text


def balanced(tex: str) -> None:
    """Assert that braces are closed, environments are nested, and every row has a cell for each column."""
    tex_without_escapes = re.sub(r"\\[{}%&#_$]", "", re.sub(r"(?m)^%.*$", "", tex))
    tex_without_escapes = tex_without_escapes.replace(r"\\", "")
    depth = 0
    for letter in tex_without_escapes:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0
    assert tex_without_escapes.count("$") % 2 == 0
    assert "%" not in tex_without_escapes
    assert "#" not in tex_without_escapes
    assert not re.search(r"_", re.sub(r"\\label\{.*\}", "", tex_without_escapes))
    open_environments: list[str] = []
    for keyword, name in re.findall(r"\\(begin|end)\{([a-z*]+)\}", tex):
        if keyword == "begin":
            open_environments.append(name)
        else:
            assert open_environments.pop() == name
    assert open_environments == []
    [alignment] = re.findall(r"\\begin\{tabular\}\{(.*)\}\n", tex)
    column_types = re.sub(r"\[[^\]]*\]", "", re.sub(r"\{[^{}]*\}", "", alignment))
    assert re.fullmatch("[lr]+", column_types)
    num_columns = len(column_types)
    body = tex[tex.index(r"\toprule") : tex.index(r"\bottomrule")]
    rows = [row for row in body.replace("\n", " ").replace(r"\midrule", "").split(r" \\") if row.strip()]
    assert all(len(re.findall(r"(?<!\\)&", row)) == num_columns - 1 for row in rows)
    assert all(ord(letter) < 128 for letter in tex)


NASTY = r"""<script>alert('x')</script> & "q" _a% #1 ~ ^ $x$ {y} \z | `t` λ ± <img src=//evil>"""


def test_hostile_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blank = rendering.render
    monkeypatch.setattr(
        rendering,
        "render",
        lambda plot, suffixes: RENDER(plot, suffixes) if plot.name == "figure3" else blank(plot, suffixes),
    )
    model = 'mine/<b onclick="x()">$a_1$ & 100%\'s'
    for seed in (1, 2):
        save(record("rte", model, BASE, seed, 0.5), tmp_path / "runs")
        save(record("rte", model, istar(), seed, 0.5 + seed / 100), tmp_path / "runs")
    failed = record("rte", model, BASE, 3, status="failed", name="failed")
    save(replace(failed, error=NASTY), tmp_path / "runs")
    (tmp_path / "runs" / "<i>no & run").mkdir()
    report.write_report(tmp_path / "runs", tmp_path / "report")
    page = parsed(tmp_path / "report" / "index.html")
    page_text = "".join(page.text)
    assert " ".join(NASTY.split()) in page_text
    assert "<i>no & run" in page_text
    assert '<b onclick="x()">$a_1$ & 100%\'s' in page_text
    assert not [tag for tag, _ in page.tags if tag == "i"]
    inline_parts(tmp_path / "report" / "index.html")
    narrow, wide = sorted((tmp_path / "report").rglob("figure3*.svg"))
    for path in (narrow, wide):
        ElementTree.parse(path)
    assert wide.stat().st_size > 1_000
    for path in (tmp_path / "report" / "tables").glob("*.tex"):
        balanced(path.read_text(encoding="utf-8").replace("λ", ""))
    markdown = (tmp_path / "report" / "tables" / "left_out.md").read_text(encoding="utf-8")
    assert r"\<script\>alert('x')\</script\>" in markdown
    assert r"\| \`t\`" in markdown


# Commands of sweeps.


def test_each_model_has_one_command_for_all_its_tasks(tmp_path: Path) -> None:
    save(record("cola", BERT, BASE, 1), tmp_path)
    save(record("rte", BERT, BASE, 1, status="failed"), tmp_path)
    save(record("rte", "here/my model", BASE, 1, model__pretrained=False), tmp_path)
    save(record("demo", "tiny", istar(), 1, model__pretrained=False), tmp_path)
    runs = read_runs(tmp_path, keep_records=True)
    assert sweep_commands.build_sweep_commands("table1", runs.frame, runs.records, "runs") == [
        "istar train -m +sweep=table1 task=rte,cola model=bert",
        "istar train -m +sweep=table1 task=rte model=auto 'model.name=here/my model' model.pretrained=false",
        "istar train -m +sweep=table1 task=demo model=tiny",
    ]
    for path in ("easy.txt", "hard.txt"):
        save(record("clm", "tiny", BASE, 1, status="failed", data=path, task__data_dir=path), tmp_path)
    runs = read_runs(tmp_path, keep_records=True)
    assert sweep_commands.build_sweep_commands("table1", runs.frame, runs.records, "runs")[2:4] == [
        f"istar train -m +sweep=table1 task=clm task.data_dir={path} model=tiny" for path in ("easy.txt", "hard.txt")
    ]
    command = sweep_commands.build_sweep_commands("figure3", runs.frame, runs.records, "else where")[0]
    assert command == "istar train -m +sweep=figure3 task=rte,cola model=bert 'run.root=else where'"


def test_only_seeds_of_the_same_model_and_task_are_missing(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        save(record("rte", BERT, BASE, seed), tmp_path)
        save(record("demo", "tiny", BASE, seed), tmp_path)
        save(record("demo", "tiny", istar(), seed), tmp_path)
    save(record("rte", BERT, cosreg(), 2), tmp_path)
    save(record("rte", BERT, cosreg(), 3, status="failed"), tmp_path)
    _, frame = load_frame(tmp_path)
    compared = method_comparisons.compare_methods(frame)
    assert sweep_commands.describe_missing_seeds(compared.methods) == [
        "Seeds on rte with bert-base-cased: CosReg λ=1 lacks 1, 3."
    ]
    rows = paper_tables.build_table1_sheet(configurations.select_cells(frame)).rows
    assert {(row[0].text, row[1].text) for row in rows} == {
        ("demo, accuracy", "Base"), ("demo, accuracy", "I-STAR"), ("rte, accuracy", "Base"), ("rte, accuracy", "CosReg")
    }  # fmt: skip


# Figures.


def load_frame(root: Path) -> tuple[Any, pd.DataFrame]:
    loaded = read_runs(root, keep_records=True)
    return loaded, configurations.add_selection_columns(loaded)


def test_lines_differ_in_nothing_but_what_they_vary(tmp_path: Path) -> None:
    for seed in (1, 2):
        for weight in (-1, 1):
            save(record("rte", BERT, istar(weight, 0.4), seed, 0.5 + weight / 10), tmp_path)
        # These runs are better, but they are the only lambda with their zeta and learning rate.
        save(record("rte", BERT, istar(-5, 0.8), seed, 0.99), tmp_path)
        save(record("rte", BERT, istar(3, 0.4), seed, 0.99, optim__lr=1e-5), tmp_path)
        save(record("rte", BERT, BASE, seed, 0.55), tmp_path)
        save(record("rte", BERT, BASE, seed, 0.95, optim__lr=1e-5), tmp_path)
    _, frame = load_frame(tmp_path)
    [panel] = paper_figures.build_isotropy_performance_plot(frame, {}).panels
    assert {line.label: line.y[0] for line in panel.lines} == pytest.approx(
        {"Base": 55, "I-STAR λ=-1 ζ=0.4": 40, "I-STAR λ=1 ζ=0.4": 60}
    )
    assert (
        panel.fixed_settings
        == "ζ = 0.4, lr 3e-05, batch 32, accumulated 2, epochs 3, 32-true; 6 runs, 2 other configurations not shown, "
        "among them that of Table 1, for which only one λ was tried"
    )


def test_points_have_both_deviations(tmp_path: Path) -> None:
    values = {seed: 0.6 + seed**2 / 100 for seed in range(1, 6)}
    runs = [record("rte", BERT, istar(-1), seed, value) for seed, value in values.items()]
    for run in runs:
        save(run, tmp_path)
    _, frame = load_frame(tmp_path)
    [panel] = paper_figures.build_isotropy_performance_plot(frame, {}).panels
    [line] = panel.lines
    scores = [run.isotropy["after"]["union"] for run in runs]
    assert line.x[0] == pytest.approx(np.mean(scores), rel=1e-12)
    assert line.x_error[0] == pytest.approx(np.std(scores, ddof=1), rel=1e-9)
    assert line.y[0] == pytest.approx(100 * np.mean(list(values.values())), rel=1e-12)
    assert line.y_error[0] == pytest.approx(100 * np.std(list(values.values()), ddof=1), rel=1e-9)


def test_ablations(tmp_path: Path) -> None:
    for zeta, value in ((0, 0.5), (0.4, 0.7), (1, 0.6)):
        for seed in (1, 2):
            save(record("rte", BERT, istar(-1, zeta), seed, value + seed / 100), tmp_path)
    for layer in (1, 3):
        save(record("rte", BERT, istar(-1, 0.4, [layer]), 1, 0.6 + layer / 100), tmp_path)
    # These runs are better, but their estimator is not that of the paper.
    for seed in (1, 2, 3):
        for layers in ("all", [2]):
            save(record("rte", BERT, istar(-1, "auto", layers), seed, 0.9), tmp_path)  # type: ignore[arg-type]
            save(record("rte", BERT, istar(-1, 0.0, layers, estimator="unbiased"), seed, 0.9), tmp_path)
    _, frame = load_frame(tmp_path)
    [cell] = [cell for cell in configurations.select_cells(frame) if cell.family == "istar"]
    assert (cell.num_configurations, cell.score_by_seed("accuracy")[1]) == (3, pytest.approx(71))
    assert len(paper_tables.collect_tried_pairs(frame, cell)) == 3
    [panel] = paper_figures.build_zeta_ablation_plot(frame).panels
    assert panel.lines[0].x == (0, 0.4, 1)
    assert panel.lines[0].y == pytest.approx((51.5, 71.5, 61.5))
    assert panel.lines[0].y_error == pytest.approx([np.std([1, 2], ddof=1)] * 3)
    assert panel.vertical_line == (0.4, "best ζ")
    [panel] = paper_figures.build_layer_ablation_plot(frame).panels
    assert (panel.lines[0].x, panel.lines[0].y) == ((1, 3), pytest.approx((61, 63)))
    assert panel.horizontal_line == (pytest.approx(71.5), "all layers")


def test_figures_and_tables_choose_the_same_cells(tmp_path: Path) -> None:
    """A mean of one seed is not the best beside means of five, and the figure has the configuration of Table 2."""
    for seed in range(1, 6):
        save(record("rte", BERT, istar(-1, 0.4), seed, 0.6 + seed / 1000), tmp_path)
        save(record("rte", BERT, istar(-1, 0.6), seed, 0.58), tmp_path)
    save(record("rte", BERT, istar(-1, 0.2), 1, 0.7), tmp_path)
    # These runs are more and better, but each configuration has fewer seeds.
    for zeta in (0.0, 0.2, 0.4, 0.6, 0.8):
        for seed in range(1, 4):
            save(record("rte", BERT, istar(3, zeta), seed, 0.65), tmp_path)
    _, frame = load_frame(tmp_path)
    [row] = paper_tables.build_table2_sheet(configurations.select_cells(frame), frame).rows
    assert row[1].text == "-1 | 0.4"
    [panel] = paper_figures.build_zeta_ablation_plot(frame).panels
    [line] = panel.lines
    assert panel.vertical_line == (0.4, "best ζ")
    assert (line.x, line.hollow) == ((0.2, 0.4, 0.6), (True, False, False))
    assert panel.fixed_settings == (
        "λ = -1, lr 3e-05, batch 32, accumulated 2, epochs 3, 32-true; 11 runs, 1 other configuration not shown; "
        "fewer than 5 seeds: 1 at ζ = 0.2"
    )
    [panel] = paper_figures.build_isotropy_performance_plot(frame, {}).panels
    assert {line.label: line.hollow for line in panel.lines} == {
        "I-STAR λ=-1 ζ=0.4": (False,), "I-STAR λ=3 ζ=0.4": (True,),
    }  # fmt: skip


def test_a_collapsed_mean_is_marked_and_not_the_best(tmp_path: Path) -> None:
    constant = {"collapsed": {"validation": True}}
    for seed in (1, 2):
        save(record("rte", BERT, istar(-1, 0.4), seed, 0.5, changes=constant), tmp_path)
        save(record("rte", BERT, istar(-1, 0.8), seed, 0.45), tmp_path)
    _, frame = load_frame(tmp_path)
    [panel] = paper_figures.build_zeta_ablation_plot(frame).panels
    assert panel.vertical_line is None
    assert panel.lines[0].crossed == (True, False)


def test_layers_and_dimensions_are_means_over_seeds(tmp_path: Path) -> None:
    runs = [record("rte", BERT, reg, seed) for reg in (BASE, cosreg(1), istar(-1)) for seed in (1, 2)]
    for run in runs:
        save(run, tmp_path)
    loaded, frame = load_frame(tmp_path)
    results_by_folder = {folder: geometry_file.read_geometry(Path(folder)) for folder in frame["folder"]}
    geometry_by_folder = {folder: geometry for folder, geometry in results_by_folder.items() if geometry is not None}
    plot = paper_figures.build_mean_activation_plot(frame, geometry_by_folder)
    assert "the tokens of 50 validation texts" in plot.caption
    [panel] = plot.panels
    assert [line.label for line in panel.lines] == ["Base", "CosReg λ=1"]
    means = np.mean([make_geometry(run)["mean_activation"] for run in runs[2:4]], axis=0)
    assert panel.lines[1].y == pytest.approx(means, rel=1e-12)
    [folder] = frame[(frame["family"] == "cosreg") & (frame["seed"] == 1)]["folder"]
    with_more_texts = geometry_by_folder | {folder: {**geometry_by_folder[folder], "examples": 5_463}}
    plot = paper_figures.build_mean_activation_plot(frame, with_more_texts)
    assert "the tokens of 50 to 5,463 validation texts" in plot.caption
    [panel] = paper_figures.build_intrinsic_dimension_plot(frame, geometry_by_folder).panels
    assert panel.lines[1].label == "I-STAR λ=-1 ζ=0.4"
    assert np.isnan(panel.lines[1].y[0])
    assert panel.y_bounds is None  # only an IsoScore is at most 1
    assert panel.lines[1].y[1:] == pytest.approx(make_geometry(runs[4])["two_nn"][1:])
    [panel] = paper_figures.build_layer_isotropy_plot(frame, loaded.records, geometry_by_folder).panels
    after = [[run.isotropy["after"][str(layer)] for layer in range(5)] for run in runs[4:]]
    assert panel.lines[1].y == pytest.approx(np.mean(after, axis=0), rel=1e-12)
    assert panel.lines[1].y_error == pytest.approx(np.std(after, axis=0, ddof=1), rel=1e-9, abs=1e-15)
    # Without `geometry.json` there is no line.
    assert paper_figures.build_mean_activation_plot(frame, {}).panels == ()


def add_isoscore_star(run: RunRecord, root: Path, zeta: float = 0.2) -> dict[str, float]:
    """Add IsoScore* to the `geometry.json` of a saved run, and return the scores of its layers and of their union."""
    values = np.random.default_rng([run.config["seed"], len(run.name)]).uniform(0, 1, 6).tolist()
    layers = {str(number): value for number, value in enumerate(values[1:])}
    path = root / run.name / "geometry.json"
    isoscore_star = {"zeta": zeta, "num_points": 1234, "union": values[0], "layers": layers}
    path.write_text(json.dumps({**json.loads(path.read_text()), "isoscore_star": isoscore_star}))
    return {**layers, "union": values[0]}


def build_isotropy_plots(root: Path) -> tuple[Plot, Plot]:
    """Return Figures 3 and 6 of the runs below a folder."""
    loaded, frame = load_frame(root)
    results_by_folder = {folder: geometry_file.read_geometry(Path(folder)) for folder in frame["folder"]}
    geometry_by_folder = {folder: geometry for folder, geometry in results_by_folder.items() if geometry is not None}
    return (
        paper_figures.build_isotropy_performance_plot(frame, geometry_by_folder),
        paper_figures.build_layer_isotropy_plot(frame, loaded.records, geometry_by_folder),
    )


def test_a_figure_has_isoscore_star_if_all_its_runs_have_it(tmp_path: Path) -> None:
    runs = [record("rte", BERT, reg, seed) for reg in (BASE, istar(-1), istar(1)) for seed in (1, 2)]
    for run in (*runs, cosreg_run := record("rte", BERT, cosreg(), 1)):
        save(run, tmp_path)
    # Runs of an earlier version or without `run.isotropy_zeta` have no IsoScore*.
    for plot in build_isotropy_plots(tmp_path):
        assert plot.caption.startswith("IsoScore (ζ = 0) over all tokens of the validation set; the paper has")
        assert "No run of this figure has IsoScore*; run.isotropy_zeta=0.2 measures it." in plot.caption
    scores = [add_isoscore_star(run, tmp_path) for run in runs[:-1]]
    last_run = runs[-1]
    for zeta in (None, 0.3):
        if zeta is not None:
            add_isoscore_star(last_run, tmp_path, zeta)
        performance, by_layer = build_isotropy_plots(tmp_path)
        assert performance.x_label == "IsoScore"
        assert by_layer.panels[0].y_label == "IsoScore"
        for plot in (performance, by_layer):
            assert "Of the 6 runs of this figure, 5 have IsoScore* as well." in plot.caption
        # All runs are shown with IsoScore, including those that have IsoScore*, too.
        after = [run.isotropy["after"] for run in runs]
        assert [line.x[0] for line in performance.panels[0].lines] == pytest.approx(
            [np.mean([run["union"] for run in after[start : start + 2]]) for start in (0, 2, 4)], rel=1e-12
        )
    scores.append(add_isoscore_star(last_run, tmp_path))
    performance, by_layer = build_isotropy_plots(tmp_path)
    assert performance.x_label == "IsoScore*"
    [panel] = performance.panels
    assert [line.label for line in panel.lines] == ["Base", "I-STAR λ=-1 ζ=0.4", "I-STAR λ=1 ζ=0.4"]
    # Each method has two runs.
    for method, line in enumerate(panel.lines):
        unions = [run["union"] for run in scores[2 * method : 2 * method + 2]]
        assert line.x[0] == pytest.approx(np.mean(unions), rel=1e-12)
        assert line.x_error[0] == pytest.approx(np.std(unions, ddof=1), rel=1e-9)
    [panel] = by_layer.panels
    assert panel.y_label == "IsoScore*"
    for method, line in enumerate(panel.lines):
        layers = [[run[str(layer)] for layer in range(5)] for run in scores[2 * method : 2 * method + 2]]
        assert line.y == pytest.approx(np.mean(layers, axis=0), rel=1e-12)
    for plot in (performance, by_layer):
        assert plot.caption.startswith("IsoScore* with the paper's ζ = 0.2 over all tokens of the validation set, in")
        assert "1,234 points of the training data" in plot.caption
    # The run with CosReg has no IsoScore* and is not in the figure.
    assert cosreg_run.name not in performance.caption
    # States without variance have no score; the other run of the method has one.
    path = tmp_path / last_run.name / "geometry.json"
    geometry = json.loads(path.read_text())
    geometry["isoscore_star"] |= {"union": None, "layers": dict.fromkeys(geometry["isoscore_star"]["layers"])}
    path.write_text(json.dumps(geometry))
    performance, by_layer = build_isotropy_plots(tmp_path)
    assert performance.panels[0].lines[-1].x[0] == pytest.approx(scores[-2]["union"])
    assert by_layer.panels[0].lines[-1].y == pytest.approx([scores[-2][str(layer)] for layer in range(5)])


def test_curves_have_a_line_for_each_method_with_its_lambda(tmp_path: Path) -> None:
    runs = [record("rte", BERT, BASE, seed, 0.5 + seed / 10) for seed in (1, 2)]
    others = [record("rte", BERT, istar(weight), 1, 0.7) for weight in (-1, 1)]
    for run in (*runs, *others, record("rte", BERT, BASE, 1, 0.9, optim__lr=1e-5)):
        save(run, tmp_path)
    loaded, frame = load_frame(tmp_path)
    methods = compare_methods(frame).methods
    losses, metrics = training_figures.build_learning_curve_plots(methods, loaded.records)
    [lines] = [panel.lines for panel in losses.panels]
    assert [line.label for line in lines] == ["Base", "I-STAR λ=-1 ζ=0.4", "I-STAR λ=1 ζ=0.4"]
    expected = [np.mean([run.epochs[epoch]["metrics"]["loss"] for run in runs]) for epoch in range(3)]
    assert lines[0].y == pytest.approx(expected, rel=1e-12)
    [panel] = metrics.panels
    assert panel.lines[0].y == pytest.approx([0.8 * 65, 0.9 * 65, 65])
    assert panel.y_range == (0, 100)


def test_a_method_has_one_colour_and_figure_2_needs_a_model_of_the_paper(tmp_path: Path) -> None:
    for model, has_figure2 in (("mine", False), (BERT, True)):
        root = tmp_path / model
        for reg in (BASE, istar(1), istar(-1), cosreg(1)):
            for seed in (1, 2):
                save(record("rte", model, reg, seed), root)
        sections = compute_sections(read_runs(root, keep_records=True), root, "Base")
        plots = {section.plot.name: section.plot for section in sections if section.plot is not None}
        assert ("figure2" in plots) == has_figure2
        colours: dict[str, set[str]] = {}
        for name in ("all_methods", "curves_metric", "figure3", "figure4", "figure5", "figure6"):
            for label, style in panel_drawing.assign_line_styles(plots[name]).items():
                colours.setdefault(label, set()).add(style["color"])
        assert {*colours} == {"Base", "CosReg λ=1", "I-STAR λ=-1 ζ=0.4", "I-STAR λ=1 ζ=0.4"}
        assert len(set.union(*colours.values())) == len(colours) == sum(map(len, colours.values()))


def test_stability_of_small_batches() -> None:
    scores = compute_stability_scores((10, 50), (0.0, 1.0), num_draws=2, num_shrinkage_points=800)
    means = scores.set_index(["line", "points"])["mean"]
    assert means["ζ = 0", 10] < means["ζ = 0", 50] < 0.1
    assert means["ζ = 1", 10] == means["ζ = 1", 50]
    assert abs(means["unbiased", 50] - paper_figures.TRUE_SCORE) < 0.1
    assert all(means["ζ = auto", points] > 2 * means["ζ = 0", points] for points in (10, 50))


def test_the_plot_of_stability() -> None:
    variances = make_variances().double()
    assert pytest.approx(isoscore_from_covariance(variances.diag()).item(), abs=1e-5) == paper_figures.TRUE_SCORE
    [panel] = paper_figures.build_minibatch_stability_plot().panels
    assert [line.label for line in panel.lines] == [*(f"ζ = {zeta:g}" for zeta in ZETAS), "ζ = auto", "unbiased"]
    assert all(line.x == BATCH_SIZES for line in panel.lines)
    assert [line.scale_position for line in panel.lines] == [*ZETAS, math.inf, math.inf]


@pytest.mark.slow
def test_the_written_scores_of_stability() -> None:
    """The figure shows what the simulation returns."""
    pd.testing.assert_frame_equal(pd.read_csv(SCORES), compute_stability_scores(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "{}", '{"mean', '{"mean_activation": [1], "two_nn": [3]}', '{"examples": 9, "two_nn": [1]}'),
        '{"examples": 9, "mean_activation": [1], "two_nn": 3}',
        '{"examples": 9, "mean_activation": [1], "two_nn": [3], '
        '"isoscore_star": {"zeta": 0.2, "num_points": 9, "union": 1}}',
        '{"examples": 9, "mean_activation": [1], "two_nn": [3], '
        '"isoscore_star": {"zeta": 0.2, "num_points": 9, "union": 1, "layers": {"1": 0.5}}}',
        '{"examples": 9, "mean_activation": [1], "two_nn": [3], "isoscore_star": null}',
    ],
)
def test_a_broken_geometry_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "geometry.json").write_text(text)
    with pytest.raises(UserError, match=r"geometry\.json(: not JSON| is not a geometry)"):
        geometry_file.read_geometry(tmp_path)
    assert geometry_file.read_geometry(tmp_path / "nowhere") is None


# Writing.


@pytest.fixture
def one_run(tmp_path: Path) -> Path:
    save(record("rte", BERT, BASE, 1), tmp_path / "runs")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_run_is_read_once_and_every_picture_drawn_once(one_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, computing and drawing take nearly all of a report's time. The same runs give the same files."""
    for seed in (2, 3):
        save(record("rte", BERT, istar(), seed), one_run / "runs")
    calls: Counter[str] = Counter()

    def count_calls_of(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counting_call(*arguments: Any) -> Any:
            calls[name] += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, counting_call)

    count_calls_of(run_frame, "read_result")
    count_calls_of(rendering, "render")
    report.write_report(one_run / "runs", one_run / "report")
    pictures = list((one_run / "report" / "figures").glob("*.png"))
    assert len(pictures) > 3
    assert calls == {"read_result": 3, "render": len(pictures)}
    files = [target for _, target in parsed(one_run / "report" / "index.html").references if target[0] != "#"]
    assert {Path(file).suffix for file in files} >= {".svg", ".pdf", ".png", ".csv", ".md", ".tex"}
    assert all((one_run / "report" / file).is_file() for file in files)
    first_contents = contents(one_run / "report")
    report.write_report(one_run / "runs", one_run / "report")
    assert contents(one_run / "report") == first_contents
    assert sorted(path.name for path in one_run.iterdir()) == ["report", "runs"]


def test_a_report_below_its_runs_is_replaced_unless_it_has_other_files(one_run: Path) -> None:
    out = one_run / "runs" / "report"
    for _ in range(2):
        report.write_report(one_run / "runs", out)
    assert "not read" not in (out / "tables" / "left_out.csv").read_text()
    (out / "figures" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds figures/notes\.txt, which is no part of a report"):
        report.write_report(one_run / "runs", out)
    assert (out / "figures" / "notes.txt").read_text() == "mine"


def write_foreign_files(folder: Path, kind: str) -> None:
    if kind == "a file":
        folder.write_text("mine")
        return
    folder.mkdir()
    if kind == "someone's page":
        (folder / "index.html").write_text("<html>mine</html>")
    if kind == "someone's tables":
        (folder / "tables").mkdir()
        (folder / "tables" / "mine.csv").write_text("1")


@pytest.mark.parametrize("kind", ["a file", "someone's page", "someone's tables"])
def test_nobody_loses_files(one_run: Path, kind: str, capsys: Any) -> None:
    out = one_run / "report"
    write_foreign_files(out, kind)
    contents_before = contents(out) if out.is_dir() else out.read_text()
    assert main(["report", str(one_run / "runs"), "--out", str(out)]) == 2
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: --out {out} ")
    assert (contents(out) if out.is_dir() else out.read_text()) == contents_before


def test_nothing_to_report(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "runs").mkdir()
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 2
    (tmp_path / "runs" / "foreign").mkdir()
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 2
    assert main(["report", str(tmp_path / "nowhere"), "--out", str(tmp_path / "report")]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {tmp_path / 'runs'} holds no runs;")
    assert "1 folder could not be read as one" in second
    assert "is not a folder" in third
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    "runs",
    [
        [record("rte", BERT, BASE, 1, status=status) for status in ("failed", "unfinished", "pruned")],
        [record("rte", BERT, cosreg(), 1)],
        [record("demo", "tiny", istar(-0.2), 1, changes={"collapsed": {}, "timing": {"total": 5.0}})],
        [record("rte", BERT, istar(-1, layers=[1]), 1)],
        [record("rte", BERT, istar(), 1, changes={"isotropy": {}}), record("rte", BERT, BASE, 1)],
    ],
    ids=["no finished run", "cosreg", "demo", "layer", "flawed"],
)
def test_whatever_there_is_makes_a_page(tmp_path: Path, runs: list[RunRecord]) -> None:
    for run in runs:
        save(run, tmp_path / "runs", geometry=False)
    report.write_report(tmp_path / "runs", tmp_path / "report")
    parsed(tmp_path / "report" / "index.html")


def test_the_command(one_run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(one_run)
    (one_run / "runs" / "sweeps" / "a").mkdir(parents=True)
    (one_run / "runs" / "sweeps" / "a" / "result.json").write_text(json.dumps({}))
    assert main(["report", "runs"]) == 0
    assert capsys.readouterr().out.startswith("report/index.html: 1 run\n")
    table1 = pd.read_csv("report/tables/table1.csv")
    assert table1.loc[0, "mean"] == pytest.approx(50)
    assert "run.root" not in "".join(parsed(one_run / "report" / "index.html").text)
    assert list(pd.read_csv("report/tables/left_out.csv")["folder"]) == []
    assert paper_tables.EMPTY_CELL not in table1.columns
