"""Each penalty names its paper, and the entries are complete BibTeX."""

import re
from pathlib import Path

import pytest

from istar.finetune.config.penalties import PENALTIES
from istar.finetune.config.reg_config import PenaltyConfig
from istar.regularizers import Penalty, base

CLASSES = sorted({type(kind().make()) for kind in PENALTIES.values() if issubclass(kind, PenaltyConfig)}, key=repr)
ENTRIES = Path(base.__file__).with_name("references.bib").read_text().strip().split("\n\n")


@pytest.mark.parametrize("penalty_class", CLASSES)
def test_a_penalty_has_a_citation_of_the_paper_that_its_module_names(penalty_class: type[Penalty]) -> None:
    citation = penalty_class().citation
    title = re.search("title = {(.*)},", citation)
    assert title is not None
    module = __import__(penalty_class.__module__, fromlist=["x"])
    if penalty_class.__name__ != "RandomDirection":  # a placebo of istar
        year = re.search(r"year = {(\d+)}", citation)
        surname = re.search("author = {(?:{{)?([^,]+),", citation)
        assert year is not None
        assert surname is not None
        assert f"{surname[1]} " in module.__doc__ or f"{surname[1]}," in module.__doc__
        assert year[1] in module.__doc__


def test_the_entries_are_complete_and_each_is_used() -> None:
    used = {penalty_class.reference for penalty_class in CLASSES}
    keys = [re.fullmatch(r"@\w+{(\w+),\n.*title = .*author = .*year = .*\n}", entry, re.S) for entry in ENTRIES]
    assert {key[1] for key in keys if key} == used
    assert all(keys)
