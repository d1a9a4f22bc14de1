"""Which optimizer trains which parameters, and Coupled Adam against the formulas of the paper."""

import math
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.testing import assert_close
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from istar.errors import UserError
from istar.finetune.config import AdamWConfig
from istar.finetune.config.optim_config import TorchOptimConfig
from istar.finetune.training.optimizers import CoupledAdam, make_optimizer
from istar.hidden_states.sharding import is_sharded_tensor
from istar.regularizers import CosReg
from tests.forks import compute_in_group

SIZES = {"vocab_size": 21, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGS = {
    "adamw": AdamWConfig(weight_decay=0.1),
    "muon": AdamWConfig(name="muon", weight_decay=0.1),
    "coupled_adam": AdamWConfig(name="coupled_adam", weight_decay=0.1),
    "SGD": TorchOptimConfig(name="SGD", weight_decay=0.1, arguments={"momentum": 0.9}),
    "Adafactor": TorchOptimConfig(name="Adafactor", weight_decay=0.1),
}


def make_llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).double()


def set_gradients(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def list_special_names(model, name: str) -> set[str]:
    """Return the names of the parameters that are not AdamW's."""
    optimizer = make_optimizer(model, CONFIGS[name])
    special_ids = {id(weight) for group in optimizer.param_groups if "fused" not in group for weight in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in special_ids}


# ---- Coupled Adam


def step_as_in_the_paper(weights, gradients, lr, betas, eps, weight_decay):
    """Compute the steps for each number in float64, with a second moment for each row of which the mean is taken."""
    beta1, beta2 = betas
    rows, dims = weights.shape
    weights = weights.copy()
    first, second = np.zeros((rows, dims)), np.zeros((rows, dims))
    for step, gradient in enumerate(gradients, 1):
        for row in range(rows):
            for dim in range(dims):
                first[row, dim] = beta1 * first[row, dim] + (1 - beta1) * gradient[row, dim]
                second[row, dim] = beta2 * second[row, dim] + (1 - beta2) * gradient[row, dim] ** 2
        for dim in range(dims):
            mean = sum(second[row, dim] for row in range(rows)) / rows
            for row in range(rows):
                direction = first[row, dim] / (1 - beta1**step) / (math.sqrt(mean / (1 - beta2**step)) + eps)
                weights[row, dim] -= lr * weight_decay * weights[row, dim] + lr * direction
    return weights


@pytest.mark.parametrize("eps", [1e-8, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_coupled_adam_has_the_mean_second_moment_of_all_tokens(eps, weight_decay):
    """Frequencies of the tokens differ by orders of magnitude, and one has no gradient at all."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=(7, 3))
    frequency = np.array([1, 10, 100, 0.1, 0.01, 0, 1])[:, None]
    gradients = [rng.normal(size=(7, 3)) * frequency for _ in range(6)]
    options = {"lr": 0.03, "betas": (0.8, 0.95), "eps": eps, "weight_decay": weight_decay}
    matrix = torch.nn.Parameter(torch.tensor(start))
    optimizer = CoupledAdam([matrix], **options)
    for gradient in gradients:
        matrix.grad = torch.tensor(gradient)
        optimizer.step()
    assert_close(matrix.detach().numpy(), step_as_in_the_paper(start, gradients, **options), rtol=1e-12, atol=1e-14)


def test_coupled_adam_without_a_gradient_changes_nothing():
    matrix = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = CoupledAdam([matrix], lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert not optimizer.state
    assert_close(matrix.detach(), torch.ones(3, 2))


def test_coupled_adam_is_for_the_token_embeddings():
    """Position embeddings and the biases of heads are no embeddings of tokens."""
    assert list_special_names(make_llama(), "coupled_adam") == {"model.embed_tokens.weight", "lm_head.weight"}
    assert list_special_names(make_llama(tied=True), "coupled_adam") == {"model.embed_tokens.weight"}
    bert = BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=12))
    assert list_special_names(bert, "coupled_adam") == {"bert.embeddings.word_embeddings.weight"}


def test_coupled_adam_of_one_model_is_two_optimizers():
    model, expected = make_llama(), make_llama()
    optimizer = make_optimizer(model, AdamWConfig(name="coupled_adam", lr=0.01, weight_decay=0.1, betas=[0.8, 0.95]))
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-8}
    embeddings = [expected.model.embed_tokens.weight, expected.lm_head.weight]
    others = [parameter for parameter in expected.parameters() if all(parameter is not matrix for matrix in embeddings)]
    starts = [matrix.detach().numpy().copy() for matrix in embeddings]
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 if p.dim() == 2 else 0.0} for p in others], **options, foreach=False
    )
    gradients = []
    for seed in range(3):
        set_gradients(model, seed)
        set_gradients(expected, seed)
        gradients.append([matrix.grad.numpy().copy() for matrix in embeddings])
        optimizer.step()
        adamw.step()
    for index, start in enumerate(starts):
        steps = step_as_in_the_paper(start, [pair[index] for pair in gradients], **options, weight_decay=0.1)
        embeddings[index].data = torch.tensor(steps)
    for parameter, expected_parameter in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(parameter, expected_parameter, rtol=1e-10, atol=1e-12)


# ---- Muon


def test_muon_is_for_the_matrices_of_the_layers():
    names = {name for name, _ in make_llama().named_parameters() if "layers" in name and "norm" not in name}
    assert len(names) == 7
    assert list_special_names(make_llama(), "muon") == names
    bert = BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=12))
    names = {name for name, _ in bert.named_parameters() if "layer." in name and name.endswith("weight")}
    assert list_special_names(bert, "muon") == {name for name in names if "LayerNorm" not in name}


def test_updates_of_muon_are_orthogonal_and_as_large_as_those_of_adamw():
    """Newton-Schulz iterations in bfloat16 give singular values of about 1, and 0.2 is the size of Adam's updates."""
    model = make_llama()
    matrix = model.model.layers[0].mlp.up_proj.weight
    start, norm_start = matrix.detach().clone(), model.model.norm.weight.detach().clone()
    optimizer = make_optimizer(model, AdamWConfig(name="muon", lr=0.01, weight_decay=0.0))
    set_gradients(model, 0)
    optimizer.step()
    singular_values = torch.linalg.svdvals((matrix - start).detach()) / (0.01 * 0.2 * math.sqrt(16))
    assert singular_values.min() > 0.6
    assert singular_values.max() < 1.3
    # The first step of AdamW is the sign of the gradient.
    assert_close((norm_start - model.model.norm.weight) / 0.01, model.model.norm.weight.grad.sign(), rtol=0, atol=1e-5)


# ---- all optimizers


@pytest.mark.parametrize("name", CONFIGS)
def test_all_parameters_are_trained_and_matrices_decayed(name):
    model = make_llama()
    optimizer = make_optimizer(model, CONFIGS[name])
    decay_by_id = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert decay_by_id[id(parameter)] == (0.0 if "norm" in name else 0.1)


@pytest.mark.parametrize("name", ["muon", "coupled_adam"])
def test_a_schedule_sets_the_rates_of_both_optimizers_even_after_a_restart(name):
    model, restored_model = make_llama(), make_llama()
    optimizer, restored = (make_optimizer(copy, CONFIGS[name]) for copy in (model, restored_model))
    set_gradients(model, 0)
    optimizer.step()
    restored_model.load_state_dict(model.state_dict())
    restored.load_state_dict(deepcopy(optimizer.state_dict()))
    for candidate, candidate_model in ((optimizer, model), (restored, restored_model)):
        for group in candidate.param_groups:
            group["lr"] = 0.0
        set_gradients(candidate_model, 1)
        before = [parameter.detach().clone() for parameter in candidate_model.parameters()]
        candidate.step()
        assert_close(list(candidate_model.parameters()), before, rtol=0, atol=0)
        for group in candidate.param_groups:
            group["lr"] = 0.01
        set_gradients(candidate_model, 2)
        candidate.step()
    assert_close(list(model.parameters()), list(restored_model.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["muon", "coupled_adam"])
def test_a_model_without_anything_to_train_in_a_special_way_is_refused(name):
    model = make_llama()
    for parameter in model.parameters():
        parameter.requires_grad = parameter.dim() == 1
    with pytest.raises(UserError, match=f"^optim={name}: .* frozen .*; use optim=adamw"):
        make_optimizer(model, CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_unscaled_once(setting, name):
    """Lightning unscales the gradients of optimizers that are not fused before it clips them."""
    module = setting.module(CosReg(1.0), skip_nonfinite=True)
    module.trainer = SimpleNamespace(
        precision_plugin=SimpleNamespace(scaler=Mock()), global_step=0, log_every_n_steps=2, training=True
    )
    set_gradients(module.model, 0)
    module.configure_gradient_clipping(make_optimizer(module.model, CONFIGS[name]))
    assert module.trainer.precision_plugin.scaler.unscale_.call_count == (name == "adamw")


# ---- sharded weights

TORCH_NAMES = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop")
SHARDED_CONFIGS = {
    "adamw": AdamWConfig(lr=0.01),
    "coupled_adam": AdamWConfig(name="coupled_adam", lr=0.01),
    "muon": AdamWConfig(name="muon", lr=0.01),
    "SGD": TorchOptimConfig(name="SGD", lr=0.01, arguments={"momentum": 0.9}),
    **{name: TorchOptimConfig(name=name, lr=0.01) for name in TORCH_NAMES},
}


def train_four_steps(model, config) -> torch.Tensor:
    """Return all parameters after four steps, of which a new optimizer with the states of the first makes the last."""
    optimizer = make_optimizer(model, config)
    for seed in range(4):
        if seed == 3:
            options = StateDictOptions(full_state_dict=True)
            states = get_optimizer_state_dict(model, optimizer, options=options)
            model.zero_grad()
            optimizer = make_optimizer(model, config)
            set_optimizer_state_dict(model, optimizer, states, options=options)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            is_sharded = is_sharded_tensor(parameter)
            parameter.grad = (
                distribute_tensor(gradient, parameter.device_mesh, parameter.placements) if is_sharded else gradient
            )
        optimizer.step()
    weights = [weight.full_tensor() if is_sharded_tensor(weight) else weight for weight in model.parameters()]
    return torch.nn.utils.parameters_to_vector(weights).detach()


def train_on_rank(rank: int) -> dict[str, torch.Tensor]:
    mesh = dist.init_device_mesh("cpu", (2,))
    return {
        name: train_four_steps(fully_shard(make_llama(), mesh=mesh), config) for name, config in SHARDED_CONFIGS.items()
    }


@pytest.fixture(scope="module")
def sharded_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    return compute_in_group(train_on_rank, (), 2, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", SHARDED_CONFIGS)
def test_two_processes_with_sharded_weights_train_as_one(sharded_results, name):
    """Muon computes in bfloat16, in which sums in another order differ."""
    expected = train_four_steps(make_llama(), SHARDED_CONFIGS[name])
    atol = 2e-3 if name == "muon" else 1e-12
    for result in sharded_results:
        assert_close(result[name], expected, rtol=0, atol=atol)
