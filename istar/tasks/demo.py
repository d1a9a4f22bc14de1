"""Small generated data sets in readable English: the `demo*` tasks, which need no network and no download.

A context-free grammar, `GRAMMAR`, holds every word. A draw fills a template with random choices from it, and
whatever decides the label is passed in, so labels are balanced by construction.
"""

import random
import re
import zlib
from collections.abc import Callable
from typing import Any

from datasets import Dataset, Features, List, Value

from istar.errors import UserError
from istar.tasks.specs import TASKS

Row = dict[str, Any]

SIZES = {"train": 4000, "validation": 400, "test": 200}

# How often the first person of a pair likes the thing. At 1/2 the label would be an exclusive or, of which no
# single sentence tells anything, and a fresh network would find nothing to begin with for many epochs.
# Now the second sentence alone allows this accuracy at best, the first alone 1/2.
LIKES_FIRST = 0.65

# How often each of a scene's six values comes, for the same reason: common values are shared more often.
COMMON = (16, 1, 4, 1, 1, 1)

# Symbol -> its expansions; an expansion listed twice is drawn twice as often.
GRAMMAR: dict[str, tuple[str, ...]] = {
    # Judgements: `demo` and `demo_sentence`. The two polarities mirror each other, so that neither the
    # negation nor the adjective decides alone.
    "judgement": (
        "{opening}{who} found the {work} {verdict}{ending}.",
        "{opening}{who} called the {work} {verdict}{ending}.",
        "{opening}{who} told us that the {work} was {verdict}{ending}.",
        "to {who} the {work} seemed {verdict}{meanwhile}.",
        "the {work} was {verdict}, if we may believe {who}{meanwhile}.",
    ),
    "positive": ("{good}",) * 4 + ("{very} {good}",) * 2 + ("{not} {bad}",),
    "negative": ("{bad}",) * 4 + ("{very} {bad}",) * 2 + ("{not} {good}",),
    "good": (
        *("splendid", "lovely", "wonderful", "delightful", "excellent", "charming") * 3,
        *("superb", "witty"),
    ),
    "bad": (
        *("dull", "awful", "dreadful", "boring", "terrible", "tedious") * 3,
        *("poor", "forgettable"),
    ),
    "very": ("really", "quite", "rather", "truly"),
    "not": ("not", "hardly", "far from", "anything but"),
    "work": ("film", "play", "concert", "lecture", "novel", "exhibition", "opera", "dinner", "story", "tour"),
    "opening": ("",) * 18 + ("after a long day, ", "on the way home, ", "over a cup of tea, "),
    "ending": ("",) * 18 + (" and went home early", " and did not say why", "{meanwhile}"),
    "meanwhile": ("",) * 9 + (", although it was not raining",),
    "who": (
        *("Anna", "Bob", "Carla", "David", "Emma", "Frank"),
        *("Grace", "Hugo", "Julia", "Martin", "Nora", "Peter"),
    ),
    # Scenes: `demo_regression`. Neighbours (first and second, third and fourth, ...) mean nearly the same.
    "scene": (
        "a {person} in a {colour} coat is {doing} {where}.",
        "{where}, a {person} in {colour} is {doing}.",
    ),
    "person": ("farmer", "gardener", "doctor", "nurse", "teacher", "professor"),
    "colour": ("red", "scarlet", "blue", "navy", "brown", "tan"),
    "doing": ("singing", "humming", "walking", "strolling", "sleeping", "resting"),
    "where": (
        *("by the river", "by the stream", "in the forest", "in the woods"),
        *("on the road", "on the street"),
    ),
    # Errands: `demo_span`.
    "errand": ("{who} {took} {thing} to {place}.", "{who} went to {place} with {thing}."),
    "stay": ("{other} stayed in {elsewhere}.", "{other} was waiting in {elsewhere}."),
    "weather": ("it was raining.", "the morning was cold.", "the sun was shining.", "it was getting dark."),
    "took": ("carried", "brought", "took"),
    "thing": tuple(
        f"the {how} {what}"
        for how in ("old", "heavy", "small")
        for what in ("lamp", "clock", "basket", "mirror", "kettle", "violin", "ladder", "suitcase")
    ),
    "place": tuple(
        f"the {what}" for what in ("garden", "station", "kitchen", "library", "harbour", "market", "museum", "cellar")
    ),
    "ask_who": ("who went to {place}?", "who has {thing}?"),
    "ask_thing": ("what did {who} take along?", "what is in {place} now?"),
    "ask_place": ("where did {who} go?", "where is {thing} now?"),
}

_FIELD = re.compile(r"{(\w+)}")
_SCENE = ("person", "colour", "doing", "where")
_ERRAND = ("who", "thing", "place")


def generate(name: str, split: str) -> Dataset:
    """One split of a demo task, the same in every process and whatever was generated before.

    Args:
        name: `demo`, `demo_sentence`, `demo_regression` or `demo_span`.
        split: `train`, `validation` or, but for spans, `test`, which has no labels.

    Returns:
        The task's text columns and `label`, or `id`, `question`, `context` and `answers` as in SQuAD. No text
        occurs twice in a split or in two splits.

    Raises:
        UserError: for an unknown task or split.
    """
    if name not in _DRAW:
        raise UserError(f"unknown demo task {name!r}: choose one of {', '.join(_DRAW)}")
    spec = TASKS[name]
    splits = [spec.train, *(each.name for each in (*spec.validation, *spec.test))]
    if split not in splits:
        raise UserError(f"{name} has no split {split!r}: choose one of {', '.join(splits)}")
    rng = random.Random(f"{name}/{split}")
    rows: dict[str, Row] = {}
    while len(rows) < SIZES[split]:
        row = _DRAW[name](rng, len(rows))
        text = "\n".join(row[column] for column in spec.text_columns)
        if _owner(text) == split:
            rows.setdefault(text, row)
    shuffled = rng.sample(list(rows.values()), len(rows))
    if spec.kind == "span":
        shuffled = [{"id": f"{name}-{split}-{index}", **row} for index, row in enumerate(shuffled)]
    data = Dataset.from_list(shuffled, features=_features(name))
    return data.remove_columns(spec.label_column) if split == "test" else data


def vocabulary() -> list[str]:
    """The words, in lower case and sorted, that the grammar can produce."""
    expansions = " ".join(text for texts in GRAMMAR.values() for text in texts)
    return sorted(set(re.findall(r"[a-z]+", _FIELD.sub(" ", expansions).lower())))


def _owner(text: str) -> str:
    """The split that a text belongs to: a hash of the text decides, so that splits never share one."""
    return {0: "validation", 1: "test"}.get(zlib.crc32(text.encode()) % 10, "train")


def _features(name: str) -> Features:
    spec = TASKS[name]
    texts = {column: Value("string") for column in spec.text_columns}
    if spec.kind == "span":
        answers = {"text": List(Value("string")), "answer_start": List(Value("int64"))}
        return Features({"id": Value("string"), **texts, spec.label_column: answers})
    return Features({**texts, spec.label_column: Value("float64" if spec.kind == "regression" else "int64")})


def _say(rng: random.Random, template: str, **given: str) -> str:
    """A sentence: each field of the template comes from `given` or else from a random expansion."""

    def fill(match: re.Match[str]) -> str:
        field = match[1]
        return _FIELD.sub(fill, given[field] if field in given else rng.choice(GRAMMAR[field]))

    text = _FIELD.sub(fill, template)
    return text[0].upper() + text[1:]


def _draw_pair(rng: random.Random, turn: int) -> Row:
    """Two people judge one thing; they agree if both like it or both do not."""
    agree, first = turn % 2, rng.random() < LIKES_FIRST
    work = rng.choice(GRAMMAR["work"])
    sentences = [
        _say(rng, "{judgement}", who=who, work=work, verdict="{positive}" if likes else "{negative}")
        for who, likes in zip(rng.sample(GRAMMAR["who"], 2), (first, first == agree), strict=True)
    ]
    return {"sentence1": sentences[0], "sentence2": sentences[1], "label": agree}


def _draw_sentence(rng: random.Random, turn: int) -> Row:
    """One judgement and whether it is a good one."""
    likes = turn % 2
    return {
        "sentence": _say(rng, "{judgement}", verdict="{positive}" if likes else "{negative}"),
        "label": likes,
    }


def _draw_scenes(rng: random.Random, turn: int) -> Row:
    """Two scenes of four attributes: 5 if all are shared, 0 if none; nearly the same counts half."""
    alike = turn % 6 / 5
    first, second, shared = {}, {}, 0.0
    for attribute in _SCENE:
        values = GRAMMAR[attribute]
        one, other = rng.choices(range(len(values)), COMMON, k=2)
        if rng.random() < alike:
            other = one
        shared += 1.0 if one == other else 0.5 if one // 2 == other // 2 else 0.0
        first[attribute], second[attribute] = values[one], values[other]
    return {
        "sentence1": _say(rng, "{scene}", **first),
        "sentence2": _say(rng, "{scene}", **second),
        "label": 5 * shared / len(_SCENE),
    }


def _draw_errand(rng: random.Random, turn: int) -> Row:
    """Somebody takes a thing to a place, another stays elsewhere; the question asks who, what or where."""
    who, other = rng.sample(GRAMMAR["who"], 2)
    place, elsewhere = rng.sample(GRAMMAR["place"], 2)
    given = {"who": who, "thing": rng.choice(GRAMMAR["thing"]), "place": place}
    everything = {**given, "other": other, "elsewhere": elsewhere}
    told = [_say(rng, text, **everything) for text in ("{errand}", "{stay}", "{weather}")]
    context = " ".join(rng.sample(told, len(told)))
    asked = _ERRAND[turn % len(_ERRAND)]
    answer = given[asked]
    # As several people mark answers: the whole phrase, and its noun alone.
    golds = list(dict.fromkeys((answer, answer.split()[-1])))
    return {
        "question": _say(rng, f"{{ask_{asked}}}", **given),
        "context": context,
        "answers": {"text": golds, "answer_start": [context.index(gold) for gold in golds]},
    }


_DRAW: dict[str, Callable[[random.Random, int], Row]] = {
    "demo": _draw_pair,
    "demo_sentence": _draw_sentence,
    "demo_regression": _draw_scenes,
    "demo_span": _draw_errand,
}
