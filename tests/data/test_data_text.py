"""Packing, the held-out split and streams, on documents small enough to write down."""

import json

import pytest
from data_sets import data_config

from sonar_repro.data import load_corpus, sources
from sonar_repro.data import text as text_module
from sonar_repro.data.instructions import shuffled_indices
from sonar_repro.data.text import StreamedSequences, packed, split_local, take_heldout
from sonar_repro.errors import UserError

EOS = 0


class Letters:
    """A tokenizer with one token a letter: a = 1, b = 2, ..."""

    eos_token_id, pad_token_id, bos_token_id = EOS, None, None

    def __call__(self, texts, **_):
        one = lambda text: [ord(letter) - 96 for letter in text]  # noqa: E731
        return {"input_ids": one(texts) if isinstance(texts, str) else [one(text) for text in texts]}

    def __len__(self):
        return 27


def test_documents_are_joined_by_the_end_token_and_cut():
    assert list(packed(iter(["abc", "", "de", "f"]), Letters(), 3)) == [[1, 2, 3], [0, 4, 5], [0, 6, 0]]
    assert list(packed(iter(["abcd"]), Letters(), 3)) == [[1, 2, 3]]  # the tail (d, end) is too short


def test_packing_does_not_depend_on_how_many_documents_are_tokenized_together(monkeypatch):
    documents = ["abcdefg"[: 1 + i % 7] for i in range(200)]
    whole = list(packed(iter(documents), Letters(), 5))
    monkeypatch.setattr(text_module, "_AT_ONCE", 3)
    assert list(packed(iter(documents), Letters(), 5)) == whole
    flat = [token for text in documents for token in [*Letters()(text)["input_ids"], EOS]]
    assert [token for piece in whole for token in piece] == flat[: len(flat) // 5 * 5]


def test_heldout_shares_no_document_with_training():
    documents = iter(["abcd", "efgh", "ij", "kl"])
    heldout, used = take_heldout(documents, Letters(), 3, 2)
    assert [example.input_ids for example in heldout] == [[1, 2, 3], [4, 0, 5]]
    assert used == 2
    # "fgh" and its end token are dropped; training begins with the next document.
    assert list(packed(documents, Letters(), 3)) == [[9, 10, 0], [11, 12, 0]]


def test_text_is_supervised_everywhere():
    train, heldout = split_local(["abcabc"] * 4, Letters(), 3, 1, None, seed=0, order_seed=None)
    assert all(example.labels == example.input_ids for example in [*train, *heldout])
    assert train[0].supervised_tokens == 2


def test_a_run_seed_reorders_the_same_sequences():
    documents = [chr(97 + i) * 5 for i in range(20)]
    plain, held = split_local(documents, Letters(), 3, 3, None, seed=42, order_seed=None)
    other, held_too = split_local(documents, Letters(), 3, 3, None, seed=42, order_seed=100)
    assert held == held_too
    assert other != plain
    assert sorted(other, key=lambda e: e.index) == plain


@pytest.mark.parametrize(
    ("heldout", "train", "says"),
    [(9, 1, "heldout_count=9"), (1, 99, "train_examples=99"), (3, None, "fills 0 of 4 tokens")],
)
def test_too_little_text_is_refused(heldout, train, says):
    with pytest.raises(UserError, match=says):
        split_local(["abc", "def", "ghi"], Letters(), 4, heldout, train, seed=0, order_seed=None)


class Stream:
    def __init__(self, documents):
        self.documents, self.opened = documents, 0

    def __call__(self):
        self.opened += 1
        return iter(self.documents)


def test_a_stream_reads_as_the_list_would(monkeypatch):
    monkeypatch.setattr(text_module, "BLOCK", 4)
    documents = ["abcdefghij"[: 1 + i % 9] for i in range(40)]
    expected = list(packed(iter(documents), Letters(), 5))
    stream = Stream(documents)
    sequences = StreamedSequences(stream(), stream, Letters(), 5, 18)
    assert [example.input_ids for example in sequences] == expected[:18]
    assert stream.opened == 1  # one pass in order needs one opening
    assert sequences[1].input_ids == expected[1]  # reading back opens it again
    assert sequences[17].input_ids == expected[17]
    assert stream.opened == 2
    with pytest.raises(IndexError):
        sequences[18]


def test_a_stream_reorders_within_blocks_by_run_seed(monkeypatch):
    monkeypatch.setattr(text_module, "BLOCK", 4)
    stream = Stream(["abcdefghi"[: 1 + i % 9] for i in range(40)])
    plain = list(StreamedSequences(stream(), stream, Letters(), 5, 10))
    other = list(StreamedSequences(stream(), stream, Letters(), 5, 10, order_seed=7))
    assert other != plain
    for start in (0, 4, 8):
        assert sorted(other[start : start + 4], key=lambda e: e.index) == plain[start : start + 4]
    assert list(StreamedSequences(stream(), stream, Letters(), 5, 10, order_seed=7)) == other


def test_a_stream_that_ends_early_says_where():
    stream = Stream(["abcde"] * 3)
    with pytest.raises(UserError, match="the stream ended after 3 sequences of 6 tokens"):
        list(StreamedSequences(stream(), stream, Letters(), 6, 4))


def test_hub_text_goes_the_same_way_as_local_text(monkeypatch, tmp_path):
    documents = [f"document {i} " * 30 for i in range(40)]
    stream = Stream(documents)
    monkeypatch.setattr(sources, "stream_documents", lambda spec: stream)
    hub = data_config(
        kind="text", source="hub", hub_id="a/b", revision="c", train_examples=20, heldout_count=5, max_length=16
    )
    corpus = load_corpus(hub)
    path = tmp_path / "same.jsonl"
    order = shuffled_indices(40, 42)
    shuffled_back = [
        documents[order.index(i)] for i in range(40)
    ]  # so that the local shuffle restores the stream's order
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in shuffled_back))
    local = load_corpus(
        data_config(kind="text", source="path", path=str(path), train_examples=20, heldout_count=5, max_length=16)
    )
    assert list(corpus.train) == local.train
    assert corpus.heldout == local.heldout
    assert corpus.sha256 == local.sha256


def test_embedded_text_holds_512_heldout_sequences_and_an_epoch_of_training():
    corpus = load_corpus(
        data_config(name="embedded_text", kind="text", train_examples=None, heldout_count=512, max_length=64)
    )
    assert len(corpus.heldout) == 512
    assert len(corpus.train) > 3200  # 200 steps of 16 sequences without repeating one
    assert {len(example.input_ids) for example in [*corpus.train, *corpus.heldout]} == {64}
    assert corpus.vocab_size == 2048
    seeds = [load_corpus(data_config(kind="text", train_examples=100, heldout_count=8), seed=s) for s in (42, 100, 512)]
    assert seeds[0].heldout == seeds[1].heldout == seeds[2].heldout
    assert len({corpus.sha256 for corpus in seeds}) == 3
