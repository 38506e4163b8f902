"""``forecast(...)`` from a program: the command's answer, and the same for a module outside transformers."""

import pytest
import torch
from torch import nn

import sonar_repro
from sonar_repro import forecast
from sonar_repro.errors import UserError
from sonar_repro.instruments.events import round_to_block
from sonar_repro.instruments.tracker import AllocationTracker


class Experts(nn.Module):
    """[E, 4h, h] and [E, h, 4h] in one product each: every token visits every expert."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.down = nn.Parameter(torch.empty(experts, width, 4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("eti,eoi->eto", torch.einsum("ti,eoi->eto", x, self.up).relu(), self.down).mean(0)


class Own(nn.Module):
    """No transformers class: linear, experts, linear, four times."""

    def __init__(self, experts: int = 8, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(experts, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mix, experts in zip(self.mix, self.experts):
            x = x + experts(mix(x))
        return x


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(64, 256)).square().mean()


def test_the_package_is_its_function_and_loads_no_torch_by_itself():
    import subprocess
    import sys

    code = "import sys; from sonar_repro import forecast; assert callable(forecast); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert "forecast" in dir(sonar_repro)


def test_a_config_object_and_the_model_group_agree():
    from transformers import AutoConfig

    from sonar_repro.harness.compose import compose

    group = compose("model=nanowhale", "scale=forecast").model
    config = AutoConfig.for_model(group.model_type, **group.architecture)
    by_name = forecast("nanowhale", method="sonar", length=128, gpu="h100")
    by_object = forecast(config, method="sonar", length=128, gpu="h100")
    assert by_object.peak_allocated_bytes == by_name.peak_allocated_bytes and by_name.parameters == 110_369_589
    assert by_object.breakdown == by_name.breakdown and by_object.on("h100").step_ms == by_name.on("h100").step_ms


def test_a_module_of_ones_own_is_counted_as_a_real_run_counts_it():
    """Peaks of the fake run and of the tracker on a real CPU run of the same steps, byte for byte."""
    from sonar_repro import ScheduledOptimizer, make_factory

    for method in ("standard_global_clip", "sonar"):
        found = forecast(Own(), loss=loss, method=method, gpu="h100")
        model = Own()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        tracker = AllocationTracker()
        with tracker:
            tracker.phase("load")
            tracker.attach(model)
            optimizer = ScheduledOptimizer(model, make_factory("adamw", lr=1e-5), method)
            for _ in range(3):
                tracker.phase("measured")
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
        expected = tracker.peaks["measured"].allocated
        workspaces = found.breakdown.get("workspaces", 0)
        hidden = 2 * round_to_block(4 * 1024 * 16)  # partial norms of clipping, which only a GPU has
        scalars = 8192  # a real run on the CPU keeps its verdicts in tensors of one element
        assert -scalars <= found.peak_allocated_bytes - workspaces - expected <= hidden + (1 << 20) * 2
        assert sum(found.breakdown.values()) == found.peak_reserved_bytes


def test_sonar_saves_all_but_one_layers_expert_gradients_of_a_module_of_ones_own():
    standard, sonar = (forecast(Own(), loss=loss, method=m, gpu="h100") for m in ("standard_no_expert_clip", "sonar"))
    experts = 4 * 8 * 2 * 4 * 256 * 256 * 4  # fp32
    # Where a gradient's layout is not its weight's, autograd copies it: one more tensor is alive for a moment.
    tensor = experts / 8
    assert standard.breakdown["gradients, experts"] in (experts, experts + tensor)
    assert sonar.breakdown["gradients, experts"] <= experts / 4 + tensor
    assert sonar.on("h100").fits and sonar.on("h100").step_ms > 0 and sonar.on("h100").tokens_per_s is None


def test_the_module_is_not_changed_and_its_weights_are_not_copied():
    module = Own()
    before = [(p.data_ptr(), p.device, p.grad) for p in module.parameters()]
    forecast(module, loss=loss, gpu="h100")
    assert [(p.data_ptr(), p.device, p.grad) for p in module.parameters()] == before


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: forecast("olmo"), "did you mean olmoe"),
        (lambda: forecast("olmoe", gpu="h1000"), "no such card"),
        (lambda: forecast(3, loss=loss), "goes with an nn.Module"),
        (
            lambda: forecast(
                Own(), loss=lambda m: m(torch.empty(4, 256)).sum() if m(torch.empty(4, 256)).sum() > 0 else 0
            ),
            "values",
        ),
    ],
)
def test_a_mistake_is_a_user_error(ask, told):
    with pytest.raises(UserError, match=told):
        ask()
