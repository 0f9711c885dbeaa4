"""Steps whose cost grows neither with the rows of the data nor with the features."""

from numpyro_scalegp.quadruply_stochastic.elbo import QuadruplyStochasticELBO
from numpyro_scalegp.quadruply_stochastic.relevance import relevance_vectors
from numpyro_scalegp.quadruply_stochastic.row_optimizers import RowOptimizer, row_adagrad, row_adam
from numpyro_scalegp.quadruply_stochastic.row_svi import RowSVI

__all__ = [
    "QuadruplyStochasticELBO",
    "RowOptimizer",
    "RowSVI",
    "relevance_vectors",
    "row_adagrad",
    "row_adam",
]
