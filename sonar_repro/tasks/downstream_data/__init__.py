"""Local tasks for lm-evaluation-harness: its YAML, and JSONL that a seeded script of this folder makes."""
