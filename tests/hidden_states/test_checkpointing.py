"""The gradient of an attached penalty under activation checkpointing, whoever applies it and when."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from istar.errors import UserError
from istar.hidden_states import attach
from tests.hidden_states.builders import CLOSE, IDS, INPUTS, MASK, SHAPE, UNLABELLED, bert, llama, make_istar
from tests.oracles import algorithm_1, stack
from tests.penalties import WEIGHT, WIDTH, ZETA, Recording, assert_equal, gradients, naive_loss, seeded_pass, sigma


def make_bert() -> tuple[hf.PreTrainedModel, nn.ModuleList, dict[str, Tensor]]:
    """Return an encoder with dropout, its layers and its inputs."""
    model = bert()
    return model, model.bert.encoder.layer, INPUTS


def make_llama() -> tuple[hf.PreTrainedModel, nn.ModuleList, dict[str, Tensor]]:
    """Return a decoder with a final norm, its layers and its inputs."""
    model = llama(use_cache=False)
    return model, model.model.layers, {**UNLABELLED, "labels": IDS}


def use_flag(model: Any, layers: nn.ModuleList, use_reentrant: bool) -> None:
    """Switch on the activation checkpointing of transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def use_wrapper(model: nn.Module, layers: nn.ModuleList, implementation: CheckpointImpl) -> None:
    """Wrap each layer as FSDP in accelerate and Lightning does."""
    wrap, layer_class = partial(checkpoint_wrapper, checkpoint_impl=implementation), type(layers[0])
    apply_activation_checkpointing(model, wrap, lambda module: isinstance(module, layer_class))


def use_hooks(model: nn.Module, layers: nn.ModuleList) -> None:
    """Checkpoint each layer by torch's composable function, which registers hooks."""
    for layer in layers:
        composable_checkpoint(layer)


def use_forward(model: nn.Module, layers: nn.ModuleList, use_reentrant: bool) -> None:
    """Checkpoint within the forward function of each layer."""
    for layer in layers:
        layer.forward = checkpointed_forward(layer.forward, use_reentrant)


def checkpointed_forward(forward: Callable[..., Any], use_reentrant: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda *inputs: forward(*inputs, **kwargs), *args, use_reentrant=use_reentrant)

    return call


def accumulated_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by the names that the parameters have without wrappers."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


METHODS: dict[str, Callable[[Any, nn.ModuleList], None]] = {
    "flag, reentrant": partial(use_flag, use_reentrant=True),
    "flag, not reentrant": partial(use_flag, use_reentrant=False),
    "wrapper, reentrant": partial(use_wrapper, implementation=CheckpointImpl.REENTRANT),
    "wrapper, not reentrant": partial(use_wrapper, implementation=CheckpointImpl.NO_REENTRANT),
    "composable": use_hooks,
    "forward, reentrant": partial(use_forward, use_reentrant=True),
    "forward, not reentrant": partial(use_forward, use_reentrant=False),
}


@pytest.mark.parametrize(
    ("make_model", "method"),
    [
        *((make_bert, method) for method in METHODS),
        (make_llama, "flag, reentrant"),
        *(pytest.param(make_llama, method, marks=pytest.mark.slow) for method in list(METHODS)[1:]),
    ],
)
def test_the_gradient_is_that_of_the_naive_penalty_without_checkpointing(make_model, method):
    model, _, inputs = make_model()
    outputs = seeded_pass(model, inputs, 1, output_hidden_states=True)
    expected = gradients(model, naive_loss(outputs, outputs.hidden_states, MASK))
    for is_attached_first in (False, True):
        model, layers, inputs = make_model()
        penalty = Recording("with_embeddings")
        if not is_attached_first:
            METHODS[method](model, layers)
        with attach(model, penalty) as watch:
            if is_attached_first:
                METHODS[method](model, layers)
            # The recomputation of the first pass leaves nothing behind for the second one.
            for _ in range(2 if is_attached_first else 1):
                model.zero_grad()
                penalty.received.clear()
                loss = seeded_pass(model, inputs, 1).loss
                (loss + watch.loss()).backward()
                with pytest.raises(UserError, match="no forward pass was read"):
                    watch.loss()
                assert_equal(penalty.received, outputs.hidden_states)
                assert_close(accumulated_gradients(model), expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # they are token ids
@pytest.mark.parametrize("implementation", CheckpointImpl)
@pytest.mark.parametrize("make_model", [make_bert, make_llama])
def test_the_whole_base_model_is_wrapped(make_model, implementation):
    """A reentrant checkpoint of it computes all hidden states without gradients, where no pass is read."""
    model, _, inputs = make_model()
    outputs = seeded_pass(model, inputs, 1, output_hidden_states=True)
    expected = gradients(model, naive_loss(outputs, outputs.hidden_states, MASK))
    name = model.base_model_prefix
    setattr(model, name, checkpoint_wrapper(getattr(model, name), implementation))
    with attach(model, make_istar("with_embeddings")) as watch:
        for _ in range(2):
            model.zero_grad()
            loss = seeded_pass(model, inputs, 1).loss
            if implementation == CheckpointImpl.REENTRANT:
                with pytest.raises(UserError, match="inside a reentrant checkpoint"):
                    watch.loss()
                return
            (loss + watch.loss()).backward()
            assert_close(accumulated_gradients(model), expected, **CLOSE)


# Checkpoints of a module that is not of transformers ------------------------------------------------------------


class Tower(nn.Module):
    """Four linear layers, each of them or each two of them within a checkpoint in the module's own forward."""

    def __init__(self, segments: int, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).double()
        self.segments, self.use_reentrant = segments, use_reentrant

    def forward(self, points: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        blocks = [nn.Sequential(nn.Tanh(), layer) for layer in self.layers]
        if not self.segments:
            return nn.Sequential(*blocks)(points)
        length = len(blocks) // self.segments
        for start in range(0, len(blocks), length):
            segment = nn.Sequential(*blocks[start : start + length])
            points = checkpoint(segment, points, use_reentrant=self.use_reentrant)
        return points


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("segments", "numbers"), [(1, [3]), (2, [1, 2, 3, 4]), (2, [2, 4]), (4, [1, 2, 3, 4])])
def test_checkpoints_of_several_layers_are_right_or_refused(numbers, segments, use_reentrant):
    """A reentrant checkpoint computes the layers inside of it without gradients, except the last one."""
    points = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points.requires_grad_()
    model = Tower(0, False)
    states = [points]
    for layer in model.layers:
        states.append(layer(states[-1].tanh()))
    score = algorithm_1(stack([states[number] for number in numbers], MASK), sigma(), ZETA, torch.linalg.eigvalsh)
    expected = gradients(model, WEIGHT * (1 - score) + states[-1].square().sum())
    model = Tower(segments, use_reentrant)
    returned_layers = range(4 // segments, 5, 4 // segments)
    with attach(model, make_istar(numbers), modules=model.layers) as watch:
        if use_reentrant and not set(numbers) <= set(returned_layers):
            message = r"hidden state [123] was computed without gradients.*use_reentrant=False"
            with pytest.raises(UserError, match=message) as error:
                model(points, MASK)
            assert "\n" not in str(error.value)
            return
        state = model(points, MASK)
        (watch.loss() + state.square().sum()).backward()
    assert_close(accumulated_gradients(model), expected, **CLOSE)


class Block(nn.Module):
    """Several layers within one checkpoint."""

    def __init__(self, layers: nn.ModuleList, use_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.use_reentrant = layers, use_reentrant

    def forward(self, state: Tensor, *inputs: Any, **arguments: Any) -> Tensor:
        def run(state: Tensor) -> Tensor:
            for layer in self.layers:
                state = layer(state, *inputs, **arguments)
            return state

        return checkpoint(run, state, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_states_that_a_model_returns_without_gradients_are_refused(use_reentrant):
    """transformers collects the hidden states of images where the layers compute them, inside the checkpoint."""
    torch.manual_seed(0)
    sizes = {name: SHAPE[name] for name in list(SHAPE)[:4]}
    model = hf.ViTModel(hf.ViTConfig(**sizes, image_size=8, patch_size=4)).double().train()
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    outputs = seeded_pass(model, inputs, 1, output_hidden_states=True)
    expected = gradients(model, naive_loss(outputs, outputs.hidden_states[1:], torch.ones(2, 5)))
    model.layers = nn.ModuleList([Block(model.layers, use_reentrant)])
    with attach(model, make_istar()) as watch:
        if use_reentrant:
            with pytest.raises(UserError, match="hidden state 1 was computed without gradients"):
                model(**inputs)
            return
        seeded_pass(model, inputs, 1)
        watch.loss().backward()
    actual = {name.replace("layers.0.", "", 1): value for name, value in accumulated_gradients(model).items()}
    assert_close(actual, expected, **CLOSE)


def test_other_hooks_on_saved_tensors_change_nothing():
    model, _, inputs = make_bert()
    outputs = seeded_pass(model, inputs, 1, output_hidden_states=True)
    expected = gradients(model, naive_loss(outputs, outputs.hidden_states[1:], MASK))
    with attach(model, make_istar()) as watch, torch.autograd.graph.save_on_cpu():
        loss = seeded_pass(model, inputs, 1).loss
        loss = loss + watch.loss()
    assert_close(gradients(model, loss), expected, **CLOSE)
