"""Sentences on what stands out among embedding matrices, made from their measures by fixed rules.

I(W) is over both signs of the eigenvectors, so that matrices can be compared. The thresholds of I(W) are those of
`findings`.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from istar.embeddings.embed_models import ModelEmbeddings
from istar.embeddings.embed_tables import FORM_NAMES, average_similarity, format_score
from istar.geometry.show.compare import list_names
from istar.geometry.show.findings import NOT_SHIFTED, SHIFTED, classify_anisotropy

_SIGNS = "over both signs of the eigenvectors"


def describe_embeddings(models: Sequence[ModelEmbeddings]) -> list[str]:
    """Return at most six sentences on the embedding matrices of one or more models.

    They are on the most and the least isotropic raw matrix, on what centering does to unusually anisotropic matrices,
    on the distance of the mean of the rows from 0, on the form with the best average word similarity in each model, and
    on unused tokens. There are no sentences on measures that are not defined or were not taken.
    """
    sentences = [
        *_rank_isotropy(models),
        *_describe_centering(models),
        *_rank_norm_ratios(models),
        *_describe_word_similarity(models),
        *_describe_unused_tokens(models),
    ]
    return sentences or ["I(W) and the norms of these matrices are not defined."]


def _rank_isotropy(models: Sequence[ModelEmbeddings]) -> Iterator[str]:
    """Yield a sentence on the models whose raw matrices have the largest and the smallest I(W)."""
    defined = _sort_defined(models, lambda model: _get_isotropy(model, "raw"))
    if not defined:
        return
    low, high = defined[0], defined[-1]
    low_text, high_text = (f"{_get_isotropy(model, 'raw'):.3f}" for model in (low, high))
    name = _name_matrices(models)
    if len(defined) == 1:
        yield f"I(W) of the raw {name} of {low.label}, {_SIGNS}, is {low_text}; 1 is isotropic."
    elif low_text == high_text:
        yield f"I(W) of the raw {name} of {_name_all(defined)}, {_SIGNS}, is {low_text}; 1 is isotropic."
    elif len(defined) == 2:
        yield (
            f"The raw {name} of {high.label} are more isotropic than those of {low.label}: I(W), {_SIGNS}, is "
            f"{high_text} and {low_text}; 1 is isotropic."
        )
    else:
        yield (
            f"Of all raw {name}, those of {high.label} are the most isotropic and those of {low.label} the least: "
            f"I(W), {_SIGNS}, is {high_text} and {low_text}; 1 is isotropic."
        )


def _describe_centering(models: Sequence[ModelEmbeddings]) -> Iterator[str]:
    """Yield a sentence each on the matrices that are isotropic but for a common shift, and on other anisotropic ones.

    If there are neither, a sentence says that the matrices are not unusually anisotropic.
    """
    texts_by_kind: dict[str | None, list[str]] = {"shifted": [], "anisotropic": [], None: []}
    for model in models:
        raw, centered = (_get_isotropy(model, form) for form in ("raw", "centered"))
        if math.isfinite(raw) and math.isfinite(centered):
            text = f"{model.label} ({raw:.3f} raw, {centered:.3f} centered)"
            texts_by_kind[classify_anisotropy(raw, centered)].append(text)
    name = _name_matrices(models)
    if shifted := texts_by_kind["shifted"]:
        yield (
            f"Centering raises I(W) of the {name} of {list_names(shifted)} to at least {NOT_SHIFTED}: but for a common "
            "shift, they are isotropic."
        )
    if anisotropic := texts_by_kind["anisotropic"]:
        yield (
            f"After centering, I(W) of the {name} of {list_names(anisotropic)} is still below {NOT_SHIFTED}, so that a "
            "common shift is not all that makes them anisotropic."
        )
    if texts_by_kind[None] and not shifted and not anisotropic:
        yield (
            f"I(W) of the {name} of {list_names(texts_by_kind[None])} is above {SHIFTED} without centering, so that "
            "they are not unusually anisotropic."
        )


def _rank_norm_ratios(models: Sequence[ModelEmbeddings]) -> Iterator[str]:
    """Yield a sentence on the models with the largest and the smallest ratio of the norm of the mean to the norms."""
    defined = _sort_defined(models, _get_norm_ratio)
    if not defined:
        return
    low, high = defined[0], defined[-1]
    low_text, high_text = (f"{_get_norm_ratio(model):.0%}" for model in (low, high))
    scale = "0% if the rows lie around the origin, 100% if all have the same direction"
    if low_text == high_text:
        yield (
            f"In {_name_all(defined)}, the norm of the mean of all rows is {low_text} of the average norm of a row "
            f"({scale})."
        )
        return
    yield (
        f"Relative to the average norm of a row, the norm of the mean of all rows is largest in {high.label} "
        f"({high_text}) and smallest in {low.label} ({low_text}); it is {scale}."
    )


def _describe_word_similarity(models: Sequence[ModelEmbeddings]) -> Iterator[str]:
    """Yield a sentence on the form with the best average word similarity in each model that has several forms.

    The averages of different models are not compared, because their tokenizers may keep different pairs of words.
    """
    texts = [text for model in models if (text := _name_best_forms(model))]
    if not texts:
        return
    tokenizers = (
        " Models with different tokenizers cannot be compared by it, because they may keep different pairs of words."
        if len(texts) > 1
        else ""
    )
    yield (
        f"The average word similarity by cosine (Table 2) is highest for {list_names(texts)}. It has no interval, so "
        f"that the choice of the word pairs may explain small differences.{tokenizers}"
    )


def _name_best_forms(model: ModelEmbeddings) -> str:
    """Return the forms of a model with the best average word similarity by cosine, with the gain over the raw matrix.

    Forms are equally good if their averages have the same two decimals. The result is empty if fewer than two forms
    have a defined average.
    """
    average_by_form = {form: scores["cosine"] for form, scores in average_similarity(model).items()}
    defined = {form: average for form, average in average_by_form.items() if math.isfinite(average)}
    if len(defined) < 2:
        return ""
    best_text = format_score(max(defined.values()))
    best_forms = [form for form, average in defined.items() if format_score(average) == best_text]
    noun = "form" if len(best_forms) == 1 else "forms"
    text = f"the {list_names([FORM_NAMES[form] for form in best_forms])} {noun} of {model.label} ({best_text}"
    if "raw" in best_forms:
        return f"{text})"
    if "raw" not in defined:
        return f"{text}; undefined for the raw matrix)"
    return f"{text}, {format_score(max(defined.values()) - defined['raw'])} more than for the raw matrix)"


def _describe_unused_tokens(models: Sequence[ModelEmbeddings]) -> Iterator[str]:
    """Yield a sentence on the average cosine of the unused tokens with the others in each model that has both."""
    texts = []
    for model in models:
        raw, centered = (_average_unused_cosine(model, form) for form in ("raw", "centered"))
        if math.isfinite(raw):
            centered_text = f" ({centered:.2f} after centering)" if math.isfinite(centered) else ""
            texts.append(f"{raw:.2f} in {model.label}{centered_text}")
    if texts:
        yield f"The average cosine of the unused tokens of Figure 3 with the other tokens is {list_names(texts)}."


def _average_unused_cosine(model: ModelEmbeddings, form: str) -> float:
    """Return the average cosine of a model's unused tokens with all its other tokens; NaN if it was not measured."""
    bins, column = model.unused_similarity, f"cosine_{form}"
    if column not in bins:
        return math.nan
    bins = bins[bins["order"] == "index"]
    return float((bins[column] * bins["tokens"]).sum() / bins["tokens"].sum())


def _sort_defined(
    models: Sequence[ModelEmbeddings], get_value: Callable[[ModelEmbeddings], float]
) -> list[ModelEmbeddings]:
    """Return the models for which a measure is finite, by ascending value."""
    return sorted((model for model in models if math.isfinite(get_value(model))), key=get_value)


def _get_isotropy(model: ModelEmbeddings, form: str) -> float:
    """Return I(W) of a form of a model's matrix over both signs of the eigenvectors."""
    return float(model.measures_by_form[form]["partition_isotropy_both"])


def _get_norm_ratio(model: ModelEmbeddings) -> float:
    """Return the norm of the mean of the raw rows, divided by their average norm."""
    return float(model.measures_by_form["raw"]["norm_ratio"])


def _name_matrices(models: Sequence[ModelEmbeddings]) -> str:
    return f"{models[0].metadata['matrix']} embeddings"


def _name_all(models: Sequence[ModelEmbeddings]) -> str:
    """Return words for all of one or more models."""
    if len(models) > 2:
        return f"all {len(models)} models"
    return list_names([model.label for model in models])
