"""The audit finds the bias of biased estimators, and none of unbiased ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_scalegp as sgp
from numpyro_scalegp.estimators import Audit, Pathwise
from numpyro_scalegp.linear.preconditioners import Identity, PivotedCholesky
from numpyro_scalegp.solvers import ConjugateGradients


def data() -> tuple[jax.Array, jax.Array]:
    X = jax.random.normal(jax.random.key(0), (120, 2))
    return X, jnp.sin(2.0 * X[:, 0]) + 0.1 * jax.random.normal(jax.random.key(1), (120,))


KERNEL = sgp.kernels.Matern32([0.8, 1.2], 1.1)
TERMS = ["log_determinant", "quadratic_form"]
NAMES = ["log_prob", *TERMS, "lengthscale[0]", "lengthscale[1]", "variance", "noise_variance"]


@functools.cache
def result() -> Audit:
    estimators = {
        "solved": Pathwise(ConjugateGradients(1e-5, 200, PivotedCholesky(10)), 8),
        "cut short": Pathwise(ConjugateGradients(1e-6, 3, Identity()), 8),
    }
    X, y = data()
    with pytest.warns(RuntimeWarning, match="above its tolerance"):
        return sgp.estimators.audit(
            estimators, KERNEL, X, y, 0.05, key=jax.random.key(2), num_draws=40, max_rows=80
        )


def test_tells_biased_from_unbiased():
    rows = {
        name: [row for row in result().rows if row.estimator == name] for name in result().costs
    }
    assert [row.quantity for row in rows["solved"]] == NAMES
    for row in rows["solved"]:
        rounding = 1e-5 * abs(row.exact)
        assert abs(row.bias) < 4.0 * row.standard_error + rounding, row
        assert row.standard_error == pytest.approx(row.standard_deviation / 40**0.5)
    assert max(abs(row.bias) / row.standard_error for row in rows["cut short"]) > 10.0


@pytest.mark.slow
def test_compares_with_the_exact_values_on_the_same_rows():
    X, y = data()
    rows = jax.random.choice(jax.random.split(jax.random.key(2))[0], 120, (80,), replace=False)

    def exact(kernel: sgp.kernels.Matern32, noise: float) -> jax.Array:
        return sgp.GaussianProcess(kernel, X[rows], noise).log_prob(y[rows])

    value, (kernel, noise) = jax.value_and_grad(exact, argnums=(0, 1))(KERNEL, 0.05)
    expected = [value, *kernel.lengthscale, kernel.variance, noise]
    exact_values = [row.exact for row in result().rows[: len(NAMES)] if row.quantity not in TERMS]
    np.testing.assert_allclose(exact_values, expected, rtol=1e-4)
    assert result().num_rows == 80


def test_costs_table_and_plot():
    costs = result().costs
    assert costs["cut short"].epochs == 4.0 < costs["solved"].epochs
    assert (costs["cut short"].converged, costs["solved"].converged) == (0.0, 1.0)
    assert all(cost.seconds > 0 for cost in costs.values())
    table = str(result())
    starred = [line for line in table.splitlines() if line.endswith("*")]
    solved, cut = table.split("cut short:")
    assert starred
    assert "*" not in solved
    assert all(f"  {name} " in cut for name in NAMES)
    pytest.importorskip("matplotlib")
    figure = result().plot()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(costs)


@pytest.mark.slow
def test_covers_estimators_without_a_solver_and_plots_terms_against_budgets():
    X, y = data()
    estimators = {f"features {p}": sgp.estimators.RandomFourier(p) for p in (10, 20)}
    estimators["one sample 30"] = sgp.estimators.SingleSampleRFF(20, 20)
    audit = sgp.estimators.audit(
        estimators, KERNEL, X, y, 0.05, key=jax.random.key(3), num_draws=30, max_rows=60
    )
    biases = {row[:2]: row for row in audit.rows}
    for name in ("features 10", "features 20"):
        assert biases[name, "log_determinant"].bias < 0.0 < biases[name, "quadratic_form"].bias
    for term in ("log_determinant", "quadratic_form"):
        row = biases["one sample 30", term]
        assert abs(row.bias) < 4.0 * row.standard_error
        parts = {r.quantity: r.exact for r in audit.rows if r.estimator == "features 10"}
    total = parts["log_determinant"] + parts["quadratic_form"] + 60 * np.log(2.0 * np.pi)
    np.testing.assert_allclose(parts["log_prob"], -0.5 * total, rtol=1e-5)
    assert np.isnan(audit.costs["features 10"].epochs)
    assert "epochs" not in str(audit)
    pytest.importorskip("matplotlib")
    panels = audit.plot_terms().axes
    assert [text.get_text() for text in panels[0].get_legend().get_texts()] == [
        "features",
        "one sample",
    ]
    with pytest.raises(ValueError, match="must end with a space and a number, got 'solved'"):
        result().plot_terms()
