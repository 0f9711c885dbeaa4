"""Unknown inputs: a map of 150 irises, and a curve with noisy inputs.

The first model is a GP latent variable model: each of four measurements is an independent function
of a flower's unknown position in a plane. The model does not use the species, which only color the
figure. Nearest neighbors on its map are of the same species more often than in the plane of the
first two principal components, from which the optimization starts.

In the second model, the inputs of a curve were measured with a known error, which NUTS takes into
account. A GP that treats the measured inputs as exact attributes their error to noise. Gray lines
in the last panel lead from each measured input to its posterior mean.
"""

import argparse
from pathlib import Path

import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_median, init_to_value
from numpyro.infer.autoguide import AutoNormal
from sklearn.datasets import load_iris

import numpyro_scalegp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def map_model(Y):
    """The columns of Y are functions of unknown positions Z with standard normal priors."""
    n, num_outputs = Y.shape
    Z = numpyro.sample("Z", dist.Normal(0.0, 1.0).expand([n, 2]).to_event(2))
    prior = sgp.infer.lengthscale_prior(0.3, 10.0).expand([2]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", prior)
    variance = numpyro.sample("variance", sgp.infer.variance_prior(3.0))
    noise = numpyro.sample("noise", sgp.infer.variance_prior(1.0))
    gp = sgp.GaussianProcess(sgp.kernels.RBF(lengthscale, variance), Z, noise)
    with numpyro.plate("outputs", num_outputs):  # one factorization for all
        numpyro.sample("Y", gp, obs=Y.T)


def curve_model(x, y, error):
    """A curve whose inputs x were measured with a known error, zero if they are exact."""
    X = x
    if error:
        X = numpyro.sample("X", dist.Normal(x, error).to_event(1))
    lengthscale = numpyro.sample("lengthscale", sgp.infer.lengthscale_prior(0.2, 4.0))
    variance = numpyro.sample("variance", sgp.infer.variance_prior(3.0))
    noise = numpyro.sample("noise", sgp.infer.variance_prior(1.0))
    kernel = sgp.kernels.RBF(lengthscale, variance)
    numpyro.sample("y", sgp.GaussianProcess(kernel, X[:, None], noise), obs=y)


def neighbors_agree(Z, labels):
    """The share of points whose nearest neighbor has the same label."""
    distances = np.linalg.norm(Z[:, None] - Z, axis=-1) + np.diag(np.full(len(Z), np.inf))
    return float(np.mean(labels[distances.argmin(axis=1)] == labels))


def main(num_steps=1000, num_draws=300, folder="outputs/latent_inputs"):
    """Fit both models; returns the agreement of neighbors, and the noise of the curve."""
    iris = load_iris()
    Y = (iris.data - iris.data.mean(axis=0)) / iris.data.std(axis=0)
    linear = Y @ np.linalg.svd(Y, full_matrices=False)[2][:2].T
    linear = linear / linear.std(axis=0)
    # At equal positions the gradient would be zero: start from principal components.
    start = init_to_value(values={"Z": linear, "lengthscale": np.full(2, 2.0), "noise": 0.1})
    guide = AutoNormal(map_model, init_loc_fn=start, init_scale=0.05)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.03, num_steps))
    svi = SVI(map_model, guide, optimizer, Trace_ELBO())
    params = svi.run(jax.random.key(0), num_steps, Y, progress_bar=False).params
    Z = np.asarray(guide.median(params)["Z"])
    maps = {"principal components": linear, "GP": Z}
    scores = {name: neighbors_agree(points, iris.target) for name, points in maps.items()}
    for name, share in scores.items():
        print(f"{name:20} nearest neighbors of one species: {share:.1%}")

    random, error = np.random.default_rng(0), 0.25
    truth = random.uniform(-3.0, 3.0, size=40)
    x = truth + error * random.normal(size=40)
    y = np.sin(2.0 * truth) + 0.1 * random.normal(size=40)
    noises, inferred = {}, x
    for name, assumed_error in (("exact inputs", 0.0), ("noisy inputs", error)):
        kernel = NUTS(curve_model, init_strategy=init_to_median)
        mcmc = MCMC(kernel, num_warmup=num_draws, num_samples=num_draws, progress_bar=False)
        mcmc.run(jax.random.key(1), x, y, assumed_error)
        draws = mcmc.get_samples()
        noises[name] = float(np.sqrt(np.median(draws["noise"])))
        print(f"{name}: noise {noises[name]:.2f} (it is 0.10)")
        inferred = np.mean(draws.get("X", x[None]), axis=0)
    before, after = (np.sqrt(np.mean((inputs - truth) ** 2)) for inputs in (x, inferred))
    print(f"RMSE of the inputs: measured {before:.2f}, posterior mean {after:.2f}")
    draw(folder, maps, iris.target, x, inferred, y)
    return scores, noises


def draw(folder, maps, species, x, inferred, y):
    """Draw both maps, and the points of the curve at measured and inferred inputs."""
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    for (name, points), axes in zip(maps.items(), panels, strict=False):
        axes.scatter(*points.T, c=species, s=8)
        axes.set(title=name, xlabel="first", ylabel="second")
    panels[2].plot(np.stack([x, inferred]), np.stack([y, y]), "0.7", linewidth=0.8)
    panels[2].plot(x, y, ".", color="0.6", label="as measured")
    panels[2].plot(inferred, y, "C0.", label="posterior mean")
    panels[2].set(title="noisy inputs", xlabel="x", ylabel="y")
    panels[2].legend(loc="lower left")
    Path(folder).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(folder) / "maps.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-steps", type=int, default=1000)
    parser.add_argument("--num-draws", type=int, default=300)
    numpyro.enable_x64()
    main(**vars(parser.parse_args()))
