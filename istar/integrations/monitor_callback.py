"""A callback that watches trainings of transformers' `Trainer` and its subclasses with an `istar.Monitor`."""

import copy
import json
import warnings
from collections.abc import Mapping
from typing import Any, Unpack

from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from istar.integrations.monitor_owner import MonitorOptions, MonitorOwner, Probe, describe_reading
from istar.integrations.trainer_callback import refuse_data_parallel
from istar.monitoring.monitor import Reading

READINGS_KEY = "istar_readings"
"""Key of the list of readings, each as a JSON string, in the callback states of `trainer_state.json`."""


class MonitorCallback(MonitorOwner, TrainerCallback):
    """Watches the geometry of the states while a `Trainer` trains, with an `istar.Monitor`.

        trainer.add_callback(MonitorCallback(trainer, every=50))
        trainer.train()

    The trainer is transformers' or a subclass, such as those of trl and sentence-transformers. Each reading is printed
    as one line, and sent to the trainer's reporters, such as W&B and TensorBoard, at the step of the reading. Its names
    are those of `Reading.flatten` after `train/`, such as `train/geometry/layer_6/inter_sim`. The log history does not
    contain the readings, because each has about a hundred numbers.

    An alarm with `action="stop"` warns, and ends the training after the step, as early stopping does. Checkpoints
    contain the readings in `trainer_state.json`, and a resumed training continues them.

    With a probe, each evaluation, also outside of `train`, measures its batches and adds the measures to the metrics as
    `eval_<state>_<measure>`, for example `eval_layer_6_isoscore_unbiased`, and their means over the layers as
    `eval_<measure>`. `metric_for_best_model` can name one. Callbacks that need one, such as `EarlyStoppingCallback`,
    must be added after this one. A hyperparameter search needs `compute_objective`, because its default is the sum of
    all metrics.

    Args:
        trainer: the trainer that gets this callback.
        probe: number of batches from the beginning of the evaluation set, in each process, or batches for the model, or
            None. A subclass of the trainer whose batches are not arguments of the model needs batches.
        options: arguments of `istar.Monitor`; see `istar.integrations.monitor_owner.MonitorOptions`.

    Attributes:
        monitor: the monitor of the latest training or evaluation. It is closed at the end, and its readings stay.

    Raises:
        UserError: for an unknown option. When training begins, for other mistakes in the options, for a model that
            cannot be watched, and if `Trainer` would use `nn.DataParallel`. In an evaluation, if the model does not
            take the batches of the probe.
    """

    def __init__(self, trainer: Trainer, *, probe: Probe = None, **options: Unpack[MonitorOptions]) -> None:
        super().__init__(probe, **options)
        self._trainer: Any = trainer

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Create the monitor, with the readings of the checkpoint if training resumes from one."""
        refuse_data_parallel(args)
        lines = state.stateful_callbacks.setdefault(READINGS_KEY, [])
        monitor = self.start_monitor(kwargs["model"])
        if state.global_step > 0:
            monitor.load_state_dict({"step": state.global_step, "readings": [json.loads(line) for line in lines]})

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> Any:
        """Count the optimizer step, report a reading, and end the training after a collapse."""
        reading, collapse = self.take_step()
        if reading is not None:
            self._report(reading, reading.flatten(), args, state, control, kwargs)
        if collapse:
            control.should_training_stop = True
            if state.is_world_process_zero:
                warnings.warn(collapse, UserWarning, stacklevel=2)
        return control

    def on_evaluate(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the probe, report it, and add the measures to the metrics."""
        if self.probe is None:
            return
        metrics = kwargs.pop("metrics")
        batches = self.list_probe_batches(kwargs["eval_dataloader"])
        # The batches of sentence-transformers have several columns, such as two sentences. The model takes one column.
        if isinstance(self.probe, int) and hasattr(self._trainer, "collect_features"):
            batches = (column for batch in batches for column in self._trainer.collect_features(batch)[0])
        reading = self.measure_probe(kwargs["model"], batches)
        prefix = next(name.removesuffix("runtime") for name in metrics if name.endswith("_runtime"))
        values = {f"{prefix}{name}": value for name, value in self.name_values(reading, "_").items()}
        metrics.update(values)
        self._report(reading, values, args, state, control, kwargs)

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hooks from the model."""
        self.close_monitor()

    def _report(
        self,
        reading: Reading,
        values: Mapping[str, float],
        args: TrainingArguments,
        state: Any,
        control: Any,
        event: Mapping[str, Any],
    ) -> None:
        """Print a reading as a line, send its values to the reporters, and keep it for the next checkpoint."""
        state.stateful_callbacks.setdefault(READINGS_KEY, []).append(json.dumps(reading))
        if state.is_world_process_zero:
            tqdm.write(describe_reading(reading, self.measures))
        state_of_reading = copy.copy(state)
        state_of_reading.global_step = reading.step
        reporters = tuple(get_reporting_integration_callbacks("all"))
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, reporters):
                callback.on_log(args, state_of_reading, control, **event, logs=dict(values))
