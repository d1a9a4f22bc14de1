"""`istar.measure`: the geometry of points, or of the states of a model, from Python."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor, nn

from istar.drawing.terminal import make_console
from istar.errors import UserError, did_you_mean
from istar.geometry.collect.labels import make_labels
from istar.geometry.collect.layers import MeasureSet
from istar.geometry.collect.pass_settings import MeasureSettings, SpecialTokens, SumSettings
from istar.geometry.geometry import Geometry

if TYPE_CHECKING:
    from istar.geometry.collect.labels import ItemLabels
    from istar.texts.corpus import Documents
    from istar.vectors.clouds import PointSource

    Batch = Tensor | Sequence[Any] | Mapping[str, Any]

NUM_EXAMPLES = 1_000
"""Number of examples, from the first one on, whose mean states are kept for the similarity of layers."""
NUM_GROUPS = 10
"""Number of groups of examples for standard errors."""


@overload
def measure(
    points: PointSource,
    /,
    *,
    key: str | Sequence[str] | None = None,
    groups: ItemLabels | None = None,
    ids: ItemLabels | None = None,
    pairs: bool = False,
    measures: MeasureSet = "basic",
    sample: int = 5_000,
    seed: int = 0,
    limit: int | None = None,
    device: str | None = None,
    progress: bool = False,
) -> Geometry: ...
@overload
def measure(
    model: nn.Module,
    batches: Iterable[Batch],
    /,
    *,
    modules: Sequence[str | nn.Module] | None = None,
    mask: str | Callable[[Batch], Tensor] | None = None,
    channels: Literal["first", "last"] | None = None,
    special_tokens: SpecialTokens = "include",
    groups: ItemLabels | None = None,
    ids: ItemLabels | None = None,
    measures: MeasureSet = "basic",
    sample: int = 5_000,
    seed: int = 0,
    limit: int | None = None,
    progress: bool = False,
) -> Geometry: ...
@overload
def measure(
    model: nn.Module | str | Path,
    texts: Iterable[str] | Mapping[str, Iterable[str]] | str | Path,
    /,
    *,
    tokenizer: Any = None,
    special_tokens: SpecialTokens = "exclude",
    groups: ItemLabels | None = None,
    measures: MeasureSet = "basic",
    sample: int = 5_000,
    seed: int = 0,
    limit: int | None = None,
    length: int = 0,
    documents: Documents = "separate",
    batch_tokens: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    progress: bool = False,
) -> Geometry: ...
def measure(source: Any, inputs: Any = None, /, **options: Any) -> Geometry:
    """Measure the geometry of points, or of the states of a model.

    The source decides what is measured:

    - **points**: a tensor, an array (in memory or memory-mapped), a data frame of floating columns or a list of rows,
      `(n, d)`; a dictionary of several clouds, which may differ in n and d; or a file of vectors: .npy, .npz,
      .safetensors, .pt (weights only), .parquet, .jsonl. A cloud is one row of the table.
    - **a model with texts**: a transformers model in memory with its tokenizer, or the name of a model (hub id, folder
      or run), and any iterable of str, which is read once; a dictionary of several; or a file, folder or data set of
      the hub, as for `istar measure --text`.
    - **a model with batches**: any iterable of inputs: a dictionary is passed as keywords, a tuple as arguments, and
      everything else as the only argument. A transformers model of any modality says where its states are; any other
      module needs `modules`.
    - **a SentenceTransformer with sentences**: the states of its encoder, and what `encode` returns, as `pooled`.

    A model is called in eval mode, without gradients and uncompiled, on its own device and in its own dtype. Whatever
    happens, each module has its mode back afterwards, and no hook is left. States are named `embeddings`, `layer_1` to
    `layer_L` (before a final normalization) and `final_norm`, or by the names of the given modules.

    Args:
        source: points or a model. Floating numbers of any width, on any device; sums are float32 or wider.
        inputs: texts, batches or sentences; None for points.
        key: for files: column, key or archive member, or several; needed if a file has more than one candidate.
            `"vectors.parquet:embedding"` is the same.
        groups: a group for each row of points or each example of batches, such as its document, speaker or user.
            Standard errors leave out tenths of the groups. By default each is its own group: independent of the others.
        ids: a name for each row or example, by which `istar.compare` pairs two geometries. Texts are paired if they are
            equal.
        pairs: row i of all clouds belongs together, such as a query and its answer; adds their alignment.
        tokenizer: of a transformers model in memory with texts. Without it, inputs are batches.
        modules: names, patterns in which `*` stands for one part of a name (`blocks.*`), or modules. Their output, its
            first tensor or its `last_hidden_state` is a state, `(batch, d)`, `(batch, places, d)`, or with `channels`
            `(batch, d, height, width)`.
        mask: which places count, 1 or 0: a key of the batch, or a function of the batch, `(batch, places)`. By default
            `attention_mask`, if the batch has one.
        channels: where the width of a state with four dimensions is: "first" for `(batch, d, height, width)`.
        special_tokens: whether places that are not content count: the special tokens of a tokenizer (default: exclude);
            of batches `special_tokens_mask`, or in models of images and sound the first places that do not depend on
            the input, such as CLS and registers (default: include).
        measures: "basic", or "all" also the measures that take the most time.
        sample: most points for measures of pairs of points, such as TwoNN; 0 leaves these out.
        seed: seed of the sample.
        limit: most tokens, rows or places of each source; None reads all.
        length: most tokens of a block of text; 0 takes the model's longest input, at most 512. See also
            `istar measure --help` for `documents` and `batch_tokens`.
        documents: whether the model sees each text alone ("separate") or several in a block ("packed").
        batch_tokens: most tokens of a batch of texts, with padding.
        dtype: of the weights of a model given by name.
        device: where points are summed, or where a model given by name is loaded.
        progress: show a bar on standard error.

    Returns:
        A `Geometry`: a row for each state.

    Raises:
        UserError: one line for points that are not finite (how many, which is first), not floating, fewer than 4 or of
            width 1; an empty or exhausted iterable; a model whose states are not known, without `modules`; names that
            match no module; a module that is not called, or several times; a mask of another shape than a state; an
            option that does not belong to the source.

    >>> import torch
    >>> import istar
    >>> geometry = istar.measure(torch.randn(1_000, 8, generator=torch.Generator().manual_seed(0)))
    >>> round(float(geometry["isoscore_unbiased"]["points"]), 1)
    1.0
    """
    road, what, arguments = _choose_road(source, inputs, options)
    known = [
        name for name, parameter in inspect.signature(road).parameters.items() if parameter.kind.name == "KEYWORD_ONLY"
    ]
    for name in options:
        if name not in known:
            raise UserError(
                f"istar.measure takes no {name} for {what}{did_you_mean(name, known)}; expected {', '.join(known)}"
            )
    return road(*arguments, **options)


def _choose_road(
    source: Any, inputs: Any, options: Mapping[str, Any]
) -> tuple[Callable[..., Geometry], str, list[Any]]:
    """Return the function that measures this source, what the source is, and the positional arguments."""
    is_name = isinstance(source, str | Path)
    if not isinstance(source, nn.Module) and inputs is None:
        return _measure_points, "points", [source]
    if inputs is None:
        raise UserError(
            "a model needs texts or batches: istar.measure(model, texts, tokenizer=tokenizer) or istar.measure(model, "
            "loader)"
        )
    if not is_name and not isinstance(source, nn.Module):
        raise UserError(
            f"a {type(source).__name__} is neither a model nor the name of one; expected istar.measure(points), or a "
            "model and its inputs"
        )
    if isinstance(inputs, str | Path | Mapping) or is_name or options.get("tokenizer") is not None:
        return _measure_texts, "texts", [source, inputs]
    batches = iter(inputs)
    first = next(batches, None)
    if first is None:
        raise UserError("the batches are empty or read already; expected at least one, as from a list or a data loader")
    batches = itertools.chain([first], batches)
    if _is_sentence_transformer(source):
        return _measure_sentences, "sentences", [source, batches]
    if isinstance(first, str):
        raise UserError("texts need a tokenizer: istar.measure(model, texts, tokenizer=tokenizer)")
    return _measure_batches, "batches", [source, batches]


def _is_sentence_transformer(model: object) -> bool:
    module = sys.modules.get("sentence_transformers")  # if it is not imported, there is no model of it
    return module is not None and isinstance(model, module.SentenceTransformer)


def _measure_points(
    points: Any,
    *,
    key: str | Sequence[str] | None = None,
    groups: ItemLabels | None = None,
    ids: ItemLabels | None = None,
    pairs: bool = False,
    measures: MeasureSet = "basic",
    sample: int = 5_000,
    seed: int = 0,
    limit: int | None = None,
    device: str | None = None,
    progress: bool = False,
) -> Geometry:
    from istar.geometry.collect.measure_clouds import measure_clouds
    from istar.vectors.clouds import open_clouds

    collected = measure_clouds(
        open_clouds(points, key),
        SumSettings(measures=measures, groups=NUM_GROUPS, sample=sample, seed=seed),
        make_labels(NUM_GROUPS, groups, ids),
        str(points) if isinstance(points, str | Path) else "points",
        pairs=pairs,
        limit=limit,
        device=device,
        num_examples=NUM_EXAMPLES,
        console=make_console(stderr=True) if progress else None,
    )
    return Geometry(collected.measurements, collected.examples)


def _measure_batches(
    model: nn.Module,
    batches: Iterator[Any],
    *,
    modules: Sequence[str | nn.Module] | None = None,
    mask: str | Callable[[Any], Tensor] | None = None,
    channels: Literal["first", "last"] | None = None,
    special_tokens: SpecialTokens = "include",
    groups: ItemLabels | None = None,
    ids: ItemLabels | None = None,
    measures: MeasureSet = "basic",
    sample: int = 5_000,
    seed: int = 0,
    limit: int | None = None,
    progress: bool = False,
) -> Geometry:
    from istar.geometry.collect.batch_reader import BatchReader
    from istar.geometry.collect.measure_batches import measure_batches

    first = next(batches)
    with BatchReader(
        model, first, modules=modules, mask=mask, channels=channels, special_tokens=special_tokens
    ) as reader:
        collected = measure_batches(
            reader,
            ((batch, None) for batch in itertools.chain([first], batches)),
            SumSettings(measures=measures, groups=NUM_GROUPS, sample=sample, seed=seed),
            make_labels(NUM_GROUPS, groups, ids),
            _describe_model(model),
            {"special_tokens": special_tokens},
            num_types=_find_vocabulary_size(model),
            limit=limit,
            num_examples=NUM_EXAMPLES,
            console=make_console(stderr=True) if progress else None,
        )
    return Geometry(collected.measurements, collected.examples)


def _measure_sentences(
    model: Any,
    sentences: Iterator[str],
    *,
    special_tokens: SpecialTokens = "exclude",
    groups: ItemLabels | None = None,
    ids: ItemLabels | None = None,
    measures: MeasureSet = "basic",
    sample: int = 5_000,
    seed: int = 0,
    limit: int | None = None,
    progress: bool = False,
) -> Geometry:
    from istar.geometry.collect.measure_batches import measure_batches
    from istar.geometry.collect.sentence_reader import SentenceReader, sort_sentences

    batches = sort_sentences(sentences)
    first = next(batches)
    with SentenceReader(model, first[0], special_tokens=special_tokens) as reader:
        collected = measure_batches(
            reader,
            itertools.chain([first], batches),
            SumSettings(measures=measures, groups=NUM_GROUPS, sample=sample, seed=seed),
            make_labels(NUM_GROUPS, groups, ids),
            _describe_model(model),
            {"special_tokens": special_tokens},
            num_types=_find_vocabulary_size(model),
            limit=limit,
            num_examples=NUM_EXAMPLES,
            console=make_console(stderr=True) if progress else None,
        )
    return Geometry(collected.measurements, collected.examples)


def _measure_texts(
    model: nn.Module | str | Path,
    texts: Any,
    *,
    tokenizer: Any = None,
    special_tokens: SpecialTokens = "exclude",
    groups: ItemLabels | None = None,
    measures: MeasureSet = "basic",
    sample: int = 5_000,
    seed: int = 0,
    limit: int | None = None,
    length: int = 0,
    documents: Documents = "separate",
    batch_tokens: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    progress: bool = False,
) -> Geometry:
    from istar.geometry.collect import measure as text_road
    from istar.hidden_states.model_layers import eval_mode, uncompiled
    from istar.models.saved_checkpoints import parse_models
    from istar.texts.corpus import open_texts

    settings = MeasureSettings(
        length,
        batch_tokens=batch_tokens,
        limit=limit,
        documents=documents,
        special_tokens=special_tokens,
        measures=measures,
        groups=NUM_GROUPS,
        sample=sample,
        seed=seed,
    )
    sources = open_texts(texts)
    labels = make_labels(NUM_GROUPS, groups)
    labels.check_length("texts", len(sources[0].documents or ()))
    console = make_console(stderr=True) if progress else None
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise UserError("a model in memory needs its tokenizer: istar.measure(model, texts, tokenizer=tokenizer)")
        opened = text_road.hold_model(model, tokenizer)
    else:
        opened = text_road.open_model(parse_models([str(model)])[0].source, dtype, device)
    plan = text_road.plan_pass(opened, sources, settings)
    with eval_mode(opened.encoder), uncompiled():
        collected = text_road.measure_texts(plan, None, console, NUM_EXAMPLES, labels)
    return Geometry(collected.measurements, collected.examples)


def _describe_model(model: nn.Module) -> dict[str, Any]:
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in model.parameters() if weight.is_floating_point()}
    config = getattr(model, "config", None)
    return {
        "name": type(model).__name__,
        "dtype": ", ".join(sorted(dtypes)),
        "type": getattr(config, "model_type", None),
    }


def _find_vocabulary_size(model: Any) -> int:
    config = getattr(model, "config", None)
    text_config: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    return int(getattr(text_config, "vocab_size", 0) or 0)
