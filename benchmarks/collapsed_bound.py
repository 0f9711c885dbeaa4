"""NUTS over hyperparameters with the collapsed bound of inducing points, `estimators.SGPR`.

    python benchmarks/collapsed_bound.py --data kin40k --n 10000 --num-inducing 200

RBF kernel with ARD, float32. Prints seconds, leapfrog steps, divergences, effective sizes, the time
of a value with its gradient beside that of the products it cannot do without, and the test error at
the posterior's draws. Needs SCALEGP_DATA.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from iterative import seconds
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, init_to_median
from sparse import hyperparameters

import numpyro_scalegp as sgp


def model(X, y, points, tight):
    """A GP regression by the bound."""
    lengthscale, variance, noise = hyperparameters(X.shape[1])
    kernel = sgp.kernels.RBF(lengthscale, variance)
    estimator = sgp.estimators.SGPR(points, tight=tight)
    gp = sgp.GaussianProcess(kernel, X, noise**2, estimator=estimator)
    numpyro.sample("y", gp, obs=y)


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="kin40k")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--num-inducing", type=int, default=200)
    parser.add_argument("--num-warmup", type=int, default=200)
    parser.add_argument("--num-samples", type=int, default=200)
    parser.add_argument("--old", action="store_true", help="the bound of 2009")
    arguments = parser.parse_args()
    data = sgp.datasets.load_uci(arguments.data, split=arguments.split)
    X = jnp.asarray(data.X_train[: arguments.n], jnp.float32)
    y = jnp.asarray(data.y_train[: arguments.n], jnp.float32)
    n, d = X.shape
    points = sgp.features.kmeans_points(jax.random.key(1), X, arguments.num_inducing)

    def bound(parameters):
        kernel = sgp.kernels.RBF(jnp.exp(parameters[:d]), jnp.exp(parameters[d]))
        noise = jnp.exp(2.0 * parameters[d + 1])
        estimator = sgp.estimators.SGPR(points, tight=not arguments.old)
        return sgp.GaussianProcess(kernel, X, noise, estimator=estimator).log_prob(y)

    at = jnp.zeros(d + 2).at[-1].set(-1.0)
    gradient = np.median(seconds(jax.jit(jax.value_and_grad(bound)), at))
    # Phi and its outer products, and as much again for each of the two arguments of each.
    A = jnp.ones((n, len(points)))
    B = jnp.ones((len(points), len(points)))
    floor = 3 * np.median(seconds(jax.jit(lambda A, B: (A @ B, A.T @ A)), A, B))

    kernel = NUTS(model, init_strategy=init_to_median)
    sizes = {"num_warmup": arguments.num_warmup, "num_samples": arguments.num_samples}
    mcmc = MCMC(kernel, **sizes, progress_bar=False)
    start = time.perf_counter()
    fields = ("num_steps", "diverging")
    given = X, y, points, not arguments.old
    mcmc.run(jax.random.key(2), *given, extra_fields=fields)
    samples = jax.block_until_ready(mcmc.get_samples())
    spent = time.perf_counter() - start
    extra, grouped = mcmc.get_extra_fields(), mcmc.get_samples(group_by_chain=True)
    sizes = {name: np.min(effective_sample_size(np.asarray(v))) for name, v in grouped.items()}
    posterior = sgp.posterior(model, samples, *given)
    Xs = jnp.asarray(data.X_test, jnp.float32)
    rmse = float(np.sqrt(np.mean((np.asarray(posterior.mean(Xs)) - data.y_test) ** 2)))
    print(f"{data.name}: n = {n}, d = {d}, {len(points)} points, device {jax.devices()[0]}")
    print(f"value and gradient {1e3 * gradient:.1f} ms, its products alone {1e3 * floor:.1f} ms")
    print(
        f"NUTS {spent:.0f} s with compilation, {int(extra['num_steps'].sum())} leapfrog steps "
        f"after warmup, {int(extra['diverging'].sum())} divergences, least effective sizes "
        + ", ".join(f"{name} {size:.0f}" for name, size in sizes.items())
    )
    print(f"test RMSE {rmse:.4f}, noise {float(np.mean(samples['noise'])):.4f}")


if __name__ == "__main__":
    main()
