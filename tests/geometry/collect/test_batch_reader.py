"""The states of models of images, sound and proteins, and of any modules, against plain hooks in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from istar.errors import UserError
from istar.geometry.collect.batch_reader import BatchReader

SHAPE: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24
}  # fmt: skip
IMAGE: dict[str, Any] = {"image_size": 16, "patch_size": 4}
SPEECH: dict[str, Any] = {
    **SHAPE, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
WINDOWS: dict[str, Any] = {
    "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 25,
    "max_target_positions": 20, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip


def images(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, size, size, dtype=torch.float64)}


def sound() -> dict[str, Tensor]:
    mask = torch.arange(400) < torch.tensor([[400], [250], [123]])
    return {"input_values": torch.randn(3, 400, dtype=torch.float64), "attention_mask": mask.long()}


def proteins() -> dict[str, Tensor]:
    mask = (torch.arange(9) < torch.tensor([[9], [6], [4]])).long()
    return {"input_ids": torch.randint(4, 24, (3, 9)), "attention_mask": mask}


class Case(NamedTuple):
    """A tiny model, a batch, the paths of its blocks and of its final norm, and its number of special places."""

    make: Callable[[], Any]
    batch: Callable[[], dict[str, Tensor]]
    blocks: str
    norm: str | None
    num_special: int | None = None  # None: not tried


CASES: dict[str, Case] = {
    "ViT": Case(lambda: hf.ViTModel(hf.ViTConfig(**SHAPE, **IMAGE)), images, "layers", "layernorm", 1),
    "ViT with classifier": Case(
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**SHAPE, **IMAGE)), images, "vit.layers", "vit.layernorm", 1
    ),
    "DINOv2": Case(
        lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**SHAPE, **IMAGE, num_register_tokens=4)),
        images, "encoder.layer", "layernorm", 5,
    ),
    "SigLIP": Case(
        lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SHAPE, **IMAGE)), images, "encoder.layers",
        "post_layernorm", 0,
    ),
    "CLIP": Case(
        lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**SHAPE, **IMAGE)), images, "encoder.layers", None, 1
    ),
    "BLIP": Case(
        lambda: hf.BlipVisionModel(hf.BlipVisionConfig(**SHAPE, **IMAGE)), images, "encoder.layers", "post_layernorm", 1
    ),
    "Swin": Case(
        lambda: hf.SwinModel(hf.SwinConfig(**WINDOWS)), lambda: images(32), "encoder.layers", "layernorm", 0
    ),
    "Swinv2": Case(lambda: hf.Swinv2Model(hf.Swinv2Config(**WINDOWS)), lambda: images(32), "encoder.layers",
                   "layernorm"),
    "AST": Case(
        lambda: hf.ASTModel(hf.ASTConfig(**SHAPE, patch_size=4, num_mel_bins=8, max_length=16, frequency_stride=4,
                                         time_stride=4)),
        lambda: {"input_values": torch.randn(3, 16, 8, dtype=torch.float64)}, "layers", "layernorm", 2,
    ),
    "VideoMAE": Case(
        lambda: hf.VideoMAEModel(hf.VideoMAEConfig(**SHAPE, image_size=16, patch_size=8, num_frames=4)),
        lambda: {"pixel_values": torch.randn(3, 4, 3, 16, 16, dtype=torch.float64)}, "encoder.layer", None, 0,
    ),
    "wav2vec2": Case(lambda: hf.Wav2Vec2Model(hf.Wav2Vec2Config(**SPEECH)), sound, "encoder.layers", None, 0),
    "HuBERT": Case(
        lambda: hf.HubertModel(hf.HubertConfig(**SPEECH, do_stable_layer_norm=True)), sound, "encoder.layers",
        "encoder.layer_norm", 0,
    ),
    "Whisper": Case(
        lambda: hf.WhisperModel(hf.WhisperConfig(**WHISPER)).get_encoder(),
        lambda: {"input_features": torch.randn(3, 8, 50, dtype=torch.float64)}, "layers", "layer_norm", 0,
    ),
    "ESM": Case(
        lambda: hf.EsmModel(hf.EsmConfig(**SHAPE, vocab_size=33, pad_token_id=1, position_embedding_type="rotary")),
        proteins, "encoder.layer", "encoder.emb_layer_norm_after",
    ),
}  # fmt: skip


def build(make: Callable[[], Any]) -> Any:
    """Return a model in float64 whose norms change what they get, in train mode except for its first part."""
    torch.manual_seed(0)
    model = make().double().train()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    next(model.children()).eval()
    return model


def record(model: nn.Module, batch: Any, blocks: str, norm: str | None) -> dict[str, Tensor]:
    """Return the input of the first block, the outputs of all blocks, and that of the norm, by plain hooks."""
    states: dict[str, Tensor] = {}

    def record_output(name: str, output: Any) -> None:
        # BLIP normalizes its pooled state, too, after the states of all places.
        states.setdefault(name, (output if isinstance(output, Tensor) else output[0]).clone())

    modules = list(model.get_submodule(blocks))
    handles = [modules[0].register_forward_pre_hook(
        lambda module, args, kwargs: record_output("embeddings", args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )]  # fmt: skip
    named = [(f"layer_{number}", module) for number, module in enumerate(modules, 1)]
    for name, module in named + ([("final_norm", model.get_submodule(norm))] if norm else []):
        handles.append(module.register_forward_hook(lambda module, args, out, name=name: record_output(name, out)))
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        model.eval()(**batch)
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    for handle in handles:
        handle.remove()
    return states


def count_own_hooks(model: nn.Module) -> int:
    """Return the number of hooks, without those that transformers itself installs when hidden states are requested."""
    hooks = [hook for module in model.modules() for hook in
             (*module._forward_hooks.values(), *module._forward_pre_hooks.values())]  # fmt: skip
    return sum("transformers" not in getattr(hook, "__module__", "") for hook in hooks)


def read(model: nn.Module, batch: Any, **options: Any) -> dict[str, Any]:
    with BatchReader(model, batch, **options) as reader:
        return reader.read(batch)[0]


@pytest.mark.parametrize("name", CASES)
def test_each_state_is_what_the_block_or_the_norm_computes(name: str) -> None:
    case = CASES[name]
    model = build(case.make)
    modes, batch = [module.training for module in model.modules()], case.batch()
    expected = record(model, batch, case.blocks, case.norm)
    with BatchReader(model, batch) as reader:
        states, token_ids = reader.read(batch)
    assert reader.names == tuple(states) == tuple(expected)
    assert reader.norm is (model.get_submodule(case.norm) if case.norm else None)
    for state, (values, _) in states.items():
        torch.testing.assert_close(values, expected[state], rtol=1e-12, atol=1e-12, msg=state)
    if case.norm:
        last, normed = list(states.values())[-2:]
        assert not torch.allclose(last.values, normed.values, atol=1e-2)
    assert (token_ids is batch["input_ids"]) if "input_ids" in batch else token_ids is None
    assert [module.training for module in model.modules()] == modes
    assert count_own_hooks(model) == 0
    assert "forward" not in vars(model)


@pytest.mark.parametrize("name", ["wav2vec2", "HuBERT", "ESM", "ViT"])
def test_the_mask_of_a_batch_says_which_places_count(name: str) -> None:
    batch = CASES[name].batch()
    states = read(build(CASES[name].make), batch)
    mask = batch.get("attention_mask")
    # Each frame needs 10 samples and then 3 frames: frame t ends at sample 5 (2 t + 2) + 10.
    ends = torch.arange(39) * 10 + 20
    expected = {"ESM": mask, "ViT": None}.get(name, mask is not None and ends <= mask.sum(1)[:, None])
    for places in states.values():
        assert places.mask is None if expected is None else torch.equal(places.mask, expected.bool())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.num_special is not None])
def test_places_that_do_not_depend_on_the_input_are_left_out_on_request(name: str) -> None:
    case = CASES[name]
    model, batch = build(case.make), case.batch()
    included, excluded = read(model, batch), read(model, batch, special_tokens="exclude")
    for state, (values, mask) in excluded.items():
        counts = (
            torch.ones(values.shape[:2], dtype=torch.bool) if included[state].mask is None else included[state].mask
        )
        counts = counts.clone()
        counts[:, : case.num_special] = False
        assert torch.equal(counts if mask is None else mask, counts)
        assert torch.equal(values, included[state].values)


def test_special_tokens_of_texts_are_known_from_the_batch_alone() -> None:
    model, batch = build(CASES["ESM"].make), proteins()
    special = torch.zeros(3, 9, dtype=torch.long)
    special[:, 0] = 1
    states = read(model, {**batch, "special_tokens_mask": special}, special_tokens="exclude")
    expected = batch["attention_mask"].bool() & (special == 0)
    assert all(torch.equal(places.mask, expected) for places in states.values())
    with pytest.raises(
        UserError, match='the batch has no special_tokens_mask, which special_tokens="exclude" needs; expected a tok'
    ):
        read(model, batch, special_tokens="exclude")


# Modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # nested tensors are a prototype of torch
def test_padded_sequences_of_a_torch_encoder_are_read_by_the_names_of_its_layers() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8)).double()
    padding = torch.arange(7) >= torch.tensor([[5], [3], [2]])  # the longest sequence is shorter than the batch
    batch = {"src": torch.randn(3, 7, 8, dtype=torch.float64), "src_key_padding_mask": padding}
    states = read(encoder, batch, modules=["layers.*", encoder.norm], mask=lambda batch: ~batch["src_key_padding_mask"])
    assert list(states) == ["layers.0", "layers.1", "layers.2", "norm"]
    for number, length in enumerate((5, 3, 2)):
        expected = batch["src"][number : number + 1, :length]
        with torch.no_grad():
            for module, places in zip([*encoder.eval().layers, encoder.norm], states.values(), strict=True):
                expected = module(expected)
                torch.testing.assert_close(places.values[number, :length], expected[0], rtol=1e-10, atol=1e-10)
                assert torch.equal(places.mask, ~padding)


class ConvNet(nn.Module):
    """Blocks with activations that change their input in place, and a pooled output in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Conv2d(3, 6, 3, 2), nn.ReLU(inplace=True), nn.Conv2d(6, 8, 3, 2), nn.ReLU()]
        self.stem, self.head = nn.Sequential(*parts), nn.Linear(8, 5)
        self.double()

    def forward(self, images: Tensor, valid: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.head(self.stem(images).mean((2, 3)))}


def test_maps_are_places_and_changes_in_place_do_not_reach_them() -> None:
    """In the first batch, the activation leaves its input as it is."""
    model, batches = ConvNet(), [torch.randn(4, 3, 9, 9, dtype=torch.float64) for _ in range(3)]
    batches[0].zero_()
    model.stem[0].bias.data.abs_()
    with BatchReader(model, batches[0], modules=["head", "stem.0", "stem.2"], channels="first") as reader:
        read_states = [reader.read(batch)[0] for batch in batches]
    for batch, states in zip(batches, read_states, strict=True):
        with torch.no_grad():
            first = nn.functional.conv2d(batch, model.stem[0].weight, model.stem[0].bias, 2)
            second = nn.functional.conv2d(first.clamp(min=0), model.stem[2].weight, model.stem[2].bias, 2)
            pooled = model.head(second.clamp(min=0).mean((2, 3)))
        assert list(states) == ["head", "stem.0", "stem.2"]
        for name, maps in (("stem.0", first), ("stem.2", second)):
            # Places are the pixels by rows.
            expected = torch.stack([maps[:, :, row, column] for row in range(maps.shape[2])
                                    for column in range(maps.shape[3])], 1)  # fmt: skip
            torch.testing.assert_close(states[name].values, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(states["head"].values[:, 0], pooled, rtol=1e-12, atol=1e-12)
    assert (first < 0).any()
    assert states["head"].mask is None


def test_a_mask_does_not_apply_to_states_with_one_place_an_example() -> None:
    model = CASES["ESM"].make().double()
    states = read(model, proteins(), modules=["encoder.layer.*", "pooler"])
    assert [places.mask is None for places in states.values()] == [False, False, False, True]
    assert states["pooler"].values.shape == (3, 1, 16)


@pytest.mark.filterwarnings("ignore")  # those of the compiler
@pytest.mark.parametrize("part", ["whole", "inner"])
def test_a_compiled_model_that_was_called_is_read_uncompiled(part: str) -> None:
    model, batch, graphs = build(CASES["ESM"].make).eval(), proteins(), []
    expected = record(model, batch, "encoder.layer", "encoder.emb_layer_norm_after")

    def count_graph(graph: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count_graph) if part == "whole" else model
    if part == "inner":
        model.encoder.compile(backend=count_graph)
    with torch.inference_mode():
        compiled(**batch)
    num_graphs = len(graphs)
    assert num_graphs > 0
    for options, wanted in (({}, [*expected.values()]), ({"modules": ["encoder.layer.*"]}, [*expected.values()][1:-1])):
        values = [places.values for places in read(compiled, batch, **options).values()]
        assert len(values) == len(wanted)
        assert all(torch.equal(*pair) for pair in zip(values, wanted, strict=True))
    assert len(graphs) == num_graphs


def test_a_pass_has_no_gradients_autocast_or_cache() -> None:
    torch.manual_seed(0)
    model = hf.GPT2Model(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50))
    batch = {"input_ids": torch.randint(3, 50, (2, 5))}
    with torch.no_grad():
        expected = model.eval()(**batch, output_hidden_states=True).hidden_states
    with torch.autocast("cpu", dtype=torch.bfloat16), BatchReader(model, batch) as reader:
        output, states = reader.run(batch)
    assert output.past_key_values is None
    assert all(torch.equal(*pair) for pair in zip([*states.values()][:2], expected, strict=False))
    assert not any(state.requires_grad for state in states.values())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_model_with_lora_is_read_and_one_with_virtual_tokens_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = hf.BertConfig(**SHAPE, vocab_size=50)
    ids = torch.randint(3, 50, (3, 7))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    adapter = peft.LoraConfig(target_modules=["query"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(hf.BertModel(config), adapter)
    states = read(model, batch)
    with torch.no_grad():
        expected = model.eval()(**batch, output_hidden_states=True).hidden_states
    assert list(states) == ["embeddings", "layer_1", "layer_2", "layer_3"]
    assert all(torch.equal(places.values, state) for places, state in zip(states.values(), expected, strict=True))
    prompts = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    model = peft.get_peft_model(hf.BertForSequenceClassification(config), prompts)
    with pytest.raises(UserError, match=r"the mask has shape \(3, 7\), and embeddings has 9 places for 3 examples"):
        read(model, batch)


class Words(nn.Module):
    """A module that takes nothing but points."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Identity()

    def forward(self, points: Tensor) -> Tensor:
        return self.block(points)


def test_what_a_batch_says_of_its_places_is_not_for_the_model() -> None:
    points, valid, special = torch.randn(2, 3, 4), torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.eye(3)[:2]
    batch = {"points": points, "valid": valid, "special_tokens_mask": special}
    options: dict[str, Any] = {"modules": ["block"], "mask": "valid"}
    for special_tokens, expected in (("include", valid), ("exclude", valid * (1 - special))):
        [places] = read(Words(), batch, special_tokens=special_tokens, **options).values()
        assert torch.equal(places.values, points)
        assert torch.equal(places.mask, expected.bool())
    with pytest.raises(UserError, match=r"special_tokens_mask has shape \(2, 2\); expected \(2, 3\) as the mask"):
        read(Words(), {**batch, "special_tokens_mask": special[:, :2]}, special_tokens="exclude", **options)


def test_constant_places_are_left_out_of_states_with_the_same_places_only() -> None:
    batch = images()
    with BatchReader(build(CASES["ViT"].make), batch, special_tokens="exclude") as reader:
        states = {
            "embeddings": torch.randn(3, 17, 4),
            "layer_1": torch.randn(3, 8, 4),
            "layer_2": torch.randn(3, 17, 4),
        }
        places, _ = reader.arrange(states, batch)
    masks = [state.mask for state in places.values()]
    assert masks[1] is None
    assert all(torch.equal(mask, (torch.arange(17) > 0).expand(3, 17)) for mask in masks[::2])


# Refusals ---------------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """A module that is called twice, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, points: Tensor) -> Tensor:
        return self.twice(self.twice(points))


def clip() -> Any:
    return hf.CLIPModel(
        hf.CLIPConfig(text_config={**SHAPE, "vocab_size": 50}, vision_config={**SHAPE, **IMAGE}, projection_dim=8)
    )


def on_meta() -> Any:
    with torch.device("meta"):
        return CASES["ViT"].make()


MAPS = torch.randn(2, 3, 9, 9, dtype=torch.float64)
IDS = torch.randint(3, 50, (2, 5))
REFUSALS: dict[str, tuple[Callable[[], Any], Any, dict[str, Any], str]] = {
    "no states": (lambda: nn.Linear(4, 2), torch.ones(3, 4), {}, r"no transformers model in Linear.*modules=\["),
    "two towers": (clip, {"pixel_values": torch.randn(2, 3, 16, 16), "input_ids": IDS}, {},
                   r"CLIPModel returns no hidden states; measure model\.text_model or model\.vision_model"),
    "encoder-decoder": (lambda: hf.WhisperModel(hf.WhisperConfig(**WHISPER)), None, {},
                        r"WhisperModel is an encoder-decoder.*for example model\.get_encoder\(\)$"),
    "labels": (ConvNet, (MAPS, torch.ones(2), torch.ones(2)), {"modules": ["head"]},
               r"ConvNet cannot be called with \(a Tensor, a Tensor, a Tensor\).*leave out labels"),
    "keyword": (CASES["ViT"].make, {"pictures": torch.ones(2)}, {}, r"ViTModel cannot be called with \(pictures=\)"),
    "meta": (on_meta, images(), {}, "ViTModel is on meta, without weights; expected a model that is loaded"),
    "no match": (ConvNet, MAPS, {"modules": ["stems.*"]}, r"is named stems\.\*; did you mean stem"),
    "part of a name": (ConvNet, MAPS, {"modules": ["*.*.*"]}, "no module of ConvNet is named"),
    "no modules": (ConvNet, MAPS, {"modules": []}, "modules is empty"),
    "other model": (ConvNet, MAPS, {"modules": [nn.ReLU()]}, "a ReLU of modules is not part of ConvNet"),
    "named twice": (ConvNet, MAPS, {"modules": ["head", "he*"]}, "a module is named twice"),
    "called twice": (Doubled, torch.ones(3, 2, 4), {"modules": ["twice"]}, "twice was called 2 times in a pass"),
    "never called": (Doubled, torch.ones(3, 2, 4), {"modules": ["never"]}, "never was called 0 times in a pass"),
    "channels": (ConvNet, MAPS, {"modules": ["stem.0"]}, r'stem\.0 has shape \(2, 6, 4, 4\).*channels="first"'),
    "no such mask": (ConvNet, {"images": MAPS}, {"modules": ["head"], "mask": "valid"}, "the batch has no key valid"),
    "mask": (ConvNet, {"images": MAPS, "valid": torch.ones(2, 3)},
             {"modules": ["stem.0"], "channels": "first", "mask": "valid"},
             r"the mask has shape \(2, 3\), and stem\.0 has 16 places for 2 examples.*mask="),
    "mask of pairs": (ConvNet, {"images": MAPS, "valid": torch.ones(2, 1, 3, 3)},
                      {"modules": ["head"], "mask": "valid"},
                      r"the mask has shape \(2, 1, 3, 3\); expected \(batch, places\)"),
    "mask of frames": (CASES["Whisper"].make, {"input_features": torch.randn(2, 8, 50),
                                               "attention_mask": torch.ones(2, 50)}, {}, r"mask has shape \(2, 50\)"),
    "padding first": (CASES["wav2vec2"].make, {"input_values": torch.randn(2, 400),
                                               "attention_mask": torch.arange(400).expand(2, 400) > 90}, {},
                      "the mask has padding before samples; expected all padding after them"),
    "special places of modules": (ConvNet, MAPS, {"modules": ["head"], "special_tokens": "exclude"},
                                  "the batch has no special_tokens_mask"),
    "option": (ConvNet, MAPS, {"modules": ["head"], "channels": "left"}, "channels=left is not known"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_read_is_refused_in_one_line_and_leaves_the_model_as_it_was(name: str) -> None:
    make, batch, options, message = REFUSALS[name]
    model = make().train()
    next(model.children(), model).eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(UserError, match=message) as caught:
        read(model, batch, **options)
    assert "\n" not in str(caught.value)
    assert [module.training for module in model.modules()] == modes
    assert count_own_hooks(model) == 0
    assert torch.is_grad_enabled()


def test_a_state_of_another_width_or_dtype_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Identity())
    with BatchReader(model, torch.ones(2, 4), modules=["1"]) as reader:
        reader.read(torch.ones(2, 4))
        with pytest.raises(UserError, match="1 has width 5; expected 4 as in earlier batches"):
            reader.read(torch.ones(2, 5))
        with pytest.raises(UserError, match=r"1 is torch\.int64; expected a floating state"):
            reader.read(torch.ones(2, 4, dtype=torch.int64))
