"""Training and validation with several gloo processes (DDP, SGD, float64) equal those of one process."""

import copy
import functools
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from istar.finetune.config import AdamWConfig, DataConfig, ModelConfig
from istar.finetune.execute.build_config import build_config
from istar.finetune.execute.build_model import build_model, build_tokenizer
from istar.finetune.tasks.evaluation import Evaluator
from istar.finetune.tasks.features import Collator, FeatureRows, featurize
from istar.finetune.training import module
from istar.finetune.training.data import FineTuningData
from istar.finetune.training.module import FineTuner
from istar.finetune.training.refresh import ShrinkageCovariance
from istar.finetune.training.sharded_training import ShardingStrategy
from istar.finetune.training.validation_isoscore import ValidationIsoScore
from istar.hidden_states import HiddenStatePenalty, PenaltySettings, attach
from istar.hidden_states.sharding import is_sharded_module, is_sharded_tensor
from istar.regularizers import CosReg, IStar
from istar.runs.tasks import TASKS
from tests.finetune.tasks.builders import load_splits
from tests.finetune.training.conftest import trainer
from tests.finetune.training.test_tokens_per_second import Clock, Rates
from tests.forks import compute_in_group

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
STEPS, EPOCHS, BATCH, WIDTH, EXAMPLES = 4, 2, 8, 64, 41
TRAINING_WORLD_SIZES = (2, pytest.param(4, marks=pytest.mark.slow))  # numbers of processes
PENALTIES = {
    "none": lambda sync: None,
    "istar": lambda sync: IStar(-1.0, 0.4, sync=sync),
    "cosreg": lambda sync: CosReg(1.0, sync=sync),
}
CASES = {  # penalty, sync, micro-batches per step
    "none": ("none", True, 1),
    "istar-accumulated": ("istar", True, 2),
    "cosreg": ("cosreg", True, 1),
    "istar-apart": ("istar", False, 1),
    "istar-skipped": ("istar", True, 1),
    "istar-accumulated-sharded": ("istar", True, 2),
    "istar-skipped-sharded": ("istar", True, 1),
}
NIGHTLY = ("none", "cosreg", "demo_regression")
"""The trainings and validations of which there are none with two processes, but with four or three."""
SKIPPED_STEP = 1  # the step whose loss is NaN on the first process only
SYNCED_CASES = [name for name, (_, sync, _) in CASES.items() if sync]
UNSYNCED_CASES = [name for name, (_, sync, _) in CASES.items() if not sync]
ALL_REDUCE_SIZES = {  # numbers of elements in a micro-batch's all-reduces, forward and backward
    "none": ([], []),
    # Number and sum of the points, and the sum of their products, in one tensor.
    "istar": ([1 + WIDTH + WIDTH**2], []),
    "cosreg": ([WIDTH + 2], [WIDTH + 2]),
}
VALIDATION_TASKS = ("demo", "demo_regression", "demo_span")


class Sgd(FineTuner):
    def configure_optimizers(self):
        # The fused implementation has no variant for sharded parameters.
        return torch.optim.SGD(self.parameters(), lr=self.optim.lr, fused=not is_sharded_module(self.model))


class SgdWithNanLoss(Sgd):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_broken = self.trainer.global_step == SKIPPED_STEP and self.trainer.global_rank == 0
        return loss * torch.nan if is_broken else loss


class RecordingShrinkage(ShrinkageCovariance):
    """Records the Sigma_S of each epoch."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.covariances = []

    def refresh(self, *args):
        points = super().refresh(*args)
        self.covariances.append(self.penalty.penalty.shrinkage_covariance)
        return points


class BatchRecorder(L.Callback):
    """Records the tokens of each micro-batch and the sizes of its all-reduces, forward and backward."""

    def __init__(self, all_reduce):
        self.all_reduce = all_reduce
        self.tokens, self.forward, self.backward = [], [], []

    def take_all_reduce_sizes(self):
        sizes = [call.args[0].numel() for call in self.all_reduce.call_args_list]
        self.all_reduce.reset_mock()
        return sizes

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.tokens.append(int(batch["attention_mask"].sum()))
        self.take_all_reduce_sizes()

    def on_before_backward(self, trainer, pl_module, loss):
        self.forward.append(self.take_all_reduce_sizes())

    def on_train_batch_end(self, *_):
        self.backward.append(self.take_all_reduce_sizes())


EXAMPLES_BY_TASK = {}


def get_examples(name):
    """Return examples of a demo task. The ranks have them from the process that starts them."""
    if name not in EXAMPLES_BY_TASK:
        EXAMPLES_BY_TASK[name] = load_splits(TASKS[name], None, ["validation"])["validation"].select(range(120))
    return EXAMPLES_BY_TASK[name]


@functools.cache
def make_setup(name):
    """Return a tokenized demo task and a tiny float64 model without dropout; spans are in several windows."""
    spec, model_config = TASKS[name], ModelConfig("tiny", pretrained=False)
    tokenizer = build_tokenizer(model_config)
    examples = get_examples(name)
    validation, train = examples.select(range(EXAMPLES)), examples.select(range(EXAMPLES, len(examples)))
    max_length = 28 if spec.kind == "span" else 64
    options = {"doc_stride": 4, "cache_dir": None}
    features = featurize(spec, validation, tokenizer, max_length, training=False, **options)
    config = build_config(model_config, spec, tokenizer)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.initializer_range = 0.3  # Wide enough for predictions that differ.
    torch.manual_seed(0)
    return SimpleNamespace(
        model=build_model(model_config, spec, config, tokenizer).double(),
        train=featurize(spec, train, tokenizer, max_length, training=True, **options),
        validation=features,
        collate=Collator(tokenizer),
        evaluators={"": Evaluator(spec, validation, features)},
    )


def make_data(setup, world_size):
    config = DataConfig(batch_size=BATCH // world_size, eval_batch_size=4, group_by_length=False)
    return FineTuningData(FeatureRows(setup.train), [FeatureRows(setup.validation)], [], setup.collate, config, seed=3)


def make_trainer(world_size, *callbacks, strategy="ddp", **settings):
    distributed_options = {"strategy": strategy, "devices": world_size} if world_size > 1 else {}
    return trainer(*callbacks, **distributed_options, **settings)


def join_parameters(module):
    """Return all parameters in one vector; those of a sharded module are gathered from all processes."""
    parameters = [
        parameter.full_tensor() if is_sharded_tensor(parameter) else parameter for parameter in module.parameters()
    ]
    return parameters_to_vector(parameters).detach().clone()


def train(name, world_size):
    penalty, sync, accumulate = CASES[name]
    setup, regularizer = make_setup("demo"), PENALTIES[penalty](sync)
    model = copy.deepcopy(setup.model)
    settings = PenaltySettings(num_points=2_000)
    penalized = None if regularizer is None else HiddenStatePenalty(model, regularizer, settings)
    skip_nonfinite = "skipped" in name
    tuner = (SgdWithNanLoss if skip_nonfinite else Sgd)(
        model, penalized, AdamWConfig(lr=0.02), setup.evaluators, skip_nonfinite=skip_nonfinite
    )
    start = join_parameters(tuner)
    callbacks = []
    if penalty == "istar":
        callbacks = [RecordingShrinkage(penalized, FeatureRows(setup.train), setup.collate, 8, seed=3)]
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        recorder = BatchRecorder(all_reduce)
        make_trainer(
            world_size,
            recorder,
            *callbacks,
            strategy=ShardingStrategy("32-true") if name.endswith("sharded") else "ddp",
            max_epochs=EPOCHS,
            limit_train_batches=STEPS * accumulate // EPOCHS,
            accumulate_grad_batches=accumulate,
        ).fit(tuner, datamodule=make_data(setup, world_size))
    return {
        "start": start,
        "end": join_parameters(tuner),
        "skipped": tuner.step_guard.num_skipped,
        "tokens": torch.tensor(recorder.tokens),
        "reduced": (recorder.forward, recorder.backward),
        "covariances": [sigma for callback in callbacks for sigma in callback.covariances],
        "restored": [restore_covariance(callback, setup, sync) for callback in callbacks],
    }


def restore_covariance(callback, setup, sync):
    """Return the Sigma_S of a new run that resumes from this run's checkpoint."""
    model = copy.deepcopy(setup.model)
    resumed = attach(model, IStar(-1.0, 0.4, sync=sync))
    resumed.load_state_dict(callback.penalty.state_dict())
    return resumed.penalty.shrinkage_covariance


def validate(name, world_size):
    setup, isotropy = make_setup(name), ValidationIsoScore()
    tuner = FineTuner(setup.model, None, AdamWConfig(), setup.evaluators)
    [logged] = make_trainer(world_size, isotropy, limit_val_batches=1.0).validate(
        tuner, datamodule=make_data(setup, world_size), verbose=False
    )
    return {
        "evaluation": asdict(tuner.evaluations[""]),
        "isotropy": {**isotropy.scores, "points": isotropy.num_points},
        "loss": logged.get("val/loss"),
        "features": len(setup.validation),
    }


def measure_rate(world_size):
    """Return the tokens per second of a step that takes one second, and the tokens of this process."""
    setup = make_setup("demo")
    tuner, recorder = FineTuner(copy.deepcopy(setup.model), None, AdamWConfig(), setup.evaluators), Rates()
    with patch.object(module, "time", Clock()):
        make_trainer(world_size, recorder, max_steps=1, log_every_n_steps=1).fit(
            tuner, datamodule=make_data(setup, world_size)
        )
    return {"rate": recorder.by_step[1], "tokens": recorder.num_tokens[0]}


def compute(name, world_size):
    """Return the results of a training, of a validation or, of `rate`, of one step."""
    if name == "rate":
        return measure_rate(world_size)
    return train(name, world_size) if name in CASES else validate(name, world_size)


def compute_results(world_size):
    names = {2: [*CASES, *VALIDATION_TASKS], 3: VALIDATION_TASKS, 4: CASES}[world_size]
    names = ["rate", *(name for name in names if world_size > 2 or name not in NIGHTLY)]
    return {name: compute(name, world_size) for name in names}


def with_sizes(names, most):
    """Parametrize a test by each name with two processes, and with the largest number of them, which is nightly."""
    return pytest.mark.parametrize(
        ("name", "world_size"),
        [(name, 2) for name in names if name not in NIGHTLY]
        + [pytest.param(name, most, marks=pytest.mark.slow) for name in names],
    )


def compute_on_rank(rank, world_size, examples):
    EXAMPLES_BY_TASK.update(examples)
    return compute_results(world_size)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function that gives the results of each rank, by number of processes."""

    @functools.cache
    def run_ranks(world_size):
        examples = {name: get_examples(name) for name in VALIDATION_TASKS}
        return compute_in_group(
            compute_on_rank, (world_size, examples), world_size, tmp_path_factory.mktemp(f"gloo{world_size}")
        )

    return run_ranks


compute_once = functools.cache(compute)


def select_results(results, name, world_size):
    """Return the results of each of several processes and those of a single process, which has no process group."""
    return [values[name] for values in results(world_size)], compute_once(name, 1)


@with_sizes(SYNCED_CASES, 4)
def test_training_leads_to_the_parameters_of_one_process(results, name, world_size):
    rank_results, single_result = select_results(results, name, world_size)
    for rank_result in rank_results:
        assert rank_result["end"].dtype == torch.float64
        assert torch.equal(rank_result["start"], single_result["start"])
        assert_close(rank_result["end"], single_result["end"], **TOLERANCE)
    assert (single_result["end"] - single_result["start"]).abs().max() > 1e-2


@pytest.mark.parametrize("world_size", TRAINING_WORLD_SIZES)
def test_a_step_that_is_not_finite_on_one_process_is_skipped_on_all(results, world_size):
    rank_results, single_result = select_results(results, "istar-skipped", world_size)
    assert [rank_result["skipped"] for rank_result in (*rank_results, single_result)] == [1] * (world_size + 1)


@with_sizes(UNSYNCED_CASES, 4)
def test_without_sync_they_are_others_yet_equal_on_all_processes(results, name, world_size):
    rank_results, single_result = select_results(results, name, world_size)
    assert (rank_results[0]["end"] - single_result["end"]).abs().max() > 1e-4
    assert all(torch.equal(rank_result["end"], rank_results[0]["end"]) for rank_result in rank_results)


@with_sizes(CASES, 4)
def test_shards_are_unequal_and_together_the_batch_of_one_process(results, name, world_size):
    rank_results, single_result = select_results(results, name, world_size)
    tokens = torch.stack([rank_result["tokens"] for rank_result in rank_results])
    assert (tokens.amax(0) > tokens.amin(0)).double().mean() > 0.8
    assert torch.equal(tokens.sum(0), single_result["tokens"])
    assert len(single_result["tokens"]) == STEPS * CASES[name][2]


@pytest.mark.parametrize("world_size", TRAINING_WORLD_SIZES)
def test_tokens_per_second_are_those_of_all_processes(results, world_size):
    rank_results, single_result = select_results(results, "rate", world_size)
    assert single_result["rate"] == single_result["tokens"] == sum(result["tokens"] for result in rank_results)
    assert {result["rate"] for result in rank_results} == {single_result["rate"]}


@with_sizes(["istar-skipped", "istar-accumulated"], 4)
def test_sigma_s_is_that_of_one_process_and_equal_on_all_bit_for_bit(results, name, world_size):
    rank_results, single_result = select_results(results, name, world_size)
    for epoch in range(EPOCHS):
        expected = single_result["covariances"][epoch]
        for rank_result in rank_results:
            assert torch.equal(rank_result["covariances"][epoch], rank_results[0]["covariances"][epoch])
            # Sigma_S is kept in float32.
            assert_close(rank_result["covariances"][epoch], expected, rtol=0, atol=1e-7 * expected.abs().max().item())
    assert not torch.equal(*single_result["covariances"])


@pytest.mark.parametrize("world_size", TRAINING_WORLD_SIZES)
def test_each_process_resumes_with_the_sigma_s_that_it_had(results, world_size):
    rank_results, _ = select_results(results, "istar-apart", world_size)
    for rank_result in rank_results:
        assert torch.equal(rank_result["restored"][0], rank_result["covariances"][-1])
    assert not torch.equal(rank_results[0]["covariances"][-1], rank_results[1]["covariances"][-1])


@with_sizes(CASES, 4)
def test_a_penalty_costs_few_small_all_reduces(results, name, world_size):
    penalty, sync, accumulate = CASES[name]
    forward, backward = ALL_REDUCE_SIZES[penalty] if sync else ([], [])
    rank_results, single_result = select_results(results, name, world_size)
    for rank_result in rank_results:
        assert rank_result["reduced"] == ([forward] * STEPS * accumulate, [backward] * STEPS * accumulate)
    assert not any(sizes for passes in single_result["reduced"] for sizes in passes)


@with_sizes(VALIDATION_TASKS, 3)
def test_validation_says_the_same_as_one_process(results, name, world_size):
    """Results are equal bit for bit: other examples of a batch change logits by less than their float32 resolution."""
    rank_results, single_result = select_results(results, name, world_size)
    for rank_result in rank_results:
        assert rank_result["evaluation"] == single_result["evaluation"]
        assert rank_result["isotropy"] == pytest.approx(single_result["isotropy"], rel=1e-9)
    predictions = single_result["evaluation"]["predictions"]
    assert len(predictions) == EXAMPLES
    assert len({str(row["prediction"]) for row in predictions}) > 1
    assert (single_result["features"] > EXAMPLES) == (name == "demo_span")
    assert single_result["features"] % world_size != 0


@with_sizes(["demo", "demo_regression"], 3)
def test_the_validation_loss_is_that_of_one_process(results, name, world_size):
    rank_results, single_result = select_results(results, name, world_size)
    for rank_result in rank_results:
        assert rank_result["loss"] == pytest.approx(single_result["loss"], rel=1e-9)
