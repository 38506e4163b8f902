"""Commands of README and docs work as written: each is planned, the quick ones are run, code blocks executed."""

import json
import re
import shlex
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from sonar_repro.__main__ import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
BLOCKS = [block for text in PAGES.values() for block in re.findall(r"```(\w+)\n(.*?)```", text, re.S)]
LINES = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
LINES += [line for text in PAGES.values() for line in re.findall(r"(?m)^ {4}(\S.*)$", text)]
COMMANDS = sorted({line.split("#")[0].strip() for line in LINES if line.startswith("python -m sonar_repro ")})


@pytest.fixture
def files(tmp_path):
    """What the README's placeholders stand for."""
    row = json.dumps({"instruction": "Say yes.", "input": "", "output": "Yes."})
    (tmp_path / "my.jsonl").write_text("\n".join([row] * 800) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmoe", "num_hidden_layers": 2}))
    host = ROOT / "sonar_repro" / "forecast" / "hosts" / "amd_epyc.json"
    return {
        "my.jsonl": str(tmp_path / "my.jsonl"),
        "PATH/config.json": str(tmp_path / "config.json"),
        "my.json ": f"{host} ",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_plans(command, files, tmp_path, capsys):
    for placeholder, path in files.items():
        command = f"{command} ".replace(placeholder, path).strip()
    argv = shlex.split(command)[3:]
    GlobalHydra.instance().clear()
    plan = ["dry_run=true"] if "task=" not in command else []
    if "task=fetch" in command:
        pytest.skip("needs the hub")
    code = main([*argv, *plan, f"runs_dir={tmp_path / 'runs'}"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "nothing was run" in captured.out or "task=doctor" in command


def test_the_readme_names_existing_targets_and_folders():
    root = ROOT
    makefile = (root / "Makefile").read_text()
    for target in set(re.findall(r"(?m)(?:`|^ {4}|^|    )make ([a-z0-9-]+)", "\n".join(PAGES.values()))):
        assert f"\n{target}:" in makefile, target
    for path in re.findall(r"^\| ((?:`[\w./]+` ?)+)", README, re.M):
        for name in re.findall(r"`([\w./]+)`", path):
            folder = "sonar_repro" if "/" not in name and name.endswith(".py") else ""
            if "/" in name or folder:
                assert (root / folder / name).exists(), name


def tiny_model_and_batch():
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = OlmoeForCausalLM._from_config(config, experts_implementation="eager").train()
    ids = torch.randint(0, 64, (2, 8))
    return model, {"input_ids": ids, "labels": ids}


def test_the_code_blocks_run(monkeypatch):
    """The loop, and the loop with the lines for several processes before it (here one, as torchrun would start it)."""
    import torch
    import torch.distributed as dist

    [loop] = [text for kind, text in re.findall(r"```(\w+)\n(.*?)```", README, re.S) if kind == "python"]
    steps = loop[loop.index("loss =") :]
    own = [text for kind, text in BLOCKS if kind == "python"]
    codes = {text if "loss =" in text else text + steps for text in own}
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    for code in codes:
        model, batch = tiny_model_and_batch()
        before = [p.detach().clone() for p in model.parameters()]
        try:
            exec(code, {"model": model, "batch": batch})
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
