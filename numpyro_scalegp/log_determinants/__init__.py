"""Log-determinants of finite feature maps from mini-batches, for `FeatureSpaceGP`."""

from numpyro_scalegp.log_determinants.compositional import Compositional
from numpyro_scalegp.log_determinants.mini_batch import MiniBatch
from numpyro_scalegp.log_determinants.minimax import Minimax
from numpyro_scalegp.log_determinants.variational import Variational

__all__ = ["Compositional", "MiniBatch", "Minimax", "Variational"]
