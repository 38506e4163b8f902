"""Padding, masks, order, resume and sharding of batches."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from sonar_repro.data import BatchStream, Example, collate, sequential_batches
from sonar_repro.errors import UserError


def example(index, length, supervised=1):
    ids = [index + 2] * length
    return Example(index, ids, [-100] * (length - supervised) + ids[length - supervised :])


def indices(batch):
    return [row[0].item() - 2 for row in batch.input_ids]


def test_right_padding_to_the_longest():
    batch = collate([Example(0, [5, 6, 1], [-100, -100, 1]), Example(1, [5, 1, 2, 3], [-100, 1, 2, 3])], pad_id=0)
    assert batch.input_ids.tolist() == [[5, 6, 1, 0], [5, 1, 2, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.labels.tolist() == [[-100, -100, 1, -100], [-100, 1, 2, 3]]
    assert (batch.tokens, batch.supervised_tokens) == (7, 4)
    assert {tensor.dtype for tensor in batch.model_inputs().values()} == {torch.int64}
    assert list(batch.model_inputs("cpu")) == ["input_ids", "attention_mask", "labels"]


def test_pad_equal_to_eos_keeps_real_end_tokens():
    # Granite: pad and end token share id 9. A mask or a label made from "id != pad" would lose three positions here.
    batch = collate([Example(0, [5, 9, 1, 9], [-100, -100, 1, 9]), Example(1, [5, 9], [-100, 9])], pad_id=9)
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.labels.tolist() == [[-100, -100, 1, 9], [-100, 9, -100, -100]]
    assert batch.supervised_tokens == 3


def test_supervised_tokens_are_counted_after_the_shift():
    batch = collate([Example(0, [1, 2, 3], [1, 2, 3]), Example(1, [4, 5], [-100, 5])], pad_id=0)
    assert batch.supervised_tokens == 3  # position 0 of the first row is no target
    assert batch.supervised_tokens == int((batch.labels[:, 1:] != -100).sum())


def test_a_batch_without_supervision_is_seen_before_the_forward_pass():
    # pytorch#70348: the loss over no target is NaN; the count is a plain integer on the host.
    batch = collate([Example(0, [1, 2], [-100, -100]), Example(1, [3], [3])], pad_id=0)
    assert batch.supervised_tokens == 0
    assert isinstance(batch.supervised_tokens, int)
    logits = torch.zeros(2, 1, 5)
    assert cross_entropy(logits.reshape(-1, 5), batch.labels[:, 1:].reshape(-1)).isnan()


def test_order_is_fixed_and_wraps_without_loss():
    data = [example(i, 3) for i in range(5)]
    stream = BatchStream(data, 2, 0)
    assert [indices(next(stream)) for _ in range(6)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]


@pytest.mark.parametrize("start", [0, 1, 3, 7, 12])
def test_resume_at_a_position_gives_the_same_batches(start):
    data = [example(i, 2 + i % 3) for i in range(7)]
    whole = BatchStream(data, 3, 0)
    for _ in range(start):
        next(whole)
    assert whole.position == start
    resumed = BatchStream(data, 3, 0, start=whole.position)
    for _ in range(5):
        first, second = next(whole), next(resumed)
        assert all(torch.equal(a, b) for a, b in zip(first.model_inputs().values(), second.model_inputs().values()))
    assert whole.position == resumed.position == start + 5


def test_processes_together_read_what_one_process_reads():
    data = [example(i, 2) for i in range(11)]
    one = BatchStream(data, 6, 0)
    ranks = [BatchStream(data, 2, 0, rank=rank, world_size=3) for rank in range(3)]
    for _ in range(6):
        assert sum((indices(next(rank)) for rank in ranks), []) == indices(next(one))


def test_heldout_is_read_once_with_a_short_last_batch():
    assert [indices(batch) for batch in sequential_batches([example(i, 2) for i in range(5)], 2, 0)] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert list(sequential_batches([], 2, 0)) == []


@pytest.mark.parametrize(
    ("size", "count", "text"), [(0, 3, "batch_size=0"), (4, 3, "batch_size=4"), (1, 0, "no usable")]
)
def test_impossible_batches_are_refused(size, count, text):
    with pytest.raises(UserError, match=text):
        BatchStream([example(i, 2) for i in range(count)], size, 0)
