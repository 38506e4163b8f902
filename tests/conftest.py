"""Shared by every room's tests."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent / "harness"))
