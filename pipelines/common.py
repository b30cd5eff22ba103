"""What all MHLA pipelines share."""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from ..processor import MHLAProcessor
from ..retrofit import retrofit


class MHLAPipelineMixin:
    """Adds `set_attn_processor` to a diffusers pipeline with a `transformer`."""

    def set_attn_processor(self, processor: Any) -> None:
        """Set attention processors on the transformer.

        Args:
            processor: `MHLAProcessor()` retrofits a stock transformer, or changes the MHLA of one that has it; anything
                else is passed to the transformer's own `set_attn_processor`.
        """
        if isinstance(processor, MHLAProcessor):
            retrofit(self, processor)
        elif hasattr(self.transformer, "set_attn_processor"):
            self.transformer.set_attn_processor(processor)
        else:
            raise UserError(f"processor={processor!r} must be an MHLAProcessor on a {type(self.transformer).__name__}.")
