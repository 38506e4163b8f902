"""Local tasks for lm-evaluation-harness: its YAML, and JSONL (Apache-2.0, as the code) that a seeded script made.

The questions are about the subjects of the embedded instructions, so that a model trained on those has met them: they
measure that the evaluation works, and nothing about the quality of a model. The script is in this repository's history
(`make.py` of this folder, last in commit e8e060c).
"""
