"""The penalty in transformers' `Trainer`: gradients against naive ones, refreshes, logs, checkpoints and errors."""

import copy
import functools
import gc
import os
import random
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from torch.utils.data import IterableDataset
from transformers import BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

import istar
from istar.errors import UserError
from istar.integrations.transformers import PenaltyMixin, PenaltyTrainer
from tests.forks import run_in_processes
from tests.integrations.builders import (
    collate,
    expected_gradient,
    make_examples,
    make_model,
    make_settings,
    make_sigma,
    sgd_arguments,
    task_loss,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    # The call is in peft.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`enable_input_require_grads` is deprecated:FutureWarning"),
]

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
WEIGHT, ZETA = 3.0, 0.3
HEEDS_DECLARATIONS = hasattr(Trainer, "loss_is_scaled_for_ga")  # transformers >= 5.19


def make_penalty(weight=WEIGHT, **arguments):
    penalty = istar.IStar(weight, ZETA, **arguments)
    penalty.shrinkage_covariance = make_sigma()
    return penalty


class Recorder(PenaltyMixin, Trainer):
    """Records the batches that it trains on, and the number of items of a step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.num_items = [], None

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.batches.append(dict(inputs))
        self.num_items = num_items_in_batch
        return super().training_step(model, inputs, num_items_in_batch)


class MeanLossTrainer(Trainer):
    """A `compute_loss` as users write it: the mean over the batch, whatever the number of items; it pops the labels."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = task_loss(outputs, {"labels": labels})
        return (loss, outputs) if return_outputs else loss


class RecorderOfMeans(Recorder, MeanLossTrainer):
    pass


class DeclaredMeans(RecorderOfMeans):
    loss_is_scaled_for_ga = False


class SumOfItems(MeanLossTrainer):
    """Divides by the items of the whole step, and says so."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return len(inputs["labels"]) / num_items_in_batch * super().compute_loss(model, inputs)


class RecorderOfSums(Recorder, SumOfItems):
    pass


def loss_by_items(outputs, labels, num_items_in_batch=None):
    mean = task_loss(outputs, {"labels": labels})
    return mean if num_items_in_batch is None else mean * len(labels) / num_items_in_batch


def loss_by_batch(outputs, labels, num_items_in_batch=None):
    return task_loss(outputs, {"labels": labels})


def train_step_and_expected(
    name, folder, accumulation, factor, trainer_class=Recorder, arguments=None, **trainer_arguments
):
    """Return the changes of the parameters in one step, the expected ones, and those expected without a penalty."""
    model, processes = make_model(name), int(os.environ.get("WORLD_SIZE", 1))
    trainer = trainer_class(
        model=model,
        args=sgd_arguments(folder, gradient_accumulation_steps=accumulation, **(arguments or {})),
        train_dataset=make_examples(name),
        data_collator=collate,
        penalty=make_penalty(),
        settings=make_settings(None),
        **trainer_arguments,
    )
    initial_model = copy.deepcopy(model)
    trainer.train()
    assert len(trainer.batches) == accumulation
    batches = [[batch] for batch in trainer.batches]
    if processes > 1:
        batches_by_process = [None] * processes
        dist.all_gather_object(batches_by_process, trainer.batches)
        batches = [list(step) for step in zip(*batches_by_process, strict=True)]
    changes = {
        name: old_parameter.detach() - new_parameter.detach()
        for (name, old_parameter), new_parameter in zip(
            initial_model.named_parameters(), model.parameters(), strict=True
        )
    }
    expected = expected_gradient(initial_model, batches, WEIGHT, make_sigma(), ZETA, factor, trainer.num_items)
    expected_without_penalty = expected_gradient(
        initial_model, batches, 0.0, make_sigma(), ZETA, factor, trainer.num_items
    )
    return changes, expected, expected_without_penalty


def check_changes(changes, expected, expected_without_penalty):
    assert_close({name: changes[name] for name in expected}, expected, **CLOSE)
    assert all(not change.any() for name, change in changes.items() if name not in expected)
    assert sum((expected[name] - expected_without_penalty[name]).norm() for name in expected) > 1e-2


# Models for which Trainer uses the mean task loss; it multiplies that of others by the number of micro-batches.
SLOW = pytest.mark.slow
NORMALIZED_BY_TRAINER = ("bert question answering", "gpt2 language model", "llama language model")


@pytest.mark.parametrize(
    ("name", "accumulation", "checkpointing"),
    [
        ("bert classification", 1, None),
        ("bert question answering", 4, {"use_reentrant": False}),
        pytest.param("albert classification", 2, None, marks=SLOW),
        ("distilbert classification", 2, {"use_reentrant": True}),
        pytest.param("gpt2 language model", 4, {"use_reentrant": True}, marks=SLOW),
        ("llama language model", 2, None),
        pytest.param("llama classification", 4, None, marks=SLOW),
    ],
)
def test_a_step_is_the_gradient_of_the_mean_of_task_loss_and_penalty(name, accumulation, checkpointing, tmp_path):
    arguments = (
        {}
        if checkpointing is None
        else {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": checkpointing}
    )
    factor = 1 if name in NORMALIZED_BY_TRAINER else accumulation
    check_changes(*train_step_and_expected(name, tmp_path, accumulation, factor, arguments=arguments))


@pytest.mark.parametrize(
    ("trainer_class", "factor", "loss_function"),
    [
        pytest.param(RecorderOfMeans, 4, None, id="a-mean-that-is-not-declared"),
        pytest.param(DeclaredMeans, 1 if HEEDS_DECLARATIONS else 4, None, id="a-mean-that-is-declared"),
        pytest.param(RecorderOfSums, 1, None, id="normalized-and-declared"),
        pytest.param(Recorder, 1, loss_by_items, id="a-function-by-items"),
        pytest.param(Recorder, 4, loss_by_batch, id="a-function-by-batch"),
    ],
)
def test_losses_of_ones_own_are_scaled_as_the_trainer_scales_them(trainer_class, factor, loss_function, tmp_path):
    check_changes(
        *train_step_and_expected(
            "bert classification", tmp_path, 4, factor, trainer_class, compute_loss_func=loss_function
        )
    )


# Several processes ------------------------------------------------------------------------------------------------

CASES = {
    2: [
        ("bert classification", 2, 4),
        ("bert question answering", 2, 1),
        ("gpt2 language model", 4, 1),
        ("mean of one's own", 2, 2),
        ("not averaged", 2, 2),
    ],
    4: [("bert classification", 2, 8), ("gpt2 language model", 1, 1), ("gpt2 language model", 4, 1)],
}


def run_worker(rank, processes, port, folder):
    torch.set_num_threads(1)
    gc.freeze()  # No collection visits the objects of the imported libraries, as in tests/conftest.py.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
    )
    results = {}
    for case, accumulation, factor in CASES[processes]:
        name, trainer_class, arguments = case, Recorder, {}
        if case == "mean of one's own":
            name, trainer_class = "bert classification", RecorderOfMeans
        elif case == "not averaged":
            name, arguments = "bert classification", {"average_tokens_across_devices": False}
        results[case, accumulation] = train_step_and_expected(
            name, f"{folder}/{rank}", accumulation, factor, trainer_class, arguments
        )
    results["state"] = refresh_and_save(f"{folder}/shared", sync=True)
    results["states"] = refresh_and_save(f"{folder}/apart", sync=False)
    results["covariance of a stream"] = compute_stream_covariance(f"{folder}/stream")
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    # Skip the shutdown of the interpreter, in which the process group may abort.
    os._exit(0)


def refresh_and_save(folder, sync):
    """Sigma_S and the logged terms of a process that has saved a checkpoint."""
    trainer = PenaltyTrainer(
        model=make_model("gpt2 language model").float(),
        args=sgd_arguments(folder, save_strategy="steps", save_steps=1, logging_steps=1),
        train_dataset=make_examples("gpt2 language model"),
        data_collator=collate,
        penalty=istar.IStar(WEIGHT, ZETA, sync=sync),
    )
    trainer.train()
    dist.barrier()
    return (
        trainer.penalty.shrinkage_covariance,
        trainer.state.log_history[0],
        sorted(path.name for path in Path(folder, "checkpoint-1").iterdir()),
    )


class Stream(IterableDataset):
    """Six examples without a length: the trainer's epoch after a pass is a fraction."""

    def __iter__(self):
        for example in make_examples("bert classification", 6):
            yield example | {"input_ids": example["input_ids"][:3]}


def compute_stream_covariance(folder):
    """Sigma_S of a stream, which accelerate reads in the first of several processes."""
    trainer = make_trainer(folder, istar.IStar(WEIGHT, ZETA), data_collator=collate, per_device_train_batch_size=1)
    trainer.train_dataset = Stream()
    trainer.train()
    return trainer.penalty.shrinkage_covariance


@pytest.fixture(scope="module", params=[pytest.param(size, marks=pytest.mark.slow) for size in (2, 4)])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    run_in_processes(run_worker, (request.param, port, str(folder)), request.param)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


def test_a_step_of_several_processes_has_one_penalty_per_micro_step_of_the_union(results):
    for case in CASES[len(results)]:
        for result in results:
            check_changes(*result[case[:2]])


def test_processes_share_one_shrinkage_covariance_and_file_or_have_one_each(results):
    states_with_sync = [result["state"] for result in results]
    states_without_sync = [result["states"] for result in results]
    assert all(
        torch.equal(state[0], states_with_sync[0][0]) and state[1] == states_with_sync[0][1]
        for state in states_with_sync
    )
    assert "istar_penalty.safetensors" in states_with_sync[0][2]
    assert not torch.equal(states_without_sync[0][0], states_without_sync[1][0])
    # Logs are means over the processes: the number of points is that of one process without sync.
    for log in (states_with_sync[0][1], states_without_sync[0][1]):
        assert log["loss"] == pytest.approx(log["task_loss"] + log["penalty"], rel=1e-5)
    ratio = states_with_sync[0][1]["points"] / states_without_sync[0][1]["points"]
    assert ratio == pytest.approx(len(results), rel=1e-6)
    assert "istar_penalty.safetensors" in states_without_sync[0][2]


def test_several_processes_count_each_point_of_a_stream_once(results):
    expected = istar.shrinkage_covariance(make_bert(), [collate(list(Stream()))])
    for result in results:
        assert_close(result["covariance of a stream"], expected, rtol=1e-5, atol=1e-7)


# What surrounds a step --------------------------------------------------------------------------------------------


class RandomCollator:
    """Replaces a token at random, with every generator that a collator may use."""

    def __call__(self, examples):
        batch = collate(examples)
        token = int(torch.randint(2, 40, ())) + random.randrange(2) + np.random.randint(2)
        batch["input_ids"][:, 1] = token % 40
        return batch


def make_bert(dropout=0.0):
    torch.manual_seed(5)
    config = make_model("bert classification").config
    config.hidden_dropout_prob = dropout
    return BertForSequenceClassification(config)


def make_trainer(folder, penalty, trainer_class=Recorder, model=None, **arguments):
    penalty_argument_names = ("compute_metrics", "callbacks", "compute_loss_func")
    setting_names = ("refresh", "num_points", "momentum", "schedule", "points", "target", "rows")
    settings = make_settings(**{name: arguments.pop(name) for name in setting_names if name in arguments})
    penalty_arguments = {name: arguments.pop(name) for name in penalty_argument_names if name in arguments}
    collator = arguments.pop("data_collator", RandomCollator())
    if trainer_class is not Trainer:
        penalty_arguments |= {"penalty": penalty, "settings": settings}
    return trainer_class(
        model=model or make_bert(),
        args=sgd_arguments(folder, **({"learning_rate": 0.1, "logging_steps": 1} | arguments)),
        train_dataset=make_examples("bert classification", 24),
        eval_dataset=make_examples("bert classification", 10),
        data_collator=collator,
        **penalty_arguments,
    )


def copy_parameters(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_a_penalty_of_weight_0_and_its_refreshes_change_nothing_bit_for_bit(tmp_path):
    arguments = {"max_steps": 4, "gradient_accumulation_steps": 2}
    trainer_without_penalty = make_trainer(tmp_path, None, Trainer, make_bert(0.2), **arguments)
    trainer_without_penalty.train()
    trainer = make_trainer(tmp_path, make_penalty(0.0), Recorder, make_bert(0.2), refresh=3, num_points=60, **arguments)
    trainer.train()
    assert all(
        torch.equal(*pair)
        for pair in zip(copy_parameters(trainer), copy_parameters(trainer_without_penalty), strict=True)
    )
    first_log = trainer.state.log_history[0]
    assert "penalty" not in first_log
    assert first_log["task_loss"] == pytest.approx(first_log["loss"] / 2)  # Trainer adds up the micro-batches.


def test_the_training_uses_the_same_batches_with_and_without_a_penalty(tmp_path):
    batches = []
    for penalty, refresh in ((make_penalty(), None), (make_penalty(-1.0), 3)):
        arguments = {"per_device_train_batch_size": 6, "num_train_epochs": 2, "max_steps": -1}
        trainer = make_trainer(tmp_path, penalty, refresh=refresh, num_points=60, **arguments)
        trainer.train()
        batches.append([batch["input_ids"] for batch in trainer.batches])
    assert len(batches[0]) == 8
    assert all(torch.equal(*pair) for pair in zip(*batches, strict=True))


class CovarianceRecorder(TrainerCallback):
    """Records Sigma_S after each step."""

    def __init__(self, penalty):
        self.penalty, self.matrices = penalty, []

    def on_step_end(self, *args, **kwargs):
        self.matrices.append(self.penalty.shrinkage_covariance)

    def find_refresh_steps(self):
        """Return the indices of the recorded steps with another Sigma_S than the step before; 0 is one of them."""
        pairs = zip(self.matrices, self.matrices[1:], strict=False)
        return [0, *(i for i, pair in enumerate(pairs, start=1) if not torch.equal(*pair))]


def test_the_loader_of_the_training_stays_the_active_one_of_accelerate(tmp_path):
    is_active = []

    class ActiveLoaderRecorder(TrainerCallback):
        def on_step_end(self, *args, train_dataloader=None, **kwargs):
            is_active.append(trainer.accelerator.gradient_state.active_dataloader is train_dataloader)

    trainer = make_trainer(
        tmp_path, istar.IStar(1.0, ZETA), refresh=2, num_points=60, max_steps=4, callbacks=[ActiveLoaderRecorder()]
    )
    trainer.train()
    assert is_active == [True] * 4


@pytest.mark.parametrize(("refresh", "refreshed"), [("epoch", [0, 3]), (2, [0, 2, 3, 4])])
def test_the_shrinkage_covariance_is_computed_before_each_epoch_or_every_n_steps(refresh, refreshed, tmp_path):
    penalty = istar.IStar(1.0, ZETA)
    recorder = CovarianceRecorder(penalty)
    arguments = {"num_train_epochs": 2, "max_steps": -1, "gradient_accumulation_steps": 2, "num_points": 60}
    arguments["per_device_train_batch_size"] = 4
    make_trainer(tmp_path, penalty, refresh=refresh, callbacks=[recorder], **arguments).train()
    assert recorder.find_refresh_steps() == refreshed


def test_the_shrinkage_covariance_of_a_stream_is_computed_before_each_pass(tmp_path):
    """A pass has 3 steps."""
    recorders = []
    for resumes in (False, True):
        recorders.append(CovarianceRecorder(istar.IStar(1.0, ZETA)))
        settings = {"max_steps": 7, "save_strategy": "steps", "save_steps": 2}
        trainer = make_trainer(tmp_path, recorders[-1].penalty, callbacks=[recorders[-1]], **settings)
        trainer.train_dataset = Stream()
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumes else None)
    assert recorders[0].find_refresh_steps() == [0, 3, 6]
    # The resumed training begins with the saved matrix.
    assert_close(recorders[1].matrices[0], recorders[0].matrices[1], rtol=0, atol=0)
    assert recorders[1].find_refresh_steps() == [0, 1, 4]


def test_the_first_shrinkage_covariance_is_that_of_the_data_under_the_trainers_autocast(tmp_path):
    penalty = istar.IStar(1.0, ZETA)
    model = make_bert()
    initial_model = copy.deepcopy(model)
    trainer = make_trainer(tmp_path, penalty, model=model, bf16=True)
    trainer.data_collator = collate
    trainer.train()
    batches = [collate([example]) for example in trainer.train_dataset]
    with torch.autocast("cpu", torch.bfloat16):
        expected = istar.shrinkage_covariance(initial_model, batches)
    float32_covariance = istar.shrinkage_covariance(initial_model, batches)
    # Batches of other lengths round differently, by much less than bfloat16 does.
    error = (penalty.shrinkage_covariance - expected).norm()
    assert error < 0.3 * (float32_covariance - expected).norm()


def test_logs_hold_the_means_of_the_terms_since_the_last_log(tmp_path):
    terms = []

    class TermRecorder(Recorder):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            terms.append((*self.penalty.last[:4], loss.detach()))
            return loss

    penalty = istar.IStar(2.0, "auto")
    trainer = make_trainer(tmp_path, penalty, TermRecorder, max_steps=4, logging_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 2
    for index, log in enumerate(logs):
        value, score, points, zeta, loss = torch.tensor(terms[4 * index : 4 * index + 4]).mean(0).tolist()
        expected = {"penalty": 2.0 * value, "isoscore_star": score, "points": points, "zeta": zeta, "loss": 2 * loss}
        expected["task_loss"] = loss - 2.0 * value
        assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert log["penalty"] == pytest.approx(2.0 * (1 - log["isoscore_star"]), rel=1e-5)
    assert not any("penalty" in log for log in trainer.state.log_history if "loss" not in log)


def test_a_batch_without_a_score_adds_nothing_and_is_logged(tmp_path):
    """The third batch of 9 examples has one point; without it, its task loss alone would count."""
    scores = []

    class Scores(Recorder):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            scores.append(self.penalty.last.score.item())
            return loss

    penalty = istar.IStar(1.0, 0.0, layers="last")
    settings = {"points": istar.Points("first"), "num_train_epochs": 2, "max_steps": -1, "logging_steps": 6}
    trainer = make_trainer(tmp_path, penalty, Scores, per_device_train_batch_size=4, **settings)
    trainer.train_dataset = trainer.train_dataset[:9]
    with pytest.warns(UserWarning, match="have no isoscore, because they are too few or all equal"):
        trainer.train()
    [log] = [log for log in trainer.state.log_history if "loss" in log]
    assert log["undefined"] == 2 == penalty.undefined.seen
    expected_scores = np.array(scores)
    assert np.isnan(expected_scores).tolist() == [False, False, True] * 2
    assert log["isoscore"] == pytest.approx(np.nanmean(expected_scores), rel=1e-5)
    assert log["penalty"] == pytest.approx(np.nan_to_num(1 - expected_scores).mean(), rel=1e-5)
    assert log["points"] == pytest.approx(3)
    assert all(value.isfinite().all() for value in copy_parameters(trainer))


def test_a_second_training_begins_like_the_first(tmp_path):
    """As `hyperparameter_search` trains, with a model of its own for each trial."""
    states = []

    class StateRecorder(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            penalty = trainer.penalty
            states.append([penalty.kept_score, penalty.kept_batches, penalty.shrinkage_covariance, penalty.last.score])

    penalty = istar.IStar(1.0, ZETA, set_point=istar.SetPoint("keep", batches=2))
    settings = {"max_steps": 3, "momentum": 0.5, "callbacks": [StateRecorder()]}
    trainer = make_trainer(tmp_path, penalty, **settings)
    trainer.model_init = lambda trial: make_bert()
    for _ in range(2):
        trainer.train()
    assert_close(states[0], states[1], rtol=0, atol=0)
    # A Sigma_S that is never refreshed stays.
    penalty = make_penalty()
    trainer = make_trainer(tmp_path, penalty, max_steps=1, refresh=None)
    for _ in range(2):
        trainer.train()
    assert_close(penalty.shrinkage_covariance.double(), make_sigma())


class OutOfMemory(PenaltyTrainer):
    """Runs out of memory in the third step, while the batch size is the initial one."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step == 2 and self._train_batch_size == self.args.per_device_train_batch_size > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, num_items_in_batch)


def test_an_attempt_with_a_smaller_batch_size_begins_like_the_first(tmp_path):
    def train(**arguments):
        penalty = istar.IStar(1.0, ZETA, set_point=istar.SetPoint("keep", batches=2))
        settings = make_settings(momentum=0.5, schedule="linear")
        args = sgd_arguments(tmp_path, max_steps=3, learning_rate=0.0, logging_steps=3, **arguments)
        trainer = OutOfMemory(
            model=make_bert(),
            args=args,
            train_dataset=make_examples("bert classification") * 4,
            data_collator=collate,
            penalty=penalty,
            settings=settings,
        )
        trainer.train()
        logged = {name: trainer.state.log_history[0][name] for name in ("isoscore_star", "penalty", "lambda")}
        return trainer._train_batch_size, logged, [penalty.kept_score, penalty.kept_batches, penalty.weight]

    batch_size, *found = train(per_device_train_batch_size=3, auto_find_batch_size=True)
    _, *expected = train(per_device_train_batch_size=batch_size)
    assert batch_size == 2
    assert_close(found, expected, rtol=1e-6, atol=0)


def test_evaluations_hold_no_penalty_and_predictions_no_hidden_states(tmp_path):
    trainer = make_trainer(tmp_path, make_penalty(1000.0), eval_strategy="steps", eval_steps=1, refresh=None)
    trainer.data_collator = collate
    trainer.train()
    [logged_loss] = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    trainer_without_penalty = make_trainer(tmp_path, None, Trainer, trainer.model)
    trainer_without_penalty.data_collator = collate
    assert logged_loss == trainer.evaluate()["eval_loss"] == trainer_without_penalty.evaluate()["eval_loss"]
    assert trainer.predict(trainer.eval_dataset).predictions.shape == (10, 2)


def test_outputs_can_be_returned_with_the_loss(tmp_path):
    trainer = make_trainer(tmp_path, make_penalty())
    trainer.attach_penalty()
    trainer.current_gradient_accumulation_steps = 1
    batch = collate(make_examples("bert classification", 3))
    loss, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
    assert outputs.hidden_states is None
    assert outputs.logits.shape == (3, 2)
    assert_close(loss - outputs.loss, WEIGHT * trainer.penalty.last.value)
    trainer.detach_penalty()
    assert_close(trainer.compute_loss(trainer.model, dict(batch)), outputs.loss)


def test_a_schedule_sets_lambda_before_each_step(tmp_path):
    penalty = make_penalty()
    weights = []

    class WeightRecorder(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            weights.append(penalty.weight)

    trainer = make_trainer(
        tmp_path, penalty, max_steps=4, schedule=lambda step, steps: -2 * step / steps, callbacks=[WeightRecorder()]
    )
    trainer.train()
    assert weights == [0, -0.5, -1, -1.5]
    assert ["penalty" in log for log in trainer.state.log_history] == [False, True, True, True, False]


class OwnLoss(PenaltyTrainer):
    compute_loss = MeanLossTrainer.compute_loss


class OwnStep(PenaltyTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = task_loss(model(**inputs), inputs)
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("trainer_class", [OwnLoss, OwnStep])
def test_a_trainer_that_leaves_the_penalty_out_is_refused_before_its_first_step(trainer_class, tmp_path):
    trainer = make_trainer(tmp_path, make_penalty(), trainer_class, refresh=None, gradient_accumulation_steps=2)
    before = copy_parameters(trainer)
    with pytest.raises(UserError, match=rf"^{trainer_class.__name__} .* without .*: call super\(\)\.compute_loss\(\) "):
        trainer.train()
    assert all(map(torch.equal, copy_parameters(trainer), before))
    make_trainer(tmp_path, make_penalty(0.0), trainer_class).train()


class StopError(Exception):
    pass


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise StopError


def count_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_hooks_are_on_the_trained_model_only_while_it_trains(tmp_path):
    trainer = make_trainer(tmp_path, make_penalty(), max_steps=3, callbacks=[StopAt(2)])
    assert count_hooks(trainer.model) == 0
    with pytest.raises(StopError):
        trainer.train()
    assert count_hooks(trainer.model) == 0
    models = []
    arguments = {"penalty": make_penalty(), "args": sgd_arguments(tmp_path), "data_collator": collate}
    trainer = PenaltyTrainer(
        model_init=lambda: models.append(make_bert()) or models[-1], train_dataset=make_examples("bert"), **arguments
    )
    trainer.train()
    assert trainer.model is models[-1]
    assert trainer.penalty.last is not None
    assert count_hooks(trainer.model) == 0


RESUME_SETTINGS = {
    "max_steps": 7,
    "per_device_train_batch_size": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "gradient_accumulation_steps": 2,
    "num_points": 60,
}


def train_resumed(folder, refresh, momentum, stop=None, **arguments):
    """Train with `RESUME_SETTINGS`, up to a step where training stops with a `StopError`."""
    trainer = make_trainer(
        folder, istar.IStar(2.0, ZETA), model=make_bert(0.1), refresh=refresh, momentum=momentum,
        callbacks=[StopAt(stop)], data_collator=collate, **RESUME_SETTINGS,
    )  # fmt: skip
    trainer.train(**arguments)
    return trainer


@pytest.fixture(scope="module")
def train_uninterrupted(tmp_path_factory):
    """Return a function that returns the trainer after a training without an interruption."""
    return functools.cache(lambda *settings: train_resumed(tmp_path_factory.mktemp("whole"), *settings))


@pytest.mark.parametrize(
    ("refresh", "momentum", "step"),
    [("epoch", 0.5, 4), pytest.param("epoch", 0.5, 6, marks=SLOW), pytest.param(3, 0.0, 4, marks=SLOW)],
)
def test_a_resumed_training_equals_one_without_an_interruption(train_uninterrupted, refresh, momentum, step, tmp_path):
    """An epoch has 3 steps. Trainer itself resumes exactly only if the collator draws no random numbers."""
    with pytest.raises(StopError):
        train_resumed(tmp_path, refresh, momentum, step + 1)
    assert (tmp_path / f"checkpoint-{step}" / "istar_penalty.safetensors").exists()
    resumed = train_resumed(tmp_path, refresh, momentum, resume_from_checkpoint=True)
    expected = train_uninterrupted(refresh, momentum)
    assert_close(copy_parameters(resumed), copy_parameters(expected), rtol=0, atol=1e-7)
    sigmas = [trainer.penalty.shrinkage_covariance for trainer in (resumed, expected)]
    assert_close(*sigmas, rtol=1e-6, atol=1e-8)


def test_sampled_rows_of_an_embedding_matrix_resume_exactly(tmp_path):
    arguments = {"target": "input_embeddings", "rows": 9, "data_collator": collate, **RESUME_SETTINGS}
    final_parameters = []
    for folder, stop, resumes in (("whole", None, False), ("parts", 5, False), ("parts", None, True)):
        trainer = make_trainer(
            tmp_path / folder, istar.CosReg(2.0), model=make_bert(0.1), callbacks=[StopAt(stop)], **arguments
        )
        with nullcontext() if stop is None else pytest.raises(StopError):
            trainer.train(resume_from_checkpoint=resumes)
        final_parameters.append(copy_parameters(trainer))
    assert_close(final_parameters[2], final_parameters[0], rtol=0, atol=1e-7)
    assert any(log.get("points") == 9 for log in trainer.state.log_history)
    for path in (tmp_path / "parts").rglob("istar_penalty*"):
        path.unlink()
    with pytest.warns(UserWarning, match="the checkpoint has no penalty"):
        trainer.train(resume_from_checkpoint=True)


def test_lambda_and_the_points_left_out_are_logged(tmp_path):
    penalty, points = istar.CosReg(1.0, layers="all"), istar.Points(max_norm_ratio=1.000001)
    trainer = make_trainer(
        tmp_path, penalty, max_steps=4, points=points, refresh=None,
        schedule="linear",
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["lambda"] for log in logs] == [1.0, 0.75, 0.5, 0.25]
    assert sum(log["points_left_out"] for log in logs) > 0


@pytest.mark.parametrize("refresh", ["epoch", None])
def test_a_checkpoint_without_the_penaltys_state_gives_one_warning(refresh, tmp_path):
    make_trainer(tmp_path, None, Trainer, max_steps=2, save_strategy="steps", save_steps=2).train()
    folder = str(tmp_path / "checkpoint-2")
    trainer = make_trainer(tmp_path, istar.IStar(2.0, ZETA), refresh=refresh, max_steps=3)
    expectation = (
        pytest.raises(UserError, match="shrinkage covariance is not set") if refresh is None else nullcontext()
    )
    with (
        expectation,
        pytest.warns(UserWarning, match=r"istar_penalty.safetensors does not exist: the checkpoint has no penalty"),
    ):
        trainer.train(resume_from_checkpoint=folder)
    assert (trainer.penalty.shrinkage_covariance is None) == (refresh is None)


def test_adapters_of_a_frozen_model_with_checkpoints_get_the_penaltys_gradient(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(6)
    model = make_model("gpt2 language model")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    model.enable_input_require_grads()
    initial_model = copy.deepcopy(model)
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    trainer = Recorder(
        model=model,
        args=sgd_arguments(tmp_path, gradient_accumulation_steps=2, **checkpointing),
        train_dataset=make_examples("gpt2 language model"),
        data_collator=collate,
        penalty=make_penalty(),
        settings=make_settings(None),
    )
    trainer.train()
    steps = [[batch] for batch in trainer.batches]
    expected = expected_gradient(initial_model, steps, WEIGHT, make_sigma(), ZETA, num_items=trainer.num_items)
    assert len(expected) == 4
    new_parameters, old_parameters = dict(model.named_parameters()), dict(initial_model.named_parameters())
    for name, gradient in expected.items():
        assert_close(old_parameters[name] - new_parameters[name], gradient, **CLOSE)
    assert all(
        torch.equal(new_parameters[name], old_parameters[name]) for name in new_parameters if name not in expected
    )


def test_data_parallel_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(UserError, match=r"^several GPUs are visible to one process.*torchrun.*$"):
        make_trainer(tmp_path, make_penalty())


def test_importing_istar_does_not_import_transformers():
    code = "import sys, istar.integrations; assert not {'transformers', 'trl', 'accelerate'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
