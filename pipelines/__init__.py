"""Generation pipelines, one file per family."""

import diffusers

from .dit import MHLADiTPipeline
from .sana import MHLASanaPAGPipeline, MHLASanaPipeline
from .wan import MHLAWanImageToVideoPipeline, MHLAWanPipeline, MHLAWanVideoToVideoPipeline

__all__ = [
    "MHLADiTPipeline",
    "MHLASanaPAGPipeline",
    "MHLASanaPipeline",
    "MHLAWanImageToVideoPipeline",
    "MHLAWanPipeline",
    "MHLAWanVideoToVideoPipeline",
]

# DiffusionPipeline.from_pretrained looks a saved pipeline's class up by name in the diffusers module.
for _name in __all__:
    setattr(diffusers, _name, globals()[_name])
