"""The options of all groups compose, mistakes are refused in one line, and a config is read back from its file."""

import copy
import operator
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from istar.errors import UserError
from istar.finetune.config import AdamWConfig, Config, WandbConfig, schema
from istar.finetune.config.optim_config import TorchOptimConfig
from istar.finetune.config.penalties import PENALTIES, NoRegConfig
from istar.finetune.config.schema import to_dict
from istar.runs.tasks import TASKS
from tests.conftest import compose_fast, compose_in

CONF = Path(__file__).resolve().parents[3] / "conf"
OPTIONS = sorted(
    [(path.parent.relative_to(CONF).as_posix(), path.stem) for path in CONF.rglob("*.yaml") if path.parent != CONF]
    + [("task", name) for name in TASKS]
    + [("reg", name) for name in PENALTIES]
    + [("sweep", path.stem) for path in (CONF.parent / "sweep").glob("*.yaml")]
)


GROUPS = {group for group, _ in OPTIONS}
COMBINED = ("task", "model", "reg", "logger")
"""Groups of which every config has an option."""
COMPOSED_ELSEWHERE = ("experiment/method", "sweep")
"""Groups whose options `test_experiments_of_four_methods` and tests/finetune/sweeps/test_trials.py compose."""
OTHER_GROUPS = sorted(GROUPS - {*COMBINED, *COMPOSED_ELSEWHERE})
# By option of `model`: the overrides without which it does not compose.
REQUIRED_OVERRIDES = {
    "auto": ["model.name=some/model"],
    "new": ["model.architecture=llama"],
}


def options(group: str) -> list[str]:
    """Return the names of all options of a group."""
    return [name for option_group, name in OPTIONS if option_group == group]


def read_refusal(*overrides: str, folder: Path = CONF) -> str:
    """Return the one-line message with which a config with these overrides is refused.

    Hydra composes the options once, and applies all other overrides to a copy.
    """
    is_option = [override.partition("=")[0] in GROUPS or not re.match("[^~]*=", override) for override in overrides]
    try:
        config = copy.deepcopy(compose_in(folder, *compress(overrides, is_option)))
        values = compress(overrides, map(operator.not_, is_option))
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(list(values)), config)
        schema.load(config)
    except UserError as error:
        message = str(error)
    except (HydraException, OmegaConfBaseException) as error:
        message = schema.explain(error)
    else:
        pytest.fail(f"{overrides} was accepted")
    assert message
    assert "\n" not in message
    assert len(message) < 400
    return message


# ---- configs in conf/


def test_all_shipped_groups_are_seen() -> None:
    groups = {"task", "model", "reg", "data", "optim", "trainer", "logger", "run", "debug", "experiment", "sweep"}
    assert groups <= GROUPS


def check_choice(composed: Callable[..., Config], task: str, reg: str, model: str, *overrides: str) -> Config:
    """Assert that these options compose together, each with its effect, and return the config."""
    config = composed(
        f"task={task}", f"reg={reg}", f"model={model}", *REQUIRED_OVERRIDES.get(model, []), "model.name=m", *overrides
    )
    assert (config.task.name, config.model.name) == (task, "m")
    # The option `istar_paper_code` is a variant of `istar`.
    assert config.reg.name == (reg if reg in PENALTIES else reg.partition("_")[0])
    if reg in PENALTIES:
        assert type(config.reg) is PENALTIES[reg]
    assert "???" not in str(to_dict(config))
    return config


@pytest.mark.parametrize("index", range(max(map(len, map(options, COMBINED)))))
def test_every_option_composes_and_is_read_back(composed: Callable[..., Config], index: int) -> None:
    """Options of all groups are composed with each other, because composing takes a quarter of a second."""
    task, model, reg, logger = (options(group)[index % len(options(group))] for group in COMBINED)
    others = [f"{group}={options(group)[index]}" for group in OTHER_GROUPS if index < len(options(group))]
    others += ["optim.name=NAdam", "optim.arguments.momentum_decay=0.1"] if "optim=torch" in others else []
    config = check_choice(composed, task, reg, model, f"logger={logger}", *others, "seed=7", "task.limit_train=3")
    values = to_dict(config)
    assert list(values) == ["task", "model", "reg", "data", "optim", "trainer", "monitor", "logger", "run", "seed"]
    assert schema.load(OmegaConf.create(values)) == config
    assert to_dict(schema.load(OmegaConf.create(values))) == values


def test_paper_defaults(composed: Callable[..., Config]) -> None:
    config = composed("task=rte")
    assert (config.optim.lr, config.optim.schedule, config.optim.warmup) == (3e-5, "constant", 0)
    assert (config.trainer.max_epochs, config.trainer.accumulate_grad_batches) == (3, 2)
    assert (config.data.batch_size, config.seed) == (32, 42)
    assert (config.model.name, config.model.pretrained) == ("google-bert/bert-base-cased", True)
    reg = config.reg
    assert isinstance(reg, PENALTIES["istar"])
    assert (reg.layers, reg.num_points, reg.include_padding, reg.sync) == ("all", 250_000, False, True)
    assert 0.2 <= reg.zeta <= 0.8
    cosreg = composed("reg=cosreg").reg
    assert type(cosreg) is PENALTIES["cosreg"]
    assert (cosreg.weight, cosreg.layers) == (1, "last")
    assert type(composed("reg=none").reg) is NoRegConfig
    paper_code_reg = composed("reg=istar_paper_code").reg
    assert (paper_code_reg.include_padding, paper_code_reg.sync) == (True, False)


def test_arguments_of_lightning_trainer_are_keys(composed: Callable[..., Config]) -> None:
    assert composed("trainer.deterministic=warn").trainer.deterministic == "warn"
    config = composed("trainer.benchmark=true", "trainer.max_time=00:12:00:00")
    assert config.trainer.lightning == {"benchmark": True, "max_time": "00:12:00:00"}
    values = to_dict(config)
    assert (values["trainer"]["benchmark"], values["trainer"]["max_time"]) == (True, "00:12:00:00")
    assert "lightning" not in values["trainer"]
    assert schema.load(OmegaConf.create(values)) == config
    # Other arguments of Lightning are checked against its signature, which takes seconds to import.
    assert composed("trainer.max_steps=70", "trainer.limit_val_batches=2").trainer.lightning == {}


def test_values_of_the_model_configuration_are_keys(composed: Callable[..., Config]) -> None:
    """They need no `+`, although the schema does not contain them."""
    config = composed("model=small_decoder", "model.config.hidden_size=128", "model.config.layer_norm_eps=1e-5")
    assert config.model.config["hidden_size"] == 128
    assert config.model.config["layer_norm_eps"] == 1e-5
    assert config.model.config["num_hidden_layers"] == 4
    assert schema.load(OmegaConf.create(to_dict(config))) == config
    assert composed("model=new", "model.architecture=llama").model.name == "llama"


def test_some_tasks_choose_their_model(composed: Callable[..., Config]) -> None:
    for task in ("demo", "demo_span"):
        config = composed(f"task={task}")
        assert (config.model.name, config.model.pretrained, config.optim.lr) == ("tiny", False, 1e-3)
    assert composed("task=clm").model.architecture == "gpt_neox"
    assert composed("task=clm_wikitext2").model.name == "openai-community/gpt2"


@pytest.mark.parametrize("hardware", ["cpu", "gpu", "ddp"])
def test_the_choice_of_hardware_changes_no_schedule(hardware: str) -> None:
    settings = OmegaConf.load(CONF / "trainer" / f"{hardware}.yaml")
    assert settings.pop("defaults") == OmegaConf.load(CONF / "trainer" / "default.yaml").defaults
    assert set(settings) <= {"accelerator", "strategy", "devices", "precision"}


def test_the_command_line_wins_in_any_order() -> None:
    overrides = ("debug=smoke", "trainer.max_epochs=7", "optim.lr=2e-4", "optim=adamw", "model=bert", "task=demo")
    config = schema.load(compose_in(CONF, *overrides))
    assert config.model.name == "google-bert/bert-base-cased"
    assert (config.optim.lr, config.trainer.max_epochs) == (2e-4, 7)
    assert (config.task.limit_train, config.data.batch_size) == (32, 8)


@pytest.mark.parametrize(
    ("experiment", "prefix", "weight"),
    [("methods", "istar", 1.0), pytest.param("demo", "scratch", 0.2, marks=pytest.mark.slow)],
)
def test_experiments_of_four_methods(
    composed: Callable[..., Config], experiment: str, prefix: str, weight: float
) -> None:
    sweep_values = OmegaConf.load(CONF / "experiment" / f"{experiment}.yaml").hydra.sweeper.params["+experiment/method"]
    assert set(sweep_values.split(",")) == {"base", f"{prefix}_negative", f"{prefix}_positive", "cosreg"}
    # The task can be chosen, too; a benchmark keeps its model.
    expected = {
        ("base",): ("demo", "tiny", "none", None),
        (f"{prefix}_positive",): ("demo", "tiny", "istar", weight),
        (f"{prefix}_negative",): ("demo", "tiny", "istar", -weight),
        (f"{prefix}_negative", "task=demo_span", "reg.lambda=-3"): ("demo_span", "tiny", "istar", -3.0),
        ("cosreg", "task=rte"): ("rte", "google-bert/bert-base-cased", "cosreg", 1.0),
    }
    for (method, *overrides), names in expected.items():
        config = composed(f"experiment={experiment}", f"+experiment/method={method}", *overrides)
        found = (config.task.name, config.model.name, config.reg.name, getattr(config.reg, "weight", None))
        assert found == names


def test_defaults_stand_in_one_place(composed: Callable[..., Config]) -> None:
    """A field that no YAML file mentions has the default of its dataclass."""
    config = composed("task=rte")
    for group in ("data", "optim", "trainer", "run", "reg"):
        assert getattr(config, group) == type(getattr(config, group))()


def test_values_keep_their_types(composed: Callable[..., Config]) -> None:
    config = composed("reg.layers=[1,2]", "reg.lambda=2", "optim.betas=[0.8,0.9]", "logger=wandb", "logger.tags=[a,b]")
    assert config.reg.layers == [1, 2]
    assert type(config.reg.layers) is list
    assert config.optim.betas == [0.8, 0.9]
    assert isinstance(config.logger, WandbConfig)
    assert config.logger.tags == ["a", "b"]
    for group in fields(config):
        if group.name != "seed":
            values = vars(getattr(config, group.name)).values()
            assert not any(OmegaConf.is_config(value) for value in values)


def test_optimizers_of_torch_by_name(composed: Callable[..., Config]) -> None:
    """Capturable optimizers are for GPUs, and are not refused on a machine without one."""
    arguments = ("optim.arguments.alpha=0.9", "optim.arguments.capturable=true")
    config = composed("optim=torch", "optim.name=RMSprop", *arguments, "optim.schedule=linear", "optim.lr=2")
    assert config.optim == TorchOptimConfig(
        name="RMSprop", lr=2.0, schedule="linear", arguments={"alpha": 0.9, "capturable": True}
    )
    assert composed("optim=torch", "optim.name=Rprop", "optim.weight_decay=0").optim.weight_decay == 0
    assert composed("optim=sgd", "optim.arguments.momentum=0").optim.arguments == {"momentum": 0}
    assert composed("optim=muon").optim == AdamWConfig(name="muon", lr=1e-3)


# ---- configs that are refused


REFUSED: dict[str, list[str]] = {
    **{
        key: ["0"]
        for key in (
            "task.max_length", "model.lora_r", "model.lora_alpha", "reg.num_points", "reg.refresh_every_n_steps",
            "data.batch_size", "data.eval_batch_size", "trainer.check_val_every_n_epoch", "trainer.early_stopping",
            "trainer.accumulate_grad_batches", "trainer.gradient_clip_val", "trainer.checkpoint_every_n_minutes",
            "trainer.log_every_n_steps", "trainer.max_epochs",
        )
    },
    **{
        key: ["nonsense"]
        for key in (
            "model.load_in", "model.attn_implementation", "reg.name", "reg.compute", "reg.target", "reg.schedule",
            "logger.name", "trainer.nonfinite", "trainer.deterministic", "trainer.val_check_interval",
        )
    },
    "task.limit_train": ["1.5", "many", "0"],
    "model.architecture": [
        "model=new", "model=gpt2 model.architecture=gpt2", "model=small_decoder model.tokenizer=null",
    ],
    "model.config": ["model=gpt2 model.config.hidden_size=8", "model=gpt2 model.config=3"],
    "model.name": ["model=auto", "model=auto model.name=null"],
    "model.tokenizer": ["train", "model=gpt2 model.tokenizer=train"],
    "model.vocab_size": ["model=small_decoder model.vocab_size=299"],
    "model.lora": ["model=small_decoder model.lora=true"],
    "model.lora_dropout": ["1"], "model.lora_target_modules": ["[]"],
    "reg.lambda": ["abc", "null", "inf", "nan", *(f"reg={name} reg.lambda=0" for name in ("weight_decay", "dropout"))],
    "reg.layers": ["3", "[1,a]", "[]"],
    "reg.zeta": ["2", "-0.1", "nan", "high", "null", "[0.2]", "true", "reg.estimator=unbiased reg.zeta=3"],
    "compute": ["reg.compute=bf16 reg.zeta=auto", "reg.compute=bf16 reg.estimator=unbiased"],
    "reg.schedule=warmup": ["reg.schedule=warmup"],
    "reg.warmup": ["0.1", "reg.schedule=linear reg.warmup=2"],
    "reg.max_norm_ratio": ["1"], "reg.sample": ["1"],
    "reg.target=input": [f"{other} reg.target=input_embeddings" for other in ("reg.points=last", "reg=simctg")],
    "reg.rows": ["10", "reg.target=input_embeddings reg.rows=1"],
    "reg.points": ["reg=simctg reg.points=first", "reg=simctg reg.points=last"],
    "reg.target_score": [
        "1.5", "held", "[1]", "reg=uniformity reg.target_score=0.5", "reg=kurtosis reg.target_score=0.5",
        "reg.target_score=keep reg.schedule=warmup reg.warmup=0.1",
    ],
    "reg.side": ["above", "reg.target_score=0.1 reg.side=left"],
    "reg.target_batches": ["reg.target_score=0.2 reg.target_batches=3", "reg.target_score=keep reg.target_batches=0"],
    "reg.variance_weight": ["reg=vicreg reg.variance_weight=-1"],
    "reg.covariance_weight": ["reg=vicreg reg.covariance_weight=nan"],
    "reg.gamma": ["reg=vicreg reg.gamma=0"], "reg.temperature": ["reg=uniformity reg.temperature=0"],
    "reg.directions": ["reg=sigreg reg.directions=0"], "reg.margin": ["reg=simctg reg.margin=2"],
    "reg.decay": ["reg=spectrum reg.decay=linear"], "reg.rate": ["reg=spectrum reg.rate=-1"],
    "eval_batch_size": ["trainer.strategy=fsdp data.eval_batch_size=1"],
    "data.num_workers": ["-1"],
    "optim.name": ["NAdam", "optim=torch", *(f"optim=torch optim.name={name}" for name in ("LBFGS", "lr_scheduler"))],
    "optim.lr": ["3e-5x", "[1]", "0", "-1e-5", "nan", "inf", "${foo}"],
    "optim.weight_decay": ["-1", "nan", "inf", "optim=torch optim.name=Rprop"],
    "optim.eps": ["0", "nan"], "optim.warmup": ["1.5"],
    "optim.betas": ["0.9", "[a,b]", "null", "[0.9,1]", "[0.9]"],
    "optim.arguments": [
        "optim=sgd optim.arguments.lr=0.5", "optim=sgd optim.arguments.nesterov=flase", "optim=sgd optim.arguments=3",
        "optim=sgd optim.arguments.momentum=-1",
        # The constructor accepts these, and the first step does not.
        "optim=torch optim.name=NAdam +optim.arguments.betas=[0.9,0.9,0.9]",
    ],
    "trainer.max_steps": ["0", "trainer.min_steps=9 trainer.max_steps=7"],
    "trainer.max_time": ["1", "trainer.check_val_every_n_epoch=2 trainer.max_time=00:12:00:00"],
    "trainer.limit_train_batches": ["-1"], "trainer.limit_val_batches": ["0", "1.5"],
    "trainer.strategy": ["trainer.strategy=fsdp trainer.precision=16-mixed", "optim=adafactor trainer.strategy=fsdp"],
    "trainer.logger": ["false"], "trainer.no_key": ["~trainer.no_key"],
    "logger.tags": ["logger=wandb logger.tags=abc"], "logger.mode": ["logger=wandb logger.mode=of"],
    "run.root": ["null"], "run.isotropy_zeta": ["2"],
    "seed": ["abc", "1.5", "null", "[1]", "-1", "4294967296", "seed"],
}  # fmt: skip
"""By key: values that are refused alone, or together with other overrides."""
SUGGESTED = {
    "reg.lamda=1": "reg.lambda", "++reg.lamda=3": "reg.lambda", "lambda=3": "reg.lambda", "lr=3": "optim.lr",
    "trainer.max_epoch=3": "trainer.max_epochs", "trainer.max_step=9": "trainer.max_steps", "sed=3": "seed",
    "data.bach_size=3": "data.batch_size", "task.limit_trian=3": "task.limit_train",
    "optim=sgd optim.momentum=0.5": "optim.arguments", "optim=sgd optim.arguments.momentm=0.5": "momentum",
    "task=rtee": "rte", "model=brt": "bert", "experiment=dem": "demo", "optim=sdg": "sgd", "reg.name=istarr": "istar",
    "reg.layers=al": "all", "reg.estimator=unbaised": "unbiased", "reg.points=contents": "content",
    "optim.schedule=lineer": "linear", "optim=torch optim.name=NAdm": "NAdam", "trainer.precision=bf16": "bf16-mixed",
    "trainer.strategy=ddp_spawn": "ddp",
}  # fmt: skip
"""By overrides with a misspelt key, option or value: what is suggested."""
WORDINGS = {
    "reg.zeta=3": "reg.zeta=3 is outside [0, 1]; 0 means no shrinkage, 1 means the shrinkage covariance alone; the "
    "paper uses 0.2 to 0.8",
    "trainer.max_epochs=0": "trainer.max_epochs=0 is too small; expected 1 or more",
    "reg=vicreg reg.gamma=0": "reg.gamma=0; expected a finite number above 0",
    "reg.estimator=unbaised": "reg.estimator=unbaised is not known; did you mean unbiased?; expected one of shrinkage, "
    "unbiased",
    "task.limit_train=1.5": "task.limit_train: Value '1.5' of type 'float' could not be converted to Integer",
    "xyzzy=3": "xyzzy: there is no such key; `istar train --cfg job` lists all",
    "+reg.weight=3": "reg.weight: there is no such key; did you mean reg.variance_weight?; `istar train "
    "--cfg job` lists all",
    "reg=cosreg reg.zeta=0.3": "reg.zeta belongs to reg=istar or random_direction, which is not selected",
    "logger.project=x": "logger.project belongs to logger=wandb, which is not selected",
    "model=auto": "model.name is not set; give it on the command line: model.name=<value>",
    "~trainer.max_epochs": "trainer.max_epochs is missing; give it on the command line: trainer.max_epochs=<value>",
    "~optim.lr": "optim.lr is missing; give it on the command line: optim.lr=<value>",
    "~reg": "reg is missing; give it on the command line: reg=<value>",
    "~reg.name": "reg.name is missing; give it on the command line: reg.name=<value>",
}
"""By overrides: the whole message, one of each kind."""


@pytest.mark.parametrize("name", ["bert-base-cased", "org/some-model"])
def test_a_hub_id_as_an_option_names_the_option_for_it(name: str) -> None:
    assert f"a hub id or a folder is model=auto model.name={name}; otherwise" in read_refusal(f"model={name}")


@pytest.mark.parametrize("key", REFUSED)
def test_a_refused_value_is_named(key: str) -> None:
    for text in REFUSED[key]:
        is_value = "=" not in text and not text.startswith("~") and text != key
        assert key in read_refusal(*([f"{key}={text}"] if is_value else text.split()))


@pytest.mark.parametrize("overrides", SUGGESTED)
def test_the_most_similar_name_is_suggested(overrides: str) -> None:
    assert f"did you mean {SUGGESTED[overrides]}?" in read_refusal(*overrides.split())


@pytest.mark.parametrize("overrides", WORDINGS)
def test_wording(overrides: str) -> None:
    assert read_refusal(*overrides.split()) == WORDINGS[overrides]


def test_options_shown_are_those_to_choose() -> None:
    for group in ("task", "model"):
        assert "schema" not in read_refusal(f"{group}=nothing_like_it").lower()


MISTAKES_IN_FILES = [
    ("experiment/mine.yaml", "reg:\n  lamda: 1\n", ["reg.lamda", "did you mean reg.lambda?"]),
    ("optim/adamw.yaml", "\nlrr: 1\n", ["optim.lrr", "did you mean optim.lr?"]),
]


@pytest.mark.parametrize(("file", "text", "message_parts"), MISTAKES_IN_FILES)
def test_mistakes_in_a_file(tmp_path: Path, file: str, text: str, message_parts: list[str]) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    with (conf / file).open("a") as open_file:
        open_file.write(f"# @package _global_\n{text}" if file.startswith("experiment/") else text)
    overrides = ("experiment=mine",) if file.startswith("experiment/") else ("task=rte",)
    message = read_refusal(*overrides, folder=conf)
    for part in message_parts:
        assert part in message


def test_mistakes_in_a_stored_node() -> None:
    store = ConfigStore.instance()
    store.store(group="experiment", name="stored_for_test", node={"reg": {"lamda": 1}}, package="_global_")
    try:
        message = read_refusal("experiment=stored_for_test")
    finally:
        del store.repo["experiment"]
    assert "reg.lamda" in message
    assert "did you mean reg.lambda?" in message


# ---- round trips


def test_round_trip_through_yaml_keeps_small_numbers(composed: Callable[..., Config], tmp_path: Path) -> None:
    """PyYAML reads 1e-05 as text; the numbers in a config.yaml must be read back as numbers."""
    import yaml

    values = to_dict(composed("optim.lr=1e-5", "optim.eps=1e-8", "reg.lambda=-1"))
    assert yaml.safe_load(yaml.safe_dump(values, sort_keys=False)) == values
    assert OmegaConf.to_container(OmegaConf.create(yaml.safe_dump(values))) == values


def test_to_dict_leaves_the_config_alone(composed: Callable[..., Config]) -> None:
    config = composed("reg.layers=[1]")
    values: Any = to_dict(config)
    values["task"]["name"] = "other"
    assert config.task.name == "demo"


def test_lists_are_not_shared_between_runs(composed: Callable[..., Config]) -> None:
    first, second = composed(), composed()
    first.optim.betas.append(1.0)
    assert second.optim.betas == [0.9, 0.999]


def test_explain_speaks_of_foreign_errors_too() -> None:
    assert schema.explain(HydraException("first\n  second   third")) == "first second third"


@pytest.mark.parametrize("group", [group.name for group in fields(Config) if group.name != "seed"])
def test_every_field_is_typed(composed: Callable[..., Config], group: str) -> None:
    """A value of the wrong type is refused for every number and boolean."""
    overrides = ("logger=wandb",)
    for key, value in to_dict(getattr(composed(*overrides), group)).items():
        if isinstance(value, bool | int | float) and key != "devices":
            message = read_refusal(*overrides, f"{group}.{key}=nonsense")
            assert message.startswith(f"{group}.{key}")
            assert "nonsense" in message


def test_zeta_is_a_number_or_auto(composed: Callable[..., Config]) -> None:
    for text, expected in (("0.2", 0.2), ("1", 1.0), ("'0.4'", 0.4), ("auto", "auto")):
        zeta = composed(f"reg.zeta={text}").reg.zeta
        assert (type(zeta), zeta) == (type(expected), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("task=rte", "reg=istar", "reg.lambda=-1", "reg.layers=[1,2]", "trainer.max_steps=7"),
        ("reg.zeta=auto", "task=clm", "model.config.hidden_size=32", "model=small_decoder", "seed=3"),
        ("logger=wandb", "logger.tags=[a,b]", "task=demo", "+experiment/method=cosreg", "optim.lr=1e-3"),
    ],
)
def test_configs_of_the_tests_are_those_of_hydra(overrides: tuple[str, ...]) -> None:
    assert compose_fast(CONF, *overrides) == compose_in(CONF, *overrides)
