"""Word similarity: valid and broken files, three kinds of tokenizers, and correlations checked against numpy."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from istar.embeddings.wordsim import Benchmark, Pair, measure_similarity, read_benchmark, word_vectors
from istar.errors import UserError

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


SIMLEX = "old\tnew\tA\t1.58\t2.72\t2.81\t2\t7.25\t1\t0.41"
VALID_TEXTS = {
    "header": ("word1\tword2\tPOS\tSimLex999\tconc(w1)\n" + SIMLEX, ("old", "new", 1.58)),
    "short": ("old\tnew\tN\t1.58\n", ("old", "new", 1.58)),
    "carriage returns": (f"{SIMLEX}\r\n\r\n{SIMLEX}\r\n", ("old", "new", 1.58)),
    "byte-order mark": ("\ufefftiger\tcat\t7.35\n", ("tiger", "cat", 7.35)),
    "spaces behind": ("tiger\tcat\t7.35  \n", ("tiger", "cat", 7.35)),
    "space behind columns by spaces": ("sun-n moon-n 50 \nsun-n sea-n 5\n", ("sun", "moon", 50.0)),
    "wordsim header": ("Word 1\tWord 2\tHuman (mean)\ntiger\tcat\t7.35\n", ("tiger", "cat", 7.35)),
    "header by spaces": ("word1 word2 score\nsun sea 5\n", ("sun", "sea", 5.0)),
    "words that begin like a header": ("wordy\tterse\t0.5\n", ("wordy", "terse", 0.5)),
    "comments": ("# by people\n#word1\tword2\tmean\ntiger\tcat\t7.35\n# end\n", ("tiger", "cat", 7.35)),
    "natural": ("sun sunlight 50.000000\nx-n off-n 1\n", ("sun", "sunlight", 50.0)),
    "lemmas": ("sun-n well-known-j 50\n", ("sun", "well-known", 50.0)),
    "a relation behind the rating": ("take\tremove\tV\t6.81\tSYNONYMS\n", ("take", "remove", 6.81)),
    "one individual rating": ("squishing\tsquirt\t7\t7\n", ("squishing", "squirt", 7.0)),
    "a missing individual rating": ("squishing\tsquirt\t5.5\t7\t\t4\n", ("squishing", "squirt", 5.5)),
    "accents": ("café\tcrème brûlée\t5.0\n", ("café", "crème brûlée", 5.0)),
}


@pytest.mark.parametrize(("text", "first_pair"), VALID_TEXTS.values(), ids=VALID_TEXTS)
def test_each_format_is_recognized(tmp_path, text, first_pair):
    benchmark = read_benchmark(write_file(tmp_path, text))
    assert benchmark.name == "pairs.txt"
    assert benchmark.pairs[0] == Pair(*first_pair)
    assert "#" not in "".join(benchmark.words())


@pytest.mark.parametrize(
    "text",
    [
        "access,gateway,3.79\nice cream,cold,8\n",
        'Word 1;Word 2;"Human (mean)"\r\naccess;gateway;3.79\r\n"ice cream";cold;8\r\n',
        "access\tgateway\t3.79\nice cream\tcold\t8\n",
        "word1,word2,POS,SimLex999\naccess,gateway,N,3.79\nice cream,cold,A,8\n",
    ],
)
def test_csv_files_have_the_same_columns(tmp_path, text):
    benchmark = read_benchmark(write_file(tmp_path, text, "MTURK-771.csv"))
    expected = (Pair("access", "gateway", 3.79), Pair("ice cream", "cold", 8.0))
    assert benchmark == Benchmark("MTURK-771.csv", expected)


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("word1\tword2\tPOS\tAssoc(USF)", "a\tb\tN\t7.25"),
        ("word1\tword2\tPOS\tSD(SimLex)", "a\tb\tN\t7.25"),
        ("word1\tword2\tid", "a\tb\t7"),
        ("word1\tword2\tn\tscore", "a\tb\t10\t10"),
        ("word1 word2 frequency", "a b 7"),
    ],
)
def test_a_header_that_names_another_column_than_the_rating_is_refused(tmp_path, header, line):
    with pytest.raises(UserError, match=r"line 1: the rating is read from column [34]"):
        read_benchmark(write_file(tmp_path, f"{header}\n{line}\n"))


LINES = {"simlex": "{}\tb\tV\t1\tX\n", "men": "{} b 1\n", "wordsim": "{}\tb\t1\n", "rw": "{}\tb\t1\t0\t2\n"}


@pytest.mark.parametrize(
    ("line_format", "count", "file", "name"),
    [
        ("simlex", 999, "a.txt", "simlex999"),
        ("simlex", 998, "SimLex-999.txt", "SimLex-999.txt"),
        ("simlex", 998, "SimLex-999", "SimLex-999 (998 pairs)"),
        ("simlex", 3500, "SimVerb-3500.txt", "SimVerb-3500.txt"),
        ("simlex", 3000, "SimVerb-3000-test.txt", "SimVerb-3000-test.txt"),
        ("men", 3000, "a", "men"),
        ("men", 65, "RG-65.txt", "RG-65.txt"),
        ("men", 2000, "MEN", "MEN (2000 pairs)"),
        ("men", 999, "b", "b"),
        ("wordsim", 203, "a", "wordsim_similarity"),
        ("wordsim", 252, "similarity.txt", "wordsim_relatedness"),
        ("wordsim", 353, "combined.tab", "combined.tab"),
        ("wordsim", 771, "mturk-similarity.tsv", "mturk-similarity.tsv"),
        ("wordsim", 999, "simlex999", "simlex999 (999 pairs)"),
        ("rw", 2034, "a", "rw"),
        ("rw", 2033, "rw", "rw (2033 pairs)"),
    ],
)
def test_format_and_number_of_pairs_name_a_benchmark(tmp_path, line_format, count, file, name):
    text = "".join(LINES[line_format].format(f"a{index}") for index in range(count))
    assert read_benchmark(write_file(tmp_path, text, file)).name == name
    # A header, comments and empty lines are not pairs.
    with_other_lines = write_file(tmp_path, f"word1\tword2\tscore\n\n{text}# {count} pairs\n", file)
    assert read_benchmark(with_other_lines).name == name


@pytest.mark.parametrize(
    ("label", "name"),
    [("mine", "mine"), ("MEN", "men"), ("SimLex-999", "simlex999"), ("wordsim similarity", "wordsim_similarity")],
)
def test_a_label_is_the_name(tmp_path, label, name):
    assert read_benchmark(write_file(tmp_path, "a\tb\t1\n"), label).name == name


BROKEN_TEXTS = {
    "columns": ("tiger\tcat\t7.35\ntiger cat 7.35\n", "line 2: 'tiger cat 7.35' is not a line of wordsim"),
    "cut": (f"{SIMLEX}\nold\tnew", "line 2: 'old new' is not a line of simlex"),
    "rating": ("tiger\tcat\t7.35\n\ntiger\tcat\thigh\n", "line 3: 'tiger cat high'"),
    "nan": ("tiger\tcat\t7.35\ntiger\tcat\tnan\n", "line 2: 'tiger cat nan'"),
    "word": ("tiger\tcat\t7.35\n\tcat\t3\n", "line 2: 'cat 3'"),
    "header alone": ("Word 1\tWord 2\tHuman (mean)\n", "no lines follow the header"),
    "empty": ("\n \n", "the file is empty"),
    "other": ("index,sentence,label\n", "line 1: .* is not a line of simlex or men or wordsim or rw"),
    "years": ("king\tqueen\t1998\n", "line 1: 'king queen 1998' is not a line .* a rating below 1000"),
    "years and ratings": ("king\tqueen\t1998\t8.5\n", "line 1: "),
    "counts and ratings": ("king\tqueen\t57\t8.5\n", "line 1: "),
    "one count": ("a\tb\t5\t4\t6\nc\td\t57\t8\t2\n", "line 2: 'c d 57 8 2' is not a line of rw"),
    "concreteness and ratings": ("king\tqueen\tN\t5.1\t8.5\n", "line 1: "),
    "unknown header": ("first\tsecond\tmean\na\tb\t1\n", "line 1: .* a header begins with word1"),
    "commas": ("access,gateway,3.79\n", "line 1: "),
    "long": ("x" * 5000, "line 1: 'x+\\.\\.\\.' is not a line"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN_TEXTS.values(), ids=BROKEN_TEXTS)
def test_an_error_names_file_and_line(tmp_path, text, message):
    path = write_file(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        read_benchmark(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 400


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"none\.txt: cannot be read: No such file"):
        read_benchmark(tmp_path / "none.txt")
    with pytest.raises(UserError, match="Is a directory"):
        read_benchmark(tmp_path)
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        read_benchmark(write_file(tmp_path, "tiger\tcat\t7.35\ncafé\tcat\t1\n", encoding="latin-1"))
    with pytest.raises(UserError, match="it holds null bytes"):
        read_benchmark(write_file(tmp_path, "tiger\tcat\t7.35\n", encoding="utf-16-le"))


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
    assert torch.equal(single_token_vectors["cat"], embeddings[vocabulary["Ġcat"]])
    assert "Cat" not in single_token_vectors
    piece_ids = byte_level_tokenizer("the Cat")["input_ids"][1:]
    assert len(piece_ids) > 1
    mean_vectors = word_vectors(["cat", "Cat"], byte_level_tokenizer, embeddings, "mean")
    torch.testing.assert_close(mean_vectors["Cat"], embeddings[piece_ids].mean(0), rtol=1e-12, atol=1e-12)
    assert torch.equal(mean_vectors["cat"], single_token_vectors["cat"])


@pytest.mark.parametrize("normalized", [False, True])
def test_a_mark_before_the_word_is_not_counted_as_a_piece(normalized):
    tokenizer = make_marking_tokenizer(normalized)
    embeddings = make_matrix(len(tokenizer))
    single_token_vectors = word_vectors(["cat", "tiger", "catfish", "zebra"], tokenizer, embeddings)
    assert torch.equal(single_token_vectors["cat"], embeddings[tokenizer.get_vocab()["▁cat"]])
    assert "catfish" not in single_token_vectors
    assert "zebra" not in word_vectors(["zebra"], tokenizer, embeddings, "mean")  # z is unknown


@pytest.fixture(scope="module")
def wordpiece_tokenizer(minilm):
    return AutoTokenizer.from_pretrained(minilm)


def test_a_real_wordpiece_tokenizer(wordpiece_tokenizer):
    embeddings = make_matrix(len(wordpiece_tokenizer), 3).to(torch.bfloat16)
    single_token_vectors = word_vectors(["tiger", "Jerusalem", "squishing", "☃☃"], wordpiece_tokenizer, embeddings)
    assert set(single_token_vectors) == {"tiger", "Jerusalem"}
    assert torch.equal(single_token_vectors["tiger"], embeddings[wordpiece_tokenizer.get_vocab()["tiger"]].double())
    mean_vectors = word_vectors(["squishing", "☃☃"], wordpiece_tokenizer, embeddings, "mean")
    piece_ids = wordpiece_tokenizer("squishing", add_special_tokens=False)["input_ids"]
    assert len(piece_ids) > 1
    torch.testing.assert_close(mean_vectors["squishing"], embeddings[piece_ids].double().mean(0))
    assert "☃☃" not in mean_vectors


@pytest.mark.parametrize(
    "name",
    [name if name == "SimLex-999.txt" else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED_BY_FILE],
)
def test_a_real_model_agrees_with_people(real_data, minilm, wordpiece_tokenizer, name):
    embeddings = load_file(minilm / "model.safetensors")["embeddings.word_embeddings.weight"]
    benchmark = read_benchmark(real_data / "wordsim" / name)
    kept = {}
    for policy in ("single_token", "mean"):
        result = measure_similarity(word_vectors(benchmark.words(), wordpiece_tokenizer, embeddings, policy), benchmark)
        kept[policy] = result.kept
        assert all(0.15 < correlation < 0.9 for correlation in result[1:5])
    assert 80 < kept["single_token"] < kept["mean"] == len(benchmark.pairs)


def make_benchmark(num_pairs=40, seed=3):
    ratings = np.random.default_rng(seed).random(num_pairs)
    pairs = tuple(Pair(f"a{i}", f"b{i}", float(round(10 * rating, 1))) for i, rating in enumerate(ratings))
    return Benchmark("made up", pairs)


def make_vectors(benchmark, dimensions=6, seed=5):
    words = benchmark.words()
    return dict(zip(words, make_matrix(len(words), dimensions, seed), strict=True))


def test_correlations_equal_numpy_on_values_and_ranks():
    benchmark = make_benchmark()
    vectors = make_vectors(benchmark)
    result = measure_similarity(vectors, benchmark)
    ratings = [pair.rating for pair in benchmark.pairs]
    first, second = (np.array([vectors[pair[side]].numpy() for pair in benchmark.pairs]) for side in (0, 1))
    products = (first * second).sum(1)
    cosines = products / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    expected = []
    for scores in (cosines, products):
        ranks = scipy.stats.rankdata(scores), scipy.stats.rankdata(ratings)
        expected += [np.corrcoef(scores, ratings)[0, 1], np.corrcoef(*ranks)[0, 1]]
    assert result[1:5] == pytest.approx(expected, abs=1e-12)
    assert (result.kept, result.note) == (40, "")
    # Pairs with a word that has no vector are left out.
    known_vectors = {word: vector for word, vector in vectors.items() if word not in ("a3", "b7", "b3")}
    remaining = [pair for index, pair in enumerate(benchmark.pairs) if index not in (3, 7)]
    assert measure_similarity(known_vectors, benchmark) == measure_similarity(
        vectors, Benchmark("made up", tuple(remaining))
    )


def test_invariance_of_the_correlations():
    benchmark = make_benchmark()
    vectors = make_vectors(benchmark)
    rotation, _ = torch.linalg.qr(make_matrix(6, 6, 8))
    result = measure_similarity(vectors, benchmark)
    rotated = {word: vector @ rotation * 3 for word, vector in vectors.items()}
    assert measure_similarity(rotated, benchmark)[1:5] == pytest.approx(result[1:5], abs=1e-12)
    scales = torch.rand(80, 1, generator=torch.Generator().manual_seed(2)) + 0.1
    scaled = {word: vector * scale for (word, vector), scale in zip(vectors.items(), scales, strict=True)}
    scaled_result = measure_similarity(scaled, benchmark)
    assert scaled_result.cosine_pearson == pytest.approx(result.cosine_pearson, abs=1e-12)
    assert abs(scaled_result.inner_product_pearson - result.inner_product_pearson) > 1e-3


def test_a_perfect_order_is_one_and_a_constant_side_undefined():
    ratings = [1.0, 2.0, 5.0, 9.0]
    pairs = tuple(Pair("x", f"y{index}", rating) for index, rating in enumerate(ratings))
    vectors = {"x": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    vectors |= {f"y{index}": torch.tensor([rating, 0.0]).double() for index, rating in enumerate(ratings)}
    result = measure_similarity(vectors, Benchmark("four", pairs))
    assert (result.inner_product_pearson, result.inner_product_spearman) == pytest.approx((1, 1))
    # Every cosine is 1.
    assert math.isnan(result.cosine_pearson)
    assert math.isnan(result.cosine_spearman)
    assert result.note == "cosine: the score is constant"
    equal_ratings = Benchmark("four", tuple(pair._replace(rating=3.0) for pair in pairs))
    assert "inner product: the rating is constant" in measure_similarity(vectors, equal_ratings).note
    vectors["y1"] = torch.zeros(2, dtype=torch.float64)
    assert measure_similarity(vectors, Benchmark("four", pairs)).cosine_pearson < 1


def test_too_few_pairs_are_refused_in_one_line():
    benchmark = make_benchmark()
    with pytest.raises(UserError, match=r"^made up: 0 of 40 pairs.*$"):
        measure_similarity({}, benchmark)
    with pytest.raises(UserError, match="1 of 1 pairs"):
        measure_similarity(make_vectors(benchmark), Benchmark("one", benchmark.pairs[:1]))
