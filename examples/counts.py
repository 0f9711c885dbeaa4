"""Visits to a doctor: a GP for counts with mini-batches and two likelihoods.

The RAND health insurance experiment (20,190 person-years, included in statsmodels) recorded visits
to a doctor; nine inputs describe the insurance plan and the person's health. The log rate is a GP
of these inputs. `QuadratureELBO` works with any likelihood: here the Poisson, and the negative
binomial, whose variance exceeds its mean. On held-out people, both models are compared with
generalized linear models, in which the log rate is linear in the inputs.

Here the likelihood matters more than the shape of the log rate: with the negative binomial, a
linear log rate predicts as well as the GP. The figure shows why the Poisson model fails: it
predicts too few people without a visit.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import statsmodels.api as sm
from numpyro.infer import SVI

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def load(num_rows):
    """Standardized inputs and counts, as (X, y) for training and for testing."""
    data = sm.datasets.randhie.load_pandas()
    X, y = data.exog.to_numpy(float), data.endog.to_numpy(int)
    rng = np.random.default_rng(0)
    # Rows with equal inputs are mostly the same person in several years: hold out whole groups.
    group = np.unique(X, axis=0, return_inverse=True)[1].ravel()
    test = (rng.permutation(group.max() + 1) % 5 == 0)[group]
    X = (X - X[~test].mean(0)) / X[~test].std(0)
    rows = rng.permutation(len(y))[:num_rows]
    # JAX arrays, because the plate indexes them with traced indices.
    return [(jnp.asarray(X[i]), jnp.asarray(y[i])) for i in (rows[~test[rows]], rows[test[rows]])]


def model(X, y=None, batch_size=None, *, negative_binomial):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 0.7).expand([9]).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(-1.0, 1.0))
    level = numpyro.sample("level", dist.Normal(1.0, 1.0))
    rows = sgp.plate("rows", len(X), batch_size)
    X, y = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale, variance), X))
    rate = jnp.exp(level + f)
    likelihood = dist.Poisson(rate)
    if negative_binomial:
        concentration = numpyro.sample("concentration", dist.LogNormal(0.0, 1.0))
        likelihood = dist.NegativeBinomial2(rate, concentration)
    with rows:
        numpyro.sample("visits", likelihood, obs=y)


def fit_and_predict(model, train, test, num_inducing, num_steps):
    """Mean log predictive density of the test data, and replicates of the test data."""
    points = sgp.features.kmeans_points(jax.random.key(0), train[0], num_inducing)
    guide = sgp.guides.AutoSparseGP(model, inducing_points=points)
    svi = SVI(model, guide, optax.adam(0.01), sgp.infer.QuadratureELBO(num_nodes=10))
    result = svi.run(jax.random.key(1), num_steps, *train, 256, progress_bar=False)
    predictive = sgp.infer.Predictive(model, guide=guide, params=result.params, num_samples=200)
    draws = predictive.draws(jax.random.key(2), *test)
    log_density = draws.log_predictive_density()["visits"]
    return float(log_density.mean()), draws.predictive["visits"]


def main(num_rows=None, num_inducing=100, num_steps=1500, folder="outputs/counts"):
    """Run it all; returns each model's mean log predictive density on the test rows."""
    train, test = load(num_rows)
    scores, replicates = {}, {}
    for name, flag in {"Poisson": False, "negative binomial": True}.items():
        likelihood_model = functools.partial(model, negative_binomial=flag)
        scores[f"{name} GP"], replicates[name] = fit_and_predict(
            likelihood_model, train, test, num_inducing, num_steps
        )
    A, B = sm.add_constant(np.asarray(train[0])), sm.add_constant(np.asarray(test[0]))
    visits = np.asarray(train[1])
    linear = sm.Poisson(visits, A).fit(disp=0)
    scores["Poisson linear"] = dist.Poisson(linear.predict(B)).log_prob(test[1]).mean()
    linear = sm.NegativeBinomial(visits, A).fit(disp=0)
    likelihood = dist.NegativeBinomial2(linear.predict(B), 1.0 / linear.params[-1])
    scores["negative binomial linear"] = likelihood.log_prob(test[1]).mean()
    scores["Poisson constant"] = dist.Poisson(train[1].mean()).log_prob(test[1]).mean()
    print(f"{len(train[1])} training rows; mean log density of {len(test[1])} test rows:")
    for name, score in scores.items():
        print(f"  {name:25} {score:7.3f}")

    Path(folder).mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4))
    shares = {"observed": np.asarray(test[1])[None], **replicates}
    for i, (name, counts) in enumerate(shares.items()):
        height = [np.mean(counts == k) for k in range(13)]
        axes.bar(np.arange(13) + 0.27 * (i - 1), height, width=0.27, label=name)
    axes.set(xlabel="visits in a year", ylabel="share of the test rows")
    axes.legend(title="test rows and replicates")
    figure.savefig(Path(folder) / "replicates.svg", bbox_inches="tight")
    return {name: float(score) for name, score in scores.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-rows", type=int, help="rows to use; all by default")
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--num-steps", type=int, default=1500)
    main(**vars(parser.parse_args()))
