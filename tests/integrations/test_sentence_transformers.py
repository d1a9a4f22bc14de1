"""The penalty with losses of sentence-transformers: gradients against the formula, logs, Sigma_S and resuming."""

import contextlib
import copy
import functools
import os
import random
import shutil
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import transformers as hf
from torch import Tensor, nn
from torch.testing import assert_close

pytest.importorskip("sentence_transformers")
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import istar
from istar.errors import UserError
from istar.integrations.sentence_transformers import PenaltyLoss, PenaltyLossCallback
from tests.integrations.builders import BERT, CLOSE, SHAPE, WEIGHT, ZETA, compute_gradients, compute_penalty
from tests.oracles import algorithm_1, stack

WORDS = list("abcdefghijklmnopqrstuvwxyz")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small saved BERT and its tokenizer."""
    path = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    hf.BertModel(hf.BertConfig(**BERT)).save_pretrained(path)
    hf.BertTokenizer(vocab={word: i for i, word in enumerate(SPECIAL + WORDS)}).save_pretrained(path)
    return path


@functools.cache
def load_encoder(folder: Path) -> SentenceTransformer:
    modules = [Transformer(str(folder)), Pooling(12)]
    return SentenceTransformer(modules=modules, device="cpu").double()


def make_encoder(folder: Path) -> SentenceTransformer:
    return copy.deepcopy(load_encoder(folder))


def test_a_model_whose_first_state_is_not_the_embedding_output_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 40}
    hf.MambaModel(hf.MambaConfig(**sizes)).save_pretrained(tmp_path)
    hf.BertTokenizer(vocab={word: i for i, word in enumerate(SPECIAL + WORDS)}).save_pretrained(tmp_path)
    model = make_encoder(tmp_path)
    loss = losses.MultipleNegativesRankingLoss(model)
    with pytest.raises(
        UserError, match="MambaModel returns no embeddings as its first hidden state; expected on='pool"
    ):
        PenaltyLoss(model, loss, istar.IStar(-1.0, zeta=0))


def make_pairs(num_pairs: int, with_labels: bool = False) -> Dataset:
    generator = random.Random(2)
    texts = [
        [" ".join(generator.choices(WORDS, k=generator.randint(2, 6))) for _ in range(num_pairs)] for _ in range(2)
    ]
    columns: dict[str, Any] = {"anchor": texts[0], "positive": texts[1]}
    return Dataset.from_dict(
        columns | ({"label": [generator.random() for _ in range(num_pairs)]} if with_labels else {})
    )


class MeanSquaredError(nn.MSELoss):
    """torch 2.10 has no gradient for labels of another data type than the outputs."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return super().forward(outputs, labels.to(outputs.dtype))


def make_loss(model: SentenceTransformer, has_labels: bool) -> nn.Module:
    if has_labels:
        return losses.CosineSimilarityLoss(model, MeanSquaredError())
    return losses.MultipleNegativesRankingLoss(model)


class RecordingLoss(nn.Module):
    """A loss that records its arguments."""

    def __init__(self, model: SentenceTransformer, loss: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.calls: list[Any] = []

    def forward(self, sentence_features: Any, labels: Tensor | None = None) -> Tensor:
        columns = [{name: features[name] for name in ("input_ids", "attention_mask")} for features in sentence_features]
        self.calls.append((columns, labels))
        return self.loss(sentence_features, labels)


class GradientRecorder(hf.TrainerCallback):
    """Records the gradients of the first optimizer step."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.gradients:
            named = model.named_parameters()
            self.gradients = {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def make_trainer(
    folder: Path, model: SentenceTransformer, loss: nn.Module, data: Dataset, *callbacks: Any, **settings: Any
) -> SentenceTransformerTrainer:
    defaults = {
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": "none",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "logging_steps": 1,
    }
    args = SentenceTransformerTrainingArguments(str(folder), **(defaults | settings))
    return SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss, callbacks=list(callbacks))


def naive_loss(base: nn.Module, columns: list[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
    """Return the contrastive loss without labels, and the squared error of cosines with labels."""
    embeddings = []
    for column in columns:
        mask = column["attention_mask"][..., None].double()
        embeddings.append((base(**column).last_hidden_state * mask).sum(1) / mask.sum(1))
    first, second = (nn.functional.normalize(embedding) for embedding in embeddings)
    if labels is None:
        return nn.functional.cross_entropy(20 * first @ second.T, torch.arange(len(first)))
    return (((first * second).sum(-1) - labels) ** 2).mean()


def naive_points(base: nn.Module, columns: list[dict[str, Tensor]], on: str) -> Tensor:
    clouds = []
    for column in columns:
        states, mask = base(**column, output_hidden_states=True).hidden_states, column["attention_mask"]
        if on == "tokens":
            clouds.append(stack(states[1:], mask))
        else:
            token_weights = mask[..., None].double()
            clouds.append((states[-1] * token_weights).sum(1) / token_weights.sum(1))
    return torch.cat(clouds)


@pytest.mark.parametrize(("has_labels", "on", "accumulation"), [(False, "tokens", 2), (True, "pooled", 1)])
def test_the_gradient_is_that_of_the_mean_over_micro_batches(bert_folder, tmp_path, has_labels, on, accumulation):
    model, base = make_encoder(bert_folder), hf.BertModel.from_pretrained(bert_folder).double()
    data = make_pairs(4 * accumulation, with_labels=has_labels)
    recording_loss = RecordingLoss(model, make_loss(model, has_labels))
    loss = PenaltyLoss(model, recording_loss, istar.IStar(WEIGHT, ZETA), on)
    gradient_recorder = GradientRecorder()
    trainer = make_trainer(
        tmp_path,
        model,
        loss,
        data,
        PenaltyLossCallback(loss),
        gradient_recorder,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
    )
    trainer.train()

    covariance = loss.penalty.shrinkage_covariance
    points = torch.cat([naive_points(base, columns, on) for columns, _ in recording_loss.calls])
    assert_close(covariance.double(), torch.cov(points.T), rtol=1e-4, atol=1e-6)
    assert len(recording_loss.calls) == accumulation
    expected_losses, expected_penalties = [], []
    for columns, labels in recording_loss.calls:
        expected_losses.append(naive_loss(base, columns, labels))
        expected_penalties.append(compute_penalty(naive_points(base, columns, on), covariance))
    expected = compute_gradients(base, (torch.stack(expected_losses) + torch.stack(expected_penalties)).mean())
    actual = {name.removeprefix("0.model."): gradient for name, gradient in gradient_recorder.gradients.items()}
    assert_close(actual, expected, **CLOSE)

    first_log = trainer.state.log_history[0]
    assert first_log["task_loss"] == pytest.approx(torch.stack(expected_losses).mean().item(), abs=1e-3)
    assert first_log["penalty"] == pytest.approx(torch.stack(expected_penalties).mean().item(), abs=1e-3)
    assert first_log["loss"] == pytest.approx(first_log["task_loss"] + first_log["penalty"], abs=1e-3)
    assert first_log["isoscore_star"] == pytest.approx(1 - first_log["penalty"] / WEIGHT, abs=1e-3)
    assert first_log["points"] == pytest.approx(len(points) / accumulation)
    assert not model[0].model.config.output_hidden_states


def run_in_process(rank: int, port: int, folder: Path, data: Dataset, on: str) -> None:
    """One of two processes, as torchrun starts them."""
    warnings.simplefilter("ignore")
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()}
    model = make_encoder(folder)
    recording_loss = RecordingLoss(model, make_loss(model, has_labels=True))
    loss = PenaltyLoss(model, recording_loss, istar.IStar(WEIGHT, ZETA), on)
    gradient_recorder = GradientRecorder()
    settings = {"gradient_accumulation_steps": 2, "max_steps": 1, "ddp_backend": "gloo"}
    # The pooler of BERT has no gradient.
    settings["ddp_find_unused_parameters"] = True
    make_trainer(folder / "output", model, loss, data, PenaltyLossCallback(loss), gradient_recorder, **settings).train()
    torch.save(
        (gradient_recorder.gradients, recording_loss.calls, loss.penalty.shrinkage_covariance), folder / f"{rank}.pt"
    )


def test_over_two_processes_the_penalty_is_that_of_one_cloud(bert_folder, tmp_path):
    on = "tokens"
    shutil.copytree(bert_folder, tmp_path, dirs_exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.start_processes(run_in_process, (port, tmp_path, make_pairs(16, with_labels=True), on), 2, start_method="fork")
    outcomes = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]

    base = hf.BertModel.from_pretrained(bert_folder).double()
    covariance = outcomes[0][2]
    expected_losses = []
    for step in range(2):
        parts = [calls[step] for _, calls, _ in outcomes]
        cloud = torch.cat([naive_points(base, columns, on) for columns, _ in parts])
        for columns, labels in parts:
            expected_losses.append(naive_loss(base, columns, labels) + compute_penalty(cloud, covariance))
    expected_gradients = compute_gradients(base, torch.stack(expected_losses).mean())
    for process_gradients, _, _ in outcomes:
        actual = {
            name.removeprefix("module.").removeprefix("0.model."): gradient
            for name, gradient in process_gradients.items()
        }
        assert_close({name: actual[name] for name in expected_gradients}, expected_gradients, **CLOSE)
    assert torch.equal(covariance, outcomes[1][2])


@pytest.mark.slow
def test_a_resumed_training_ends_as_one_that_was_not_interrupted(bert_folder, tmp_path):
    # The checkpoints are in the middle of an epoch; their Sigma_S must be that of the beginning of the epoch.
    def train(resume: Path | None = None) -> dict[str, Tensor]:
        model = make_encoder(bert_folder)
        loss = PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.IStar(WEIGHT, ZETA))
        loss.settings = istar.PenaltySettings(num_points=60)
        settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
        trainer = make_trainer(tmp_path, model, loss, make_pairs(12), PenaltyLossCallback(loss), **settings)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    uninterrupted = train()
    for step in (2, 3, 4):
        assert_close(train(tmp_path / f"checkpoint-{step}"), uninterrupted, rtol=0, atol=0)


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_second_training_begins_like_the_first(bert_folder, tmp_path, is_failed):
    """Also one that follows a training that failed, as `auto_find_batch_size` repeats it."""
    model = make_encoder(bert_folder)
    settings = istar.PenaltySettings(schedule="linear", num_points=30, momentum=0.5)
    penalty = istar.IStar(1.0, ZETA, set_point=istar.SetPoint("keep"))
    loss = PenaltyLoss(model, make_loss(model, has_labels=False), penalty, settings=settings)
    trainer = make_trainer(
        tmp_path, model, loss, make_pairs(12), PenaltyLossCallback(loss), max_steps=3, learning_rate=0.0
    )
    states: list[Any] = []

    class StateRecorder(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                states.append([penalty.kept_score, penalty.shrinkage_covariance, torch.tensor(penalty.weight)])
                if is_failed and len(states) == 1:
                    raise KeyboardInterrupt

    trainer.add_callback(StateRecorder())
    with pytest.raises(KeyboardInterrupt) if is_failed else contextlib.nullcontext():
        trainer.train()
    penalty.kept_score = penalty.kept_score + 1
    trainer.train()
    assert_close(states[1], states[0], rtol=0, atol=0)
    assert penalty.weight == 1


def test_a_refresh_leaves_the_order_of_the_batches_alone(bert_folder, tmp_path):
    def train_and_read_batches(zeta: float) -> list[Any]:
        model = make_encoder(bert_folder)
        recording_loss = RecordingLoss(model, losses.MultipleNegativesRankingLoss(model))
        loss = PenaltyLoss(model, recording_loss, istar.IStar(WEIGHT, zeta))
        settings = {"num_train_epochs": 2, "batch_sampler": "no_duplicates", "logging_strategy": "no"}
        make_trainer(tmp_path, model, loss, make_pairs(8), PenaltyLossCallback(loss), **settings).train()
        return [[column["input_ids"].tolist() for column in columns] for columns, _ in recording_loss.calls]

    with_refresh = train_and_read_batches(ZETA)
    assert len(with_refresh) == 4
    assert with_refresh == train_and_read_batches(0)


def test_in_evaluation_there_is_no_penalty_and_with_lambda_0_it_is_0(bert_folder):
    model = make_encoder(bert_folder)
    loss = PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.CosReg(1.0))
    features = [model.preprocess(["a b", "c d e"]), model.preprocess(["f", "g h"])]
    components = loss([dict(column) for column in features], None)
    assert set(components) == {"task_loss", "penalty", "average_cosine", "points"}
    assert_close(sum(components.values()), components["task_loss"] + components["penalty"], rtol=0, atol=0)
    with torch.no_grad():
        assert set(loss([dict(column) for column in features], None)) == {"task_loss"}
    loss.penalty.weight = 0.0
    assert "penalty" not in loss([dict(column) for column in features], None)


def test_losses_that_compute_embeddings_again_are_refused(bert_folder):
    model = make_encoder(bert_folder)
    loss = PenaltyLoss(model, losses.CachedMultipleNegativesRankingLoss(model), istar.CosReg(1.0))
    features = [model.preprocess(["a b", "c d e"]), model.preprocess(["f", "g h"])]
    with pytest.raises(istar.UserError, match="CachedMultipleNegativesRankingLoss does not run the model with grad"):
        loss(features, None)
    with pytest.raises(istar.UserError, match="expected one of tokens, pooled"):
        PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.CosReg(1.0), on="words")


@pytest.mark.parametrize("is_nested", [False, True])
def test_several_losses_leave_the_models_settings_alone(bert_folder, tmp_path, is_nested):
    """With a data set and a loss for each of two tasks, or one penalty around another."""
    model = make_encoder(bert_folder)
    first = PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.CosReg(1.0))
    if is_nested:
        second = PenaltyLoss(model, first, istar.IStar(1.0, 0.0))
        loss, data = second, make_pairs(8)
    else:
        second = PenaltyLoss(model, make_loss(model, has_labels=True), istar.IStar(1.0, 0.0))
        loss = {"a": first, "b": second}
        data = {"a": make_pairs(8), "b": make_pairs(8, with_labels=True)}
    make_trainer(tmp_path, model, loss, data, num_train_epochs=1).train()
    assert all(one.penalty.last.points > 0 for one in (first, second))
    assert not model[0].model.config.output_hidden_states
    model.save(str(tmp_path / "saved"), create_model_card=False)
    assert not hf.AutoConfig.from_pretrained(tmp_path / "saved").output_hidden_states


def test_two_penalties_around_one_loss_are_added_up(bert_folder):
    model = make_encoder(bert_folder).eval()
    first = PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.CosReg(1.0))
    second = PenaltyLoss(model, first, istar.CosReg(2.0), on="pooled")
    features = [model.preprocess(["a b", "c d e"]), model.preprocess(["f", "g h"])]
    components = second(features, None)
    assert len(components.values()) == 3
    names = ["penalty", "average_cosine", "points"]
    assert list(components) == ["task_loss", *names, *(f"{name}_2" for name in names)]
    assert_close(sum(components.values()), components["task_loss"] + components["penalty"] + components["penalty_2"])
    assert components["penalty"] == first.penalty.last.value
    assert components["penalty_2"] == 2 * second.penalty.last.value


@pytest.mark.parametrize("logging_steps", [1, 3, 12])
def test_each_dataset_logs_the_means_of_its_own_penalty(bert_folder, tmp_path, logging_steps):
    """Two data sets have penalties with one score, which no other batch may dilute, and the third has another one."""
    model = make_encoder(bert_folder)
    cosines = [
        PenaltyLoss(model, make_loss(model, has_labels=False), istar.CosReg(weight), suffix=suffix)
        for weight, suffix in ((1.0, "_a"), (2.0, "_b"))
    ]
    isoscore = PenaltyLoss(model, make_loss(model, has_labels=False), istar.IStar(1.0, 0.0), on="pooled")
    losses_by_name = {"a": cosines[0], "b": cosines[1], "c": isoscore}
    data = {"a": make_pairs(24), "b": make_pairs(12), "c": make_pairs(9)}
    terms: list[dict[str, float]] = []
    names = {
        "a": ("penalty_a", "average_cosine_a"),
        "b": ("penalty_b", "average_cosine_b"),
        "c": ("penalty", "isoscore"),
    }

    def record(name: str) -> Any:
        def add_terms(module: PenaltyLoss, args: Any, components: Any) -> None:
            last = module.penalty.last
            terms.append(
                dict(zip(names[name], (module.penalty.weight * last.value.item(), last.score.item()), strict=True))
            )

        return add_terms

    for name, loss in losses_by_name.items():
        loss([model.preprocess(["a", "b"]), model.preprocess(["c", "d"])])  # before training, and not logged
        loss.register_forward_hook(record(name))
    callbacks = [PenaltyLossCallback(loss) for loss in losses_by_name.values()]
    trainer = make_trainer(
        tmp_path, model, losses_by_name, data, *callbacks, num_train_epochs=1, logging_steps=logging_steps
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(terms) == len(logs) * logging_steps == 12
    for index, entry in enumerate(logs):
        interval = terms[index * logging_steps : (index + 1) * logging_steps]
        for name in [name for pair in names.values() for name in pair]:
            values = [each[name] for each in interval if name in each]
            assert (name in entry) == bool(values), name
            if values:
                assert entry[name] == pytest.approx(sum(values) / len(values), abs=6e-5)


@pytest.mark.parametrize("is_nested", [False, True])
def test_two_penalties_resume_each_with_its_own_state(bert_folder, tmp_path, is_nested):
    def make(**settings: Any) -> tuple[list[PenaltyLoss], SentenceTransformerTrainer]:
        model, data = make_encoder(bert_folder), make_pairs(12)
        tokens = PenaltyLoss(model, make_loss(model, has_labels=False), istar.IStar(WEIGHT, ZETA))
        inner_loss = tokens if is_nested else make_loss(model, has_labels=False)
        suffix = "" if is_nested else "_2"
        pooled = PenaltyLoss(model, inner_loss, istar.IStar(WEIGHT, ZETA), on="pooled", suffix=suffix)
        callbacks = [PenaltyLossCallback(tokens), PenaltyLossCallback(pooled)]
        loss: Any = pooled if is_nested else {"tokens": tokens, "pooled": pooled}
        data = data if is_nested else {"tokens": data, "pooled": data}
        return [tokens, pooled], make_trainer(tmp_path, model, loss, data, *callbacks, **settings)

    expected_losses, trainer = make(max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    names = ["istar_penalty.safetensors", "istar_penalty_2.safetensors"]
    assert sorted(path.name for path in (tmp_path / "checkpoint-1").glob("istar_penalty*")) == names
    resumed_losses, trainer = make(max_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for loss, expected_loss in zip(resumed_losses, expected_losses, strict=True):
        covariance = loss.penalty.shrinkage_covariance
        assert_close(covariance, expected_loss.penalty.shrinkage_covariance, rtol=0, atol=0)


def test_mistakes_with_callbacks_are_refused_in_one_line(bert_folder, tmp_path):
    model = make_encoder(bert_folder)
    settings = istar.PenaltySettings(schedule="linear")
    first, second = (
        PenaltyLoss(model, make_loss(model, has_labels=False), istar.CosReg(1.0), settings=settings) for _ in range(2)
    )
    with pytest.raises(UserError, match=r"^the schedule of PenaltyLoss .*: callbacks=\[PenaltyLossCallback\(loss\)\]$"):
        make_trainer(tmp_path, model, first, make_pairs(8), max_steps=1).train()
    callbacks = [PenaltyLossCallback(first), PenaltyLossCallback(second)]
    message = r"^two PenaltyLossCallbacks use the file istar_penalty\.safetensors; .*: PenaltyLoss\(.*, suffix=.*\)$"
    with pytest.raises(UserError, match=message):
        make_trainer(tmp_path, model, first, make_pairs(8), *callbacks, max_steps=1).train()
    make_trainer(tmp_path, model, first, make_pairs(8), callbacks[0], max_steps=1).train()


def test_a_pass_that_fails_leaves_the_models_settings_alone(bert_folder):
    model = make_encoder(bert_folder)
    losses_of_model = [
        PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.CosReg(1.0)) for _ in range(2)
    ]
    for loss in losses_of_model:
        with pytest.raises(IndexError):
            loss([{"input_ids": torch.full((2, 3), 10**6), "attention_mask": torch.ones(2, 3)}] * 2, None)
        assert not model[0].model.config.output_hidden_states


WRAPPERS = {
    "matryoshka": lambda model, loss: losses.MatryoshkaLoss(model, loss, [12, 6, 3]),
    "layers": lambda model, loss: losses.AdaptiveLayerLoss(model, loss, n_layers_per_step=-1),
    "both": lambda model, loss: losses.Matryoshka2dLoss(model, loss, [12, 6]),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("on", ["tokens", "pooled"])
def test_a_penalty_around_a_loss_around_a_loss_counts_each_pass_once(bert_folder, name, on):
    def make_features(model: SentenceTransformer) -> list[dict[str, Tensor]]:
        return [model.preprocess(["a b", "c d e"]), model.preprocess(["f", "g h i j"])]

    model = make_encoder(bert_folder).eval()
    inner = losses.MultipleNegativesRankingLoss(model)
    expected_task_loss = WRAPPERS[name](model, inner)
    loss = PenaltyLoss(model, WRAPPERS[name](model, inner), istar.IStar(1.0, 0.0), on)
    random.seed(0)
    components = loss(make_features(model), None)
    random.seed(0)
    assert_close(components["task_loss"], expected_task_loss(make_features(model), None))
    columns = [{name: column[name] for name in ("input_ids", "attention_mask")} for column in make_features(model)]
    points = naive_points(model[0].model, columns, on)
    if on == "tokens":
        assert loss.penalty.last.points == len(points)
        assert_close(
            components["penalty"], 1 - algorithm_1(points, torch.eye(12).double(), 0.0, torch.linalg.eigvalsh), **CLOSE
        )
    assert components["penalty"].isfinite()
    sum(components.values()).backward()


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_loss_around_a_penalty_is_refused_in_one_line(bert_folder, name):
    model = make_encoder(bert_folder)
    loss = WRAPPERS[name](model, PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.CosReg(1.0)))
    with pytest.raises(istar.UserError, match=r"put PenaltyLoss around it: PenaltyLoss\(model, MatryoshkaLoss\("):
        loss([model.preprocess(["a b", "c d e"]), model.preprocess(["f", "g h"])], None)


def test_a_batch_of_one_embedding_adds_nothing(bert_folder, tmp_path):
    """Nine texts in batches of four: the last one has a single point."""
    model = make_encoder(bert_folder)
    data = Dataset.from_dict({"text": make_pairs(9)["anchor"], "label": [0, 0, 1, 1, 0, 1, 0, 1, 0]})
    loss = PenaltyLoss(model, losses.BatchAllTripletLoss(model), istar.IStar(1.0, 0.0), on="pooled")
    with pytest.warns(UserWarning, match="have no isoscore, because they are too few or all equal"):
        make_trainer(tmp_path, model, loss, data, num_train_epochs=2).train()
    assert loss.penalty.undefined.seen == 2
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_real_encoder_is_penalized_on_tokens_and_on_embeddings(minilm):
    model = SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
    features = [model.preprocess(["A cat sat.", "It rained."]), model.preprocess(["A cat.", "Rain fell in the night."])]
    tokens = sum(int(column["attention_mask"].sum()) for column in features)
    for on, points in (("tokens", 6 * tokens), ("pooled", 4)):
        loss = PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.IStar(-1.0, zeta=0), on)
        components = loss([dict(column) for column in features], None)
        assert loss.penalty.last.points == points
        sum(components.values()).backward()
        assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "pooler" not in name)
        model.zero_grad()


def test_sigma_s_is_computed_without_padding_if_the_model_has_no_argument_for_a_mask(tmp_path: Path) -> None:
    hf.FNetModel(hf.FNetConfig(**SHAPE)).save_pretrained(tmp_path)
    hf.BertTokenizer(vocab={word: i for i, word in enumerate(SPECIAL + WORDS)}).save_pretrained(tmp_path)
    model = make_encoder(tmp_path)
    loss = PenaltyLoss(model, losses.MultipleNegativesRankingLoss(model), istar.IStar(-1.0))
    columns = [model.preprocess([word, " ".join(WORDS[:4])]) for word in WORDS[:2]]
    batch = {f"{index}_{key}": value for index, column in enumerate(columns) for key, value in column.items()}
    assert loss.refresh([batch]) == 2 * sum(int(column["attention_mask"].sum()) for column in columns)


def test_the_model_card_has_the_settings_and_the_paper(bert_folder: Path) -> None:
    """sentence-transformers reads them from the loss."""
    model = make_encoder(bert_folder)
    loss = PenaltyLoss(model, losses.CoSENTLoss(model), istar.IStar(weight=-2.0))
    dataset = Dataset.from_dict({"a": ["a b"], "b": ["c d"], "score": [1.0]})
    arguments = SentenceTransformerTrainingArguments(output_dir="unused", report_to=[])
    SentenceTransformerTrainer(model, arguments, dataset, loss=loss)
    model.model_card_data.set_losses([loss])
    card = model.model_card_data.to_yaml() + str(model.model_card_data.citations)
    assert "Stable Anisotropic Regularization" in card
    assert "CoSENT" in card
    assert "loss:PenaltyLoss" in card
    [data] = model.model_card_data.train_datasets
    assert "IStar(weight=-2.0, zeta=0.4, layers='all')" in data["loss"]["config_code"]
    assert "CoSENTLoss" in data["loss"]["config_code"]
