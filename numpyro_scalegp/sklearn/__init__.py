"""Estimators for scikit-learn."""

from numpyro_scalegp.sklearn.estimators import ScalableGPClassifier, ScalableGPRegressor

__all__ = ["ScalableGPClassifier", "ScalableGPRegressor"]
