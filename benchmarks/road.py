"""From data to posterior by the defaults: the ten lines of docs/methods/iterative.md on UCI sets.

    python benchmarks/road.py --data pol elevators bike kin40k keggdirected --splits 3
    python benchmarks/road.py --data flights --rows 100000    # random rows of New York's flights
    python benchmarks/road.py --data pol --refinements 0 --peer    # beside GPyTorch's SVGP
    python benchmarks/road.py --data pol --exact-peer    # beside its exact GP, for as long

For each set: RMSE and negative log density on the test rows, in standardized units, seconds for
the hyperparameters and for the solve, compilation included, what the solve reached, and the peak
memory of the process; means over splits with standard errors. The peer has 512 inducing points, an
RBF kernel with ARD and mini-batches of 1024, for 50 epochs, as in benchmarks/sparse.py. The exact
peer has our kernel and its own defaults: Adam at 0.1 until our time is spent, then predictions. It
holds some eleven n x n arrays, 9.5 GiB for 15,000 rows. Sets but flights need SCALEGP_DATA, peers
need the `bench` extra.
"""

import argparse
import dataclasses
import resource
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from iterative import gpytorch_exact
from sparse import GPyTorch, score, score_of

import numpyro_scalegp as sgp


def model(X, y=None):
    """The model of the page: Matern-3/2 with a lengthscale for each column."""
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(1.0, 1.0).expand([X.shape[1]]).to_event(1)
    )
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    kernel = sgp.kernels.Matern32(lengthscale, variance)
    gp = sgp.GaussianProcess(kernel, X, noise**2, estimator=sgp.estimators.Pathwise())
    numpyro.sample("y", gp, obs=y)


def load(name, split, num_rows):
    """A data set with some of its training rows, in random order."""
    flights = name == "flights"
    data = sgp.datasets.load_flights() if flights else sgp.datasets.load_uci(name, split)
    order = np.random.default_rng(split).permutation(len(data.X_train))[:num_rows]
    return dataclasses.replace(data, X_train=data.X_train[order], y_train=data.y_train[order])


def peer(data):
    """RMSE, negative log density and seconds of GPyTorch's SVGP."""
    X, batch_size = jnp.asarray(data.X_train, jnp.float32), 1024
    total = 50 * -(-len(X) // batch_size)
    start = time.perf_counter()
    points = sgp.features.kmeans_points(jax.random.key(1), X, 512)
    model = GPyTorch(data, points, batch_size, total, 0.04)
    model.run(total - 1)
    elapsed = time.perf_counter() - start
    found = model.score()
    print(f"  GPyTorch: RMSE {found.rmse:.4f}, NLL {found.nll:.4f}, {elapsed:.0f} s", flush=True)
    return found.rmse, found.nll, elapsed


def exact_peer(data, seconds):
    """RMSE, negative log density and seconds of GPyTorch's exact GP, trained for as long."""
    import gpytorch
    import torch

    torch.manual_seed(0)
    start, num_steps = time.perf_counter(), 0
    model, objective = gpytorch_exact(*(np.float32(part) for part in (data.X_train, data.y_train)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while time.perf_counter() - start < seconds:
            optimizer.zero_grad()
            (-objective()).backward()
            optimizer.step()
            num_steps += 1
        model.eval()
        model.likelihood.eval()
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            found = model.likelihood(model(torch.tensor(np.float32(data.X_test))))
            found = score(found.mean.numpy(), found.variance.numpy(), data.y_test)
    elapsed = time.perf_counter() - start
    print(
        f"  GPyTorch, exact: RMSE {found.rmse:.4f}, NLL {found.nll:.4f}, {num_steps} steps, "
        f"{elapsed:.0f} s, noise {model.likelihood.noise.item():.3g}",
        flush=True,
    )
    return found.rmse, found.nll, elapsed


def fit(name, split, seed, rows, epochs, options):
    """One set and split by the road: what is scored, and the parts of it that say why."""
    data = load(name, split, rows)
    parts = data.X_train, data.y_train, data.X_test, data.y_test
    X, y, X_test, y_test = (jnp.array(part, jnp.float32) for part in parts)
    start = time.perf_counter()
    values = sgp.infer.initial_hyperparameters(jax.random.key(seed), model, X, y, **options)
    fitting = time.perf_counter() - start
    start = time.perf_counter()
    posterior = sgp.posterior(model, values, X, y, max_epochs=epochs)
    solving = time.perf_counter() - start
    found = {
        **score_of(posterior.predictive(X_test), y_test),
        "seconds": fitting + solving,
        "hyperparameters_seconds": fitting,
        "solve_seconds": solving,
        "solve_epochs": float(posterior.diagnostics["epochs"]),
        "noise": float(values["noise"]),
        "rows": len(X),
        "columns": X.shape[1],
    }
    return data, values, posterior, found


QUICK = {"num_refinements": 0, "subset_size": 1000, "num_subsets": 1}


def record(data, split, seed, method, *, rows=None):
    """The record of a unit, for benchmarks/evidence.py; "road-quick" has shorter settings."""
    options = QUICK if method == "road-quick" else {}
    return fit(data, split, seed, rows, None, options)[-1]


def run(name, split, arguments):
    """One set and split: a row of the table, printed with what was picked and reached."""
    options = {"num_refinements": arguments.refinements, **arguments.subsets}
    data, values, posterior, found = fit(
        name, split, arguments.seed, arguments.rows, arguments.epochs, options
    )
    fitting, solving = found["hyperparameters_seconds"], found["solve_seconds"]
    rmse, nll, shape = found["rmse"], found["nll"], (found["rows"], found["columns"])
    print(f"{name}, split {split}, {shape}: {values.report}; noise {found['noise']:.3g}")
    reached = {key: round(float(value), 4) for key, value in posterior.diagnostics.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"  {reached}; RMSE {rmse:.4f}, NLL {nll:.4f}; peak {peak:.2f} GiB", flush=True)
    row = rmse, nll, fitting, solving, found["solve_epochs"]
    if arguments.peer:
        row += peer(data)
    if arguments.exact_peer:
        row += exact_peer(data, fitting + solving)
    return row


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=["pol"])
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--rows", type=int, default=None, help="training rows at most")
    parser.add_argument("--refinements", type=int, default=None, help="steps on all rows")
    parser.add_argument("--subset-size", type=int, default=None)
    parser.add_argument("--num-subsets", type=int, default=None, help="neighborhoods")
    parser.add_argument("--epochs", type=float, default=None, help="of the solve, at most")
    parser.add_argument("--peer", action="store_true", help="GPyTorch's SVGP beside it")
    parser.add_argument("--exact-peer", action="store_true", help="GPyTorch's exact GP beside it")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    given = {"subset_size": arguments.subset_size, "num_subsets": arguments.num_subsets}
    arguments.subsets = {name: value for name, value in given.items() if value is not None}
    A = jax.random.normal(jax.random.key(0), (4096, 4096))
    multiply = jax.jit(jnp.matmul).lower(A, A).compile()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(multiply(A, A))
        times.append(time.perf_counter() - start)
    print(f"{2 * 4096**3 / min(times) / 1e9:.0f} GFLOP/s in a 4096-square float32 product")
    for name in arguments.data:
        splits = range(arguments.splits)
        rows = np.array([run(name, split, arguments) for split in splits])
        error = rows.std(axis=0, ddof=1) / len(rows) ** 0.5 if len(rows) > 1 else 0 * rows[0]
        heads = ["RMSE", "NLL", "seconds for hyperparameters", "for the solve", "epochs"]
        heads += ["RMSE of a peer", "NLL", "seconds"] * 2
        cells = zip(heads, rows.mean(axis=0), error, strict=False)
        print(f"{name}: " + ", ".join(f"{h} {m:.4g} +- {e:.2g}" for h, m, e in cells), flush=True)


if __name__ == "__main__":
    main()
