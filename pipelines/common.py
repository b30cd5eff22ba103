"""What all MHLA pipelines share."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from ..errors import UserError
from ..processor import MHLAProcessor, check_processor
from ..retrofit import TRANSFORMERS, retrofit


class MHLAPipelineMixin:
    """Adds `set_attn_processor` to a diffusers pipeline with a `transformer`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """As diffusers' `from_pretrained`; another family's pipeline is refused with a `UserError`."""
        hint = get_type_hints(cls.__init__)["transformer"]
        takes = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
        try:
            pipeline = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
            found = type(pipeline.transformer).__name__
        except (AttributeError, TypeError, ValueError):
            pipeline, found = None, _saved_transformer(cls, pretrained_model_name_or_path)
            if found is None or found.removeprefix("MHLA") in [kind.__name__.removeprefix("MHLA") for kind in takes]:
                raise
        if pipeline is None or not isinstance(pipeline.transformer, (*takes, type(None))):
            raise UserError(
                f"{pretrained_model_name_or_path} makes a pipeline with a {found}; {cls.__name__} takes a "
                f"{' or '.join(kind.__name__ for kind in takes)}."
            )
        return pipeline

    def set_attn_processor(self, processor: Any) -> None:
        """Set attention processors on the transformer (on both, where a Wan2.2 pipeline has two).

        Args:
            processor: `MHLAProcessor()` retrofits a stock transformer, or changes the MHLA of one that has it; anything
                else is passed to the transformer's own `set_attn_processor`.
        """
        check_processor(processor)
        if isinstance(processor, MHLAProcessor):
            retrofit(self, processor)
            return
        transformers = [getattr(self, name, None) for name in TRANSFORMERS]
        for transformer in (found for found in transformers if found is not None):
            if not hasattr(transformer, "set_attn_processor"):
                raise UserError(f"processor={processor!r} must be an MHLAProcessor on a {type(transformer).__name__}.")
            transformer.set_attn_processor(processor)


def _saved_transformer(pipeline_class: Any, name_or_path: Any) -> str | None:
    """The transformer's class name according to a saved pipeline's model_index.json, if there is one."""
    try:
        return pipeline_class.load_config(name_or_path).get("transformer", (None, None))[1]
    except OSError:
        return None
