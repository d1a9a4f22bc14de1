"""Training of a model that FSDP2 shards over gloo processes equals that of one process (float64, SGD)."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    XLNetConfig,
)

import istar
from istar.errors import UserError
from istar.finetune.training.sharded_training import gather_weights, scatter_weights, shard
from tests.forks import compute_in_group

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
STEPS, BATCH, TOKENS, VOCABULARY = 3, 8, 7, 50
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": VOCABULARY}
SHORT_SIZES = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 16}
CONFIGS = {
    "bert": BertConfig(**SIZES, intermediate_size=32),
    "albert": AlbertConfig(**SIZES, intermediate_size=32, embedding_size=8),
    "distilbert": DistilBertConfig(dim=16, n_layers=3, n_heads=2, hidden_dim=32, vocab_size=VOCABULARY),
    "gpt2": GPT2Config(**SHORT_SIZES),  # ties the output embeddings to the input embeddings
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=32),
    "llama": LlamaConfig(**SIZES, intermediate_size=32, num_key_value_heads=2),
}
DECODERS = ("gpt2", "gpt_neox", "llama")
CASES = [*CONFIGS, "bert with checkpoints", "gpt2 with adapters"]
FAST = ("bert", "gpt2")


def make_model(case: str) -> torch.nn.Module:
    """Return a small float64 model without dropout."""
    name = case.split()[0]
    torch.manual_seed(0)
    auto_class = AutoModelForCausalLM if name in DECODERS else AutoModelForSequenceClassification
    model = auto_class.from_config(CONFIGS[name]).double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if case.endswith("checkpoints"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    if case.endswith("adapters"):
        import peft

        lora = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["c_attn"], r=2, lora_dropout=0.0, fan_in_fan_out=True
        )
        model = peft.get_peft_model(model, lora).double()
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter)
    return model


def make_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(TOKENS) < torch.tensor([7, 4, 6, 7, 5, 7, 7, 3])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


def train(case: str, rank: int = 0, world_size: int = 1) -> dict[str, torch.Tensor]:
    """Train on this process's share of a batch, and return all weights; {} on ranks other than 0."""
    model = make_model(case)
    batch = {name: values[rank::world_size] for name, values in make_batch().items()}
    penalty = istar.IStar(weight=-0.7, zeta=0.3)
    penalty.shrinkage_covariance = torch.diag(torch.linspace(1, 2, 16, dtype=torch.float64))
    attached = istar.attach(model, penalty)
    if world_size > 1:
        shard(model, "32-true")
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5)
    for _ in range(STEPS):
        # Each process has as many texts, so that the mean of the processes' means is the mean of the batch.
        loss = model(**batch).logits.square().mean() + attached.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = gather_weights(model) if world_size > 1 else model.state_dict()
    assert weights is not None
    if world_size > 1:
        check_loading(model, weights, rank)
    return {name: value.clone() for name, value in weights.items()}


def check_loading(model: torch.nn.Module, weights: dict[str, torch.Tensor], rank: int) -> None:
    """All processes load other weights, and have them afterwards."""
    [everyones_weights] = broadcast([weights if rank == 0 else None])
    scatter_weights(model, {name: 2 * value for name, value in everyones_weights.items()})
    loaded = gather_weights(model)
    assert loaded is not None
    if rank == 0:
        assert all(torch.equal(loaded[name], 2 * value) for name, value in weights.items())


def broadcast(values: list[Any]) -> list[Any]:
    dist.broadcast_object_list(values)
    return values


def train_on_rank(rank: int, world_size: int, cases: tuple[str, ...]) -> dict[str, dict[str, torch.Tensor]]:
    return {case: train(case, rank, world_size) for case in cases}


@pytest.fixture(scope="module")
def train_sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, tuple[str, ...]], Any]:
    """Return a function that trains some cases with several processes, and returns the weights by case."""

    @functools.cache
    def call(world_size: int, cases: tuple[str, ...]) -> Any:
        arguments = (world_size, cases)
        return compute_in_group(train_on_rank, arguments, world_size, tmp_path_factory.mktemp("gloo"))[0]

    return call


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's
@pytest.mark.parametrize(
    ("case", "world_size", "cases"),
    [(case, 2, FAST) for case in FAST]
    + [pytest.param(case, size, tuple(CASES), marks=pytest.mark.slow) for size in (2, 4) for case in CASES],
)
def test_training_equals_one_process(
    train_sharded: Callable[[int, tuple[str, ...]], Any], case: str, world_size: int, cases: tuple[str, ...]
) -> None:
    weights = train_sharded(world_size, cases)[case]
    expected = train(case)
    assert weights.keys() == expected.keys()
    assert_close(weights, expected, **CLOSE)
    start = make_model(case).state_dict()
    assert max((expected[name] - start[name]).abs().max() for name in start) > 1e-2


def test_a_model_without_modules_of_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"no modules of XLNetModel return its layers; use ddp"):
        shard(AutoModel.from_config(XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=16, vocab_size=20)), "32-true")


def test_weights_of_a_model_that_is_not_sharded_are_its_own() -> None:
    assert gather_weights(make_model("bert")) is None
