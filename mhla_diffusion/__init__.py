"""Multi-head linear attention (MHLA) for diffusers."""

from .attention import linear_attention, mhla_attention, mhla_attention_matrix
from .backbones import MHLADiTTransformer2DModel, MHLASanaTransformer2DModel, MHLAWanTransformer3DModel
from .causal import CausalState, causal_mhla_attention, temporal_causal_mixing
from .layout import BlockLayout
from .mixing import BlockMixing
from .processor import MHLAConfig, MHLAProcessor
from .retrofit import apply_mhla
from .temporal import TemporalState

# Last, since pipelines stand on all of the above; importing them is what lets DiffusionPipeline load what they save.
from . import pipelines  # isort: skip

__version__ = "0.1.0"

__all__ = [
    "BlockLayout",
    "BlockMixing",
    "CausalState",
    "MHLAConfig",
    "MHLADiTTransformer2DModel",
    "MHLAProcessor",
    "MHLASanaTransformer2DModel",
    "MHLAWanTransformer3DModel",
    "TemporalState",
    "apply_mhla",
    "causal_mhla_attention",
    "linear_attention",
    "mhla_attention",
    "mhla_attention_matrix",
    "pipelines",
    "temporal_causal_mixing",
]
