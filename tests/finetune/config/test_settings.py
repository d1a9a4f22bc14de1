"""Which values change what a run is, and which do not."""

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import pytest

from istar.finetune.config import Config, schema
from istar.finetune.config.groups import settings_of
from istar.finetune.config.penalties import PENALTIES

EFFECTS: dict[str, tuple[list[str], list[str]]] = {
    "task=rte": (
        [
            "task.max_length=256",
            "task.limit_train=100 task.limit_validation=50 task.data_dir=/elsewhere task.submission=true",
            "task.doc_stride=64 task.n_best=5 task.max_answer_length=9",
            "task.packing=false task.whole_word=true task.shuffle_blocks=3",
            "monitor.every=9 monitor.points=50 monitor.measures=[isoscore] monitor.readings=5 monitor.action=null",
            "monitor.every=9 monitor.probe_examples=null trainer.keep_models=log",
            "trainer.val_check_interval=1.0 trainer.max_time=null trainer.max_steps=null",
            "trainer.val_check_interval=null trainer.limit_train_batches=null trainer.limit_val_batches=null",
            "trainer.gradient_clip_algorithm=norm trainer.detect_anomaly=false",
            "trainer.accelerator=cpu trainer.strategy=ddp trainer.nonfinite=skip trainer.log_every_n_steps=1",
            "trainer.devices=auto",
            "trainer.devices='1'",
            "model.vocab_size=500 model.lora_r=3 model.lora_dropout=0.5 model.name=copy model.revision=main",
            "data.num_workers=3 data.cache_dir=/elsewhere logger=wandb run.root=/elsewhere run.smoke=true",
        ],
        [
            "task.max_length=128",
            "task.validation_fraction=0.1",
            "monitor.every=9 monitor.stop_at_inter_sim=0.5",
            "monitor.every=9 monitor.action=stop",
            "trainer.limit_train_batches=1",  # one batch rather than all of them
            "trainer.fast_dev_run=true",
            "trainer.inference_mode=null",
            "trainer.gradient_clip_algorithm=value",
            "trainer.checkpoints=false",  # the result is that of the last epoch
            "trainer.devices=2",
            "model.load_in=bf16",
            "model.lora=true",
            "model.lora=true model.lora_r=3",
            "model.attn_implementation=eager",
            "data.group_by_length=false",
            "data.eval_batch_size=8",
            "optim.lr=1e-5",
            "seed=7",
        ],
    ),
    "monitor.every=9 monitor.stop_at_inter_sim=0.5": (
        ["monitor.probe_examples=9", "monitor.measures=[inter_sim]", "monitor.action=null"],
        [
            "monitor.every=8", "monitor.points=50", "monitor.readings=5", "monitor.action=stop",
            "data.batch_size=8 trainer.devices=2",
        ],
    ),
    "monitor.every=9 monitor.action=stop": (
        ["monitor.probe_examples=null"],
        ["monitor.measures=[inter_sim]", "monitor.readings=5", "monitor.action=warn"],
    ),
    "task=squad": (["task.max_length=384"], ["task.doc_stride=64", "task.n_best=5", "task.max_answer_length=9"]),
    "task=clm": (["task.whole_word=true", "task.shuffle_blocks=3"], ["task.packing=false"]),
    "task=mlm": ([], ["task.whole_word=true", "task.packing=false"]),
    "task=clm task.stream=true trainer.max_steps=9 data.batch_size=8": (
        ["data.group_by_length=false"],
        ["task.shuffle_blocks=3", "data.batch_size=4 trainer.devices=2", "data.batch_size=4 trainer.num_nodes=2"],
    ),
    "model=small_encoder": (["model.name=label"], ["model.vocab_size=500", "model.config.hidden_size=64"]),
    # A batch is the same however it is divided among processes that compute one penalty.
    "reg=istar data.batch_size=8": (
        ["data.batch_size=4 trainer.devices=2", "data.batch_size=2 trainer.devices=2 trainer.num_nodes=2"],
        ["data.batch_size=4 trainer.num_nodes=3", "reg.sync=false"],
    ),
    "reg=istar reg.sync=false data.batch_size=8": (
        [], ["data.batch_size=4 trainer.devices=2", "data.batch_size=4 trainer.num_nodes=2"],
    ),
    "reg=istar": (
        ["reg.zeta=0.4", "reg.zeta='0.4'", "reg.compute=float32"],
        [
            "reg.lambda=1",
            "reg.zeta=1",
            "reg.zeta=auto",
            "reg.num_points=9",
            "reg.refresh_every_n_steps=5",
            "reg.target=input_embeddings",
            "reg.points=content",
            "reg.max_norm_ratio=3",
            "reg.schedule=linear",
            "reg.layers=last",
            "reg.include_padding=true",
            "reg.compute=bf16",
            "reg.estimator=unbiased",
        ],
    ),
    "reg.zeta=0": (["reg.num_points=9", "reg.refresh_every_n_steps=5", "reg.zeta=0.0"], []),
    "reg.estimator=unbiased": (["reg.zeta=auto", "reg.zeta=0 reg.num_points=9"], ["reg.layers=last"]),
    "reg.target=input_embeddings data.batch_size=8": (
        [
            "reg.zeta=0.8",
            "reg.layers=last",
            "reg.include_padding=true",
            "reg.num_points=9",
            "reg.sync=false data.batch_size=4 trainer.devices=2",
        ],
        ["reg.rows=5"],
    ),
    "reg=cosreg reg.target_score=0.5 reg.lambda=2": (["reg.lambda=-2"], ["reg.lambda=3", "reg.side=above"]),
    "reg=kurtosis reg.lambda=2": (["reg.lambda=-2"], ["reg.target_score=null", "reg.target_score=null reg.lambda=-2"]),
    "trainer.precision=bf16-mixed": (["reg.compute=bf16"], ["reg.compute=float32"]),
    "trainer.precision=bf16-mixed reg.zeta=auto": (["reg.compute=float32"], []),
}  # fmt: skip
"""By overrides: further ones without an effect on the run, and further ones that make it other runs."""


def describe_run(composed: Callable[..., Config], *overrides: str) -> str:
    return json.dumps(settings_of(composed(*" ".join(overrides).split())))


@pytest.mark.parametrize("overrides", EFFECTS)
def test_values_matter_if_and_only_if_they_have_an_effect(composed: Callable[..., Config], overrides: str) -> None:
    without_effect, with_effect = EFFECTS[overrides]
    run = describe_run(composed, overrides)
    for further in without_effect:
        assert describe_run(composed, overrides, further) == run, further
    others = {describe_run(composed, overrides, further) for further in with_effect}
    assert len(others | {run}) == len(with_effect) + 1


def test_a_penalty_of_weight_0_is_none(composed: Callable[..., Config]) -> None:
    run = describe_run(composed, "reg=none data.batch_size=4")
    for overrides in (
        "reg=istar reg.zeta=0.1 data.batch_size=4",
        "reg=cosreg reg.layers=all data.batch_size=4",
        "reg=istar reg.sync=false trainer.devices=2 data.batch_size=2",
    ):
        assert describe_run(composed, overrides, "reg.lambda=0") == run


def test_settings_have_the_keys_of_the_command_line(composed: Callable[..., Config]) -> None:
    config = composed("task=rte", "reg.zeta=auto", "trainer.benchmark=true")
    settings, values = settings_of(config), schema.to_dict(config)
    assert list(settings) == ["task", "model", "reg", "data", "optim", "trainer", "monitor", "seed"]
    assert [settings["reg"][key] for key in ("name", "lambda", "zeta")] == ["istar", -1.0, "auto"]
    assert settings["trainer"]["benchmark"] is True
    for group in set(settings) - {"seed"}:
        assert set(settings[group]) <= set(values[group])
    assert schema.to_dict(config) == values


def test_a_value_without_an_effect_has_a_default_that_counts(composed: Callable[..., Config]) -> None:
    groups: list[Any] = [*PENALTIES.values(), *(type(getattr(composed(), f.name)) for f in fields(Config))]
    for option in (option for group in groups if is_dataclass(group) for option in fields(group)):
        assert option.metadata.get("matters_if") is None or option.default is not MISSING
