import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import check_estimator

import numpyro_scalegp as sgp
from numpyro_scalegp.sklearn import ScalableGPClassifier, ScalableGPRegressor
from tests.compilation import programs

REGRESSOR = ScalableGPRegressor(random_state=0, num_inducing=64, num_steps=300)
CLASSIFIER = ScalableGPClassifier(random_state=0, num_inducing=32, num_steps=200)


def waves(n, seed=0):
    """Inputs of two columns, and observations with noise 0.1."""
    generator = np.random.default_rng(seed)
    X = generator.uniform(-2.0, 2.0, (n, 2)) * [1.0, 100.0]
    return X, 20.0 + 5.0 * np.sin(2.0 * X[:, 0]) + 0.5 * generator.normal(size=n)


@pytest.mark.slow
@pytest.mark.one_interpreter
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("estimator", [REGRESSOR, CLASSIFIER], ids=["regressor", "classifier"])
def test_checks_of_scikit_learn(estimator):
    """Every check of scikit-learn passes; the check of array API inputs needs another setting."""
    results = check_estimator(estimator.set_params(num_steps=100), on_skip=None)
    skipped = [result["check_name"] for result in results if result["status"] != "passed"]
    assert set(skipped) <= {"check_array_api_input"}


@pytest.mark.slow
def test_exact_predictions_are_those_of_dense_algebra():
    X, y = waves(50)
    regressor = ScalableGPRegressor(random_state=0).fit(X, y)
    new = waves(7, seed=1)[0]
    mean, deviation = regressor.predict(new, return_std=True)

    Z = (X - X.mean(axis=0)) / X.std(axis=0)
    Z_new = (new - X.mean(axis=0)) / X.std(axis=0)
    values = regressor.hyperparameters_

    def kernel(A, B):
        distance = np.linalg.norm((A[:, None] - B[None]) / values["lengthscale"], axis=-1)
        scaled = np.sqrt(3.0) * distance
        return values["variance"] * (1.0 + scaled) * np.exp(-scaled)

    noise = values["noise"] ** 2
    K, K_new = kernel(Z, Z) + noise * np.eye(50), kernel(Z_new, Z)
    z = (y - y.mean()) / y.std()
    expected = y.mean() + y.std() * K_new @ np.linalg.solve(K, z)
    variance = values["variance"] + noise
    variance = variance - np.sum(K_new * np.linalg.solve(K, K_new.T).T, axis=1)
    np.testing.assert_allclose(mean, expected, rtol=1e-7)
    np.testing.assert_allclose(deviation, y.std() * np.sqrt(variance), rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "sparse"])
def test_observations_are_recovered(method):
    """Deviations cover 95 % of new observations; the second column is irrelevant."""
    X, y = waves(400)
    new, expected = waves(2000, seed=1)
    regressor = ScalableGPRegressor(method, random_state=0, num_inducing=64).fit(X, y)
    mean, deviation = regressor.predict(new, return_std=True)
    assert 0.45 < deviation.mean() < 0.65
    assert abs(np.mean(np.abs(expected - mean) < 1.96 * deviation) - 0.95) < 0.025
    np.testing.assert_allclose(regressor.predict(new), mean, rtol=1e-5)
    dtype = "float64" if method == "exact" else "float32"
    report = f"{method} GP, Matern32 kernel, {dtype}; 400 rows, 2 columns; "
    assert regressor.report_.startswith(report)
    lengthscale = regressor.hyperparameters_["lengthscale"]
    assert lengthscale[1] > 5.0 * lengthscale[0]


@pytest.mark.slow
def test_the_iterative_method_agrees_with_the_exact_one():
    X, y = waves(600)
    new, _ = waves(200, seed=1)
    exact, iterative = (
        ScalableGPRegressor(method, random_state=0).fit(X, y).predict(new, return_std=True)
        for method in ("exact", "iterative")
    )
    np.testing.assert_allclose(iterative[0], exact[0], atol=0.15)
    np.testing.assert_allclose(iterative[1], exact[1], rtol=0.2)


@pytest.mark.parametrize("method", ["exact", "sparse"])
def test_draws_have_the_moments_of_predictions(method):
    X, y = waves(60)
    regressor = ScalableGPRegressor(method, random_state=0, num_steps=200).fit(X, y)
    new = waves(5, seed=1)[0]
    mean, deviation = regressor.predict(new, return_std=True)
    draws = regressor.sample_y(new, 4000, random_state=1)
    assert draws.shape == (5, 4000)
    assert np.all(np.abs(draws.mean(axis=1) - mean) < 4.0 * deviation / np.sqrt(4000))
    np.testing.assert_allclose(draws.std(axis=1), deviation, rtol=4.0 / np.sqrt(8000))
    np.testing.assert_array_equal(draws, regressor.sample_y(new, 4000, random_state=1))


@pytest.mark.slow
@pytest.mark.parametrize("num_classes", [2, 3])
def test_probabilities(num_classes):
    """They match many draws of the functions, and the frequencies of the labels."""
    generator = np.random.default_rng(0)
    X = generator.uniform(-1.0, 1.0, (600, 1))
    truth = np.exp(2.0 * X * np.arange(num_classes))
    truth /= truth.sum(axis=1, keepdims=True)
    labels = np.array(["a", "b", "c"])[[generator.choice(num_classes, p=p) for p in truth]]
    classifier = CLASSIFIER.fit(X, labels)
    assert classifier.classes_.tolist() == ["a", "b", "c"][:num_classes]
    probabilities = classifier.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-6)
    assert np.mean(np.abs(probabilities - truth)) < 0.06
    best = classifier.classes_[probabilities.argmax(axis=1)]
    assert np.all(classifier.predict(X) == best)

    rows = (X[:6] - X.mean()) / X.std()
    draws = classifier.posterior_.sample(jax.random.key(0), jnp.asarray(rows, jnp.float32), 4000)
    level = classifier.hyperparameters_["level"]
    if num_classes == 2:
        expected = jax.nn.sigmoid(level + draws).mean(axis=0)
        np.testing.assert_allclose(probabilities[:6, 1], expected, atol=0.02)
    else:
        expected = jax.nn.softmax(level[:, None] + draws, axis=1).mean(axis=0).T
        np.testing.assert_allclose(probabilities[:6], expected, atol=0.03)


def table(n, seed=0):
    """A data frame with numbers, categories, a date and missing values, and its observations."""
    generator = np.random.default_rng(seed)
    color = generator.choice(["red", "green", "blue"], n)
    group = generator.integers(0, 40, n)
    x = generator.normal(size=n)
    y = x + 3.0 * (color == "red") + 2.0 * np.cos(group) + 0.1 * generator.normal(size=n)
    x[generator.uniform(size=n) < 0.1] = np.nan
    frame = pd.DataFrame(
        {
            "x": x,
            "color": color,
            "group": pd.Categorical(group, categories=range(40)),
            "day": pd.Timestamp("2020-01-01") + pd.to_timedelta(generator.integers(0, 9, n), "D"),
            "flag": pd.array(generator.choice([True, False], n), dtype="boolean"),
        }
    )
    frame.loc[::50, "color"] = None
    frame.loc[::40, "flag"] = pd.NA
    return frame, y


@pytest.mark.slow
def test_a_table_with_categories_and_missing_values():
    X, y = table(380)
    X_test, y_test = table(300, seed=1)
    regressor = ScalableGPRegressor(random_state=0).fit(X, y)
    complete = X_test["x"].notna() & X_test["color"].notna()
    mean, deviation = regressor.predict(X_test, return_std=True)
    assert np.sqrt(np.mean((mean - y_test)[complete] ** 2)) < 0.5
    assert 0.9 < np.mean(np.abs(mean - y_test) < 1.96 * deviation) < 0.99
    # A missing number makes predictions less certain, and a new category is allowed.
    assert deviation[X_test["x"].isna()].mean() > deviation[complete].mean()
    new = X_test.iloc[:3].assign(color=["purple", "red", None])
    assert np.all(np.isfinite(regressor.predict(new)))
    assert "5 columns, 2 of them categorical with 4, 40 values, 2 with missing" in regressor.report_
    assert regressor.feature_names_in_.tolist() == X.columns.tolist()
    with pytest.raises(ValueError, match="feature names"):
        regressor.predict(X_test[X.columns[::-1]])


@pytest.mark.slow
def test_numbers_of_a_category_and_of_an_array():
    """A category that is a number is one; columns of arrays are numbers."""
    X, y = table(64)
    frame = pd.DataFrame({"group": X["group"], "x": X["x"].fillna(0.0)})
    of_frame = ScalableGPRegressor(random_state=0).fit(frame, y)
    assert len(of_frame.hyperparameters_["lengthscale"]) == 1 + X["group"].nunique()
    of_array = ScalableGPRegressor(random_state=0).fit(frame.to_numpy(float), y)
    assert len(of_array.hyperparameters_["lengthscale"]) == 2
    with pytest.raises(ValueError, match="must hold numbers, got 'many'"):
        of_frame.predict(frame.assign(x="many"))


@pytest.mark.slow
def test_a_column_is_what_it_was_in_training():
    """Text that looks like numbers is text, in any batch of rows."""
    generator = np.random.default_rng(0)
    unit = generator.choice(["1", "2", "3B"], 60)
    y = pd.Series(unit).map({"1": 0.0, "2": 5.0, "3B": 20.0}).to_numpy()
    frame = pd.DataFrame({"unit": unit})
    regressor = ScalableGPRegressor(random_state=0).fit(frame, y)
    expected = regressor.predict(frame)
    for value in ("1", "2"):
        rows = np.flatnonzero(unit == value)[:2]
        np.testing.assert_allclose(regressor.predict(frame.iloc[rows]), expected[rows], rtol=1e-6)
    codes = pd.DataFrame({"code": pd.Categorical(np.where(unit == "1", "10", "20"))})
    of_codes = ScalableGPRegressor(random_state=0).fit(codes, y)
    np.testing.assert_allclose(
        of_codes.predict(codes.astype(str)), of_codes.predict(codes), rtol=1e-6
    )
    zips = pd.DataFrame({"zip": np.where(unit == "1", "10110", "99999")})
    of_zips = ScalableGPRegressor(random_state=0).fit(zips, y)
    assert "1 of them categorical with 2 values" in of_zips.report_
    assert np.isfinite(of_zips.predict(zips.assign(zip="unknown"))).all()


@pytest.mark.parametrize("kind", ["naive", "zone", "date", "period"])
def test_dates_are_numbers(kind):
    days = pd.date_range("2020-01-01", periods=60)
    column = {
        "naive": days,
        "zone": days.tz_localize("UTC"),
        "date": days.date,
        "period": days.to_period("D"),
    }[kind]
    frame, y = pd.DataFrame({"day": column}), np.sin(np.arange(60) / 6.0)
    regressor = ScalableGPRegressor(random_state=0).fit(frame[::2], y[::2])
    assert np.max(np.abs(regressor.predict(frame[1:-1:2]) - y[1:-1:2])) < 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a covariance matrix is so close to singular:RuntimeWarning")
@pytest.mark.parametrize("noise", [0.01, 0.001])
def test_an_iterative_fit_of_little_noise(noise):
    """Float32 has too few digits for the solve, which is then in float64."""
    generator = np.random.default_rng(0)
    X, new = generator.uniform(-3.0, 3.0, (1100, 2)), generator.uniform(-3.0, 3.0, (300, 2))

    def function(X):
        return np.sin(2.0 * X[:, 0]) + X[:, 1]

    y = function(X) + noise * generator.normal(size=1100)
    regressor = ScalableGPRegressor("iterative", random_state=0).fit(X, y)
    assert regressor.dtype_ == np.float64
    mean, deviation = regressor.predict(new, return_std=True)
    assert np.sqrt(np.mean((mean - function(new)) ** 2)) < max(noise, 0.002)
    assert deviation.max() < 0.02
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_allclose(again.predict(new), mean, rtol=1e-9)


def test_a_column_of_a_tiny_scale_counts():
    x = np.linspace(0.0, 6.0, 50)
    X = 1e-13 * x[:, None]
    regressor = ScalableGPRegressor(random_state=0).fit(X, np.sin(x))
    assert np.max(np.abs(regressor.predict(X) - np.sin(x))) < 0.01


@pytest.mark.slow
def test_a_failed_fit_leaves_the_last_one():
    X, y = waves(20)
    regressor = ScalableGPRegressor(random_state=0).fit(X, y)
    expected = regressor.predict(X)
    with pytest.raises(ValueError, match="`kernel`"):
        regressor.set_params(kernel="Linear").fit(X, 2.0 * y)
    np.testing.assert_array_equal(regressor.predict(X), expected)


@pytest.mark.slow
def test_fits_of_similar_sizes_share_their_programs():
    X, y = waves(46)
    ScalableGPRegressor(random_state=0).fit(X[:40], y[:40]).predict(X[:3], return_std=True)
    before = programs.number
    ScalableGPRegressor(random_state=1).fit(X, y).predict(X[:3], return_std=True)
    assert programs.number == before


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_a_pipeline_is_cross_validated_in_parallel():
    X, y = waves(200)
    pipeline = make_pipeline(PolynomialFeatures(2, include_bias=False), REGRESSOR)
    assert cross_val_score(pipeline, X, y, cv=2, n_jobs=2).min() > 0.9


@pytest.mark.slow
def test_predictions_of_a_pickle_are_the_same():
    X, y = waves(30)
    regressor = ScalableGPRegressor(random_state=0).fit(X, y)
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_array_equal(again.predict(X), regressor.predict(X))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"method": "fast"}, ValueError, "`method` must be one of"),
        ({"kernel": "Linear"}, ValueError, "`kernel` must be one of"),
        ({"num_inducing": 0}, ValueError, "`num_inducing` must be at least 1"),
        ({"num_steps": 0}, ValueError, "`num_steps` must be at least 1"),
    ],
)
def test_invalid_parameters(options, error, match):
    with pytest.raises(error, match=match):
        ScalableGPRegressor(**options).fit(*waves(20))


def test_invalid_data():
    X, y = waves(20)
    with pytest.raises(ValueError, match="infinity"):
        ScalableGPRegressor().fit(np.where(X > 1.0, np.inf, X), y)
    with pytest.raises(ValueError, match="contains NaN"):
        ScalableGPRegressor().fit(pd.DataFrame(X), np.where(y > y.mean(), np.nan, y))
    frame = pd.DataFrame(X)
    with pytest.raises(ValueError, match="infinity"):
        ScalableGPRegressor().fit(frame.replace(frame.iloc[0, 0], np.inf), y)
    with pytest.raises(ValueError, match="contains NaN"):
        ScalableGPRegressor().fit(frame, [*y.astype(object).tolist()[:-1], None])
    with pytest.raises(ValueError, match="must have rows and columns"):
        ScalableGPRegressor().fit(frame.iloc[:0], [])
    with pytest.raises(ValueError, match="`y` must be the observations, got None"):
        ScalableGPRegressor().fit(frame, None)
    with pytest.raises(ValueError, match="`y` must hold numbers"):
        ScalableGPRegressor().fit(frame, pd.date_range("2020", periods=20))
    with pytest.raises(ValueError, match="at least two classes"):
        ScalableGPClassifier().fit(X, np.zeros(20, int))
    with pytest.raises(NotFittedError):
        sgp.sklearn.ScalableGPClassifier().predict(X)
