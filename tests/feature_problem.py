"""A regression on twenty features whose scales are the hyperparameters."""

import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import multivariate_normal
from jaxtyping import Array

N, D, BATCH = 300, 20, 16


def data(n: int = N) -> tuple[Array, Array]:
    """Inputs, and observations that depend on six of twenty features."""
    rng = np.random.default_rng(0)
    X, weights = rng.normal(size=(n, 3)), rng.normal(size=6)
    phase = np.random.default_rng(1).normal(size=(3, D))
    y = np.sqrt(2.0) * np.cos(X @ phase[:, :6]) @ weights + 0.5 * rng.normal(size=n)
    return jnp.array(X), jnp.array(y)


def features(log_scale: Array, X: Array) -> Array:
    """One scale for each feature; the log-determinant shrinks the scales of irrelevant features."""
    phase = jnp.array(np.random.default_rng(1).normal(size=(3, D)))
    return jnp.sqrt(2.0) * jnp.exp(log_scale) * jnp.cos(X @ phase)


def exact(log_scale: Array, noise: Array, X: Array, y: Array) -> Array:
    Phi = features(log_scale, X)
    K = Phi @ Phi.T + noise * jnp.eye(len(X))
    return multivariate_normal.logpdf(y, jnp.zeros(len(X)), K)


def best_weights(Phi: Array, noise: float, y: Array) -> Array:
    return jnp.linalg.solve(Phi.T @ Phi + noise * jnp.eye(Phi.shape[1]), Phi.T @ y)
