"""The declared benchmarks, which evidence.py runs: scripts, data, splits, seeds and methods."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

UNIT = ("data", "split", "seed", "method")


@dataclasses.dataclass(frozen=True)
class Run:
    """A declared run: what is called for each unit, and what that needs.

    `minutes` is a rough figure for two cores at 400 GFLOP/s, or for the GPU that a run is declared
    for. Runs whose data are neither "made up" nor "flights" need the folder in SCALEGP_DATA.
    Methods whose names have "gpytorch" need the peer, and runs with `peers` need these packages.
    """

    name: str
    script: str
    minutes: float
    data: tuple[str, ...]
    methods: tuple[str, ...]
    splits: tuple[int, ...] = (0,)
    seeds: tuple[int, ...] = (0,)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    function: str = "record"
    device: str = "cpu"
    peers: tuple[str, ...] = ()

    def on_gpu(self, minutes: float, **changes: Any) -> "Run":
        """The same run on a GPU, under another name."""
        changes = {"name": f"{self.name}-gpu", "minutes": minutes, "device": "gpu", **changes}
        return dataclasses.replace(self, **changes)

    @staticmethod
    def key(record: dict[str, Any]) -> tuple[Any, ...]:
        """What tells a record, or a unit, from the others of its run."""
        return tuple(record[name] for name in UNIT)

    def units(self) -> Iterator[dict[str, Any]]:
        """Each unit, in the order in which they run."""
        for unit in itertools.product(self.data, self.splits, self.seeds, self.methods):
            yield dict(zip(UNIT, unit, strict=True))


SMALL = ("yacht", "energy", "concrete", "airfoil", "wine", "skillcraft", "parkinsons")
LARGE = ("pol", "elevators", "bike")
LARGER = ("kin40k", "keggdirected")
SPLITS = (0, 1, 2)
SPARSE = ("adam", "natural", "gpytorch")
RECOMMENDED = (*SPARSE, "gpytorch, its rate", "gpytorch, natural")
STARTS = tuple(
    f"{kind}, {start}"
    for kind in ("standard", "pathwise")
    for start in ("cold", "warm", "extrapolated")
)
SOLVERS = (
    "CG, greedy 100",
    "CG, random 500",
    "CG, random, default rank",
    "CG, Nystrom 500",
    "AP 1000",
    "SGD",
    "SDD",
    "ADASAP, rank 100",
    "ADASAP",
    "AutoSolver (default)",
)
BIASES = (
    *(f"CG {number}" for number in (3, 4, 6, 8, 10, 12)),
    *(f"RR-CG {number}" for number in (4, 6, 8)),
    *(f"RFF {number}" for number in (20, 40, 80, 160)),
    *(f"SS-RFF {number}" for number in (20, 40, 80)),
)
LENGTHSCALES = (
    *(f"CG {number}" for number in (3, 4, 5, 6)),
    *(f"RR-CG {number}" for number in (6, 8)),
    *(f"RFF {number}" for number in (20, 40, 80, 160)),
)
READERS = ("package", "jax.export", "ONNX")
SERVING = (
    *(f"exact, {reader}" for reader in (*READERS, "scikit-learn", "GPyTorch")),
    *(f"sparse, {reader}" for reader in READERS),
)
SPARSITY = (
    "exact",
    "256 random features",
    "256 random features, then exact",
    "512 random features",
)
ROUNDS = tuple(
    f"{rows}{peer}" for rows in ("44 to 64 rows", "180 to 200 rows") for peer in ("", ", BoTorch")
)
PRODUCTS = tuple(f"{rows} rows" for rows in ("15,000", "50,000", "100,000"))
MEAN_POINTS = tuple(f"{1000 * 2**power:,} mean points" for power in range(5))
OUTPUTS = tuple(f"{number} outputs" for number in (20, 40, 80, 160))
NEIGHBORS = (
    *(f"{number} neighbors" for number in (5, 10, 20, 30, 60)),
    *(f"{number} neighbors, without groups" for number in (30, 40)),
)
ERRORS = ("exact gradients", "Russian roulette", "conjugate gradients, cut")
TREATMENTS = ("variational", "compositional", "compositional-0.9", "mini-batch", "sparse")
TRAININGS = tuple(f"roulette, {number} iterations" for number in (20, 30, 40))
CUT = (
    "exact gradients",
    *(f"cut, {number} iterations" for number in (20, 30, 40)),
    "roulette, 40 iterations, textbook",
    "cut, 37 iterations, textbook",
    "roulette, 20 iterations, 64 probes",
    "cut, 20 iterations, 64 probes",
)
FOLLOWING = ("usual guide", "natural=True", "refined")
COVERAGE = ("usual guide", "natural=True", "natural=True, 50 draws")
STEPS = (
    "d = 64, b = 32",
    *(f"d = 128, b = {b}" for b in (16, 32, 128, 512)),
    "d = 256, b = 32",
    "d = 512, b = 32",
)
EIGENVALUES = tuple(
    f"{rows}, {treatment}"
    for rows in ("Gaussian", "lognormal")
    for treatment in ("variational", "compositional-0.9", "minimax")
)
MEMORY = (
    "200,000 rows, 8 devices, 65 vectors",
    "400,000 rows, 8 devices, 65 vectors",
    "100,000 rows, 4 devices, 65 vectors",
    "50,000 rows, 2 devices, 65 vectors",
    "200,000 rows, 8 devices, 17 vectors",
)
ESTIMATORS = (
    "1,000 rows, 10 iterations, rank 20, 2,000 features",
    "4,000 rows, 12 iterations, rank 50, 4,000 features",
    "14,940 rows, 15 iterations, rank 100, 10,000 features",
)
TIMES = tuple(
    f"{kernel}, {n} times"
    for kernel in ("Matern32", "Harmonic")
    for n in ("10,000", "100,000", "1,800,000")
)
FIRST_CALLS = tuple(
    f"{kernel}, {task}"
    for kernel in ("Matern32", "Harmonic")
    for task in ("value", "gradient", "prediction")
)
MANY: dict[str, Any] = {
    "steps": 6000, "learn_kernel": False, "learning_rate": 0.01, "dense_rate": 0.0,
}  # fmt: skip
SUPPORTS = tuple(f"{number} support points" for number in (30, 100, 300, 1000))


def starts(
    name: str,
    minutes: float,
    methods: tuple[str, ...] = STARTS,
    splits: tuple[int, ...] = SPLITS,
    **options: Any,
) -> Run:
    """A run of `record_epochs`: what warm starts save of a solver's epochs."""
    return Run(
        name, "iterative", minutes, ("pol", "elevators"), methods, splits, options=options,
        function="record_epochs",
    )  # fmt: skip


# Training on all observations, as the experiments of Lin et al. (2024).
ALL_ROWS: dict[str, Any] = {"splits": (0,), "steps": 100, "n": None, "dtype": "float32"}


ON_CPU = (
    Run(
        "time-against-error",
        "time_against_error",
        5,
        ("pol",),
        ("sparse", "gpytorch", "road-quick", "road"),
    ),
    Run(
        "kernels", "time_against_error", 15, ("pol",),
        tuple(f"{inference}, {kernel}" for inference in ("exact GP", "sparse GP", "GPyTorch")
              for kernel in ("RBF", "Matern-3/2")),
        SPLITS, function="record_kernels", peers=("gpytorch",),
    ),
    Run("gpytorch-svgp", "sparse", 10, (*LARGE, *LARGER), ("gpytorch",), SPLITS),
    Run("road", "road", 20, LARGE, ("road-quick", "road"), SPLITS),
    Run("road-large", "road", 30, LARGER, ("road-quick", "road"), SPLITS),
    Run("road-small", "road", 10, SMALL, ("road",), SPLITS),
    Run("road-flights", "road", 12, ("flights",), ("road",), options={"rows": 100_000}),
    Run("road-exact-peer", "road", 10, ("elevators", "pol"), ("road", "gpytorch-exact")),
    Run("sparse", "sparse", 10, LARGE, SPARSE, SPLITS, options={"epochs": 30}),
    Run("sparse-large", "sparse", 10, LARGER, SPARSE, SPLITS, options={"epochs": 15}),
    Run(
        "sparse-recommended", "sparse", 10, ("pol",), RECOMMENDED, SPLITS,
        options={"epochs": 30},
    ),
    Run(
        "sparse-small",
        "sparse",
        10,
        SMALL,
        SPARSE,
        SPLITS,
        options={"steps": 500, "num_inducing": 128, "batch_size": 256},
    ),
    Run(
        "sparse-equal-seconds", "sparse", 3, ("pol", "kin40k"), SPARSE, SPLITS,
        options={"epochs": {"pol": 15, "kin40k": 8}}, function="record_equal_seconds",
    ),
    Run(
        "sparse-irrelevant", "sparse", 1, ("made up",), SPARSE, seeds=(0, 1, 2),
        options={"rows": 8000, "irrelevant": 24, "epochs": 40},
    ),
    Run("product", "iterative", 5, ("made up",), PRODUCTS, function="record_product"),
    Run(
        "gradient", "iterative", 6, ("elevators",),
        ("shared Krylov space", "textbook iterations", "gpytorch"), function="record_gradient",
        options={"noise": 0.01, "lengthscale": 0.693},
    ),
    Run(
        "value", "iterative", 4, ("pol",), ("16 probes", "64 probes"), seeds=(0, 1, 2),
        function="record_value",
    ),
    Run(
        "training-budgets", "iterative", 9, ("pol",), ("10 epochs", "20 epochs", "50 epochs"),
        SPLITS, function="record_training", options={"n": 3000},
    ),
    Run(
        "gradient-probes", "iterative", 5, ("elevators",),
        tuple(f"shared Krylov space, {number} probes" for number in (16, 64, 256)),
        function="record_gradient", options={"noise": 0.01, "lengthscale": 0.693},
    ),
    Run("solvers", "iterative", 20, LARGE, SOLVERS, SPLITS, function="record_solve"),
    Run(
        "solvers-large", "iterative", 15, ("keggdirected",), ("AP 1000", "AutoSolver (default)"),
        SPLITS, function="record_solve",
    ),
    starts("warm-starts", 10, block_size=125),
    starts("warm-starts-sgd", 6, solver="sgd", batch_size=250),
    starts("warm-starts-cg", 3, solver="cg", rank=0, group_size=1),
    starts("warm-starts-block-cg", 2, solver="cg"),
    starts("estimators-block-cg", 60, STARTS[::-1], solver="cg", max_epochs=200, **ALL_ROWS),
    starts("estimators-ap", 90, STARTS[:3:-1] + STARTS[2:0:-1], max_epochs=100, **ALL_ROWS),
    Run(
        "pathwise-training", "iterative", 75, LARGE, ("pathwise, warm",), SPLITS,
        function="record_training",
    ),
    Run(
        "truncation-bias", "truncation", 2, ("made up",), BIASES, function="record_bias",
        options={"draws": 600},
    ),
    Run(
        "truncation-lengthscale", "truncation", 5, ("made up",), LENGTHSCALES,
        function="record_lengthscale", options={"draws": 40_000},
    ),
    Run(
        "truncation-errors", "truncation", 8, (*LARGE, "kin40k"), ERRORS, SPLITS,
        function="record_errors",
    ),
    Run(
        "truncation-training", "truncation", 15, ("pol",), TRAININGS, seeds=(0, 1, 2),
        function="record_training",
    ),
    Run(
        "truncation-cut", "truncation", 9, ("pol",), CUT, function="record_training",
    ),
    Run(
        "truncation-sets", "truncation", 15, ("bike", "elevators"),
        ("exact gradients",
         *(f"{kind}, {number} iterations" for number in (20, 60, 100)
           for kind in ("roulette", "cut"))),
        function="record_training",
    ),
    Run(
        "truncation-features", "truncation", 5, ("pol", "elevators", "bike"),
        ("RFF, 1,000 features", "SS-RFF, 500 features"), function="record_training",
    ),
    Run(
        "truncation-step", "truncation", 2, ("pol",), ("30 iterations, 64 probes",),
        function="record_step",
    ),
    Run(
        "finite-rkhs-16", "feature_space", 5, (*LARGE[1:], "kin40k"),
        ("variational", "compositional"), seeds=(0, 1, 2), options={"batch_size": 16},
    ),
    Run(
        "finite-rkhs-128", "feature_space", 3, (*LARGE[1:], "kin40k"),
        ("variational", "compositional"), seeds=(0, 1, 2), options={"batch_size": 128},
    ),
    Run(
        "finite-rkhs-rbf", "feature_space", 20, ("bike", "elevators", "kin40k"),
        ("variational", "compositional", "mini-batch"), options={"rbf": 1000, "epochs": 10},
    ),
    Run(
        "finite-rkhs-steps", "feature_space", 3, ("made up",), STEPS, function="record_steps",
    ),
    Run(
        "finite-rkhs-bias", "feature_space", 2, ("made up",), EIGENVALUES,
        seeds=(0, 1, 2, 3, 4, 5), function="record_bias",
    ),
    Run("finite-rkhs", "feature_space", 25, (*LARGE, *LARGER), TREATMENTS, seeds=(0, 1, 2)),
    Run(
        "finite-rkhs-64", "feature_space", 4, (*LARGE[1:], "kin40k"),
        ("variational", "compositional"), seeds=(0, 1, 2), options={"batch_size": 64},
    ),
    Run(
        "finite-rkhs-epochs", "feature_space", 9, ("kin40k",), ("variational", "compositional"),
        seeds=(0, 1, 2), options={"epochs": 300},
    ),
    Run(
        "finite-rkhs-decay", "feature_space", 2, (*LARGE[1:], "kin40k"), ("compositional-0.1",),
        seeds=(0, 1, 2),
    ),
    Run(
        "finite-rkhs-minimax", "feature_space", 4, (*LARGE[1:], "kin40k"), ("minimax",),
        seeds=(0, 1, 2),
    ),
    Run("many-features", "quadruply_stochastic", 10, LARGE, ("10,000 features",), SPLITS),
    Run(
        "many-features-kin40k", "quadruply_stochastic", 5, ("kin40k",), ("10,000 features",),
        SPLITS, options={"steps": 5000, "learn_kernel": False, "learning_rate": 0.05,
                         "dense_rate": 1e-3, "start_rows": 0},
    ),
    Run(
        "many-features-rank", "quadruply_stochastic", 9, ("kin40k",), ("10,000 features, rank 10",),
        SPLITS, options={"steps": 5000, "learn_kernel": False, "learning_rate": 0.05,
                         "dense_rate": 1e-3, "start_rows": 0},
    ),
    Run(
        "many-features-sets", "quadruply_stochastic", 10, ("kin40k",),
        ("100,000 features, 10,000 a step",), SPLITS,
        options=MANY,
    ),
    Run(
        "many-features-table", "quadruply_stochastic", 35, LARGER,
        tuple(f"100,000 features, 10,000 a step, {start}" for start in ("from zero", "rank 100")),
        options=MANY,
    ),
    Run(
        "many-features-million", "quadruply_stochastic", 10, ("kin40k",),
        ("1,000,000 features, 10,000 a step",), options=MANY,
    ),
    Run(
        "features-cost", "quadruply_stochastic", 5, ("kin40k",), ("features", "rows"),
        function="record_cost",
    ),
    Run(
        "control-variate", "quadruply_stochastic", 3, ("kin40k",), SUPPORTS,
        function="record_variance",
    ),
    Run(
        "decoupled-steps", "decoupled", 2, ("made up",), MEAN_POINTS, function="record_steps",
    ),
    Run("decoupled", "decoupled", 8, LARGE, ("hybrid, 4,000 more points",), SPLITS),
    Run(
        "decoupled-gradients", "decoupled", 2, ("pol", "elevators", "kin40k"),
        ("sparse, 128 points", "decoupled, 4,096 points more",
         "hybrid, 4,096 points more"),
        SPLITS, function="record_gradients",
    ),
    Run(
        "decoupled-seconds", "decoupled", 9, ("pol", "elevators", "kin40k"),
        ("sparse, 512 points",), SPLITS, function="record_gradients", options={"steps": 3000},
    ),
    Run(
        "decoupled-multiscale", "decoupled", 15, ("pol", "elevators", "kin40k"),
        ("sparse, 128 points", "decoupled, 1,024 points more"),
        function="record_gradients", options={"multiscale": True},
    ),
    Run(
        "decoupled-subset", "decoupled", 5, ("kin40k",), ("hybrid, 6,000 more points",), SPLITS,
        options={"subset": 1000, "steps": 800, "num_residual": 6000},
    ),
    Run(
        "decoupled-stream", "decoupled", 7, ("kin40k",),
        ("decoupled, 16,384 and 128 points", "gradients alone", "coupled, 1,024 points"),
        function="record_stream",
        options={"steps": 1000, "num_residual": 16_384, "solve_every": 500},
    ),
    Run(
        "decoupled-sinc", "decoupled", 1, ("made up",),
        ("shared basis of 10", "100 for the mean, 10 for the covariance", "shared basis of 100"),
        function="record_sinc",
    ),
    Run(
        "exact", "exact", 2, ("made up",),
        ("1,000 rows, float64", "2,000 rows, float64", "4,000 rows, float64"),
    ),
    Run(
        "laplace-sampling", "laplace", 5, ("flights",), ("integrated out", "over the function"),
        function="record_sampling",
    ),
    Run(
        "laplace-gradients", "laplace", 2, ("made up",),
        tuple(f"{n} rows, {dtype}" for dtype in ("float32", "float64") for n in (500, 1000, 2000)),
        function="record_gradients",
    ),
    Run("mixing", "mixing", 3, ("made up",), OUTPUTS),
    Run("outputs", "outputs", 1, ("made up",), ("100 rows, 5 outputs", "300 rows, 5 outputs")),
    Run("groups", "groups", 1, ("made up",), ("100 groups, 50 rows", "100 groups, 200 rows")),
    Run(
        "mesh-work", "mesh", 3, ("made up",), ("2 devices", "4 devices", "8 devices"),
        function="record_work",
    ),
    Run("mesh-memory", "mesh", 5, ("made up",), MEMORY, function="record_memory"),
    Run(
        "mesh-steps", "mesh", 3, ("made up",), ("sparse", "decoupled", "hybrid"),
        function="record_steps",
    ),
    Run(
        "mesh-features", "mesh", 5, ("made up",), ("100,000 features", "10,000,000 features"),
        function="record_features",
    ),
    Run("mesh-symmetry", "mesh", 1, ("made up",), ("2 devices",), function="record_symmetry"),
    Run(
        "mesh-processes", "mesh", 3, ("made up",), ("product", "gradient"),
        function="record_processes",
    ),
    Run(
        "priors", "priors", 5, ("made up",),
        ("flat", "LogNormal(0, 3)", "lengthscale_prior(0.1, 2.0)"),
    ),
    Run(
        "hyperparameters", "hyperparameters", 8, ("elevators",),
        ("AutoNormal", "AutoMultivariateNormal", "SGLD"),
    ),
    Run(
        "hyperparameters-noise", "hyperparameters", 3, ("elevators",),
        ("Pathwise, 2,000 features", "Pathwise, 8,000 features", "Hutchinson"),
        function="record_noise",
    ),
    Run(
        "hyperparameters-cost", "hyperparameters", 5, ("elevators",), ESTIMATORS,
        function="record_cost",
    ),
    Run(
        "sparse-posteriors", "sparse_posteriors", 10, ("made up",),
        tuple(f"measurements, {method}" for method in FOLLOWING), seeds=(0, 1, 2),
    ),
    Run(
        "sparse-posteriors-counts", "sparse_posteriors", 10, ("made up",),
        tuple(f"counts, {method}" for method in FOLLOWING), seeds=(0, 1, 2),
        options={"num_rows": 200, "inducing": 30},
    ),
    Run(
        "sparse-posteriors-uci", "sparse_posteriors", 30, ("elevators",),
        tuple(f"measurements, {method}" for method in FOLLOWING),
        options={"num_draws": 300, "inducing": 125},
    ),
    Run(
        "sparse-calibration", "sparse_posteriors", 15, ("made up",),
        ("function integrated out", *FOLLOWING[:2]), function="record_calibration",
    ),
    Run(
        "sparse-coverage", "sparse_posteriors", 10, ("made up",), COVERAGE,
        function="record_coverage",
    ),
    Run(
        "sparse-coverage-uci", "sparse_posteriors", 20, ("yacht", "energy", "concrete"), COVERAGE,
        splits=SPLITS, function="record_coverage",
    ),
    Run(
        "flights", "demo", 4, ("flights",), ("sparse GP", "linear regression", "constant"),
        options={"steps": 4500},
    ),
    Run("streams", "streams", 8, ("made up",), ("20,000,000 rows",), options={"block": 100}),
    Run("streams-smaller", "streams", 1, ("made up",), ("1,000,000 rows",)),
    Run("first-step", "first_step", 1, ("made up",), ("a new process",)),
    Run("collapsed-bound", "collapsed_bound", 4, ("kin40k",), ("SGPR, 200 points",)),
    Run(
        "hilbert-space", "hilbert_space", 5, ("made up",),
        ("HilbertSpace", "numpyro.contrib.hsgp"), seeds=(0, 1, 2, 3),
    ),
    Run(
        "neighbors-density", "nearest_neighbors", 3, ("made up",), NEIGHBORS, seeds=(0, 1, 2),
        function="record_density",
    ),
    Run(
        "neighbors-density-quiet", "nearest_neighbors", 3, ("made up",), NEIGHBORS,
        seeds=(0, 1, 2), function="record_density", options={"noise": 0.01},
    ),
    Run(
        "neighbors-sampling", "nearest_neighbors", 10, ("made up",), ("30 neighbors",),
        seeds=(0, 1, 2), function="record_sampling",
    ),
    Run(
        "neighbors-cost", "nearest_neighbors", 3, ("made up",),
        ("10,000 rows", "100,000 rows", "1,000,000 rows"), function="record_cost",
    ),
    Run(
        "neighbors-search", "nearest_neighbors", 4, ("made up",),
        ("100,000 rows", "1,000,000 rows", "10,000,000 rows"), function="record_search",
    ),
    Run(
        "neighbors-field", "nearest_neighbors", 10, ("made up",), ("Vecchia 30", "sparse 512"),
        seeds=(0, 1, 2), function="record_field",
    ),
    Run(
        "neighbors-counts", "nearest_neighbors", 10, ("made up",),
        ("neighbors 10", "inducing 4096", "sparse 512"), seeds=(0, 1, 2), function="record_counts",
    ),
    Run(
        "neighbors-batches", "nearest_neighbors", 10, ("made up",), ("inducing 4096", "sparse 512"),
        seeds=(0, 1, 2), function="record_batches",
    ),
    Run(
        "state-space-speed", "state_space", 10, ("made up",), TIMES, seeds=(0, 1),
        function="record_speed", peers=("tinygp", "celerite2"),
    ),
    Run(
        "state-space-memory", "state_space", 10, ("made up",), FIRST_CALLS,
        function="record_memory", peers=("tinygp",),
    ),
    Run(
        "state-space-dense", "state_space", 3, ("made up",), ("3,000 times",),
        seeds=(0, 1), function="record_dense", peers=("gpytorch",),
    ),
    Run(
        "state-space-nuts", "state_space", 5, ("made up",), ("100,000 times",),
        function="record_sampling",
    ),
    Run(
        "time-counts", "time_counts", 2, ("coal", "aircraft"),
        ("Laplace, linear time", "Laplace, dense", "variational, linear time", "sparse"),
        splits=tuple(range(10)),
    ),
    Run(
        "time-counts-large", "time_counts", 10, ("made up",),
        ("counts, Laplace", "counts, variational", "Student-t, variational"), seeds=(0, 1),
        options={"num_rows": 1_000_000},
    ),
    Run(
        "grids", "grids", 3, ("births",), ("7,305 times, 51 places",), seeds=(0, 1, 2),
    ),
    Run(
        "grids-places", "grids", 3, ("made up",),
        ("100 times, 50 places", "1,000 times, 100 places", "1,000 times, 300 places"),
        seeds=(0, 1),
    ),
    Run(
        "water-vapor", "maps", 3, ("water_vapor",),
        ("LaplaceGP, 20 neighbors", "GPBoost, 20 neighbors"), SPLITS,
        function="record_water_vapor", peers=("gpboost",),
    ),
    Run(
        "water-vapor-large", "maps", 10, ("water_vapor",), ("LaplaceGP, 20 neighbors",),
        function="record_water_vapor", options={"rows": 95_000},
    ),
    Run(
        "house-prices", "maps", 1, ("house_prices",),
        (
            "interpolation", "extrapolation", "interpolation, any smoothness",
            "extrapolation, any smoothness",
        ),
        function="record_house_prices",
    ),
    Run(
        "satellite", "nearest_neighbors", 10, ("satellite",),
        ("Vecchia 30", "Vecchia 60", "sparse 512"), seeds=(0, 1, 2), function="record_satellite",
    ),
    Run(
        "decoupled-kin40k", "decoupled", 4, ("kin40k",), ("hybrid, 6,000 more points",), SPLITS,
        options={"steps": 1200, "num_residual": 6000},
    ),
    Run(
        "scikit-learn", "scikit_learn", 15, ("flights", "pol", "elevators", "bike"),
        ("auto", "sparse", "gradient boosting"), SPLITS,
    ),
    Run("forecasts", "forecasts", 2, ("co2",), ("Gaussian process", "ETS", "structural")),
    Run("serving", "serving", 2, ("made up",), SERVING, peers=("gpytorch", "jax2onnx")),
    Run("optimization", "optimization", 6, ("made up",), ROUNDS, seeds=SPLITS, peers=("botorch",)),
    Run("saas", "saas", 30, ("made up",), SPARSITY),
    Run("scikit-learn-small", "scikit_learn", 5, SMALL, ("auto", "gradient boosting"), SPLITS),
)  # fmt: skip
NAMED = {run.name: run for run in ON_CPU}
RUNS = (
    *ON_CPU,
    NAMED["product"].on_gpu(
        2,
        methods=(
            *PRODUCTS,
            "300,000 rows",
            "1,000,000 rows",
            "100,000 rows, in passes",
            "1,000,000 rows, in passes",
        ),
    ),
    NAMED["pathwise-training"].on_gpu(1, data=("pol",), splits=(0,)),
    NAMED["truncation-training"].on_gpu(1, seeds=(0,)),
    NAMED["neighbors-cost"].on_gpu(1),
    NAMED["neighbors-batches"].on_gpu(2),
    NAMED["features-cost"].on_gpu(1),
    NAMED["decoupled-steps"].on_gpu(1),
    NAMED["road"].on_gpu(5, data=(*LARGER, *LARGE), methods=("road",)),
    # After `road` with a cache of compiled programs, in a new process.
    NAMED["road"].on_gpu(
        2, name="road-cached-gpu", data=("kin40k",), splits=(0,), methods=("road",)
    ),
    NAMED["sparse-large"].on_gpu(2, data=("kin40k",)),
    NAMED["decoupled-kin40k"].on_gpu(1),
    NAMED["many-features-kin40k"].on_gpu(1),
    NAMED["many-features-sets"].on_gpu(1),
)
