"""minato_gpu: a PyTorch data loader in which slow samples hold up nobody, on CPU workers and GPUs together."""

from minato_gpu.loader import DataLoader
from minato_gpu.pipeline import Field, Pipeline, Stage

__version__ = "0.1.0"
__all__ = ["DataLoader", "Field", "Pipeline", "Stage"]
