"""The scheduler runs compiled kernels where torch is loaded, as in an engine."""

import torch  # noqa: F401
