"""Floor 3: our modules over packed tokens, one parameter table each, to and from Hugging Face directories."""

from docklands.models.blocks import AttentionContext, PackedCausal
from docklands.models.build import build, build_value
from docklands.models.config import ModelConfig
from docklands.models.hf_io import export, load, load_value, read_config
from docklands.models.model import CausalLM, ValueModel
from docklands.models.params import ParamSpec, ParamTable, table_for

__all__ = [
    "AttentionContext",
    "CausalLM",
    "ModelConfig",
    "PackedCausal",
    "ParamSpec",
    "ParamTable",
    "ValueModel",
    "build",
    "build_value",
    "export",
    "load",
    "load_value",
    "read_config",
    "table_for",
]
