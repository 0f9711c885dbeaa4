"""SVGP on UCI data, compared with GPyTorch: accuracy after equal steps and equal seconds.

    python benchmarks/evidence.py sparse sparse-small sparse-large sparse-equal-seconds

Both use 512 inducing points from the same k-means, an RBF kernel with ARD, float32, mini-batches of
1024 and Adam with the same learning rate and cosine decay. A third method is this package with
natural gradients for the inducing values. Seconds are for all steps but the first, and exclude
compilation. Needs SCALEGP_DATA except for simulated data; GPyTorch needs the `bench` extra.
"""

import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta

import numpyro_scalegp as sgp

NUM_INDUCING, BATCH_SIZE, LEARNING_RATE, EPOCHS = 512, 1024, 0.04, 50


class Score(NamedTuple):
    """Test error and negative log predictive density, in standardized units."""

    rmse: float
    nll: float


def score(mean: np.ndarray, variance: np.ndarray, y: np.ndarray) -> Score:
    """Score Gaussian predictions."""
    nll = 0.5 * (np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance)
    return Score(float(np.sqrt(np.mean((y - mean) ** 2))), float(nll.mean()))


def number_in(method):
    """The number in a method's name, such as "30 neighbors" or "1,000,000 rows"."""
    return int("".join(filter(str.isdigit, method)))


def score_of(predictive, y):
    """The score of a predictive distribution, as entries of a record."""
    return {
        "rmse": float(jnp.sqrt(jnp.mean(jnp.square(predictive.mean - y)))),
        "nll": -float(jnp.mean(predictive.log_prob(y))),
    }


def simulated_data(num_rows, num_irrelevant=0):
    """A smooth function of three of the inputs, with noise of standard deviation 0.1."""
    generator = np.random.default_rng(0)
    d = 8 + num_irrelevant
    X = generator.normal(size=(num_rows + 10_000, d))
    y = np.sin(X[:, 0] * X[:, 1]) + np.cos(2 * X[:, 2]) + 0.1 * generator.normal(size=len(X))
    mean, scale = y[:num_rows].mean(), y[:num_rows].std()
    y = (y - mean) / scale
    columns, zeros, ones = tuple(f"x{j}" for j in range(d)), np.zeros(d), np.ones(d)
    parts = (X[:num_rows], y[:num_rows], X[num_rows:], y[num_rows:])
    return sgp.datasets.Dataset("made up", *parts, columns, zeros, ones, mean, scale)


def hyperparameters(d):
    """The priors of a GP regression: lengthscales, variance, noise."""
    return (
        numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([d]).to_event(1)),
        numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
        numpyro.sample("noise", dist.LogNormal(-1.0, 1.0)),
    )


def model(X, y, batch_size, kernel=sgp.kernels.RBF):
    """A GP regression with a Gaussian likelihood, mini-batched in the model."""
    n, d = X.shape
    is_multiscale = kernel is sgp.kernels.MultiscaleRBF  # half of its columns are scales
    lengthscale, variance, noise = hyperparameters(d // 2 if is_multiscale else d)
    rows = sgp.plate("rows", n, batch_size)
    X_batch, y_batch = rows.take(X, y)
    f = numpyro.sample("f", sgp.LatentGP(kernel(lengthscale, variance), X_batch))
    with rows:
        numpyro.sample("y", dist.Normal(f, noise), obs=y_batch)


class Ours:
    """This package, with point estimates of the hyperparameters as in GPyTorch."""

    natural = False

    def __init__(
        self,
        data,
        points,
        batch_size,
        total_steps,
        learning_rate,
        model=model,
        noise=None,
        guide=None,
    ):
        self.noise = noise
        self.X, self.y = (
            jnp.asarray(data.X_train, jnp.float32),
            jnp.asarray(data.y_train, jnp.float32),
        )
        self.batch_size, self.test, self.points = batch_size, data, points
        guide = guide or functools.partial(
            sgp.guides.AutoSparseGP, inducing_points=points, natural=self.natural
        )
        self.guide = guide(model, rest=AutoDelta)
        optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, total_steps))
        if self.natural:
            optimizer = sgp.infer.natural_gradients(optimizer)
        loss = sgp.infer.QuadratureELBO()
        self.svi = SVI(model, self.guide, optimizer, loss)
        init = jax.jit(self.svi.init, static_argnums=3)
        self.state = init(jax.random.key(0), self.X, self.y, batch_size)

        @functools.partial(jax.jit, donate_argnums=0)
        def steps(state, X, y, num):  # compiled once for every `num`
            step = lambda _, state: self.svi.update(state, X, y, batch_size)[0]  # noqa: E731
            return jax.lax.fori_loop(0, num, step, state)

        self.steps = steps
        self.run(1)

    def run(self, num):
        """Take `num` steps."""
        self.state = jax.block_until_ready(self.steps(self.state, self.X, self.y, num))

    def score(self):
        """Score the posterior at the test rows."""
        params = self.svi.get_params(self.state)
        posterior = self.guide.posterior(params, self.X, self.y, self.batch_size)
        Xs = jnp.asarray(self.test.X_test, jnp.float32)
        noise = self.guide.median(params)["noise"] if self.noise is None else self.noise
        mean, variance = posterior.mean(Xs), posterior.variance(Xs) + noise**2
        return score(np.asarray(mean), np.asarray(variance), self.test.y_test)


class Natural(Ours):
    """This package with natural gradients."""

    natural = True


class GPyTorch:
    """GPyTorch's SVGP with a Cholesky variational distribution."""

    distribution = "CholeskyVariationalDistribution"
    is_matern = False

    def __init__(self, data, points, batch_size, total_steps, learning_rate):
        import gpytorch
        import torch

        self.torch, self.test, self.batch_size = torch, data, batch_size
        torch.manual_seed(0)
        self.device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        self.X = torch.tensor(data.X_train, dtype=torch.float32, device=self.device)
        self.y = torch.tensor(data.y_train, dtype=torch.float32, device=self.device)
        d = self.X.shape[1]
        distribution = getattr(gpytorch.variational, self.distribution)
        is_matern = self.is_matern

        class Model(gpytorch.models.ApproximateGP):
            def __init__(self, points):
                strategy = gpytorch.variational.VariationalStrategy(
                    self,
                    points,
                    distribution(points.shape[0]),
                )
                super().__init__(strategy)
                self.mean_module = gpytorch.means.ZeroMean()
                matern = functools.partial(gpytorch.kernels.MaternKernel, nu=1.5)
                kernel = matern if is_matern else gpytorch.kernels.RBFKernel
                self.covar_module = gpytorch.kernels.ScaleKernel(kernel(ard_num_dims=d))

            def forward(self, x):
                return gpytorch.distributions.MultivariateNormal(
                    self.mean_module(x), self.covar_module(x)
                )

        self.model = Model(torch.tensor(np.asarray(points))).to(self.device)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood().to(self.device)
        self.mll = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, self.X.shape[0])
        self.optimizers = self.make_optimizers(learning_rate)
        self.schedules = self.make_schedules(total_steps)
        self.run(1)

    def make_optimizers(self, learning_rate):
        """The optimizers of all parameters: Adam at this package's rate."""
        parameters = [*self.model.parameters(), *self.likelihood.parameters()]
        return [self.torch.optim.Adam(parameters, lr=learning_rate)]

    def make_schedules(self, total_steps):
        """The schedules of the optimizers' rates: a cosine."""
        cosine = self.torch.optim.lr_scheduler.CosineAnnealingLR
        return [cosine(optimizer, total_steps) for optimizer in self.optimizers]

    def run(self, num):
        """Take `num` steps."""
        self.model.train()
        self.likelihood.train()
        for _ in range(num):
            index = self.torch.randint(self.X.shape[0], (self.batch_size,), device=self.device)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = -self.mll(self.model(self.X[index]), self.y[index])
            loss.backward()
            for stepped in (*self.optimizers, *self.schedules):
                stepped.step()
        loss.item()  # wait for the device

    def score(self):
        """Score the posterior at the test rows."""
        self.model.eval()
        self.likelihood.eval()
        Xs = self.torch.tensor(self.test.X_test, dtype=self.torch.float32, device=self.device)
        with self.torch.no_grad():
            predictives = [self.likelihood(self.model(chunk)) for chunk in Xs.split(1024)]
        mean = np.concatenate([p.mean.cpu().numpy() for p in predictives])
        variance = np.concatenate([p.variance.cpu().numpy() for p in predictives])
        return score(mean, variance, self.test.y_test)


class GPyTorchAtItsRate(GPyTorch):
    """GPyTorch with the settings of its tutorial on SVGP: Adam at a constant 0.01."""

    def make_optimizers(self, learning_rate):
        """Adam at the tutorial's rate."""
        return super().make_optimizers(0.01)

    def make_schedules(self, total_steps):
        """None: the rate is constant."""
        return []


class GPyTorchNatural(GPyTorch):
    """GPyTorch with natural gradients as in its tutorial: NGD at 0.1 beside Adam at 0.01."""

    distribution = "NaturalVariationalDistribution"

    def make_optimizers(self, learning_rate):
        """NGD for the inducing values, Adam for hyperparameters and points."""
        import gpytorch

        num_data, values = self.X.shape[0], self.model.variational_parameters()
        parameters = [*self.model.hyperparameters(), *self.likelihood.parameters()]
        return [
            gpytorch.optim.NGD(values, num_data=num_data, lr=0.1),
            self.torch.optim.Adam(parameters, lr=0.01),
        ]

    def make_schedules(self, total_steps):
        """None: the rates are constant."""
        return []


@functools.cache
def load(data, split, rows=None, irrelevant=0):
    """A UCI data set, or simulated data with `rows` observations."""
    return (
        simulated_data(rows, irrelevant)
        if data == "made up"
        else sgp.datasets.load_uci(data, split)
    )


KINDS = {
    "adam": Ours,
    "natural": Natural,
    "gpytorch": GPyTorch,
    "gpytorch, its rate": GPyTorchAtItsRate,
    "gpytorch, natural": GPyTorchNatural,
}


def record(
    data,
    split,
    seed,
    method,
    *,
    steps=None,
    epochs=EPOCHS,
    num_inducing=NUM_INDUCING,
    batch_size=BATCH_SIZE,
    learning_rate=LEARNING_RATE,
    **simulated,
):
    """The record of a unit: scores, and seconds of all steps but one.

    `simulated` has the numbers of observations and of irrelevant inputs of simulated data.
    """
    loaded = load(data, split, **simulated)
    X = jnp.asarray(loaded.X_train, jnp.float32)
    total = steps or epochs * -(-len(X) // batch_size)
    num_inducing, batch_size = min(num_inducing, len(X)), min(batch_size, len(X))
    points = sgp.features.kmeans_points(jax.random.key(1 + seed), X, num_inducing)
    fit = KINDS[method](loaded, points, batch_size, total, learning_rate)
    start = time.perf_counter()
    fit.run(total - 1)
    seconds = time.perf_counter() - start
    return {**fit.score()._asdict(), "seconds": seconds, "steps": total, "rows": len(X)}


TIMED = 40  # steps of a run that estimates the time per step


@functools.cache
def peer(data, split, seed, epochs):
    """The record of GPyTorch, whose seconds the other methods get."""
    return record(data, split, seed, "gpytorch", epochs=epochs)


def record_equal_seconds(data, split, seed, method, *, epochs):
    """The record of a unit with as many steps as fit into the seconds of GPyTorch's epochs."""
    reference = peer(data, split, seed, epochs[data])
    if method == "gpytorch":
        return reference
    timed = record(data, split, seed, method, steps=TIMED)["seconds"] / (TIMED - 1)
    return record(data, split, seed, method, steps=1 + round(reference["seconds"] / timed))
