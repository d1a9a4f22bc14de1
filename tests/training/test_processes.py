"""Training and validation with several gloo processes (DDP, SGD, float64) equal those of one process."""

import copy
import functools
import os
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from istar import models
from istar.config import DataConfig, ModelConfig, OptimConfig
from istar.regularizers import CosReg, IStar, attach
from istar.tasks.evaluation import Evaluator
from istar.tasks.features import Collator, FeatureRows, featurize
from istar.tasks.loading import load_splits
from istar.tasks.specs import TASKS
from istar.training import FineTuner, FineTuningData, LayerIsotropy, ShrinkageCovariance
from tests.forks import run_in_processes
from tests.training.conftest import trainer

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
STEPS, EPOCHS, BATCH, WIDTH, EXAMPLES = 10, 2, 8, 64, 41
TRAINED = (2, pytest.param(4, marks=pytest.mark.slow))  # numbers of processes
VALIDATED = (2, pytest.param(3, marks=pytest.mark.slow))
PENALTIES = {
    "none": lambda sync: None,
    "istar": lambda sync: IStar(-1.0, 0.4, sync=sync),
    "cosreg": lambda sync: CosReg(1.0, sync=sync),
}
CASES = {  # penalty, sync, micro-batches per step
    "none": ("none", True, 1),
    "istar": ("istar", True, 1),
    "istar-accumulated": ("istar", True, 2),
    "cosreg": ("cosreg", True, 1),
    "istar-apart": ("istar", False, 1),
    "cosreg-apart": ("cosreg", False, 1),
    "istar-skipped": ("istar", True, 1),
}
SKIPPED = 3  # the step whose loss is NaN, on the first process alone
TOGETHER = [name for name, (_, sync, _) in CASES.items() if sync]
APART = [name for name, (_, sync, _) in CASES.items() if not sync]
REDUCED = {  # numbers in each of a micro-batch's all-reduces, forward and backward
    "none": ([], []),
    "istar": ([1 + WIDTH + WIDTH**2], [1 + WIDTH + WIDTH**2]),
    "cosreg": ([WIDTH + 2], [WIDTH + 2]),
}
VALIDATIONS = ("demo", "demo_regression", "demo_span")


class Sgd(FineTuner):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.optim.lr, fused=True)


class Skipping(Sgd):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_broken = self.trainer.global_step == SKIPPED and self.trainer.global_rank == 0
        return loss * torch.nan if is_broken else loss


class Shrinkage(ShrinkageCovariance):
    """Keeps the Sigma_S of each epoch."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.used = []

    def refresh(self, *args):
        points = super().refresh(*args)
        self.used.append(self.watch.penalty.shrinkage_covariance)
        return points


class Witness(L.Callback):
    """Records the tokens of each micro-batch and the sizes of its all-reduces, forward and backward."""

    def __init__(self, all_reduce):
        self.all_reduce = all_reduce
        self.tokens, self.forward, self.backward = [], [], []

    def reduced(self):
        sizes = [call.args[0].numel() for call in self.all_reduce.call_args_list]
        self.all_reduce.reset_mock()
        return sizes

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.tokens.append(int(batch["attention_mask"].sum()))
        self.reduced()

    def on_before_backward(self, trainer, pl_module, loss):
        self.forward.append(self.reduced())

    def on_train_batch_end(self, *_):
        self.backward.append(self.reduced())


@functools.cache
def parts(name):
    """Return a tokenized demo task, with spans in several windows, and a tiny float64 model without dropout."""
    spec, tiny = TASKS[name], ModelConfig("tiny", pretrained=False)
    tokenizer = models.load_tokenizer(tiny)
    splits = load_splits(spec, None, ["train", "validation"])
    train, validation = splits["train"].select(range(200)), splits["validation"].select(range(EXAMPLES))
    length = 28 if spec.kind == "span" else 64
    options = {"doc_stride": 4, "cache_dir": None}
    features = featurize(spec, validation, tokenizer, length, training=False, **options)
    config = models.load_config(tiny, spec, tokenizer)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.initializer_range = 0.3  # Wide enough for predictions that differ.
    torch.manual_seed(0)
    return SimpleNamespace(
        model=models.load_model(tiny, spec, config, tokenizer).double(),
        train=featurize(spec, train, tokenizer, length, training=True, **options),
        validation=features,
        collate=Collator(tokenizer),
        evaluators={"": Evaluator(spec, validation, features)},
    )


def data_of(given, world_size):
    config = DataConfig(batch_size=BATCH // world_size, eval_batch_size=4, group_by_length=False)
    return FineTuningData(FeatureRows(given.train), [FeatureRows(given.validation)], [], given.collate, config, seed=3)


def trainer_of(world_size, *callbacks, **settings):
    processes = {"strategy": "ddp", "devices": world_size} if world_size > 1 else {}
    return trainer(*callbacks, **processes, **settings)


def train(name, world_size):
    penalty, sync, accumulate = CASES[name]
    given, regularizer = parts("demo"), PENALTIES[penalty](sync)
    model = copy.deepcopy(given.model)
    watch = None if regularizer is None else attach(model, regularizer)
    skips = name.endswith("skipped")
    module = (Skipping if skips else Sgd)(model, watch, OptimConfig(lr=0.02), given.evaluators, skip_nonfinite=skips)
    start = parameters_to_vector(module.parameters()).detach().clone()
    callbacks = []
    if penalty == "istar":
        callbacks = [Shrinkage(watch, FeatureRows(given.train), given.collate, 5_000, 8, seed=3, progress_bar=False)]
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        witness = Witness(all_reduce)
        trainer_of(
            world_size,
            witness,
            *callbacks,
            max_epochs=EPOCHS,
            limit_train_batches=STEPS * accumulate // EPOCHS,
            accumulate_grad_batches=accumulate,
        ).fit(module, datamodule=data_of(given, world_size))
    return {
        "start": start,
        "end": parameters_to_vector(module.parameters()).detach(),
        "skipped": module.step_guard.num_skipped,
        "tokens": torch.tensor(witness.tokens),
        "reduced": (witness.forward, witness.backward),
        "used": [sigma for callback in callbacks for sigma in callback.used],
        "restored": [restored(callback, given, sync) for callback in callbacks],
    }


def restored(callback, given, sync):
    """Return the Sigma_S of a new run that resumes from this run's checkpoint."""
    model = copy.deepcopy(given.model)
    watch = attach(model, IStar(-1.0, 0.4, sync=sync))
    new = Shrinkage(watch, FeatureRows(given.train), given.collate, 5_000, 8, seed=3, progress_bar=False)
    new.load_state_dict(callback.state_dict())
    rank = dist.get_rank() if dist.is_initialized() else 0
    new.on_train_start(SimpleNamespace(global_rank=rank), SimpleNamespace(device=torch.device("cpu")))
    return watch.penalty.shrinkage_covariance


def validate(name, world_size):
    given, isotropy = parts(name), LayerIsotropy()
    module = FineTuner(given.model, None, OptimConfig(), given.evaluators)
    [logged] = trainer_of(world_size, isotropy, limit_val_batches=1.0).validate(
        module, datamodule=data_of(given, world_size), verbose=False
    )
    return {
        "evaluation": asdict(module.evaluations[""]),
        "isotropy": {**isotropy.scores, "points": isotropy.num_points},
        "loss": logged.get("val/loss"),
        "features": len(given.validation),
    }


def everything(world_size):
    values = {}
    if world_size != 3:
        values |= {name: train(name, world_size) for name in CASES}
    if world_size != 4:
        values |= {f"{name} validated": validate(name, world_size) for name in VALIDATIONS}
    return values


def work(rank, world_size, folder):
    # With LOCAL_RANK set, Lightning does not start processes and joins the existing process group.
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.save(everything(world_size), f"{folder}/{rank}.pt")
    dist.barrier()
    # Skip the interpreter's shutdown, in which the remains of a process group may abort.
    os._exit(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function that gives the results of each rank, by number of processes. One has no process group."""

    @functools.cache
    def of_ranks(world_size):
        if world_size == 1:
            return [everything(1)]
        folder = tmp_path_factory.mktemp("gloo")
        run_in_processes(work, (world_size, str(folder)), world_size)
        return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]

    return of_ranks


def compared(results, name, world_size):
    return [values[name] for values in results(world_size)], results(1)[0][name]


@pytest.mark.parametrize("world_size", TRAINED)
@pytest.mark.parametrize("name", TOGETHER)
def test_ten_steps_lead_to_the_parameters_of_one_process(results, name, world_size):
    ranks, alone = compared(results, name, world_size)
    for rank in ranks:
        assert rank["end"].dtype == torch.float64
        assert torch.equal(rank["start"], alone["start"])
        assert_close(rank["end"], alone["end"], **CLOSE)
    assert (alone["end"] - alone["start"]).abs().max() > 1e-2


@pytest.mark.parametrize("world_size", TRAINED)
def test_a_step_that_is_not_finite_on_one_process_is_skipped_on_all(results, world_size):
    ranks, alone = compared(results, "istar-skipped", world_size)
    assert [rank["skipped"] for rank in (*ranks, alone)] == [1] * (world_size + 1)
    assert not torch.equal(alone["end"], results(1)[0]["istar"]["end"])


@pytest.mark.parametrize("world_size", TRAINED)
@pytest.mark.parametrize("name", APART)
def test_without_sync_they_are_others_yet_equal_on_all_processes(results, name, world_size):
    ranks, alone = compared(results, name, world_size)
    assert (ranks[0]["end"] - alone["end"]).abs().max() > 1e-4
    assert all(torch.equal(rank["end"], ranks[0]["end"]) for rank in ranks)


@pytest.mark.parametrize("world_size", TRAINED)
@pytest.mark.parametrize("name", CASES)
def test_shards_are_unequal_and_together_the_batch_of_one_process(results, name, world_size):
    ranks, alone = compared(results, name, world_size)
    tokens = torch.stack([rank["tokens"] for rank in ranks])
    assert (tokens.amax(0) > tokens.amin(0)).double().mean() > 0.8
    assert torch.equal(tokens.sum(0), alone["tokens"])
    assert len(alone["tokens"]) == STEPS * CASES[name][2]


@pytest.mark.parametrize("world_size", TRAINED)
@pytest.mark.parametrize("name", ["istar", "istar-accumulated"])
def test_sigma_s_is_that_of_one_process_and_equal_on_all_bit_for_bit(results, name, world_size):
    ranks, alone = compared(results, name, world_size)
    for epoch in range(EPOCHS):
        expected = alone["used"][epoch]
        for rank in ranks:
            assert torch.equal(rank["used"][epoch], ranks[0]["used"][epoch])
            # Sigma_S is kept in float32.
            assert_close(rank["used"][epoch], expected, rtol=0, atol=1e-7 * expected.abs().max().item())
    assert not torch.equal(*alone["used"])


@pytest.mark.parametrize("world_size", TRAINED)
def test_each_process_resumes_with_the_sigma_s_that_it_had(results, world_size):
    ranks, _ = compared(results, "istar-apart", world_size)
    for rank in ranks:
        assert torch.equal(rank["restored"][0], rank["used"][-1])
    assert not torch.equal(ranks[0]["used"][-1], ranks[1]["used"][-1])


@pytest.mark.parametrize("world_size", TRAINED)
@pytest.mark.parametrize("name", CASES)
def test_a_penalty_costs_one_small_all_reduce(results, name, world_size):
    penalty, sync, accumulate = CASES[name]
    forward, backward = REDUCED[penalty] if sync else ([], [])
    ranks, alone = compared(results, name, world_size)
    for rank in ranks:
        assert rank["reduced"] == ([forward] * STEPS * accumulate, [backward] * STEPS * accumulate)
    assert not any(sizes for passes in alone["reduced"] for sizes in passes)


@pytest.mark.parametrize("world_size", VALIDATED)
@pytest.mark.parametrize("name", VALIDATIONS)
def test_validation_says_the_same_as_one_process(results, name, world_size):
    """Results are equal bit for bit: other examples of a batch change logits by less than their float32 resolution."""
    ranks, alone = compared(results, f"{name} validated", world_size)
    for rank in ranks:
        assert rank["evaluation"] == alone["evaluation"]
        assert rank["isotropy"] == pytest.approx(alone["isotropy"], rel=1e-9)
    predictions = alone["evaluation"]["predictions"]
    assert len(predictions) == EXAMPLES
    assert len({str(row["prediction"]) for row in predictions}) > 1
    assert (alone["features"] > EXAMPLES) == (name == "demo_span")
    assert alone["features"] % world_size != 0


@pytest.mark.parametrize("world_size", VALIDATED)
@pytest.mark.parametrize("name", ["demo", "demo_regression"])
def test_the_validation_loss_is_that_of_one_process(results, name, world_size):
    ranks, alone = compared(results, f"{name} validated", world_size)
    for rank in ranks:
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-9)
