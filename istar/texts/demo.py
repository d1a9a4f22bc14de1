"""Synthetic data sets of English sentences for the `demo*` tasks, expanded at random from a context-free grammar.

The symbols that determine the label are chosen first, so labels are balanced by construction.
"""

import functools
import random
import re
import zlib
from collections.abc import Callable
from typing import Any

from datasets import Dataset

from istar.runs.tasks import TASKS

Example = dict[str, Any]

SIZES = {"train": 4000, "validation": 400, "test": 200}

FIRST_POSITIVE_RATE = 0.65
"""Probability that the first sentence of a `demo` pair is positive.

With 1/2, neither sentence alone would be informative, and a network with random weights would learn nothing for many
epochs. With this rate, the second sentence alone allows an accuracy of 0.65.
"""

VALUE_WEIGHTS = (16, 1, 4, 1, 1, 1)
"""Relative frequencies of the six values of a `demo_regression` attribute. They differ so that each scene alone is
informative: frequent values are shared more often."""

# Expansions by symbol. An expansion that is listed twice is chosen twice as often.
GRAMMAR: dict[str, tuple[str, ...]] = {
    # `demo` and `demo_sentence`. Both polarities have the same structure, so that neither the negation nor the
    # adjective alone determines the polarity.
    "judgement": (
        "{opening}{who} found the {work} {verdict}{ending}.",
        "{opening}{who} called the {work} {verdict}{ending}.",
        "{opening}{who} told us that the {work} was {verdict}{ending}.",
        "to {who} the {work} seemed {verdict}{meanwhile}.",
        "the {work} was {verdict}, if we may believe {who}{meanwhile}.",
    ),
    "positive": ("{good}",) * 4 + ("{very} {good}",) * 2 + ("{not} {bad}",),
    "negative": ("{bad}",) * 4 + ("{very} {bad}",) * 2 + ("{not} {good}",),
    "good": (*("splendid", "lovely", "wonderful", "delightful", "excellent", "charming") * 3, "superb", "witty"),
    "bad": (*("dull", "awful", "dreadful", "boring", "terrible", "tedious") * 3, "poor", "forgettable"),
    "very": ("really", "quite", "rather", "truly"),
    "not": ("not", "hardly", "far from", "anything but"),
    "work": ("film", "play", "concert", "lecture", "novel", "exhibition", "opera", "dinner", "story", "tour"),
    "opening": ("",) * 18 + ("after a long day, ", "on the way home, ", "over a cup of tea, "),
    "ending": ("",) * 18 + (" and went home early", " and did not say why", "{meanwhile}"),
    "meanwhile": ("",) * 9 + (", although it was not raining",),
    "who": ("Anna", "Bob", "Carla", "David", "Emma", "Frank", "Grace", "Hugo", "Julia", "Martin", "Nora", "Peter"),
    # `demo_regression`. Of the six values of an attribute, the first and second are near-synonyms, as are the third
    # and fourth, and the fifth and sixth.
    "scene": ("a {person} in a {colour} coat is {doing} {where}.", "{where}, a {person} in {colour} is {doing}."),
    "person": ("farmer", "gardener", "doctor", "nurse", "teacher", "professor"),
    "colour": ("red", "scarlet", "blue", "navy", "brown", "tan"),
    "doing": ("singing", "humming", "walking", "strolling", "sleeping", "resting"),
    "where": ("by the river", "by the stream", "in the forest", "in the woods", "on the road", "on the street"),
    # `demo_span`.
    "errand": ("{who} {took} {thing} to {place}.", "{who} went to {place} with {thing}."),
    "stay": ("{other_who} stayed in {other_place}.", "{other_who} was waiting in {other_place}."),
    "weather": ("it was raining.", "the morning was cold.", "the sun was shining.", "it was getting dark."),
    "took": ("carried", "brought", "took"),
    "thing": tuple(
        f"the {adjective} {noun}"
        for adjective in ("old", "heavy", "small")
        for noun in ("lamp", "clock", "basket", "mirror", "kettle", "violin", "ladder", "suitcase")
    ),
    "place": tuple(
        f"the {noun}" for noun in ("garden", "station", "kitchen", "library", "harbour", "market", "museum", "cellar")
    ),
    "ask_who": ("who went to {place}?", "who has {thing}?"),
    "ask_thing": ("what did {who} take along?", "what is in {place} now?"),
    "ask_place": ("where did {who} go?", "where is {thing} now?"),
}

_SYMBOL = re.compile(r"{(\w+)}")


@functools.cache
def generate(name: str, split: str) -> Dataset:
    """Generate one split of a demo task, once per process.

    The columns are the task's text columns and `label`, or SQuAD's columns for spans. Test sets lack labels. The result
    depends only on the arguments. No text occurs twice in a split, or in two splits.
    """
    spec = TASKS[name]
    rng = random.Random(f"{name}/{split}")
    rows: dict[str, Example] = {}
    while len(rows) < SIZES[split]:
        row = _GENERATORS[name](rng, len(rows))
        text = "\n".join(row[column] for column in spec.text_columns)
        # A hash assigns each text to one split, so that splits are disjoint.
        text_split = {0: "validation", 1: "test"}.get(zlib.crc32(text.encode()) % 10, "train")
        if text_split == split:
            rows.setdefault(text, row)
    shuffled_rows = rng.sample(list(rows.values()), len(rows))
    if spec.kind == "span":
        shuffled_rows = [{"id": f"{name}-{split}-{index}", **row} for index, row in enumerate(shuffled_rows)]
    dataset = Dataset.from_list(shuffled_rows)
    return dataset.remove_columns(spec.label_column) if split == "test" else dataset


def vocabulary() -> list[str]:
    """Return all words that the grammar can produce, in lower case and sorted."""
    expansions = " ".join(text for texts in GRAMMAR.values() for text in texts)
    return sorted(set(re.findall(r"[a-z]+", _SYMBOL.sub(" ", expansions).lower())))


def _expand(rng: random.Random, template: str, **values: str) -> str:
    """Fill in a template: each symbol becomes its value in `values` or a random expansion, which are templates too."""

    def expand_symbol(match: re.Match[str]) -> str:
        symbol = match[1]
        expansion = values[symbol] if symbol in values else rng.choice(GRAMMAR[symbol])
        return _SYMBOL.sub(expand_symbol, expansion) if "{" in expansion else expansion

    text = _SYMBOL.sub(expand_symbol, template)
    return text[0].upper() + text[1:]


def _generate_pair(rng: random.Random, index: int) -> Example:
    label = index % 2
    is_first_positive = rng.random() < FIRST_POSITIVE_RATE
    polarities = (is_first_positive, is_first_positive == label)
    work = rng.choice(GRAMMAR["work"])
    sentences = [
        _expand(rng, "{judgement}", who=who, work=work, verdict="{positive}" if is_positive else "{negative}")
        for who, is_positive in zip(rng.sample(GRAMMAR["who"], 2), polarities, strict=True)
    ]
    return {"sentence1": sentences[0], "sentence2": sentences[1], "label": label}


def _generate_sentence(rng: random.Random, index: int) -> Example:
    label = index % 2
    return {"sentence": _expand(rng, "{judgement}", verdict="{positive}" if label else "{negative}"), "label": label}


def _generate_scenes(rng: random.Random, index: int) -> Example:
    """Generate two scenes with four attributes each; the label is 5 times the mean similarity of the attributes.

    The similarity of two values is 1 if they are equal, 0.5 if they are near-synonyms, and 0 otherwise.
    """
    copy_rate = index % 6 / 5
    attributes = ("person", "colour", "doing", "where")
    scenes: tuple[dict[str, str], dict[str, str]] = ({}, {})
    similarity = 0.0
    for attribute in attributes:
        attribute_values = GRAMMAR[attribute]
        first_index, second_index = rng.choices(range(len(attribute_values)), VALUE_WEIGHTS, k=2)
        if rng.random() < copy_rate:
            second_index = first_index
        similarity += 1.0 if first_index == second_index else 0.5 if first_index // 2 == second_index // 2 else 0.0
        scenes[0][attribute], scenes[1][attribute] = attribute_values[first_index], attribute_values[second_index]
    return {
        "sentence1": _expand(rng, "{scene}", **scenes[0]),
        "sentence2": _expand(rng, "{scene}", **scenes[1]),
        "label": 5 * similarity / len(attributes),
    }


def _generate_errand(rng: random.Random, index: int) -> Example:
    """Generate a context and a question about the person, the thing or the place in it.

    One person takes a thing to a place, and another person is elsewhere.
    """
    who, other_who = rng.sample(GRAMMAR["who"], 2)
    place, other_place = rng.sample(GRAMMAR["place"], 2)
    errand = {"who": who, "thing": rng.choice(GRAMMAR["thing"]), "place": place}
    sentences = [
        _expand(rng, template, **errand, other_who=other_who, other_place=other_place)
        for template in ("{errand}", "{stay}", "{weather}")
    ]
    context = " ".join(rng.sample(sentences, len(sentences)))
    answer_symbol = ("who", "thing", "place")[index % 3]
    answer = errand[answer_symbol]
    # Like SQuAD's annotators, give several gold answers: the whole phrase, and its noun if that differs.
    gold_answers = list(dict.fromkeys((answer, answer.split()[-1])))
    return {
        "question": _expand(rng, f"{{ask_{answer_symbol}}}", **errand),
        "context": context,
        "answers": {"text": gold_answers, "answer_start": [context.index(gold) for gold in gold_answers]},
    }


def _generate_document(rng: random.Random, index: int) -> Example:
    who, other_who = rng.sample(GRAMMAR["who"], 2)
    names = {"who": who, "other_who": other_who, "other_place": "{place}"}
    kinds = rng.sample(("judgement", "judgement", "scene", "errand", "stay", "weather"), 4)
    verdicts = rng.choices(("{positive}", "{negative}"), k=len(kinds))
    sentences = [
        _expand(rng, f"{{{kind}}}", verdict=verdict, **names) for kind, verdict in zip(kinds, verdicts, strict=True)
    ]
    return {"text": " ".join(sentences)}


_GENERATORS: dict[str, Callable[[random.Random, int], Example]] = {
    "demo": _generate_pair,
    "demo_sentence": _generate_sentence,
    "demo_regression": _generate_scenes,
    "demo_span": _generate_errand,
    "clm": _generate_document,
    "mlm": _generate_document,
}
