"""The order hash: what it covers, and what it must not depend on."""

import hashlib

import pytest
from data_sets import data_config

from sonar_repro.data import BatchStream, Example, load_corpus, order_hash


def test_value_by_hand():
    numbers = [7, 2, 5, 6, 3, 1, 9]  # index, length, ids; twice
    expected = hashlib.sha256(b"".join(n.to_bytes(8, "little") for n in numbers)).hexdigest()
    assert order_hash([Example(7, [5, 6], [-100, 6]), Example(3, [9], [9])]) == expected


def test_covers_index_ids_and_order_of_the_first_256():
    data = [Example(i, [i, i + 1, 3], [-100, i + 1, 3]) for i in range(300)]
    whole = order_hash(data)
    assert order_hash(data[:256]) == whole
    assert order_hash(data[:255]) != whole
    assert order_hash([data[1], data[0], *data[2:]]) != whole
    assert order_hash([Example(999, data[0].input_ids, data[0].labels), *data[1:]]) != whole
    assert order_hash([Example(0, [0, 1, 4], data[0].labels), *data[1:]]) != whole
    # Boundaries count: the same ids in other pieces are other data.
    assert order_hash([Example(0, [1, 2], []), Example(1, [3], [])]) != order_hash(
        [Example(0, [1], []), Example(1, [2, 3], [])]
    )


@pytest.mark.parametrize("size", [1, 2, 8])
def test_reading_batches_of_any_size_leaves_it_alone(size):
    corpus = load_corpus(data_config(train_examples=64, heldout_count=8))
    stream = BatchStream(corpus.train, size, corpus.pad_id)
    for _ in range(70):
        next(stream)
    assert order_hash(corpus.train) == corpus.sha256


def test_same_data_same_hash_and_other_order_other_hash():
    spec = data_config(train_examples=64, heldout_count=8)
    assert load_corpus(spec).sha256 == load_corpus(spec, seed=42).sha256
    assert load_corpus(spec, seed=100).sha256 != load_corpus(spec).sha256
    assert load_corpus(data_config(train_examples=63, heldout_count=8)).sha256 != load_corpus(spec).sha256
