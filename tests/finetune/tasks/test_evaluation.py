import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from istar.errors import NonFiniteError
from istar.finetune.tasks.evaluation import Evaluator, constant_baseline, write_submission
from istar.finetune.tasks.features import Collator, FeatureRows, featurize
from istar.finetune.tasks.loading import fingerprint, hold_out, sample_examples
from istar.finetune.tasks.metrics import compute
from istar.finetune.training.module import logits_by_feature
from istar.runs.tasks import TASKS
from tests.finetune.tasks.builders import make_questions, make_tokenizer

RTE, STSB, SQUAD, COLA = TASKS["rte"], TASKS["stsb"], TASKS["squad"], TASKS["cola"]
LABELS = [0, 1, 1, 0, 1, 1]
SCORES = [0.0, 1.5, 2.0, 3.25, 4.0, 5.0]


def pairs(labels=LABELS) -> Dataset:
    texts = [f"a{row}" for row in range(len(labels))]
    return Dataset.from_dict({"sentence1": texts, "sentence2": texts, "label": labels})


def questions() -> Dataset:
    return make_questions(["apples", "pears", "cherries", "plums"], "xy " * 30, " uv" * 25)


def make_evaluator(spec, examples) -> Evaluator:
    features = featurize(spec, examples, make_tokenizer(), 48, training=False, doc_stride=8, cache_dir=None)
    return Evaluator(spec, examples, features)


def make_perfect_logits(evaluator: Evaluator) -> dict[int, np.ndarray]:
    """Return logits that point at the first gold answer in each window that holds it."""
    outputs = {}
    for row in evaluator.features:
        answers = evaluator.examples[row["example_id"]]["answers"]
        start, end = answers["answer_start"][0], answers["answer_start"][0] + len(answers["text"][0])
        offsets = np.array(row["offset_mapping"])
        outputs[row["feature_id"]] = np.stack([offsets[:, 0] == start, offsets[:, 1] == end]) * 5.0
    return outputs


def test_classification():
    random = np.random.default_rng(0)
    logits = random.normal(size=(6, 2)).astype(np.float32) * 100
    evaluation = make_evaluator(RTE, pairs())(dict(enumerate(logits)))
    predicted = logits.argmax(axis=1)
    assert evaluation.metrics == {"accuracy": np.mean(predicted == LABELS)}
    assert [row["id"] for row in evaluation.predictions] == list(range(6))
    assert [row["prediction"] for row in evaluation.predictions] == [RTE.labels[row] for row in predicted]
    assert [row["label"] for row in evaluation.predictions] == [RTE.labels[row] for row in LABELS]
    expected = torch.from_numpy(logits).double().softmax(dim=1).numpy()
    np.testing.assert_allclose([row["scores"] for row in evaluation.predictions], expected, rtol=1e-9)
    assert type(evaluation.predictions[0]["scores"][0]) is float


def test_ids_are_rows_of_the_source_in_samples_too():
    examples = pairs([0, 1] * 50)
    sample = sample_examples(examples, 40)
    remaining, held_out = hold_out(RTE, sample, 0.25)
    for rows in (examples, sample, remaining, held_out):
        evaluation = make_evaluator(RTE, rows)({row: np.zeros(2) for row in range(len(rows))})
        assert [f"a{row['id']}" for row in evaluation.predictions] == rows["sentence1"][:]
    assert fingerprint(sample) == fingerprint(examples.select(sample["row"][:]))


def test_regression():
    values = np.array([0.5, 1.0, 2.5, 3.0, 3.5, 6.0])
    evaluation = make_evaluator(STSB, pairs(SCORES))(dict(enumerate(values[:, None])))
    assert evaluation.metrics == compute(["pearson", "spearman"], values.tolist(), SCORES)
    assert evaluation.metrics["spearman"] == pytest.approx(1.0)
    assert evaluation.predictions[3] == {"id": 3, "prediction": 3.0, "label": 3.25}
    assert not evaluation.collapsed


@pytest.mark.parametrize("side", ["right", "left"])
def test_spans(side):
    evaluator = make_evaluator(SQUAD, questions())
    assert len(evaluator.features) > 4
    batch = Collator(make_tokenizer(padding_side=side))(list(FeatureRows(evaluator.features)))
    padded_logits = torch.full((2, *batch["input_ids"].shape), torch.inf)
    for row, window_logits in make_perfect_logits(evaluator).items():
        padded_logits[:, row, batch["attention_mask"][row].bool()] = torch.from_numpy(window_logits).float()
    outputs = QuestionAnsweringModelOutput(start_logits=padded_logits[0], end_logits=padded_logits[1])
    evaluation = evaluator(logits_by_feature(batch, outputs))
    assert evaluation.metrics == {"exact_match": 1.0, "f1": 1.0}
    assert evaluation.predictions[2] == {"id": "q2", "prediction": "cherries", "label": ["cherries", "buy cherries"]}
    assert not evaluation.collapsed


def test_neither_the_order_of_outputs_nor_that_of_features_matters():
    random = np.random.default_rng(1)
    order = random.permutation(6).tolist()
    outputs = dict(enumerate(random.normal(size=(6, 2))))
    evaluator = make_evaluator(RTE, pairs())
    assert evaluator({row: outputs[row] for row in order}) == evaluator(outputs)

    evaluator = make_evaluator(SQUAD, questions())
    outputs = {row["feature_id"]: random.normal(size=(2, row["length"])) for row in evaluator.features}
    expected = evaluator(outputs)
    assert evaluator(dict(reversed(outputs.items()))) == expected
    reversed_features = evaluator.features.select(range(len(outputs) - 1, -1, -1))
    assert Evaluator(SQUAD, evaluator.examples, reversed_features)(outputs) == expected


def test_memory_mapped_features_are_as_good(tmp_path):
    evaluator = make_evaluator(SQUAD, questions())
    settings = {"training": False, "doc_stride": 8, "cache_dir": tmp_path}
    mapped_features = featurize(SQUAD, questions(), make_tokenizer(), 48, **settings)
    outputs = make_perfect_logits(evaluator)
    assert Evaluator(SQUAD, evaluator.examples, mapped_features)(outputs) == evaluator(outputs)


def test_limits_on_answers_reach_the_decoding():
    evaluator = make_evaluator(SQUAD, questions())
    short_evaluator = Evaluator(SQUAD, evaluator.examples, evaluator.features, max_answer_length=2)
    assert max(len(row["prediction"]) for row in short_evaluator(make_perfect_logits(evaluator)).predictions) <= 2
    one_token_evaluator = Evaluator(SQUAD, evaluator.examples, evaluator.features, n_best=1, max_answer_length=1)
    predictions = one_token_evaluator(make_perfect_logits(evaluator)).predictions
    assert {row["prediction"] for row in predictions} <= {"", "x", "b"}


@pytest.mark.parametrize(("drop", "add", "message"), [([0, 3], [], "2 missing, 0 unknown"), ([], [9], "0 mis.* 1 unk")])
def test_exactly_the_features_are_wanted(drop, add, message):
    outputs = {row: np.zeros(2) for row in [*range(6), *add] if row not in drop}
    with pytest.raises(ValueError, match=message):
        make_evaluator(RTE, pairs())(outputs)


@pytest.mark.parametrize("invalid_logit", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(invalid_logit):
    outputs = {row: np.array([0.0, invalid_logit if row in (2, 4) else 1.0]) for row in range(6)}
    with pytest.raises(NonFiniteError, match=r"^task rte: .* 2 of 6 features are not finite"):
        make_evaluator(RTE, pairs())(outputs)
    evaluator = make_evaluator(SQUAD, questions())
    span_logits = make_perfect_logits(evaluator)
    span_logits[1][0, 3] = invalid_logit
    with pytest.raises(NonFiniteError, match=r"^task squad: .* 1 of .* not finite"):
        evaluator(span_logits)


def test_unlabelled_sets_have_predictions_only():
    evaluator = make_evaluator(RTE, pairs().remove_columns("label"))
    evaluation = evaluator({row: np.array([0.0, 1.0]) for row in range(6)})
    assert evaluation.metrics == {}
    assert not evaluation.collapsed
    assert set(evaluation.predictions[0]) == {"id", "prediction", "scores"}
    span_evaluator = make_evaluator(SQUAD, questions().remove_columns("answers"))
    outputs = make_perfect_logits(make_evaluator(SQUAD, questions()))
    predictions = [row["prediction"] for row in span_evaluator(outputs).predictions]
    assert predictions == ["apples", "pears", "cherries", "plums"]


def test_collapse_of_classes():
    equal_logits = {row: np.array([0.0, 1.0]) for row in range(6)}
    assert make_evaluator(RTE, pairs())(equal_logits).collapsed
    assert not make_evaluator(RTE, pairs([1] * 6))(equal_logits).collapsed
    assert not make_evaluator(RTE, pairs())(equal_logits | {3: np.array([1.0, 0.0])}).collapsed


@pytest.mark.parametrize(("spread", "collapsed"), [(0.0, True), (1e-3, True), (0.3, False)])
def test_collapse_of_numbers(spread, collapsed):
    outputs = {row: np.array([2.5 + spread * (-1) ** row]) for row in range(6)}
    assert make_evaluator(STSB, pairs(SCORES))(outputs).collapsed is collapsed
    assert not make_evaluator(STSB, pairs([2.0] * 6))(outputs).collapsed


def test_collapse_of_answers():
    evaluator = make_evaluator(SQUAD, questions())
    flat_logits = {row["feature_id"]: np.zeros((2, row["length"])) for row in evaluator.features}
    assert evaluator(flat_logits).collapsed
    repeated_question = questions().select([0, 0])
    question_evaluator = make_evaluator(SQUAD, repeated_question)
    assert not question_evaluator(make_perfect_logits(question_evaluator)).collapsed


def test_constant_baseline():
    assert constant_baseline(RTE, pairs([1, 1, 0]), pairs()) == {"accuracy": pytest.approx(4 / 6)}
    assert constant_baseline(RTE, pairs([0, 1]), pairs()) == {"accuracy": pytest.approx(2 / 6)}
    assert constant_baseline(STSB, pairs([1.0, 2.0]), pairs(SCORES)) == {"pearson": 0.0, "spearman": 0.0}
    assert constant_baseline(SQUAD, questions(), questions()) == {}
    assert constant_baseline(RTE, pairs(), pairs().remove_columns("label")) == {}


def test_submissions(tmp_path):
    def write_and_read_lines(spec, split, predictions):
        rows = [{"id": index, "prediction": value} for index, value in enumerate(predictions)]
        path = write_submission(spec, split, rows, tmp_path / "glue")
        assert path == tmp_path / "glue" / split.submission
        return path.read_bytes().decode().split("\n")

    name_lines = write_and_read_lines(RTE, RTE.test[0], ["not_entailment", "entailment"])
    assert name_lines == ["index\tprediction", "0\tnot_entailment", "1\tentailment", ""]
    id_lines = write_and_read_lines(COLA, COLA.test[0], ["acceptable", "unacceptable"])
    assert id_lines == ["index\tprediction", "0\t1", "1\t0", ""]
    score_lines = write_and_read_lines(STSB, STSB.test[0], [-0.25, 3.14159, 7.0])
    assert score_lines == ["index\tprediction", "0\t0.000", "1\t3.142", "2\t5.000", ""]
    assert sorted(path.name for path in (tmp_path / "glue").iterdir()) == ["CoLA.tsv", "RTE.tsv", "STS-B.tsv"]


def test_a_submission_replaces_an_old_one_whole_or_not_at_all(tmp_path):
    submission = tmp_path / "RTE.tsv"
    submission.write_text("old")
    with pytest.raises(KeyError):
        write_submission(RTE, RTE.test[0], [{"id": 0, "prediction": "entailment"}, {"id": 1}], tmp_path)
    assert submission.read_text() == "old"
    assert list(tmp_path.iterdir()) == [submission]
    write_submission(RTE, RTE.test[0], [{"id": 0, "prediction": "entailment"}], tmp_path)
    assert submission.read_text() == "index\tprediction\n0\tentailment\n"
