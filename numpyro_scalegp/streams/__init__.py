"""Data that are larger than memory: mini-batches from files, training on them, predictions."""

from numpyro_scalegp.streams.arrays import arrays
from numpyro_scalegp.streams.parquet import parquet
from numpyro_scalegp.streams.predictions import predict
from numpyro_scalegp.streams.stream import Stream
from numpyro_scalegp.streams.training import run

__all__ = ["Stream", "arrays", "parquet", "predict", "run"]
