"""Forecasts of the CO2 series from rolling origins, beside statsmodels.

    python benchmarks/evidence.py forecasts

Monthly means at Mauna Loa, standardized; from every second year after the twentieth on, the next 24
months are forecast, and scored in standardized units: RMSE, CRPS, coverage of 95 % intervals, and
seconds in all, including compilation. The Gaussian process has a trend, a season that changes and
disturbances, by the state-space estimator, with hyperparameters that are fitted at each
origin. The peers of statsmodels are exponential smoothing with a trend and a season (ETS), and
`UnobservedComponents` with a local linear trend, a stochastic season and an autoregression.
"""

import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
from numpyro.infer import SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp

FIRST, HORIZON, STEP = 240, 24, 24


def model(X, y=None, observed=None):
    """A trend, a season that changes slowly, and disturbances."""

    def positive(name, median):
        return numpyro.sample(name, dist.LogNormal(jnp.log(median), 0.5))

    trend = sgp.kernels.Linear(0.1**2, bias=2.0**2)
    trend += sgp.kernels.IntegratedWiener(positive("change_of_slope", 0.02) ** 2, origin=-30.0)
    season = sgp.kernels.Periodic(1.0, period=1.0, variance=positive("season", 0.2) ** 2)
    season *= sgp.kernels.Matern32(50.0)
    disturbances = sgp.kernels.Matern12(positive("years", 0.3), positive("scale", 0.05) ** 2)
    gp = sgp.GaussianProcess(
        trend + season + disturbances,
        X,
        positive("noise", 0.02) ** 2,
        estimator=sgp.estimators.StateSpace(num_harmonics=4),
        observed=observed,
    )
    numpyro.sample("y", gp, obs=y)


@jax.jit
def fit(X, y, observed):
    """Point estimates by 100 steps of Adam, then the posterior."""
    guide = AutoDelta(model, init_loc_fn=init_to_median)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.1, 100)), Trace_ELBO())
    state = svi.init(jax.random.key(0), X, y, observed)

    def step(state, _):
        return svi.update(state, X, y, observed)

    state, _ = jax.lax.scan(step, state, length=100)
    return sgp.posterior(model, guide, svi.get_params(state), X, y, observed)


class Peer:
    """A forecast of statsmodels, as a predictive distribution."""

    def __init__(self, kind, y, observed):
        from statsmodels.tsa.exponential_smoothing.ets import ETSModel
        from statsmodels.tsa.statespace.structural import UnobservedComponents

        past = pd.Series(y[observed])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == "ETS":
                result = ETSModel(past, trend="add", seasonal="add", seasonal_periods=12).fit(
                    disp=False
                )
                forecast = result.get_prediction(start=len(past), end=len(past) + HORIZON - 1)
                deviation = np.sqrt(forecast.forecast_variance)
            else:
                components = UnobservedComponents(
                    past, "local linear trend", seasonal=12, autoregressive=1
                )
                forecast = components.fit(disp=False).get_forecast(HORIZON)
                deviation = forecast.se_mean
        self.distribution = dist.Normal(np.array(forecast.predicted_mean), np.array(deviation))

    def predictive(self, X):
        """The distribution of the next observations."""
        return self.distribution


def record(data, split, seed, method):
    """The record of a unit."""
    with jax.enable_x64(True):
        series = sgp.datasets.load_co2()
        X = np.concatenate([series.X_train, series.X_test])
        y = np.concatenate([series.y_train, series.y_test])
        start = time.perf_counter()
        fitted = fit
        if method != "Gaussian process":

            def fitted(X, y, observed):
                return Peer(method, y, observed)

        options = {"first": FIRST, "horizon": HORIZON, "step": STEP}
        scores = sgp.forecasts.rolling_origin(fitted, X, y, **options)
        seconds = time.perf_counter() - start
    overall = scores.overall()
    return {
        "rmse": float(np.sqrt(overall["squared_error"][0])),
        "crps": overall["crps"][0],
        "crps_error": overall["crps"][1],
        "coverage": overall["coverage"][0],
        "seconds": seconds,
        "origins": len(scores.origins),
    }
