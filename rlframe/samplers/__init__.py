"""Samplers fill [T, B] batches by stepping environments with an agent."""

from rlframe.samplers.background import BackgroundProcess, BackgroundSampler
from rlframe.samplers.base import Sampler, SamplerConfig, Source, SourceAhead
from rlframe.samplers.cpu import CpuSampler
from rlframe.samplers.gpu import GpuSampler
from rlframe.samplers.no_sampler import Spaces
from rlframe.samplers.serial import SerialSampler

__all__ = [
    "BackgroundProcess",
    "BackgroundSampler",
    "CpuSampler",
    "GpuSampler",
    "Sampler",
    "SamplerConfig",
    "SerialSampler",
    "Source",
    "SourceAhead",
    "Spaces",
]
