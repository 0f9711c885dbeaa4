"""Data larger than memory: mini-batches from files, training and predictions."""

from numpyro_scalegp.streams.from_arrays import arrays
from numpyro_scalegp.streams.from_parquet import parquet
from numpyro_scalegp.streams.predictions import predict
from numpyro_scalegp.streams.stream import Stream
from numpyro_scalegp.streams.training import run

__all__ = ["Stream", "arrays", "parquet", "predict", "run"]
