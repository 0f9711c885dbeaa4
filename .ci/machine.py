"""Print how fast this machine is, to compare times of runs on different machines."""

import os
import time

import jax
import jax.numpy as jnp

SIZE = 4096

product = jax.jit(jnp.matmul)
A = jax.random.normal(jax.random.key(0), (SIZE, SIZE), jnp.float32)
product(A, A).block_until_ready()
seconds = []
for _ in range(3):
    start = time.perf_counter()
    product(A, A).block_until_ready()
    seconds.append(time.perf_counter() - start)
rate = 2 * SIZE**3 / min(seconds) / 1e9
print(f"{os.cpu_count()} cores, {rate:.0f} GFLOP/s in a float32 product of {SIZE}-square matrices")
