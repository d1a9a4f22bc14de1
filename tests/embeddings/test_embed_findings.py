"""What stands out among embedding matrices, from measures that are known."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from istar.embeddings.embed_findings import describe_embeddings
from istar.embeddings.embed_models import ModelEmbeddings

NAN = math.nan


def make_embeddings(
    label: str,
    raw: float = 0.7,
    centered: float = 0.95,
    ratio: float = 0.25,
    cosines: dict[str, tuple[float, ...]] | None = None,
    unused: pd.DataFrame | None = None,
    matrix: str = "input",
) -> ModelEmbeddings:
    """Return measures of a matrix; `cosines` has Pearson's r on each benchmark by form."""

    def make_measures(isotropy: float) -> dict[str, Any]:
        # The papers' convention has another order of the models, which no sentence may show.
        return {
            "partition_isotropy_both": isotropy,
            "partition_isotropy_as_computed": 1 - isotropy,
            "norm_ratio": ratio if isotropy is raw else 0.0,
        }

    rows = [
        {"benchmark": f"benchmark {index}", "form": form, "cosine_pearson": value, "inner_product_pearson": -value}
        for form, values in (cosines or {}).items()
        for index, value in enumerate(values)
    ]
    return ModelEmbeddings(
        label,
        {"matrix": matrix},
        {"raw": make_measures(raw), "centered": make_measures(centered), "all_but_the_top": make_measures(0.999)},
        pd.DataFrame(rows),
        [],
        pd.DataFrame() if unused is None else unused,
        pd.DataFrame(),
        {},
        {"raw": np.ones(1), "centered": np.ones(1)},
    )


def select(sentences: list[str], text: str) -> list[str]:
    """Return the sentences that contain a text."""
    return [sentence for sentence in sentences if text in sentence]


def test_the_most_and_the_least_isotropic_matrix() -> None:
    models = [make_embeddings("a", 0.6, ratio=0.5), make_embeddings("b", 0.9, ratio=0.03), make_embeddings("c", 0.7)]
    assert describe_embeddings(models) == [
        "Of all raw input embeddings, those of b are the most isotropic and those of a the least: I(W), over both "
        "signs of the eigenvectors, is 0.900 and 0.600; 1 is isotropic.",
        "I(W) of the input embeddings of a (0.600 raw, 0.950 centered), b (0.900 raw, 0.950 centered) and c (0.700 "
        "raw, 0.950 centered) is above 0.5 without centering, so that they are not unusually anisotropic.",
        "Relative to the average norm of a row, the norm of the mean of all rows is largest in a (50%) and smallest in "
        "b (3%); it is 0% if the rows lie around the origin, 100% if all have the same direction.",
    ]
    [ranking, *_] = describe_embeddings([make_embeddings("a", 0.6, matrix="output"), make_embeddings("b", 0.9)])
    assert ranking == (
        "The raw output embeddings of b are more isotropic than those of a: I(W), over both signs of the eigenvectors, "
        "is 0.900 and 0.600; 1 is isotropic."
    )


def test_one_model_and_equal_models_are_not_ranked() -> None:
    isotropy, centering, norms = describe_embeddings([make_embeddings("a", 0.12, 0.98, ratio=0.625)])
    assert isotropy == (
        "I(W) of the raw input embeddings of a, over both signs of the eigenvectors, is 0.120; 1 is isotropic."
    )
    assert centering == (
        "Centering raises I(W) of the input embeddings of a (0.120 raw, 0.980 centered) to at least 0.9: but for a "
        "common shift, they are isotropic."
    )
    assert norms.startswith("In a, the norm of the mean of all rows is 62% of the average norm of a row")
    # Differences that the sentence would not show are none.
    isotropy, _, norms = describe_embeddings([make_embeddings("a", 0.12001), make_embeddings("b", 0.12002)])
    assert isotropy.startswith("I(W) of the raw input embeddings of a and b, over both signs of the eigenvectors, is 0")
    assert norms.startswith("In a and b, the norm of the mean of all rows is 25% of")
    isotropy, _, norms = describe_embeddings([make_embeddings(label) for label in "abcd"])
    assert isotropy.startswith("I(W) of the raw input embeddings of all 4 models, over both signs of the eigenvectors")
    assert norms.startswith("In all 4 models, the norm of the mean")


def test_what_centering_does() -> None:
    models = [
        make_embeddings("shifted", 0.1, 0.95),
        make_embeddings("also", 0.5, 0.9),
        make_embeddings("narrow", 0.1, 0.89),
        make_embeddings("usual", 0.51, 0.2),
    ]
    assert describe_embeddings(models)[1:3] == [
        "Centering raises I(W) of the input embeddings of shifted (0.100 raw, 0.950 centered) and also (0.500 raw, "
        "0.900 centered) to at least 0.9: but for a common shift, they are isotropic.",
        "After centering, I(W) of the input embeddings of narrow (0.100 raw, 0.890 centered) is still below 0.9, so "
        "that a common shift is not all that makes them anisotropic.",
    ]


def test_undefined_measures_are_passed_over() -> None:
    undefined = make_embeddings("undefined", NAN, NAN, NAN)
    assert describe_embeddings([undefined]) == ["I(W) and the norms of these matrices are not defined."]
    assert describe_embeddings([undefined, make_embeddings("a")]) == describe_embeddings([make_embeddings("a")])
    half_defined = make_embeddings("half", 0.1, NAN)
    assert not select(describe_embeddings([half_defined]), "entering")


def test_the_best_form_of_each_model() -> None:
    models = [
        make_embeddings("a", cosines={"raw": (0.5, 0.3), "centered": (0.4, 0.5), "all_but_the_top": (0.44, 0.4)}),
        make_embeddings("b", cosines={"raw": (0.9,), "scaled_centered": (0.8,)}),
        make_embeddings("c", cosines={"raw": (0.9,)}),
    ]
    assert select(describe_embeddings(models), "similarity") == [
        "The average word similarity by cosine (Table 2) is highest for the centered form of a (45.00, 5.00 more than "
        "for the raw matrix) and the raw form of b (90.00). It has no interval, so that the choice of the word pairs "
        "may explain small differences. Models with different tokenizers cannot be compared by it, because they may "
        "keep different pairs of words."
    ]
    [alone] = select(describe_embeddings(models[:1]), "similarity")
    assert alone.endswith("the choice of the word pairs may explain small differences.")
    # A single form is not compared with anything.
    assert not select(describe_embeddings(models[2:]), "similarity")


@pytest.mark.parametrize(
    ("cosines", "text"),
    [
        (
            {"raw": (0.2,), "centered": (0.50001,), "scaled_centered": (0.50002,)},
            "the centered and centered-scaled forms of a (50.00, 30.00 more than for the raw matrix).",
        ),
        ({"raw": (0.5,), "centered": (0.5,)}, "the raw and centered forms of a (50.00)."),
        # A benchmark whose correlation is undefined makes the average undefined.
        (
            {"raw": (0.9, NAN), "centered": (0.2, 0.2), "scaled_centered": (0.1, 0.1)},
            "the centered form of a (20.00; undefined for the raw matrix).",
        ),
        ({"raw": (-0.3,), "centered": (-0.1,)}, "the centered form of a (-10.00, 20.00 more than for the raw matrix)."),
    ],
)
def test_equally_good_and_undefined_forms(cosines: dict[str, tuple[float, ...]], text: str) -> None:
    [sentence] = select(describe_embeddings([make_embeddings("a", cosines=cosines)]), "similarity")
    assert sentence.startswith(
        f"The average word similarity by cosine (Table 2) is highest for {text} It has no interval"
    )
    assert not select(
        describe_embeddings([make_embeddings("a", cosines={"raw": (NAN,), "centered": (0.5,)})]), "similarity"
    )


def test_unused_tokens_are_averaged_over_tokens_not_bins() -> None:
    bins = pd.DataFrame(
        {
            "order": ["index", "index", "frequency", "not in the text"],
            "tokens": [900, 100, 500, 500],
            "cosine_raw": [0.5, 0.1, 9.0, 9.0],
            "cosine_centered": [0.0, 0.1, 9.0, 9.0],
        }
    )
    models = [
        make_embeddings("a", unused=bins),
        make_embeddings("b"),
        make_embeddings("c", unused=bins.drop(columns="cosine_centered")),
    ]
    assert select(describe_embeddings(models), "unused") == [
        "The average cosine of the unused tokens of Figure 3 with the other tokens is 0.46 in a (0.01 after centering) "
        "and 0.46 in c."
    ]
