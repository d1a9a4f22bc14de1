"""`istar.measure`: the geometry of points, or of the states of a model, from Python."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console
from torch import Tensor, nn

from istar.drawing.terminal import make_console
from istar.errors import UserError, check_at_least, check_one_of, did_you_mean
from istar.geometry.collect.batch_reader import BatchReader
from istar.geometry.collect.item_labels import ByCloud, Labels, make_labels, make_labels_by_cloud
from istar.geometry.collect.measure_batches import measure_batches
from istar.geometry.collect.measure_clouds import measure_clouds
from istar.geometry.collect.pass_settings import MeasureSettings, SpecialTokens
from istar.geometry.collect.sentence_reader import SentenceReader, sort_sentences
from istar.geometry.collect.state_rows import Channels
from istar.geometry.collect.summaries import Collected
from istar.geometry.geometry import Geometry
from istar.hidden_states.model_modes import eval_mode
from istar.models.saved_checkpoints import parse_models
from istar.sums.source_sums import SumSettings
from istar.sums.stack_sums import MeasureSet
from istar.vectors.vector_files import PointSource, is_vector_file, open_clouds

if TYPE_CHECKING:
    from istar.geometry.collect.measure import OpenedModel
    from istar.texts.corpus import Documents

    Batch = Tensor | Sequence[Any] | Mapping[str, Any]
    Texts = Iterable[str] | Mapping[str, Iterable[str]] | str | Path

NUM_EXAMPLES = 1_000
"""Number of examples, from the first one on, whose mean states are kept for the similarity of layers."""
NUM_GROUPS = 10
"""Number of groups of examples for standard errors."""
_COMMON = ("groups", "measures", "sample", "seed", "limit", "progress")
_OPTIONS = {
    "points": ("key", "ids", "pairs", "device", *_COMMON),
    "batches": ("modules", "mask", "channels", "special_tokens", "ids", *_COMMON),
    "sentences": ("special_tokens", "ids", *_COMMON),
    "texts": ("tokenizer", "special_tokens", "length", "documents", "batch_tokens", "dtype", "device", *_COMMON),
}
"""Options of `measure` by what is measured."""


def measure(
    source: PointSource | nn.Module | str | Path,
    inputs: Texts | Iterable[Batch] | None = None,
    /,
    *,
    key: str | Sequence[str] | None = None,
    groups: ByCloud | None = None,
    ids: ByCloud | None = None,
    pairs: bool = False,
    tokenizer: Any = None,
    modules: Sequence[str | nn.Module] | None = None,
    mask: str | Callable[[Any], Tensor] | None = None,
    channels: Channels | None = None,
    special_tokens: SpecialTokens | None = None,
    measures: MeasureSet = "basic",
    sample: int = 5_000,
    seed: int = 0,
    limit: int | None = None,
    length: int = 0,
    documents: Documents = "separate",
    batch_tokens: int | None = None,
    dtype: str | None = None,
    device: str | None = None,
    progress: bool = False,
    **unknown: Any,
) -> Geometry:
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
    happens, each module has its mode back afterwards, and no hook of istar is left. States are named `embeddings`,
    `layer_1` to `layer_L` (before a final normalization) and `final_norm`, or by the names of the given modules.

    Args:
        source: points or a model. Floating numbers of any width, on any device; sums are float32 or wider.
        inputs: texts, batches or sentences; None for points.
        key: for files: column, key or archive member, or several; needed if a file has more than one candidate.
            `"vectors.parquet:embedding"` is the same.
        groups: a group for each row of points, text or example of batches, such as its document, speaker or user.
            Standard errors leave out tenths of the groups. By default each is its own group: independent of the others.
            Several clouds have one list for all, or a dictionary of lists.
        ids: a name for each row or example, by which `istar.compare` pairs two geometries; as `groups`. Texts are
            paired if they are equal.
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
        length: most tokens of a block of text; 0 takes the model's longest input, at most 512.
        documents: whether the model sees each text alone ("separate") or several in a block ("packed").
        batch_tokens: most tokens of a batch of texts, with padding.
        dtype: of the weights of a model given by name; by default float32.
        device: where points are summed, by default where they are; or where a model given by name is loaded, by default
            on a GPU if there is one.
        progress: show a bar on standard error.

    Returns:
        A `Geometry`: a row for each state.

    Raises:
        UserError: one line for points that are not finite (how many, which is first), not floating, fewer than 4, of
            width 1 or all equal; an empty or exhausted iterable; a model whose states are not known, without `modules`;
            names that match no module; a module that is not called, or several times; a mask of another shape than a
            state; an option that does not belong to the source.

    >>> import torch
    >>> import istar
    >>> geometry = istar.measure(torch.randn(1_000, 8, generator=torch.Generator().manual_seed(0)))
    >>> round(float(geometry["isoscore_unbiased"]["points"]), 1)
    1.0
    """
    subject: Any = source
    what, subject_inputs = _find_subject(subject, inputs, tokenizer)
    given: dict[str, Any] = {
        "key": key, "groups": groups, "ids": ids, "pairs": pairs or None, "tokenizer": tokenizer, "modules": modules,
        "mask": mask, "channels": channels, "special_tokens": special_tokens, "length": length or None,
        "batch_tokens": batch_tokens, "documents": None if documents == "separate" else documents, "dtype": dtype,
        "device": device,
    }  # fmt: skip
    _check_options(what, [name for name, value in given.items() if value is not None] + list(unknown))
    check_one_of("measures", measures, get_args(MeasureSet))
    check_one_of("special_tokens", special_tokens or "include", get_args(SpecialTokens))
    for name, minimum, value in (
        ("sample", 0, sample), ("seed", 0, seed), ("limit", 1, limit), ("length", 0, length),
        ("batch_tokens", 1, batch_tokens),
    ):  # fmt: skip
        is_missing = value is None and name in ("limit", "batch_tokens")
        if not is_missing and (not isinstance(value, Integral) or isinstance(value, bool)):
            raise UserError(f"{name}={value!r} is a {type(value).__name__}; expected a whole number")
        check_at_least(minimum, name, value)
    settings = SumSettings(measures=measures, groups=NUM_GROUPS, sample=sample, seed=seed, limit=limit)
    console = make_console(stderr=True) if progress else None
    if what == "points":
        clouds = open_clouds(subject, key)
        cloud_labels = make_labels_by_cloud(NUM_GROUPS, [cloud.name for cloud in clouds], groups, ids)
        sources = subject.values() if isinstance(subject, Mapping) else [subject]
        is_of_files = all(isinstance(file, str | Path) for file in sources)
        name = ", ".join(map(str, sources) if is_of_files else (cloud.name for cloud in clouds))
        return Geometry(*measure_clouds(clouds, settings, cloud_labels, name, pairs, device, NUM_EXAMPLES, console))
    labels = make_labels(NUM_GROUPS, groups, ids)
    settings = replace(settings, groups=labels.num_groups)
    if what == "texts":
        text_settings = MeasureSettings(
            length, **vars(settings), batch_tokens=batch_tokens, documents=documents,
            special_tokens=special_tokens or "exclude",
        )  # fmt: skip
        open_model = partial(_open_model, subject, tokenizer, dtype, device)
        return Geometry(*_measure_texts(open_model, subject_inputs, text_settings, labels, console))
    batches: Iterator[tuple[Any, Tensor | None]]
    make_reader: Callable[..., BatchReader]
    if what == "sentences":
        make_reader = partial(SentenceReader, special_tokens=special_tokens or "exclude")
        batches = sort_sentences(subject_inputs)
    else:
        make_reader = partial(
            BatchReader, modules=modules, mask=mask, channels=channels, special_tokens=special_tokens or "include"
        )
        batches = ((batch, None) for batch in subject_inputs)
    first = next(batches)
    with make_reader(subject, first[0]) as reader:
        numbered = itertools.chain([first], batches)
        return Geometry(*measure_batches(reader, numbered, settings, labels, NUM_EXAMPLES, console))


def _check_options(what: str, given: Sequence[str]) -> None:
    for name in given:
        if name not in _OPTIONS[what]:
            hint = did_you_mean(name, _OPTIONS[what]) or f"; expected {', '.join(_OPTIONS[what])}"
            raise UserError(f"istar.measure takes no {name} for {what}{hint}")


def _find_subject(source: Any, inputs: Any, tokenizer: Any) -> tuple[str, Any]:
    """Return what is measured, a key of `_OPTIONS`, and all the inputs; the first one tells texts from batches."""
    is_model = isinstance(source, nn.Module)
    if inputs is None and not is_model:
        if isinstance(source, str) and not is_vector_file(source):
            raise UserError(
                f"{source} is not a file of vectors, such as .npy or .parquet; a model needs texts: "
                f"istar.measure({source!r}, texts)"
            )
        return "points", None
    if inputs is None:
        raise UserError(
            "a model needs texts or batches: istar.measure(model, texts, tokenizer=tokenizer) or istar.measure(model, "
            "loader)"
        )
    if not is_model and not isinstance(source, str | Path):
        raise UserError(
            f"a {type(source).__name__} is neither a model nor the name of one; expected istar.measure(points), or a "
            "model and its inputs"
        )
    is_text_source, is_sentence_model = isinstance(inputs, str | Path | Mapping), _is_sentence_transformer(source)
    if is_text_source and is_sentence_model:
        raise UserError(f"a SentenceTransformer with a {type(inputs).__name__}; expected a list of sentences")
    if isinstance(inputs, Mapping) and any(isinstance(value, Tensor) for value in inputs.values()):
        raise UserError("the inputs are a single batch; expected batches, as in [batch] or a data loader")
    if is_text_source or not is_model or (tokenizer is not None and not is_sentence_model):
        return "texts", inputs
    if isinstance(inputs, Tensor) or not isinstance(inputs, Iterable):
        raise UserError(
            f"inputs are a {type(inputs).__name__}; expected batches, as in [inputs], inputs.split(64) or a data loader"
        )
    batches = iter(inputs)
    first = next(batches, None)
    if first is None:
        raise UserError("the batches are empty or read already; expected at least one, as from a list or a data loader")
    batches = itertools.chain([first], batches)
    if is_sentence_model:
        return "sentences", batches
    if isinstance(first, str):
        raise UserError("texts need a tokenizer: istar.measure(model, texts, tokenizer=tokenizer)")
    return "batches", batches


def _is_sentence_transformer(model: object) -> bool:
    module = sys.modules.get("sentence_transformers")  # if it is not imported, there is no model of it
    return module is not None and isinstance(model, module.SentenceTransformer)


def _open_model(model: nn.Module | str | Path, tokenizer: Any, dtype: str | None, device: str | None) -> OpenedModel:
    from istar.geometry.collect import measure as text_road

    if not isinstance(model, nn.Module):
        if tokenizer is not None:
            raise UserError("a model given by name has its tokenizer; leave tokenizer out, or pass the model itself")
        return text_road.open_model(parse_models([str(model)])[0].source, dtype or "float32", device or "auto")
    if tokenizer is None or isinstance(tokenizer, str):
        raise UserError("a model in memory needs its tokenizer, an object: istar.measure(model, texts, tokenizer=...)")
    if dtype is not None or device is not None:
        raise UserError("dtype and device are for a model given by name; move the model before")
    return text_road.hold_model(model, tokenizer)


def _measure_texts(
    open_model: Callable[[], OpenedModel],
    texts: Texts,
    settings: MeasureSettings,
    labels: Labels,
    console: Console | None,
) -> Collected:
    from istar.geometry.collect import measure as text_road
    from istar.texts.corpus import open_texts

    sources = open_texts(texts)
    if labels.groups is not None and settings.documents == "packed":
        raise UserError('groups are of texts that the model sees alone; expected documents="separate" with them')
    for source in sources:
        labels.check_length(f"texts of {source.name}", len(source.documents or ()))
    model = open_model()
    plan = text_road.plan_pass(model, sources, settings)
    with eval_mode(model.encoder):
        return text_road.measure_texts(plan, None, console, NUM_EXAMPLES, labels)
