"""The Stanford Alpaca prompt, character for character."""

from sonar_repro.data.prompt import FIXED_PARTS, alpaca_prompt

WITH_INPUT = """Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.

### Instruction:
Add.

### Input:
1, 2

### Response:"""

NO_INPUT = """Below is an instruction that describes a task. \
Write a response that appropriately completes the request.

### Instruction:
Say hi.

### Response:"""


def test_both_variants_are_stanfords_text():
    assert alpaca_prompt({"instruction": "Add.", "input": "1, 2", "output": "3"}) == WITH_INPUT
    assert alpaca_prompt({"instruction": "Say hi.", "input": "", "output": "hi"}) == NO_INPUT
    assert alpaca_prompt({"instruction": "Say hi.", "output": "hi"}) == NO_INPUT


def test_fields_are_never_taken_for_placeholders():
    row = {"instruction": "Format {input} and {instruction} {0}", "input": "{instruction} {x}", "output": ""}
    prompt = alpaca_prompt(row)
    assert (
        "### Instruction:\nFormat {input} and {instruction} {0}\n\n### Input:\n{instruction} {x}\n\n### Response:"
        in prompt
    )


def test_fixed_parts_rebuild_the_prompts():
    assert len(FIXED_PARTS) == 4
    head_input, middle, tail, head = FIXED_PARTS
    assert head_input + "Add." + middle + "1, 2" + tail == WITH_INPUT
    assert head + "Say hi." + tail == NO_INPUT
