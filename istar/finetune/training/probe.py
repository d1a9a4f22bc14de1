"""A callback that measures the geometry of every layer on a fixed sample of validation examples during training."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch

from istar.errors import NonFiniteError, UserError
from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.training.data import Collate, build_evaluation_loader
from istar.finetune.training.module import FineTuner, log_immediately, token_mask
from istar.geometry.collect.layers import Layer
from istar.geometry.collect.token_batch import TokenBatch
from istar.hidden_states.undisturbed import eval_mode, preserve_rng_states
from istar.measures.input_checks import accumulation_dtype
from istar.records.metric_names import geometry_key

MEASURES = ("isoscore", "inter_sim", "effective_rank", "mean_kurtosis", "average_norm")
"""Names of the measures that the probe logs, as in `istar.geometry.collect.layers.Layer.compute_measures`."""
SECONDS_KEY = "geometry/seconds"
"""Name under which the duration of a measurement is logged."""
_SEED = 0


def choose_probe_examples(num_rows: int, num_examples: int) -> list[int]:
    """Return the sorted indices of `num_examples` of `num_rows` rows: a random sample, always the same one."""
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(_SEED))
    return sorted(order[:num_examples].tolist())


def measure_layers(
    trainer: L.Trainer, module: FineTuner, rows: TokenizedRows, sample: Sequence[int], collate: Collate, batch_size: int
) -> list[dict[str, float]]:
    """Measure the geometry of each layer's hidden states over all tokens, except padding, of a sample of rows.

    The forward passes run on this process alone, in eval mode, on the trainer's device and in its precision. The
    training mode of each module and the global random generators are restored.

    Returns:
        The measures named in `MEASURES`, by name, for the embedding output and each layer.

    Raises:
        NonFiniteError: if hidden states are not finite.
    """
    accumulators: list[Layer] = []
    previous_device, root_device = module.device, trainer.strategy.root_device
    module.to(root_device)  # Lightning moves the module to the CPU after training.
    loader = build_evaluation_loader(rows, collate, batch_size, sample)
    with (
        preserve_rng_states(root_device),
        eval_mode(module),
        torch.inference_mode(),
        trainer.precision_plugin.val_step_context(),
    ):
        for batch in loader:
            batch = module.transfer_batch_to_device(batch, root_device, 0)
            mask = token_mask(batch).bool()
            tokens = TokenBatch.of(batch["input_ids"][mask].cpu(), mask.nonzero()[:, 1].cpu(), device=root_device)
            points_by_layer = [states[mask] for states in module.hidden_states(batch)]
            if not accumulators:
                # The mean of the first batch is near the mean of all.
                accumulators = [
                    Layer(vocabulary_size=0, origin=points.to(accumulation_dtype(root_device)).mean(0))
                    for points in points_by_layer
                ]
            for accumulator, points in zip(accumulators, points_by_layer, strict=True):
                accumulator.update(points, tokens)
    module.to(previous_device)
    measures_by_layer = [accumulator.compute_measures() for accumulator in accumulators]
    return [{name: measures[name] for name in MEASURES} for measures in measures_by_layer]


@dataclass(eq=False)
class GeometryProbe(L.Callback):
    """Log the geometry of every layer before training, after every n-th optimizer step and at the end of training.

    Only rank 0 measures. The trained weights are bit for bit those without this callback. The probe must precede
    the callback that writes checkpoints, so that the checkpoint of a step contains the measures of that step.

    Attributes:
        rows: tokenized validation set, from which the sample is drawn.
        collate: turns rows into a padded batch.
        batch_size: examples per forward pass.
        every_n_steps: number of optimizer steps between two measurements.
        num_examples: number of examples in the sample.
    """

    rows: TokenizedRows
    collate: Collate
    batch_size: int
    every_n_steps: int
    num_examples: int
    _step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._sample = choose_probe_examples(len(self.rows), self.num_examples)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the model before the first step."""
        self._step = trainer.global_step
        if self._step == 0:
            self._measure_and_log(trainer, pl_module, trainer.current_epoch)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *arguments: Any) -> None:
        """Measure the model if the n-th optimizer step has just been completed."""
        is_optimizer_step = trainer.global_step > self._step
        self._step = trainer.global_step
        if is_optimizer_step and self._step % self.every_n_steps == 0:
            self._measure_and_log(trainer, pl_module, trainer.current_epoch)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the model after the last step, unless it has just been measured."""
        # Unlike on_train_end, this is also called if a resumed training has no step left.
        if trainer.global_step % self.every_n_steps:
            # `current_epoch` differs by one between a training that ends and a finished one that is resumed.
            epochs: Any = trainer.fit_loop.epoch_progress.current
            self._measure_and_log(trainer, pl_module, epochs.processed - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"every_n_steps": self.every_n_steps, "num_examples": self.num_examples}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raise a `UserError` if the interrupted training was measured at different steps or not at all."""
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            raise UserError(
                "the interrupted run has not measured the steps that it has made; trainer.measure_every_n_steps=null "
                "goes on with it, run.overwrite=true starts again"
            )
        if state != self.state_dict():
            raise UserError(
                f"the interrupted run has trainer.measure_every_n_steps={state['every_n_steps']} and "
                f"trainer.measure_examples={state['num_examples']}, which go on with it; run.overwrite=true starts "
                "again"
            )

    def _measure_and_log(self, trainer: L.Trainer, pl_module: L.LightningModule, epoch: int) -> None:
        assert isinstance(pl_module, FineTuner)
        if not trainer.is_global_zero:
            return
        start = time.perf_counter()
        try:
            measures_by_layer = measure_layers(
                trainer, pl_module, self.rows, self._sample, self.collate, self.batch_size
            )
        except NonFiniteError as error:
            raise NonFiniteError(f"geometry after step {trainer.global_step}: {error}") from error
        value_by_key = {
            geometry_key(layer, name): value
            for layer, measures in enumerate(measures_by_layer)
            for name, value in measures.items()
        }
        log_immediately(trainer, {"epoch": epoch, **value_by_key, SECONDS_KEY: time.perf_counter() - start})
