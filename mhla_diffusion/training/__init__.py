"""Training: from a config to a run folder with checkpoints and an exported pipeline."""

from .config import TrainConfig, config_from_dict, config_to_yaml, load_config
from .loop import RunResult, TrainingDiverged, finetune
from .metrics import read_metrics
from .validation import held_out_loss

__all__ = [
    "RunResult",
    "TrainConfig",
    "TrainingDiverged",
    "config_from_dict",
    "config_to_yaml",
    "finetune",
    "held_out_loss",
    "load_config",
    "read_metrics",
]
