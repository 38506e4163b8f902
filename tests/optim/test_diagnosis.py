"""What a run tells about the explanations that MESH considered: values by hand, identities, and no influence."""

import math

import pytest
import torch
from tiny_whale import Toy, differing, family, weights

from sonar_repro.errors import UserError
from sonar_repro.optim.diagnosis import EVERY, Diagnosis, Routing, cosines, mutual_information
from sonar_repro.optim.reference import sinkhorn as reference_sinkhorn


def generator():
    return torch.Generator().manual_seed(0)


def test_loads_and_effective_sample_sizes_by_hand():
    """Four tokens, top 2 of 4 experts: N k / E = 2. Expert 0 has 3 tokens of weights 3, 1, 1; expert 3 has none."""
    index = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 2]])
    a = torch.tensor([[3.0, 1.0], [1.0, 1.0], [1.0, 2.0], [1.0, 2.0]])
    routing = Routing()
    routing.add(index, a, 4, torch.arange(4), generator())
    assert routing.loads[0].tolist() == [1.5, 1.5, 1.0, 0.0]
    assert routing.effective[0][:3].tolist() == pytest.approx([25 / 11 / 3, 1.0, 1.0])
    summary = Routing.summary([routing])
    assert summary["load"]["idle"] == 0.25 and summary["load"]["largest"] == 1.5
    assert summary["load"]["coefficient_of_variation"] == pytest.approx(math.sqrt((0.25 + 0.25 + 0 + 1) / 4))
    assert summary["gate"]["smallest_of_an_expert"] == pytest.approx(25 / 33)
    assert summary["gate"]["effective_share_of_tokens"] == pytest.approx((25 / 33 + 2) / 3)


def test_an_index_of_no_expert_is_left_out():
    routing = Routing()
    routing.add(torch.tensor([[0, 2], [1, 2]]), torch.ones(2, 2), 2, torch.arange(2), generator())
    assert routing.loads[0].tolist() == [0.5, 0.5]  # two of four selections, of an even share of two each


@pytest.mark.parametrize(
    "counts, share",
    [
        ([[4, 0], [0, 4]], 1.0),  # the id decides the expert
        ([[2, 2], [3, 3]], 0.0),  # it says nothing
        ([[5, 0], [7, 0]], 0.0),  # one expert: nothing to tell
        ([[3, 1], [1, 3]], 1 - (-0.75 * math.log(0.75) - 0.25 * math.log(0.25)) / math.log(2)),
    ],
)
def test_mutual_information_of_known_tables(counts, share):
    assert mutual_information(torch.tensor([counts], dtype=torch.float64)) == pytest.approx([share], abs=1e-12)


def test_cosines_leave_zero_matrices_out():
    a = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]], [[1.0, 0.0]]])
    b = torch.tensor([[[4.0, 3.0]], [[1.0, 1.0]], [[-2.0, 0.0]]])
    assert cosines(a, b) == pytest.approx([0.96, -1.0])


def steps(model, data, diagnosis=None, rate=0.05):
    """Plain SGD over ``data``; gradients by fresh backward passes."""
    for ids in data:
        if diagnosis:
            diagnosis.begin_step()
        model(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= rate * p.grad
                    p.grad = None


def test_watching_changes_no_weight_and_counts_training_passes_only():
    data = list(torch.randint(0, 96, (EVERY + 2, 2, 16), generator=torch.Generator().manual_seed(3)))
    plain, watched = family("deepseek_v4"), family("deepseek_v4")
    diagnosis = Diagnosis(watched)
    steps(plain, data)
    steps(watched, data, diagnosis)
    assert not differing(weights(plain), weights(watched))
    summary = diagnosis.summary()
    watched.eval()
    with torch.no_grad():
        watched(input_ids=data[0])
    assert diagnosis.summary() == summary and summary["steps"] == len(data)
    assert len(diagnosis.routing) == 2 and all(len(r.loads) == len(data) for r in diagnosis.routing)
    for routing in diagnosis.routing:
        for load in routing.loads:
            assert float(load.mean()) == pytest.approx(1.0)  # every token is somewhere
    pairs = diagnosis.routing[0].pairs
    assert pairs[0].sum() == pairs[1].sum() == len(data) * 32 * 2
    assert 0 <= summary["semantic"]["shuffled"] < summary["semantic"]["information_of_token_id"] <= 1
    diagnosis.close()
    watched.train()
    steps(watched, data[:1])
    assert len(diagnosis.routing[0].loads) == len(data)


def test_the_same_batch_at_rate_zero_gives_cosine_one_and_partition_is_that_of_the_reference():
    model = family("deepseek_v4")
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(3))
    diagnosis = Diagnosis(model)
    steps(model, [ids, ids], diagnosis, rate=0.0)
    summary = diagnosis.summary()
    for values in summary["temporal"].values():
        assert set(values) == {"routed", "shared", "dense"}
        assert all(value == pytest.approx(1.0, abs=1e-6) for value in values.values())
    model(input_ids=ids, labels=ids).loss.backward()
    wanted = []
    for name, p in model.named_parameters():
        if name.endswith("gate_up_proj"):
            for g in p.grad.double():
                one, parts = reference_sinkhorn(g), g.view(2, -1, g.shape[1])
                split = [reference_sinkhorn(part) for part in parts]
                wanted += [
                    float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))
                    for a, b in zip(split, one.view_as(parts))
                ]
    assert summary["partition"]["cosine_of_split_and_fused"] == pytest.approx(sum(wanted) / len(wanted), abs=1e-5)
    assert min(wanted) < 0.9999


def test_a_block_that_backward_runs_again_is_counted_once():
    model = family("olmoe")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    diagnosis = Diagnosis(model)
    steps(model, list(torch.randint(0, 96, (3, 2, 8))), diagnosis)
    assert [len(r.loads) for r in diagnosis.routing] == [3, 3]


def test_a_model_without_experts_is_refused():
    with pytest.raises(UserError, match="no experts module"):
        Diagnosis(Toy())
