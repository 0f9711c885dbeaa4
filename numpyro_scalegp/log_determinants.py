"""Mini-batch estimators of log-determinants in feature space, for `FeatureSpaceGP`."""

from numpyro_scalegp.integrated.finite_rkhs.compositional import Compositional
from numpyro_scalegp.integrated.finite_rkhs.mini_batch import MiniBatch
from numpyro_scalegp.integrated.finite_rkhs.minimax import Minimax
from numpyro_scalegp.integrated.finite_rkhs.variational import Variational

__all__ = ["Compositional", "MiniBatch", "Minimax", "Variational"]
