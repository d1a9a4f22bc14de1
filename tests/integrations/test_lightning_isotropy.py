"""Lightning's IsotropyCallback: its values against a direct computation, in one process and in two."""

import os
import socket
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.multiprocessing as mp
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from istar.errors import UserError
from istar.integrations.lightning import IsotropyCallback
from tests.integrations.builders import collate, make_classifier, make_examples
from tests.oracles import algorithm_1, mean_pair_cosine, stack

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),
]
ROWS = make_examples("classification", 8)


class Classifier(L.LightningModule):
    """Records what the callback logs, and what it should log."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_classifier("bert")
        self.logged: list[dict[str, float]] = []
        self.points: list[Tensor] = []
        self.expected: list[dict[str, float]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        states = self.model(**batch, output_hidden_states=True).hidden_states[1:]
        self.points.append(stack(states, batch["attention_mask"]))

    def on_validation_end(self) -> None:
        points = torch.cat(self.points)
        self.points = []
        expected = {"val/isoscore": float(algorithm_1(points)), "val/inter_sim": mean_pair_cosine(points.numpy())}
        self.expected.append(expected)
        names = ("val/isoscore", "val/inter_sim")
        self.logged.append({name: float(self.trainer.callback_metrics[name]) for name in names})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(*callbacks: L.Callback, **settings: object) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "precision": "64-true"}
    return L.Trainer(callbacks=list(callbacks), max_epochs=2, **quiet, **settings)  # type: ignore[arg-type]


def make_loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(ROWS, 3, collate_fn=collate)  # type: ignore[arg-type]


def test_each_validation_is_measured_and_the_training_is_the_same() -> None:
    module, plain = Classifier(), Classifier()
    trainer = make_trainer(IsotropyCallback(["isoscore", "inter_sim"]), devices=1)
    trainer.validate(module, make_loader(), verbose=False)
    trainer.fit(module, make_loader(), make_loader())
    assert len(module.logged) == 4  # before training, Lightning's sanity check, and two epochs
    for logged, expected in zip(module.logged, module.expected, strict=True):
        assert logged == pytest.approx(expected, rel=1e-6)  # Lightning logs in float32
    assert module.logged[0] != module.logged[-1]
    plain.on_validation_end = lambda: None  # type: ignore[method-assign]
    make_trainer(L.Callback(), devices=1).fit(plain, make_loader(), make_loader())
    for parameter, expected_parameter in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, expected_parameter)


def validate_in_process(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    module = Classifier()
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = make_trainer(IsotropyCallback(["isoscore", "inter_sim"]), devices=2, strategy=strategy)
    trainer.validate(module, make_loader(), verbose=False)
    torch.save(module.logged, folder / f"{rank}.pt")


def test_two_processes_measure_the_union_of_their_points(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.start_processes(validate_in_process, (port, tmp_path), 2, start_method="fork")
    module = Classifier()
    make_trainer(IsotropyCallback(["isoscore", "inter_sim"]), devices=1).validate(module, make_loader(), verbose=False)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == [pytest.approx(module.expected[0], rel=1e-6)]


def test_two_callbacks_measure_different_layers_under_different_names() -> None:
    values = []
    for options in ([{}], [{"layers": [0]}], [{}, {"layers": [0], "suffix": "_embeddings"}]):
        trainer = make_trainer(*(IsotropyCallback(["isoscore", "inter_sim"], **each) for each in options), devices=1)
        trainer.validate(Classifier(), make_loader(), verbose=False)
        values.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert values[2] == values[0] | {f"{name}_embeddings": value for name, value in values[1].items()}
    assert values[0]["val/isoscore"] != values[1]["val/isoscore"]


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UserError, match="did you mean isoscore"):
        IsotropyCallback(["isoscor"])
    with pytest.raises(UserError, match=r"^Classifier\.net was not found; name the attribute with the model: model="):
        make_trainer(IsotropyCallback(model="net"), devices=1).validate(Classifier(), make_loader())
    with pytest.raises(UserError, match=r"^the trainer has two IsotropyCallbacks with suffix=''; expected different"):
        make_trainer(IsotropyCallback(), IsotropyCallback(), devices=1).validate(Classifier(), make_loader())
