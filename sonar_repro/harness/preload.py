"""Imported once by the fork server so that each arm's process starts with torch and transformers loaded.

Imports only: no operator runs and no model is built here (a fork after one matrix product hangs the child's backward).
"""

import torch  # noqa: F401
import transformers
import transformers.models.granitemoe.modeling_granitemoe
import transformers.models.olmoe.modeling_olmoe  # noqa: F401

from ..training import train  # noqa: F401
