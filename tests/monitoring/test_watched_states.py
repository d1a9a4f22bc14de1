"""What hooks read of a training, and that they cost nothing between readings."""

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import istar
from istar.errors import UserError
from istar.monitoring.watched_states import StateWatcher
from tests.hidden_states.test_checkpointing import METHODS
from tests.monitoring.builders import MEASURES, count_hooks, make_batches, make_bert, make_llama, read_naively, train


class Operations(TorchDispatchMode):
    """Counts the operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def collect_states(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Return what a watcher receives in one pass and its backward pass."""
    received: dict[str, Tensor] = {}
    watcher = StateWatcher(model, lambda name, state, arguments: received.update({name: state.clone()}), **options)
    watcher.arm(True)
    loss = model(**batch).loss
    loss.backward()
    watcher.close()
    assert watcher.failure == ""
    return received


def test_values_are_those_of_istar_measure():
    model, [batch] = make_bert(), list(make_batches(1))
    expected = read_naively(model, batch)
    monitor = istar.Monitor(model, every=2, measures=MEASURES)
    train(model, monitor, [batch])
    [reading] = monitor.readings
    assert list(reading.values) == list(expected) == monitor.states
    for state, values in reading.values.items():
        assert values["points"] == batch["attention_mask"].sum()
        assert values["sequences"] == len(batch["input_ids"])
        for measure in MEASURES:
            assert values[measure] == pytest.approx(expected[state][measure], rel=1e-6), (state, measure)


def test_a_decoder_has_states_before_and_after_its_norm():
    model, [batch] = make_llama(), list(make_batches(1, with_token_labels=True))
    received = collect_states(model, batch)
    assert list(received) == ["embeddings", "layer_1", "layer_2", "layer_3", "final_norm"]
    assert_close(model.model.norm(received["layer_3"]), received["final_norm"])
    states = model(**batch, output_hidden_states=True).hidden_states
    for name, state in zip(["embeddings", "layer_1", "layer_2", "final_norm"], states, strict=True):
        assert_close(received[name], state, rtol=0, atol=0)


def test_layers_of_one_module_are_numbered():
    torch.manual_seed(0)
    config = hf.AlbertConfig(embedding_size=8, hidden_size=8, num_hidden_layers=3, num_attention_heads=2,
                             intermediate_size=16, vocab_size=50)  # fmt: skip
    model, [batch] = hf.AlbertForSequenceClassification(config), list(make_batches(1))
    received = collect_states(model, batch)
    assert list(received) == ["embeddings", "layer_1", "layer_2", "layer_3"]


@pytest.mark.parametrize("is_attached_first", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make_model", [make_bert, make_llama])
def test_checkpointing_changes_nothing(make_model, method, is_attached_first):
    """The recomputation in the backward pass is not read, also with a penalty that reads the same pass."""

    def find_layers(model: Any) -> nn.ModuleList:
        return model.bert.encoder.layer if make_model is make_bert else model.model.layers

    [batch] = make_batches(1, with_token_labels=make_model is make_llama)
    expected = collect_states(make_model(), batch)
    for has_penalty in (False, True):
        model = make_model().train()
        if not is_attached_first:
            METHODS[method](model, find_layers(model))
        received: list[tuple[str, Tensor]] = []

        def receive(name: str, state: Tensor, arguments: Any, received: list[Any] = received) -> None:
            received.append((name, state.clone()))

        watcher = StateWatcher(model, receive)
        watcher.arm(True)
        attached = istar.attach(model, istar.IStar(-1.0, zeta=0)) if has_penalty else None
        if is_attached_first:
            METHODS[method](model, find_layers(model))
        loss = model(**batch).loss
        (loss if attached is None else loss + attached.loss()).backward()
        assert [name for name, _ in received] == list(expected)
        assert_close(dict(received), expected, rtol=0, atol=0)
        assert watcher.num_passes == 1


def test_no_operation_is_added_between_readings():
    model, batches = make_bert(), list(make_batches(3))

    def count(monitor: Any) -> list[int]:
        numbers = []
        for batch in batches:
            with Operations() as operations:
                train(model, monitor, [batch])
            numbers.append(len(operations.names))
        return numbers

    plain, num_hooks = count(None), count_hooks(model)
    monitor = istar.Monitor(model, every=3)
    assert count_hooks(model) > num_hooks
    watched = count(monitor)
    assert watched[0] > plain[0]
    assert watched[1:] == plain[1:]
    # The step that comes now is due.
    assert count_hooks(model) > num_hooks
    train(model, monitor, batches[:1])
    assert count_hooks(model) == num_hooks


def test_a_watched_training_has_the_same_weights_and_random_numbers():
    weights = []
    for has_monitor in (False, True):
        model = make_bert(hidden_dropout_prob=0.3).train()
        monitor = istar.Monitor(model, every=1, gradients=True) if has_monitor else None
        torch.manual_seed(1)
        train(model, monitor, list(make_batches(4)))
        weights.append({**model.state_dict(), "random": torch.get_rng_state()})
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_passes_without_gradients_are_not_read():
    model, [first, second] = make_bert(), list(make_batches(2))
    monitor = istar.Monitor(model)
    with torch.no_grad():
        model(**second)
    model(**first).loss.backward()
    with torch.inference_mode():
        model(**second)
    reading = monitor.step()
    assert reading is not None
    assert reading.values["layer_1"]["points"] == first["attention_mask"].sum()


def test_generated_tokens_are_not_read():
    model, [batch] = make_llama(), list(make_batches(1, with_token_labels=True))
    monitor = istar.Monitor(model)
    model(**batch).loss.backward()
    model.generate(batch["input_ids"][:1, :3], max_new_tokens=4)
    reading = monitor.step()
    assert reading is not None
    assert reading.values["layer_1"]["points"] == batch["attention_mask"].sum()


def test_accumulated_passes_are_read_together():
    model, batches = make_bert(), list(make_batches(4))
    monitor = istar.Monitor(model)
    for batch in batches:
        model(**batch).loss.backward()
    reading = monitor.step()
    assert reading is not None
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    expected = read_naively(model, joined)
    values = reading.values["layer_2"]
    assert (values["points"], values["sequences"]) == (joined["attention_mask"].sum(), 24)
    assert values["inter_sim"] == pytest.approx(expected["layer_2"]["inter_sim"], rel=1e-6)


def test_a_pass_that_failed_does_not_spoil_the_next():
    model, [first, second] = make_bert(), list(make_batches(2))
    monitor = istar.Monitor(model)
    handle = model.bert.encoder.layer[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**first)
    handle.remove()
    second = {name: values[:, :5] if values.dim() == 2 else values for name, values in second.items()}
    model(**second).loss.backward()
    reading = monitor.step()
    assert reading is not None
    # The embeddings and the first layer of the failed pass were computed in the training.
    assert reading.values["layer_3"]["points"] == second["attention_mask"].sum()


def test_padding_free_rows_have_a_group_for_each_document():
    model = make_llama()
    ids = torch.randint(3, 50, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]])
    monitor = istar.Monitor(model)
    model(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
    reading = monitor.step()
    assert reading is not None
    assert (reading.values["layer_1"]["points"], reading.values["layer_1"]["sequences"]) == (12, 3)


def test_autocast_states_are_read():
    model, [batch] = make_bert().float(), list(make_batches(1))
    monitor = istar.Monitor(model, measures=MEASURES)
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch).loss.backward()
    reading = monitor.step()
    assert reading is not None
    expected = read_naively(model, batch)
    for state, values in reading.values.items():
        assert values["inter_sim"] == pytest.approx(expected[state]["inter_sim"], abs=0.01)


def test_skipped_layers_have_no_state():
    torch.manual_seed(0)
    config = hf.OPTConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, ffn_dim=16, vocab_size=50,
                          word_embed_proj_dim=8, layerdrop=0.5, pad_token_id=0, dropout=0.0)  # fmt: skip
    model, [batch] = hf.OPTForCausalLM(config).train(), list(make_batches(1, with_token_labels=True))
    seen = set()
    for seed in range(12):
        torch.manual_seed(seed)
        seen.add(tuple(collect_states(model, batch)))
    assert ("embeddings", "layer_2", "final_norm") in seen or any("layer_2" not in names for names in seen)
    assert any("layer_1" not in names and "layer_2" in names for names in seen)


class Wrapper(nn.Module):
    """Calls `forward` of a model itself, past its hooks, as sentence-transformers does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = {name: features[name] for name in ("input_ids", "attention_mask")}
        state = self.model.forward(**inputs).last_hidden_state
        mask = features["attention_mask"][..., None]
        return {**features, "sentence_embedding": (state * mask).sum(1) / mask.sum(1)}


def test_models_that_are_called_past_their_hooks_and_pooled_embeddings():
    encoder, [batch] = make_bert().bert, list(make_batches(1))
    model = Wrapper(encoder)
    monitor = istar.Monitor(model)
    model(batch)["sentence_embedding"].sum().backward()
    reading = monitor.step()
    assert reading is not None
    assert list(reading.values) == ["embeddings", "layer_1", "layer_2", "layer_3", "pooled"]
    assert reading.values["layer_3"]["points"] == batch["attention_mask"].sum()
    assert reading.values["pooled"]["points"] == reading.values["pooled"]["sequences"] == 6


def test_modules_of_any_model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3))
    monitor = istar.Monitor(net, modules=["0", net[2]])
    points = torch.randn(40, 5)
    output = net(points)
    output.sum().backward()
    reading = monitor.step()
    assert reading is not None
    assert list(reading.values) == ["0", "2"]
    expected = istar.measure(output.detach()).table
    assert reading.values["2"]["inter_sim"] == pytest.approx(float(expected["inter_sim"].iloc[0]), rel=1e-5)
    # The state before the activation that works in place.
    before = istar.measure(nn.functional.linear(points, net[0].weight, net[0].bias).detach()).table
    assert reading.values["0"]["inter_sim"] == pytest.approx(float(before["inter_sim"].iloc[0]), rel=1e-5)


def test_gradient_norms_are_those_of_the_states():
    model, batches = make_bert(), list(make_batches(2))
    monitor = istar.Monitor(model, gradients=True)
    for batch in batches:
        model(**batch).loss.backward()
    reading = monitor.step()
    assert reading is not None
    squares = torch.zeros(4, dtype=torch.float64)
    for batch in batches:
        outputs = model(**batch, output_hidden_states=True)
        gradients = torch.autograd.grad(outputs.loss, outputs.hidden_states)
        squares += torch.stack([gradient.square().sum() for gradient in gradients])
    norms = [values["gradient_norm"] for values in reading.values.values()]
    assert_close(torch.tensor(norms, dtype=torch.float64), squares.sqrt())


def save_and_load(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copy_model", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), save_and_load])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_copies_of_a_model_are_not_watched_and_do_not_contain_the_monitor(copy_model, backend):
    model, [batch] = make_bert(), list(make_batches(1))
    monitor = istar.Monitor(model, every=1)
    if backend is not None:
        torch.compile(model, backend=backend)(**batch)
        monitor.step()
    assert count_hooks(model) > 0
    size = len(pickle.dumps(make_bert()))
    assert len(pickle.dumps(model)) < size + 5_000
    assert len(pickle.dumps(model.bert.encoder.layer[0])) < size / 3
    num_monitors = sum(type(item) is istar.Monitor for item in gc.get_objects())
    copied = copy_model(model)
    assert sum(type(item) is istar.Monitor for item in gc.get_objects()) == num_monitors
    called = copied if backend is None else torch.compile(copied, backend=backend)
    assert called(**batch).loss == model(**batch).loss
    called(**batch).loss.backward()
    reading = monitor.step()
    assert reading is not None
    assert reading.values["layer_1"]["points"] == batch["attention_mask"].sum()  # of the one pass of the model
    with istar.Monitor(copied, every=1) as monitor_of_copy:
        copied(**batch).loss.backward()
        assert monitor_of_copy.step() == reading._replace(step=0)


def test_a_copied_monitor_is_closed_and_has_the_readings():
    model, [batch] = make_bert(), list(make_batches(1))
    monitor = istar.Monitor(model, every=1)
    train(model, monitor, [batch])
    for copied in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert copied.is_closed
        assert copied.step() is None
        assert copied.readings == monitor.readings
        assert copied.states == monitor.states
        copied.close()
    assert not monitor.is_closed
    model(**batch).loss.backward()
    assert monitor.step() is not None


def test_models_without_modules_for_their_states_are_refused():
    with pytest.raises(UserError, match=r"has no transformers model|no transformers model in Linear; name the modules"):
        istar.Monitor(nn.Linear(2, 2))
    config = hf.XLNetConfig(d_model=8, n_layer=2, n_head=2, d_inner=16, vocab_size=50)
    with pytest.raises(UserError, match=r"^XLNetModel has no modules that output its hidden states; name others"):
        istar.Monitor(hf.XLNetModel(config))
