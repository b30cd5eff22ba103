"""Generation pipelines, one file per family."""

import diffusers

from .dit import MHLADiTPipeline
from .sana import MHLASanaPAGPipeline, MHLASanaPipeline

# DiffusionPipeline.from_pretrained looks a saved pipeline's class up by name in the diffusers module.
for _pipeline in (MHLADiTPipeline, MHLASanaPipeline, MHLASanaPAGPipeline):
    setattr(diffusers, _pipeline.__name__, _pipeline)

__all__ = ["MHLADiTPipeline", "MHLASanaPAGPipeline", "MHLASanaPipeline"]
