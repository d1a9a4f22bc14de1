import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
import torchmetrics.functional as oracle
import torchmetrics.functional.text as text_oracle

from istar.finetune.tasks.language_modelling import LanguageModelEvaluator
from istar.finetune.tasks.metrics import compute, exact_match, normalize_answer, token_f1
from istar.runs.tasks import TASKS


@pytest.mark.parametrize("seed", range(5))
def test_class_metrics_agree_with_torchmetrics(seed):
    random = np.random.default_rng(seed)
    predictions, references = random.integers(0, 2, (2, 50))
    metrics = compute(["accuracy", "f1", "matthews_correlation"], predictions.tolist(), references.tolist())
    tensors = torch.from_numpy(predictions), torch.from_numpy(references)
    assert metrics["accuracy"] == pytest.approx(float(oracle.accuracy(*tensors, task="binary")), abs=1e-6)
    assert metrics["f1"] == pytest.approx(float(oracle.f1_score(*tensors, task="binary")), abs=1e-6)
    matthews = float(oracle.matthews_corrcoef(*tensors, task="binary"))
    assert metrics["matthews_correlation"] == pytest.approx(matthews, abs=1e-6)


def test_matthews_of_three_classes():
    predictions, references = np.random.default_rng(0).integers(0, 3, (2, 80))
    expected = sklearn.metrics.matthews_corrcoef(references, predictions)
    assert compute(["matthews_correlation"], predictions, references)["matthews_correlation"] == expected


@pytest.mark.parametrize("shift", [0.0, 1e5])
def test_correlations_agree_with_their_formulas(shift):
    random = np.random.default_rng(1)
    references = random.normal(size=200)
    predictions = references + random.normal(size=200) + shift
    predictions[:50] = predictions[50:100]  # ties
    metrics = compute(["pearson", "spearman"], predictions.tolist(), references.tolist())
    assert metrics["pearson"] == pytest.approx(np.corrcoef(predictions, references)[0, 1], rel=1e-9)
    ranks = [scipy.stats.rankdata(values) for values in (predictions, references)]
    assert metrics["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1], rel=1e-9)
    tensors = torch.tensor(predictions), torch.tensor(references)
    assert metrics["spearman"] == pytest.approx(float(oracle.spearman_corrcoef(*tensors)), abs=1e-6)


@pytest.mark.parametrize("constant", [0.0, 2.7, 1e6])
@pytest.mark.parametrize("swap", [False, True])
def test_a_constant_side_correlates_with_nothing(constant, swap):
    sides = [[constant, constant * (1 + 1e-15), constant], [1.0, 2.0, 4.0]]
    predictions, references = reversed(sides) if swap else sides
    assert compute(["pearson", "spearman"], predictions, references) == {"pearson": 0.0, "spearman": 0.0}


@pytest.mark.parametrize("predictions", [[0, 0, 0], [1, 1, 1], [0, 1, 0]])
@pytest.mark.parametrize("references", [[0, 0, 0], [1, 1, 1]])
def test_single_classes_give_numbers_and_no_warnings(predictions, references):
    metrics = compute(["accuracy", "f1", "matthews_correlation"], predictions, references)
    assert metrics["accuracy"] == np.mean(np.equal(predictions, references))
    assert metrics["matthews_correlation"] == 0.0
    assert 0 <= metrics["f1"] <= 1


def test_one_example_is_enough():
    assert compute(["pearson", "spearman"], [1.0], [2.0]) == {"pearson": 0.0, "spearman": 0.0}
    assert compute(["accuracy"], [1], [1]) == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Beatles", "beatles"),
        ("an  apple\ta\nday", "apple day"),
        ("Theatre and another", "theatre and another"),
        ("U.S.A.", "usa"),
        ("a-the", "athe"),  # punctuation goes before articles do
        ("«Ünïcode», ½ … ok!", "«ünïcode» ½ … ok"),  # punctuation is ASCII's only
        ("the.", ""),
        (" no\u00a0break ", "no break"),
    ],
)
def test_normal_form(text, normal):
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "f1"),
    [
        ("the cat", "A cat!", 1, 1),
        ("black cat", "the cat", 0, 2 / 3),
        ("cat cat", "cat", 0, 2 / 3),
        ("", "cat", 0, 0),
        ("", "the", 1, 0),  # as the official v1.1 script: equal, but without a shared token
        ("", "", 1, 0),
        ("São Paulo", "são paulo", 1, 1),
    ],
)
def test_answer_scores(prediction, gold, exact, f1):
    assert exact_match(prediction, gold) == exact
    assert token_f1(prediction, gold) == pytest.approx(f1)


def test_squad_takes_the_best_gold_and_agrees_with_torchmetrics():
    random = np.random.default_rng(2)
    words = ["the", "cat", "Cat,", "sat", "a", "on", "mat."]

    def make_phrase():
        # A phrase of articles alone has F1 0 in v1.1's script, but 1 in v2.0's, which torchmetrics follows.
        return " ".join([*random.choice(words, random.integers(0, 5)), random.choice(words[1:4])])

    predictions = ["the cat sat", *(make_phrase() for _ in range(60))]
    golds = [["dog", "cat sat", "a mat"], *([make_phrase() for _ in range(3)] for _ in range(60))]
    metrics = compute(["squad"], predictions, golds)
    expected = text_oracle.squad(
        [{"prediction_text": text, "id": str(row)} for row, text in enumerate(predictions)],
        [
            {"answers": {"text": gold_texts, "answer_start": [0] * len(gold_texts)}, "id": str(row)}
            for row, gold_texts in enumerate(golds)
        ],
    )
    assert metrics == pytest.approx({name: float(value) / 100 for name, value in expected.items()}, abs=1e-6)
    assert compute(["squad"], predictions[:1], golds[:1]) == {"exact_match": 1.0, "f1": 1.0}


def test_every_task_s_metrics_exist_and_hold_its_headline():
    for spec in TASKS.values():
        if spec.is_language_modelling:
            evaluation = LanguageModelEvaluator(spec, 1)({0: np.array([0.0, 1, 1])})
            assert evaluation.metrics[spec.headline] == pytest.approx(1.0)
            continue
        sample = {"classification": [1, 0], "regression": [1.0, 2.0], "span": ["a b", "c"]}[spec.kind]
        golds = [[text] for text in sample] if spec.kind == "span" else sample
        assert compute(spec.metrics, sample, golds)[spec.headline] == pytest.approx(1.0)
