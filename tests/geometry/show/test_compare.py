"""Which models `istar compare` compares, how they are called, and which of them cannot be compared."""

from dataclasses import replace
from typing import Any

import pytest

from istar.errors import UserError
from istar.geometry.show import compare
from istar.geometry.show.compare import MeasuredModel
from istar.models.saved_checkpoints import parse_models
from tests.geometry.synthetic import make_measurements, make_points


def label(*models: tuple[str, str, str | None], given: str = "") -> list[str]:
    """Return the labels of models, each given by its folder of measures, its name and its revision."""
    arguments = parse_models([f"{given}={folder}" if given else folder for folder, _, _ in models])
    measurements = [make_measurements(model={"name": name, "revision": revision}) for _, name, revision in models]
    return compare.choose_labels(arguments, [compare.name_model(measured.model) for measured in measurements])


def test_models_are_called_by_name_and_revision_and_if_needed_by_folder() -> None:
    run = "runs/rte-small-istar-0123/model"
    assert label(("a", run, None), ("b", run, "step10")) == ["rte-small-istar-0123", "rte-small-istar-0123 at step10"]
    assert label(("a", "bert", None), ("x/b", "bert", None)) == ["bert (a)", "bert (b)"]
    with pytest.raises(UserError, match="several models are called c; give them names"):
        label(("a", "bert", None), ("b", "gpt2", None), given="c")


def test_other_texts_and_settings_are_pointed_out_in_one_sentence_for_all_models() -> None:
    settings: dict[str, Any] = {"texts": {"text": "a.txt"}, "length": 16, "limit": None, "batch_tokens": 32}
    first = make_measurements(settings=settings, text_hashes={"text": "01"})
    # A file of another name with the same content is the same text, and the size of batches changes no measure.
    same = replace(first, settings={**settings, "texts": {"b": "b.txt"}, "batch_tokens": 64}, text_hashes={"b": "01"})
    models = [MeasuredModel("first", first), MeasuredModel("same", same)]
    assert compare.describe_other_settings(models) == []
    files = [make_points(["a"], settings={"source": source, "seed": 0}) for source in ("a.npy", "b.npy")]
    assert compare.describe_other_settings([MeasuredModel("file", measured) for measured in files]) == []
    other = replace(first, settings={**settings, "limit": 99}, text_hashes={"other": "23"})
    models += [MeasuredModel(name, other) for name in "abc"]
    assert compare.describe_other_settings(models) == [
        "a, b and c were measured over other texts than first.",
        "a, b and c were measured with other settings than first: limit 99 instead of None.",
    ]
