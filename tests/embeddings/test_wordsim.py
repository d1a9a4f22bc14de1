"""Word similarity: valid and broken files, three kinds of tokenizers, and correlations checked against numpy."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from istar.embeddings.wordsim import FORMATS, Benchmark, Pair, WordVectors, read_benchmark, similarity, word_vectors
from istar.errors import NonFiniteError, UserError

EXPECTED_BY_FILE = {
    "SimLex-999.txt": ("simlex999", 999, Pair("old", "new", 1.58), Pair("attend", "arrive", 6.08)),
    "MEN_dataset_lemma_form_full": ("men", 3000, Pair("sun", "sunlight", 50.0), None),
    "wordsim_similarity_goldstandard.txt": ("wordsim_similarity", 203, Pair("tiger", "cat", 7.35), None),
    "wordsim_relatedness_goldstandard.txt": ("wordsim_relatedness", 252, Pair("computer", "keyboard", 7.62), None),
    "rw.txt": ("rw", 2034, Pair("squishing", "squirt", 5.88), None),
}


def write_file(folder, text, name="pairs.txt", encoding="utf-8"):
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("name", EXPECTED_BY_FILE)
def test_the_authors_files_are_read(real_data, name):
    path = real_data / "wordsim" / name
    expected_name, expected_count, first_pair, last_pair = EXPECTED_BY_FILE[name]
    benchmark = read_benchmark(path)
    assert (benchmark.name, len(benchmark.pairs), benchmark.pairs[0]) == (expected_name, expected_count, first_pair)
    assert last_pair is None or benchmark.pairs[-2] == last_pair or benchmark.pairs[-1] == last_pair
    assert all(word == word.strip() and "\t" not in word for word in benchmark.words())
    assert len(set(benchmark.words())) == len(benchmark.words())
    format_name = {"wordsim_similarity": "wordsim353", "wordsim_relatedness": "wordsim353"}.get(
        expected_name, expected_name
    )
    assert read_benchmark(str(path), format_name) == benchmark


SIMLEX = "old\tnew\tA\t1.58\t2.72\t2.81\t2\t7.25\t1\t0.41"
VALID_TEXTS = {
    "header": ("word1\tword2\tPOS\tSimLex999\tconc(w1)\n" + SIMLEX, "simlex999", ("old", "new", 1.58)),
    "short": ("old\tnew\tN\t1.58\n", "simlex999", ("old", "new", 1.58)),
    "carriage returns": (f"{SIMLEX}\r\n\r\n{SIMLEX}\r\n", "simlex999", ("old", "new", 1.58)),
    "byte-order mark": ("\ufefftiger\tcat\t7.35\n", "wordsim353", ("tiger", "cat", 7.35)),
    "spaces behind": ("tiger\tcat\t7.35  \n", "wordsim353", ("tiger", "cat", 7.35)),
    "space behind columns by spaces": ("sun-n moon-n 50 \nsun-n sea-n 5\n", "men", ("sun", "moon", 50.0)),
    "wordsim header": ("Word 1\tWord 2\tHuman (mean)\ntiger\tcat\t7.35\n", "wordsim353", ("tiger", "cat", 7.35)),
    "natural": ("sun sunlight 50.000000\nx-n off-n 1\n", "men", ("sun", "sunlight", 50.0)),
    "lemmas": ("sun-n well-known-j 50\n", "men", ("sun", "well-known", 50.0)),
    "one rating": ("squishing\tsquirt\t5.88\t7\n", "rw", ("squishing", "squirt", 5.88)),
    "accents": ("café\tcrème brûlée\t5.0\n", "wordsim353", ("café", "crème brûlée", 5.0)),
}


@pytest.mark.parametrize(("text", "name", "first_pair"), VALID_TEXTS.values(), ids=VALID_TEXTS)
def test_each_format_is_recognized(tmp_path, text, name, first_pair):
    benchmark = read_benchmark(write_file(tmp_path, text))
    assert benchmark.name == name
    assert benchmark.pairs[0] == Pair(*first_pair)


def test_natural_forms_keep_a_suffix_like_a_word_class(tmp_path):
    benchmark = read_benchmark(write_file(tmp_path, "sun sunlight 50\nx-n off-n 1\n"))
    assert benchmark.words() == ("sun", "sunlight", "x-n", "off-n")


def test_a_part_of_wordsim_is_known_by_the_files_name(tmp_path):
    assert read_benchmark(write_file(tmp_path, "a\tb\t1\n", "My_Similarity.tsv")).name == "wordsim_similarity"
    assert read_benchmark(write_file(tmp_path, "a b 1\n", "relatedness.txt")).name == "men"


BROKEN_TEXTS = {
    "columns": ("tiger\tcat\t7.35\ntiger cat 7.35\n", r"line 2: 'tiger cat 7.35' has 1 columns; expected 3: tiger TAB"),
    "cut": (f"{SIMLEX}\nold\tnew", "line 2: 'old new' has 2 columns; expected 4 to 10"),
    "rating": (
        "tiger\tcat\t7.35\n\ntiger\tcat\thigh\n",
        "line 3: the rating is 'high'; expected a number from 0",
    ),
    "scale": ("sun moon 49\nsun moon 51\n", "line 2: the rating is '51'; expected a number from 0 to 50"),
    "nan": ("tiger\tcat\t7.35\ntiger\tcat\tnan\n", "line 2: the rating is 'nan'"),
    "word": ("tiger\tcat\t7.35\n\tcat\t3\n", "line 2: a word is empty"),
    "header alone": ("Word 1\tWord 2\tHuman (mean)\n", "no lines follow the header"),
    "empty": ("\n \n", "the file is empty"),
    "other": ("index,sentence,label\n", "line 1: 'index,sentence,label' is not a line of a known benchmark"),
    "long": ("x" * 5000, "line 1: 'x+\\.\\.\\.' is not a line"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN_TEXTS.values(), ids=BROKEN_TEXTS)
def test_an_error_names_file_and_line(tmp_path, text, message):
    path = write_file(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        read_benchmark(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"none\.txt: No such file"):
        read_benchmark(tmp_path / "none.txt")
    with pytest.raises(UserError, match="Is a directory"):
        read_benchmark(tmp_path)
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        read_benchmark(write_file(tmp_path, "tiger\tcat\t7.35\ncafé\tcat\t1\n", encoding="latin-1"))
    with pytest.raises(UserError, match="it holds null bytes"):
        read_benchmark(write_file(tmp_path, "tiger\tcat\t7.35\n", encoding="utf-16-le"))
    path = write_file(tmp_path, "tiger\tcat\t7.35\n")
    with pytest.raises(UserError, match="'wordsim'; expected one of simlex999, men, wordsim353, rw"):
        read_benchmark(path, "wordsim")
    with pytest.raises(UserError, match="has 1 columns; expected 3: sun-n"):
        read_benchmark(path, "men")
    assert set(FORMATS) == {"simlex999", "men", "wordsim353", "rw"}


TRAINING_TEXTS = ["the cat sat on the mat"] * 30 + ["cat", "catalogue", "the tiger and the cat"] * 20


@pytest.fixture(scope="module")
def byte_level_tokenizer():
    """Return a tokenizer like GPT-2's: a word after a space has another token than at the beginning of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TRAINING_TEXTS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_marking_tokenizer(normalized):
    """Return a tokenizer like SentencePiece: each word starts with a mark, also at the beginning of a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    if normalized:  # like Llama's tokenizer, where a space at the beginning of a text is a second mark
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>"])
    tokenizer.train_from_iterator(TRAINING_TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def make_matrix(rows, dimensions=7, seed=0):
    return torch.randn(rows, dimensions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_byte_level_words_are_looked_up_behind_a_space(byte_level_tokenizer):
    vocabulary = byte_level_tokenizer.get_vocab()
    assert vocabulary["cat"] != vocabulary["Ġcat"]
    embeddings = make_matrix(len(byte_level_tokenizer))
    single_token_vectors = word_vectors(["cat", "mat", "Cat"], byte_level_tokenizer, embeddings)
    assert torch.equal(single_token_vectors.vectors["cat"], embeddings[vocabulary["Ġcat"]])
    assert "Cat" not in single_token_vectors.vectors
    piece_ids = byte_level_tokenizer("the Cat")["input_ids"][1:]
    assert len(piece_ids) > 1
    mean_vectors = word_vectors(["cat", "Cat"], byte_level_tokenizer, embeddings, "mean")
    torch.testing.assert_close(mean_vectors.vectors["Cat"], embeddings[piece_ids].mean(0), rtol=1e-12, atol=1e-12)
    assert torch.equal(mean_vectors.vectors["cat"], single_token_vectors.vectors["cat"])
    assert (single_token_vectors.policy, mean_vectors.policy) == ("single_token", "mean")


@pytest.mark.parametrize("normalized", [False, True])
def test_a_mark_before_the_word_is_not_counted_as_a_piece(normalized):
    tokenizer = make_marking_tokenizer(normalized)
    embeddings = make_matrix(len(tokenizer))
    single_token_vectors = word_vectors(["cat", "tiger", "catfish", "zebra"], tokenizer, embeddings)
    assert torch.equal(single_token_vectors.vectors["cat"], embeddings[tokenizer.get_vocab()["▁cat"]])
    assert "catfish" not in single_token_vectors.vectors
    assert "zebra" not in word_vectors(["zebra"], tokenizer, embeddings, "mean").vectors  # z is unknown


@pytest.fixture(scope="module")
def wordpiece_tokenizer(minilm):
    return AutoTokenizer.from_pretrained(minilm)


def test_a_real_wordpiece_tokenizer(wordpiece_tokenizer):
    embeddings = make_matrix(len(wordpiece_tokenizer), 3).to(torch.bfloat16)
    single_token_vectors = word_vectors(["tiger", "Jerusalem", "squishing", "☃☃"], wordpiece_tokenizer, embeddings)
    assert set(single_token_vectors.vectors) == {"tiger", "Jerusalem"}
    assert torch.equal(
        single_token_vectors.vectors["tiger"], embeddings[wordpiece_tokenizer.get_vocab()["tiger"]].double()
    )
    mean_vectors = word_vectors(["squishing", "☃☃"], wordpiece_tokenizer, embeddings, "mean")
    piece_ids = wordpiece_tokenizer("squishing", add_special_tokens=False)["input_ids"]
    assert len(piece_ids) > 1
    torch.testing.assert_close(mean_vectors.vectors["squishing"], embeddings[piece_ids].double().mean(0))
    assert "☃☃" not in mean_vectors.vectors


@pytest.mark.parametrize("name", EXPECTED_BY_FILE)
def test_a_real_model_agrees_with_people(real_data, minilm, wordpiece_tokenizer, name):
    embeddings = load_file(minilm / "model.safetensors")["embeddings.word_embeddings.weight"]
    benchmark = read_benchmark(real_data / "wordsim" / name)
    num_kept_by_policy = {}
    for policy in ("single_token", "mean"):
        result = similarity(word_vectors(benchmark.words(), wordpiece_tokenizer, embeddings, policy), benchmark)
        num_kept_by_policy[policy] = len(result.kept)
        assert {*result.kept, *result.left_out} == set(benchmark.pairs)
        assert len(result.kept) + len(result.left_out) == len(benchmark.pairs)
        for correlation in (result.cosine, result.inner_product):
            assert 0.15 < correlation.pearson < 0.9
            assert 0.15 < correlation.spearman < 0.9
    assert 80 < num_kept_by_policy["single_token"] < num_kept_by_policy["mean"] == len(benchmark.pairs)


def make_benchmark(num_pairs=40, seed=3):
    generator = np.random.default_rng(seed)
    pairs = tuple(
        Pair(f"a{i}", f"b{i}", float(round(10 * rating, 1))) for i, rating in enumerate(generator.random(num_pairs))
    )
    return Benchmark("made up", pairs)


def make_vectors(benchmark, dimensions=6, seed=5):
    words = benchmark.words()
    return WordVectors(dict(zip(words, make_matrix(len(words), dimensions, seed), strict=True)), "mean")


def compute_naive_cosine(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True)) / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))


def test_correlations_equal_numpy_on_values_and_ranks():
    benchmark = make_benchmark()
    vectors = make_vectors(benchmark)
    result = similarity(vectors, benchmark)
    ratings = [pair.rating for pair in benchmark.pairs]
    vector_pairs = [
        (vectors.vectors[pair.first].tolist(), vectors.vectors[pair.second].tolist()) for pair in benchmark.pairs
    ]
    for scores, correlation in (
        ([compute_naive_cosine(x, y) for x, y in vector_pairs], result.cosine),
        ([sum(a * b for a, b in zip(x, y, strict=True)) for x, y in vector_pairs], result.inner_product),
    ):
        assert correlation.pearson == pytest.approx(np.corrcoef(scores, ratings)[0, 1], abs=1e-12)
        ranks = scipy.stats.rankdata(scores), scipy.stats.rankdata(ratings)
        assert correlation.spearman == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)
    assert result.cosine != result.inner_product
    assert (result.kept, result.left_out, result.benchmark, result.policy) == (benchmark.pairs, (), "made up", "mean")


def test_invariance_of_the_correlations():
    benchmark = make_benchmark()
    vectors = make_vectors(benchmark)
    rotation, _ = torch.linalg.qr(make_matrix(6, 6, 8))
    result = similarity(vectors, benchmark)
    rotated_result = similarity(
        WordVectors({word: vector @ rotation * 3 for word, vector in vectors.vectors.items()}, "mean"), benchmark
    )
    for name in ("cosine", "inner_product"):
        for method in ("pearson", "spearman"):
            expected = getattr(getattr(result, name), method)
            assert getattr(getattr(rotated_result, name), method) == pytest.approx(expected, abs=1e-12)
    scales = torch.rand(80, 1, generator=torch.Generator().manual_seed(2)) + 0.1
    scaled_vectors = {
        word: vector * scale for (word, vector), scale in zip(vectors.vectors.items(), scales, strict=True)
    }
    scaled_result = similarity(WordVectors(scaled_vectors, "mean"), benchmark)
    assert scaled_result.cosine.pearson == pytest.approx(result.cosine.pearson, abs=1e-12)
    assert abs(scaled_result.inner_product.pearson - result.inner_product.pearson) > 1e-3
    mirrored = Benchmark("made up", tuple(Pair(pair.second, pair.first, 10 - pair.rating) for pair in benchmark.pairs))
    assert similarity(vectors, mirrored).cosine.pearson == pytest.approx(-result.cosine.pearson, abs=1e-12)


def test_pairs_without_a_vector_are_left_out_and_counted():
    benchmark = make_benchmark()
    vectors = make_vectors(benchmark)
    known_vectors = {word: vector for word, vector in vectors.vectors.items() if word not in ("a3", "b7", "b3")}
    result = similarity(WordVectors(known_vectors, "single_token"), benchmark)
    assert result.left_out == (benchmark.pairs[3], benchmark.pairs[7])
    remaining_benchmark = Benchmark(
        "made up", tuple(pair for index, pair in enumerate(benchmark.pairs) if index not in (3, 7))
    )
    assert result.cosine == similarity(vectors, remaining_benchmark).cosine
    assert result.kept == remaining_benchmark.pairs


def test_a_perfect_order_is_one_and_a_constant_side_undefined():
    ratings = [1.0, 2.0, 5.0, 9.0]
    pairs = tuple(Pair("x", f"y{index}", rating) for index, rating in enumerate(ratings))
    vectors = {"x": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    for index, rating in enumerate(ratings):
        vectors[f"y{index}"] = torch.tensor([rating, 0.0], dtype=torch.float64)
    result = similarity(WordVectors(vectors, "mean"), Benchmark("four", pairs))
    assert result.inner_product.pearson == pytest.approx(1)
    assert result.inner_product.spearman == pytest.approx(1)
    # Every cosine is 1.
    assert math.isnan(result.cosine.pearson)
    assert math.isnan(result.cosine.spearman)
    assert (result.cosine.note, result.inner_product.note) == ("the score is constant", "")
    benchmark_of_equal_ratings = Benchmark("four", tuple(dataclasses.replace(pair, rating=3.0) for pair in pairs))
    undefined = similarity(WordVectors(vectors, "mean"), benchmark_of_equal_ratings).inner_product
    assert math.isnan(undefined.pearson)
    assert undefined.note == "the rating is constant"
    vectors["y1"] = torch.zeros(2, dtype=torch.float64)
    assert similarity(WordVectors(vectors, "mean"), Benchmark("four", pairs)).cosine.pearson < 1


def test_invalid_arguments_are_refused_in_one_line(byte_level_tokenizer):
    benchmark = make_benchmark()
    embeddings = make_matrix(len(byte_level_tokenizer))
    calls = {
        r"made up: 0 of 40 pairs .* \(policy mean\)": lambda: similarity(WordVectors({}, "mean"), benchmark),
        "1 of 1 pairs": lambda: similarity(make_vectors(benchmark), Benchmark("one", benchmark.pairs[:1])),
        "'first'; expected one of single_token, mean": lambda: word_vectors(
            ["cat"], byte_level_tokenizer, embeddings, "first"
        ),
        r"have 260 rows, but 'cat' has the token \d+; ": lambda: word_vectors(
            ["cat"], byte_level_tokenizer, embeddings[:260]
        ),
        r"embeddings have shape \(5,\)": lambda: word_vectors(["cat"], byte_level_tokenizer, torch.ones(5)),
        "embeddings are torch.int64": lambda: word_vectors(["cat"], byte_level_tokenizer, torch.ones(300, 5).long()),
    }
    for message, call in calls.items():
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(NonFiniteError, match="embeddings are not finite"):
        word_vectors(["cat"], byte_level_tokenizer, embeddings * math.inf)
