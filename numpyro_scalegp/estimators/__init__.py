"""Log marginal likelihoods and their gradients, exact or with known error."""

from numpyro_scalegp.estimators.cholesky import Cholesky

__all__ = ["Cholesky"]
