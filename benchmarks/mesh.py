"""What a mesh of devices shares: work a device, and numbers sent, from XLA's own analysis.

    python benchmarks/mesh.py steps --devices 8 --batch 1024 --num-inducing 512
    python benchmarks/mesh.py features --devices 8 --features 10000000

`steps`: one training step of each guide with a batch of p times the rows on p devices, beside a
step with the rows of one device on one. Counts of operations leave out LAPACK, and take the body of
a loop once. `features`: training steps of `RowSVI` with a row of parameters for each feature, of
which each device holds its own; losses beside those on one device, and bytes a device. Devices are
made up on a CPU, so times say nothing, and none are taken.
"""

import argparse
import functools
import math
import os
import re

KINDS = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "pred": 1, "u8": 1}


def collectives(text):
    """What a compiled program sends: kinds and bytes of the results, branches all counted."""
    found = {}
    for shapes, kind in re.findall(rf"= (.*?) ({KINDS})(?:-start)?\(", text):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            size = math.prod(int(axis) for axis in shape.split(",") if axis)
            found[kind] = found.get(kind, 0) + size * BYTES.get(dtype, 8)
    return found


def steps(arguments):
    """Print work a device and bytes sent of a step with each guide."""
    import jax
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    import optax
    from numpyro.infer import SVI
    from numpyro.infer.autoguide import AutoDelta

    import numpyro_scalegp as sgp

    p, n, d, m = arguments.devices, arguments.rows, arguments.columns, arguments.num_inducing
    generator = np.random.default_rng(0)
    X = generator.normal(size=(n, d)).astype(np.float32)
    y = np.sin(X[:, 0])
    points = generator.normal(size=(5 * m, d)).astype(np.float32)

    def model(X, y, batch):
        lengthscale = numpyro.sample(
            "lengthscale", dist.LogNormal(0.0, 1.0).expand([d]).to_event(1)
        )
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        rows = sgp.plate("rows", n, batch)
        X_batch, y_batch = rows.take(X, y)
        f = numpyro.sample("f", sgp.LatentGP(sgp.kernels.RBF(lengthscale), X_batch))
        with rows:
            numpyro.sample("y", dist.Normal(f, noise), obs=y_batch)

    guides = {
        "sparse": functools.partial(sgp.guides.AutoSparseGP, inducing_points=points[:m]),
        "decoupled": functools.partial(
            sgp.guides.AutoDecoupledGP, mean_points=points[m:], cov_points=points[:m]
        ),
        "hybrid": functools.partial(
            sgp.guides.AutoHybridGP, inducing_points=points[:m], residual_points=points[m:]
        ),
    }

    def compiled(guide, inputs, batch):
        svi = SVI(
            model, guide(model, rest=AutoDelta), optax.adam(0.01), sgp.infer.QuadratureELBO(2)
        )
        state = svi.init(jax.random.key(0), *inputs, batch)
        step = jax.jit(svi.update, static_argnums=3)
        return step.lower(state, *inputs, batch).compile()

    mesh = jax.make_mesh((p,), ("rows",), devices=jax.devices()[:p])
    for name, guide in guides.items():
        one = compiled(guide, (X, y), arguments.batch)
        many = compiled(guide, sgp.shard_rows(mesh, X, y), p * arguments.batch)
        work, whole = (step.cost_analysis()["flops"] for step in (many, one))
        print(
            f"{name:10} {work / 1e9:8.3f} GFLOP a device for {p} x {arguments.batch} rows on {p}, "
            f"{whole / 1e9:8.3f} for {arguments.batch} on one: {work / whole:.3f}"
        )
        sent = {kind: f"{size:,}" for kind, size in collectives(many.as_text()).items()}
        print(f"{'':10} bytes: {sent}; all inducing values' gradients have {4 * m * m:,} each")


def features(arguments):
    """Print losses of a model with many features, and bytes of its state, on one device and p."""
    import jax
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    import optax

    import numpyro_scalegp as sgp

    p, n, d, m = arguments.devices, arguments.rows, arguments.columns, arguments.features
    generator = np.random.default_rng(0)
    X = generator.normal(size=(n, d)).astype(np.float32)
    y = np.sin(X[:, 0])

    def model(X, y, batch):
        rows = sgp.plate("rows", n, batch)
        X_batch, y_batch = rows.take(X, y)
        phi = sgp.features.RandomFourier(sgp.kernels.RBF(2.0), m, seed=0)
        f = numpyro.sample("f", sgp.WeightSpaceGP(phi, X_batch))
        with rows:
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y_batch)

    mesh = jax.make_mesh((p,), ("rows",), devices=jax.devices()[:p])
    for num, inputs in ((1, (X, y)), (p, sgp.shard_rows(mesh, X, y))):
        guide = sgp.guides.AutoChevronGP(model, rank=arguments.rank)
        loss = sgp.infer.QuadruplyStochasticELBO(num_features=2000, control_variate_rank=200)
        svi = sgp.infer.RowSVI(model, guide, optax.adam(0.01), loss)
        state = svi.init(jax.random.key(0), *inputs, arguments.batch)
        update = jax.jit(svi.update, static_argnums=3, donate_argnums=0)
        program = update.lower(state, *inputs, arguments.batch).compile()
        losses = []
        for _ in range(5):
            state, value = update(state, *inputs, arguments.batch)
            losses.append(float(value))
        leaves = [leaf for leaf in jax.tree.leaves(state) if m in leaf.shape]
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        memory = program.memory_analysis()
        print(
            f"{num} devices: state of {m:,} features {held / 2**20:,.0f} MiB a device, a step "
            f"{memory.temp_size_in_bytes / 2**20:,.1f} MiB besides; bytes sent "
            f"{collectives(program.as_text())}; losses {losses}",
            flush=True,
        )


def main():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_steps = commands.add_parser("steps", help="steps of SVI with mini-batches")
    of_steps.add_argument("--devices", type=int, default=8)
    of_steps.add_argument("--rows", type=int, default=65_536)
    of_steps.add_argument("--columns", type=int, default=8)
    of_steps.add_argument("--batch", type=int, default=1024, help="rows of one device")
    of_steps.add_argument("--num-inducing", type=int, default=512)
    of_steps.set_defaults(run=steps)
    of_features = commands.add_parser("features", help="steps of RowSVI with many features")
    of_features.add_argument("--devices", type=int, default=8)
    of_features.add_argument("--rows", type=int, default=65_536)
    of_features.add_argument("--columns", type=int, default=8)
    of_features.add_argument("--batch", type=int, default=512, help="rows of all devices")
    of_features.add_argument("--features", type=int, default=10**7)
    of_features.add_argument("--rank", type=int, default=10)
    of_features.set_defaults(run=features)
    arguments = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={arguments.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    arguments.run(arguments)


if __name__ == "__main__":
    main()
