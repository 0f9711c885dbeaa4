"""A regressor and a classifier."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    assert_all_finite,
    check_consistent_length,
    check_is_fitted,
    check_random_state,
    column_or_1d,
    validate_data,
)

from numpyro_scalegp import kernels
from numpyro_scalegp.core import checks
from numpyro_scalegp.sklearn import fits
from numpyro_scalegp.sklearn.tables import Encoding, is_frame

_DESCRIPTIONS = {
    "exact": "exact GP",
    "iterative": "exact GP by iterative solvers",
    "sparse": "sparse GP",
}
_METHODS = ("auto", *_DESCRIPTIONS)
_KERNELS = ("RBF", "Matern12", "Matern32", "Matern52")
# Up to these numbers of rows, "auto" chooses these methods.
_MAX_EXACT, _MAX_ITERATIVE = 1_000, 20_000
_EXACT_STEPS = 100
# Mini-batch steps: this many epochs, within these numbers of steps.
_EPOCHS, _MIN_STEPS, _MAX_STEPS = 20, 500, 10_000
# Rows that are predicted at a time.
_CHUNK = 8_192
_NUM_DRAWS = 256


class _ScalableGP(BaseEstimator):
    """What both estimators do: encode tables, choose a method, and predict in chunks."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _validated(self, X: Any, y: Any = "no_validation", **options: Any) -> tuple[Any, Any]:
        """A table, as an array or a data frame, and `y` as an array of one axis."""
        fits_y = not isinstance(y, str)
        if not is_frame(X):
            options |= {"dtype": "numeric", "ensure_all_finite": "allow-nan"}
            validated = validate_data(self, X, y, **options)
            return validated if fits_y else (validated, None)
        validate_data(self, X, skip_check_array=True, reset=options.get("reset", True))
        if 0 in X.shape:
            raise ValueError(f"`X` must have rows and columns, got shape {X.shape}.")
        if not fits_y:
            return X, None
        if y is None:
            raise ValueError("`y` must be the observations, got None.")
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y")
        check_consistent_length(X, y)
        return X, y

    def _inputs(self, X: Any) -> np.ndarray:
        """Standardized new inputs."""
        check_is_fitted(self)
        return self.encoding_.encode(self._validated(X, reset=False)[0])

    def _fit(self, table: Any, y: np.ndarray, method: str, num_classes: int) -> None:
        start = time.perf_counter()
        if self.kernel not in _KERNELS:
            raise ValueError(f"`kernel` must be one of {_KERNELS}, got {self.kernel!r}.")
        num_inducing = checks.count("num_inducing", self.num_inducing)
        num_steps = checks.count_or_none("num_steps", self.num_steps)
        if num_steps is None:
            num_batches = _EPOCHS * len(y) // fits.BATCH_SIZE
            num_steps = int(np.clip(num_batches, _MIN_STEPS, _MAX_STEPS))
        family = getattr(kernels, self.kernel)
        encoding = Encoding.of(table)
        key = jax.random.key(check_random_state(self.random_state).randint(2**31))
        with _precision(np.float64 if method == "exact" else jnp.result_type(float)):
            X = encoding.encode(table).astype(jnp.result_type(float))
            y = np.asarray(y, np.int32 if num_classes else X.dtype)
            if method == "exact":
                fit = fits.fit_exact(family, X, y, _EXACT_STEPS)
            elif method == "iterative":
                fit = fits.fit_iterative(family, key, X, y, progress_bar=self.verbose)
            else:
                fit = fits.fit_sparse(
                    family,
                    key,
                    X,
                    y,
                    num_inducing=num_inducing,
                    num_steps=num_steps,
                    num_classes=num_classes,
                )
            posterior = jax.block_until_ready(fit.posterior)
        self.encoding_, self.method_, self.posterior_ = encoding, method, posterior
        self.dtype_ = np.dtype(jax.tree.leaves(fit.values)[0].dtype)
        self.hyperparameters_ = {name: np.asarray(value) for name, value in fit.values.items()}
        seconds = time.perf_counter() - start
        self.report_ = (
            f"{_DESCRIPTIONS[method]}, {self.kernel} kernel, {self.dtype_}; {len(X)} rows, "
            f"{encoding}; {seconds:.1f} s"
        )

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if state.get("dtype_") == np.float64:  # JAX would read its arrays as float32
            state["posterior_"] = jax.tree.map(_as_saved, state["posterior_"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if state.get("dtype_") == np.float64:
            with _precision(self.dtype_):
                self.posterior_ = jax.tree.map(_as_loaded, self.posterior_)

    def _in_chunks(self, function: Callable[[np.ndarray], Any], X: np.ndarray) -> Any:
        """Results of a function of rows, each an array whose last axis is the rows."""
        with _precision(self.dtype_):
            X = X.astype(self.dtype_)
            chunks = [X[start : start + _CHUNK] for start in range(0, len(X), _CHUNK)]
            results = [jax.tree.map(np.asarray, function(chunk)) for chunk in chunks]
        return jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=-1), *results)


def _precision(dtype: Any) -> Any:
    """Where fits in float64 run: they need its digits, if they have little noise."""
    return jax.enable_x64(True) if dtype == np.float64 else contextlib.nullcontext()


def _as_saved(leaf: Any) -> Any:
    """An array with its digits; a random key, of integers, stays one."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key else np.asarray(leaf)


def _as_loaded(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


class ScalableGPRegressor(RegressorMixin, _ScalableGP):
    r"""Regression with a Gaussian process, exact or sparse by the number of rows.

    Standardized columns have a lengthscale each. Numbers that are missing count as the column's
    mean, marked by a further input; categories are inputs at about equal distances. The
    observations are a function of the inputs plus normal noise.

    Args:
        method: "exact" factorizes the covariance matrix, O(n^3) for each of 120 gradients, in
            float64; "iterative" computes the same posterior by iterative solvers, in O(n^2) a
            product, with hyperparameters from subsets; "sparse" trains inducing points in
            mini-batches. "auto" is "exact" up to 1,000 rows, "iterative" up to 20,000, otherwise
            "sparse".
        kernel: "RBF", "Matern12", "Matern32" or "Matern52".
        num_inducing: the number of inducing points of a sparse GP, at most n.
        num_steps: the number of mini-batches of 1,024 rows that a sparse GP is trained on; None
            for 20 epochs, at least 500 and at most 10,000 steps.
        random_state: an integer, a `numpy.random.RandomState`, or None for a new seed.
        verbose: whether the iterative method shows its progress.

    Attributes:
        method_: the method that was chosen.
        dtype_: the precision of the posterior: float64 for exact fits, and for iterative ones
            whose solve does not converge in float32.
        report_: what was fitted, and in what time.
        posterior_: the posterior of the function, of standardized inputs and observations.
        hyperparameters_: the point estimates: lengthscales of standardized inputs, and the variance
            and noise in units of the observations' variance and standard deviation.
        encoding_: how columns become inputs.
        y_mean_, y_deviation_: the location and scale of the observations.

    Example:
        >>> import numpy as np
        >>> from numpyro_scalegp.sklearn import ScalableGPRegressor
        >>> X = np.linspace(0.0, 6.0, 60)[:, None]
        >>> regressor = ScalableGPRegressor(random_state=0).fit(X, np.sin(X[:, 0]))
        >>> mean, deviation = regressor.predict([[1.5]], return_std=True)
        >>> bool(abs(mean[0] - np.sin(1.5)) < 0.01), deviation.shape, regressor.method_
        (True, (1,), 'exact')
    """

    def __init__(
        self,
        method: str = "auto",
        *,
        kernel: str = "Matern32",
        num_inducing: int = 512,
        num_steps: int | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.method = method
        self.kernel = kernel
        self.num_inducing = num_inducing
        self.num_steps = num_steps
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> "ScalableGPRegressor":
        """Fit hyperparameters and condition on the observations.

        Args:
            X: the inputs, shape (n, columns): numbers, NaN where missing; or a data frame, whose
                columns of text and categories are categorical.
            y: the observations, shape (n,), finite.

        Raises:
            ValueError: if a parameter or the data are invalid.
        """
        X, y = self._validated(X, y, y_numeric=True)
        if y.dtype.kind not in "biufO":
            raise ValueError(f"`y` must hold numbers, got the type {y.dtype}.")
        y = y.astype(float)
        assert_all_finite(y, input_name="y")
        if self.method not in _METHODS:
            raise ValueError(f"`method` must be one of {_METHODS}, got {self.method!r}.")
        method = self.method
        if method == "auto":
            method = "exact" if len(y) <= _MAX_EXACT else "iterative"
            method = "sparse" if len(y) > _MAX_ITERATIVE else method
        mean, deviation = y.mean(), y.std() or 1.0
        self._fit(X, (y - mean) / deviation, method, num_classes=0)
        self.y_mean_, self.y_deviation_ = mean, deviation
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of an observation at new inputs, and its standard deviation if asked for.

        Args:
            X: new inputs, with the columns of the training data.
            return_std: whether to return the standard deviation of an observation, noise included.

        Returns:
            The mean, shape (m,), or a pair of mean and standard deviation.
        """
        X = self._inputs(X)

        def moments(X: np.ndarray) -> Any:
            if not return_std:
                return self.posterior_.mean(X)
            new = self.posterior_.predictive(X, jnp.square(self.hyperparameters_["noise"]))
            return new.mean, new.variance

        results = self._in_chunks(moments, X)
        if not return_std:
            return self.y_mean_ + self.y_deviation_ * results
        mean, variance = results
        deviation = self.y_deviation_ * np.sqrt(variance)
        return self.y_mean_ + self.y_deviation_ * mean, deviation

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draw observations at new inputs jointly, noise included; shape (m, n_samples).

        Args:
            X: new inputs.
            n_samples: the number of draws.
            random_state: as in the constructor.
        """
        X = self._inputs(X)
        key = jax.random.key(check_random_state(random_state).randint(2**31))
        function_key, noise_key = jax.random.split(key)
        with _precision(self.dtype_):
            functions = self.posterior_.sample(function_key, X.astype(self.dtype_), n_samples)
            noise = self.hyperparameters_["noise"] * jax.random.normal(noise_key, functions.shape)
            draws = np.asarray(functions + noise).T
        return self.y_mean_ + self.y_deviation_ * draws


class ScalableGPClassifier(ClassifierMixin, _ScalableGP):
    """Classification with sparse Gaussian processes: one function, or one for each class.

    The columns are encoded as in `ScalableGPRegressor`. The logit of two classes is a level plus a
    function; several classes have a level and a function each, and a softmax.

    Args:
        kernel: "RBF", "Matern12", "Matern32" or "Matern52".
        num_inducing: the number of inducing points of each function, at most n.
        num_steps: the number of mini-batches of 1,024 rows to train on; None for 20 epochs, at
            least 500 and at most 10,000 steps.
        random_state: an integer, a `numpy.random.RandomState`, or None for a new seed.

    Attributes:
        classes_: the labels.
        method_: "sparse".
        report_: what was fitted, and in what time.
        posterior_: the posterior of the functions, of standardized inputs.
        hyperparameters_: the point estimates.
        encoding_: how columns become inputs.

    Example:
        >>> import numpy as np
        >>> from numpyro_scalegp.sklearn import ScalableGPClassifier
        >>> X = np.linspace(-1.0, 1.0, 64)[:, None]
        >>> classifier = ScalableGPClassifier(random_state=0).fit(X, X[:, 0] > 0.0)
        >>> classifier.predict([[-0.8], [0.8]]).tolist()
        [False, True]
    """

    def __init__(
        self,
        *,
        kernel: str = "Matern32",
        num_inducing: int = 256,
        num_steps: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.kernel = kernel
        self.num_inducing = num_inducing
        self.num_steps = num_steps
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "ScalableGPClassifier":
        """Train on inputs and labels.

        Args:
            X: the inputs, shape (n, columns): numbers, NaN where missing; or a data frame, whose
                columns of text and categories are categorical.
            y: the labels, shape (n,): at least two different ones.

        Raises:
            ValueError: if a parameter or the data are invalid.
        """
        X, y = self._validated(X, y)
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y must have at least two classes, got one class, {y[0]!r}.")
        self._fit(X, labels, "sparse", num_classes=len(classes))
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class at new inputs, shape (m, classes)."""
        X = self._inputs(X)
        level = self.hyperparameters_["level"]
        if len(self.classes_) == 2:
            nodes, weights = np.polynomial.hermite_e.hermegauss(32)
        else:
            shape = _NUM_DRAWS, len(self.classes_), 1
            nodes = np.random.default_rng(0).normal(size=shape)

        def probabilities(X: np.ndarray) -> np.ndarray:
            mean = np.asarray(self.posterior_.mean(X), float)
            deviation = np.sqrt(np.asarray(self.posterior_.variance(X), float))
            if len(self.classes_) == 2:
                logits = level + mean + nodes[:, None] * deviation
                of_second = weights @ (1.0 / (1.0 + np.exp(-logits))) / weights.sum()
                return np.stack([1.0 - of_second, of_second])
            logits = level[:, None] + mean + nodes * deviation
            odds = np.exp(logits - logits.max(axis=1, keepdims=True))
            return (odds / odds.sum(axis=1, keepdims=True)).mean(axis=0)

        return self._in_chunks(probabilities, X).T

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class at new inputs, shape (m,)."""
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]
