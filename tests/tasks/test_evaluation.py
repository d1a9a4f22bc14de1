import string

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from istar.errors import UserError
from istar.tasks.evaluation import Evaluator, constant_baseline, write_submission
from istar.tasks.features import featurize
from istar.tasks.metrics import compute
from istar.tasks.specs import TASKS, Split

RTE, STSB, SQUAD, COLA = TASKS["rte"], TASKS["stsb"], TASKS["squad"], TASKS["cola"]
LABELS = [0, 1, 1, 0, 1, 1]
SCORES = [0.0, 1.5, 2.0, 3.25, 4.0, 5.0]


def letters(padding_side: str = "right") -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer in BERT's way whose tokens are single characters."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    signs = string.ascii_lowercase + string.digits + string.punctuation
    vocabulary = {token: row for row, token in enumerate([*special, *signs, *(f"##{sign}" for sign in signs)])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", padding_side=padding_side
    )


def pairs(labels=LABELS) -> Dataset:
    texts = [f"a{row}" for row in range(len(labels))]
    return Dataset.from_dict({"sentence1": texts, "sentence2": texts, "label": labels})


def questions() -> Dataset:
    words = ["apples", "pears", "cherries", "plums"]
    contexts = ["xy " * 30 + f"buy {word} now" + " uv" * 25 for word in words]
    answers = [
        {"text": [word, f"buy {word}"], "answer_start": [text.index(word), text.index("buy")]}
        for word, text in zip(words, contexts, strict=True)
    ]
    return Dataset.from_dict(
        {
            "id": [f"q{row}" for row in range(4)],
            "question": ["what?"] * 4,
            "context": contexts,
            "answers": answers,
        }
    )


def evaluator(spec, examples, side="right", max_length=48) -> Evaluator:
    features = featurize(spec, examples, letters(side), max_length, training=False, doc_stride=8, cache_dir=None)
    return Evaluator(spec, examples, features)


def perfect_spans(evaluate: Evaluator, padding: int = 0, left: bool = False) -> dict[int, np.ndarray]:
    """Logits that point at the first gold answer wherever a window holds it, and high ones in the padding."""
    outputs = {}
    for row in evaluate.features:
        gold = evaluate.examples[row["example_id"]]["answers"]
        start, end = gold["answer_start"][0], gold["answer_start"][0] + len(gold["text"][0])
        offsets = np.array(row["offset_mapping"])
        logits = np.stack([offsets[:, 0] == start, offsets[:, 1] == end]) * 5.0
        edge = np.full((2, padding), 99.0, dtype=np.float32)
        outputs[row["feature_id"]] = np.concatenate([edge, logits] if left else [logits, edge], axis=1)
    return outputs


def test_classification():
    random = np.random.default_rng(0)
    logits = random.normal(size=(6, 2)).astype(np.float32) * 100
    found = evaluator(RTE, pairs())(dict(enumerate(logits)))
    chosen = logits.argmax(axis=1)
    assert found.metrics == {"accuracy": np.mean(chosen == LABELS)}
    assert [row["id"] for row in found.predictions] == list(range(6))
    assert [row["prediction"] for row in found.predictions] == [RTE.labels[row] for row in chosen]
    assert [row["label"] for row in found.predictions] == [RTE.labels[row] for row in LABELS]
    expected = torch.from_numpy(logits).double().softmax(dim=1).numpy()
    np.testing.assert_allclose([row["scores"] for row in found.predictions], expected, rtol=1e-9)
    assert type(found.predictions[0]["scores"][0]) is float


def test_regression():
    values = np.array([0.5, 1.0, 2.5, 3.0, 3.5, 6.0])
    found = evaluator(STSB, pairs(SCORES))(dict(enumerate(values[:, None])))
    assert found.metrics == compute(["pearson", "spearman"], values.tolist(), SCORES)
    assert found.metrics["spearman"] == pytest.approx(1.0)
    assert found.predictions[3] == {"id": 3, "prediction": 3.0, "label": 3.25}
    assert not found.collapsed


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("padding", [0, 3])
def test_spans(side, padding):
    evaluate = evaluator(SQUAD, questions(), side)
    assert len(evaluate.features) > 4
    found = evaluate(perfect_spans(evaluate, padding, left=side == "left"))
    assert found.metrics == {"exact_match": 1.0, "f1": 1.0}
    assert found.predictions[2] == {
        "id": "q2",
        "prediction": "cherries",
        "label": ["cherries", "buy cherries"],
    }
    assert not found.collapsed


def test_neither_the_order_of_outputs_nor_that_of_features_matters():
    random = np.random.default_rng(1)
    order = random.permutation(6).tolist()
    outputs = dict(enumerate(random.normal(size=(6, 2))))
    evaluate = evaluator(RTE, pairs())
    shuffled = Evaluator(RTE, evaluate.examples, evaluate.features.select(order))
    expected = evaluate(outputs)
    assert evaluate({row: outputs[row] for row in order}) == expected
    assert shuffled({row: outputs[row] for row in order}) == expected

    evaluate = evaluator(SQUAD, questions())
    outputs = {
        row["feature_id"]: random.normal(size=(2, row["length"] + int(random.integers(4)))) for row in evaluate.features
    }
    expected = evaluate(outputs)
    assert evaluate(dict(reversed(outputs.items()))) == expected
    backwards = evaluate.features.select(range(len(outputs) - 1, -1, -1))
    assert Evaluator(SQUAD, evaluate.examples, backwards)(outputs) == expected


def test_memory_mapped_features_are_as_good(tmp_path):
    evaluate = evaluator(SQUAD, questions())
    stored = featurize(SQUAD, questions(), letters(), 48, training=False, doc_stride=8, cache_dir=tmp_path)
    outputs = perfect_spans(evaluate)
    assert Evaluator(SQUAD, evaluate.examples, stored)(outputs) == evaluate(outputs)


def test_limits_on_answers_reach_the_decoding():
    evaluate = evaluator(SQUAD, questions())
    short = Evaluator(SQUAD, evaluate.examples, evaluate.features, max_answer_length=2)
    assert max(len(row["prediction"]) for row in short(perfect_spans(evaluate)).predictions) <= 2
    none = Evaluator(SQUAD, evaluate.examples, evaluate.features, n_best=1, max_answer_length=1)
    assert {row["prediction"] for row in none(perfect_spans(evaluate)).predictions} <= {"", "x", "b"}


@pytest.mark.parametrize(("drop", "add", "message"), [([0, 3], [], "2 missing, 0 unknown"), ([], [9], "0 mis.* 1 unk")])
def test_exactly_the_features_are_wanted(drop, add, message):
    outputs = {row: np.zeros(2) for row in [*range(6), *add] if row not in drop}
    with pytest.raises(ValueError, match=message):
        evaluator(RTE, pairs())(outputs)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(bad):
    outputs = {row: np.array([0.0, bad if row in (2, 4) else 1.0]) for row in range(6)}
    with pytest.raises(ValueError, match="2 of 6 features are not finite"):
        evaluator(RTE, pairs())(outputs)
    evaluate = evaluator(SQUAD, questions())
    spans = perfect_spans(evaluate)
    spans[1][0, 3] = bad
    with pytest.raises(ValueError, match=r"1 of .* not finite"):
        evaluate(spans)


def test_padding_may_hold_anything():
    evaluate = evaluator(SQUAD, questions())
    outputs = perfect_spans(evaluate, padding=2)
    for logits in outputs.values():
        logits[:, -2:] = -np.inf
    assert evaluate(outputs).metrics["f1"] == 1.0


def test_wrong_shapes_and_other_examples_are_refused():
    with pytest.raises(ValueError, match="shape"):
        evaluator(RTE, pairs())({row: np.zeros(3) for row in range(6)})
    with pytest.raises(ValueError, match="shape"):
        evaluator(STSB, pairs(SCORES))({row: np.float64(1.0) for row in range(6)})
    evaluate = evaluator(SQUAD, questions())
    with pytest.raises(ValueError, match="logits"):
        evaluate({name: logits[:, :-1] for name, logits in perfect_spans(evaluate).items()})
    features = evaluator(RTE, pairs()).features
    outputs = {row: np.zeros(2) for row in range(6)}
    with pytest.raises(ValueError, match="example 5"):
        Evaluator(RTE, pairs(LABELS[:5]), features)(outputs)
    with pytest.raises(ValueError, match="1 of 7 examples"):
        Evaluator(RTE, pairs([*LABELS, 0]), features)(outputs)


def test_unlabelled_sets_have_predictions_only():
    evaluate = evaluator(RTE, pairs().remove_columns("label"))
    found = evaluate({row: np.array([0.0, 1.0]) for row in range(6)})
    assert found.metrics == {}
    assert not found.collapsed
    assert set(found.predictions[0]) == {"id", "prediction", "scores"}
    spans = evaluator(SQUAD, questions().remove_columns("answers"))
    outputs = perfect_spans(evaluator(SQUAD, questions()))
    assert [row["prediction"] for row in spans(outputs).predictions] == [
        "apples",
        "pears",
        "cherries",
        "plums",
    ]


def test_collapse_of_classes():
    same = {row: np.array([0.0, 1.0]) for row in range(6)}
    assert evaluator(RTE, pairs())(same).collapsed
    assert not evaluator(RTE, pairs([1] * 6))(same).collapsed
    assert not evaluator(RTE, pairs())(same | {3: np.array([1.0, 0.0])}).collapsed


@pytest.mark.parametrize(("spread", "collapsed"), [(0.0, True), (1e-3, True), (0.3, False)])
def test_collapse_of_numbers(spread, collapsed):
    outputs = {row: np.array([2.5 + spread * (-1) ** row]) for row in range(6)}
    assert evaluator(STSB, pairs(SCORES))(outputs).collapsed is collapsed
    assert not evaluator(STSB, pairs([2.0] * 6))(outputs).collapsed


def test_collapse_of_answers():
    evaluate = evaluator(SQUAD, questions())
    flat = {row["feature_id"]: np.zeros((2, row["length"])) for row in evaluate.features}
    assert evaluate(flat).collapsed
    one = questions().select([0, 0])
    alone = evaluator(SQUAD, one)
    assert not alone(perfect_spans(alone)).collapsed


def test_constant_baseline():
    assert constant_baseline(RTE, pairs([1, 1, 0]), pairs()) == {"accuracy": pytest.approx(4 / 6)}
    assert constant_baseline(RTE, pairs([0, 1]), pairs()) == {"accuracy": pytest.approx(2 / 6)}
    assert constant_baseline(STSB, pairs([1.0, 2.0]), pairs(SCORES)) == {"pearson": 0.0, "spearman": 0.0}
    assert constant_baseline(SQUAD, questions(), questions()) == {}
    assert constant_baseline(RTE, pairs(), pairs().remove_columns("label")) == {}


def test_submissions(tmp_path):
    def lines(spec, split, predictions):
        rows = [{"id": row, "prediction": value} for row, value in enumerate(predictions)]
        path = write_submission(spec, split, rows, tmp_path / "glue")
        assert path == tmp_path / "glue" / split.submission
        return path.read_bytes().decode().split("\n")

    names = lines(RTE, RTE.test[0], ["not_entailment", "entailment"])
    assert names == ["index\tprediction", "0\tnot_entailment", "1\tentailment", ""]
    ids = lines(COLA, COLA.test[0], ["acceptable", "unacceptable"])
    assert ids == ["index\tprediction", "0\t1", "1\t0", ""]
    numbers = lines(STSB, STSB.test[0], [-0.25, 3.14159, 7.0])
    assert numbers == ["index\tprediction", "0\t0.000", "1\t3.142", "2\t5.000", ""]
    assert sorted(path.name for path in (tmp_path / "glue").iterdir()) == ["CoLA.tsv", "RTE.tsv", "STS-B.tsv"]


def test_a_submission_replaces_an_old_one_whole_or_not_at_all(tmp_path):
    old = tmp_path / "RTE.tsv"
    old.write_text("old")
    with pytest.raises(KeyError):
        write_submission(RTE, RTE.test[0], [{"id": 0, "prediction": "entailment"}, {"id": 1}], tmp_path)
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]
    write_submission(RTE, RTE.test[0], [{"id": 0, "prediction": "entailment"}], tmp_path)
    assert old.read_text() == "index\tprediction\n0\tentailment\n"


def test_only_test_sets_of_glue_are_submitted(tmp_path):
    with pytest.raises(UserError, match="sst5"):
        write_submission(TASKS["sst5"], Split("test"), [], tmp_path)
