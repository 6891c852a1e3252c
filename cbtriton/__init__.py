"""cbtriton: continuous batching of Hugging Face causal language models on Triton kernels.

Names are imported on first use, so that `import cbtriton` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbtriton.config import ContinuousBatchingConfig, EngineConfig, KernelConfig, WorkloadHints
    from cbtriton.manager import ContinuousBatchingManager, EngineDiedError
    from cbtriton.mixin import ContinuousMixin, enable, patch_transformers
    from cbtriton.model_adapter import UnsupportedModelError
    from cbtriton.request import GenerationOutput, RequestStatus
    from cbtriton.scheduler import SCHEDULERS, SchedulingPolicy
    from cbtriton.stats import EngineStats, StepRecord

__version__ = "0.1.0"

_MODULES = {
    "ContinuousBatchingConfig": "config",
    "EngineConfig": "config",
    "KernelConfig": "config",
    "WorkloadHints": "config",
    "ContinuousBatchingManager": "manager",
    "EngineDiedError": "manager",
    "ContinuousMixin": "mixin",
    "enable": "mixin",
    "patch_transformers": "mixin",
    "UnsupportedModelError": "model_adapter",
    "GenerationOutput": "request",
    "RequestStatus": "request",
    "SCHEDULERS": "scheduler",
    "SchedulingPolicy": "scheduler",
    "EngineStats": "stats",
    "StepRecord": "stats",
}

__all__ = [
    "SCHEDULERS",
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "ContinuousMixin",
    "EngineConfig",
    "EngineDiedError",
    "EngineStats",
    "GenerationOutput",
    "KernelConfig",
    "RequestStatus",
    "SchedulingPolicy",
    "StepRecord",
    "UnsupportedModelError",
    "WorkloadHints",
    "__version__",
    "enable",
    "patch_transformers",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
