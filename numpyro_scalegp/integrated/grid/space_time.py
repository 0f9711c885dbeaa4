"""A function on a grid as a Markov process along one axis, time, at the places of the others."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from numpyro_scalegp.core import checks
from numpyro_scalegp.integrated.grid import passes
from numpyro_scalegp.integrated.grid.axes import (
    Axes,
    Factors,
    kernel_of,
    rows_of,
    shape_of,
    terms_of,
    widths_of,
)
from numpyro_scalegp.integrated.state_space.rows import check_times, form_in, order_of
from numpyro_scalegp.kernels.kernel import AbstractKernel
from numpyro_scalegp.kernels.state_space import AbstractStateSpace
from numpyro_scalegp.numerics import linalg
from numpyro_scalegp.numerics.rounding import at_least


def time_axis(kernel: AbstractKernel, axes: Axes, num_harmonics: int) -> int:
    """The longest axis whose kernels have state-space forms.

    Raises:
        ValueError: if there is none.
    """
    reasons = {}
    for j in sorted(range(len(axes)), key=lambda j: -len(axes[j])):
        try:
            for factors in terms_of(kernel, len(axes)):
                assert factors is not None
                form = factors[j].state_space(num_harmonics=num_harmonics)
                if form.time_column(axes[j].shape[1]) is None:
                    raise ValueError("the kernel does not depend on a time.")
            return j
        except ValueError as error:
            reasons[j] = f"axis {j}: {error}"
    raise ValueError(
        "`sgp.estimators.StateSpace` needs an axis whose kernel has a state-space form, time. "
        + " ".join(reasons[j] for j in sorted(reasons))
    )


class SpaceTime(eqx.Module):
    """The observations of a function at times and places, less its mean.

    Args:
        kernel: of rows, as `axes.kernel_of` makes it.
        axes: inputs of the grid.
        noise: noise variance, of a shape that broadcasts with the grid.
        observed: mask of the cells that are observed; None for all.
        axis: the axis of time.
        num_harmonics: as in `sgp.estimators.StateSpace`.
        dtype: of the results.
    """

    kernel: AbstractKernel
    axes: Axes
    noise: Float[Array, "..."]
    observed: Bool[Array, "..."] | None
    axis: int = eqx.field(static=True)
    num_harmonics: int = eqx.field(static=True)
    dtype: str = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not 0 <= self.axis < len(self.axes):
            raise ValueError(f"`axis` must be in 0..{len(self.axes) - 1}, got {self.axis}.")
        checks.count("num_harmonics", self.num_harmonics)
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"`dtype` must be 'float32' or 'float64', got {self.dtype!r}.")

    @property
    def times(self) -> Float[Array, " n_t"]:
        """The times, in the order of the axis."""
        return self.axes[self.axis][:, 0].astype(self.dtype)

    @property
    def places(self) -> Float[Array, "p d"]:
        """The inputs of all cells at one time."""
        return self._without_time(self.axes)

    def _without_time(self, axes: Axes) -> Float[Array, "p d"]:
        axes_of_places = [X for j, X in enumerate(axes) if j != self.axis]
        return (
            rows_of(tuple(axes_of_places)) if axes_of_places else jnp.zeros((1, 0), axes[0].dtype)
        )

    def split(self, rows: Float[Array, "m d"]) -> tuple[Float[Array, " m"], Float[Array, "m d_o"]]:
        """The time and the place of rows."""
        start = sum(widths_of(self.axes)[: self.axis])
        return rows[:, start].astype(self.dtype), jnp.delete(rows, start, axis=1)

    def by_time(self, values: Float[Array, "k *shape"]) -> Float[Array, "n_t p k"]:
        """Arrays on the grid, by time and place."""
        moved = jnp.moveaxis(values, self.axis + 1, 0)
        return jnp.moveaxis(moved.reshape(len(moved), values.shape[0], -1), 1, 2)

    def on_grid(self, values: Float[Array, "n_t p k"], axes: Axes) -> Float[Array, "k *shape"]:
        """Values by time and place, as arrays on a grid."""
        shape = list(shape_of(axes))
        n_t = shape.pop(self.axis)
        moved = jnp.moveaxis(values, 2, 1).reshape(n_t, values.shape[2], *shape)
        return jnp.moveaxis(moved, 0, self.axis + 1)

    def _cells(self, values: Any) -> Float[Array, "n_t p"]:
        """One value for each cell, by time and place."""
        spread = jnp.broadcast_to(values, shape_of(self.axes)).astype(self.dtype)
        return self.by_time(spread[None])[..., 0]

    @property
    def weight(self) -> Float[Array, "n_t p"]:
        """One for each cell that is observed, zero for others."""
        return self._cells(1.0 if self.observed is None else self.observed)

    def terms(
        self, kernel: AbstractKernel
    ) -> list[tuple[AbstractKernel, AbstractKernel | None] | None]:
        """The kernels of time and of places for each term, None where a component has none."""
        widths = widths_of(self.axes)
        widths_of_places = tuple(width for j, width in enumerate(widths) if j != self.axis)

        def split(factors: Factors) -> tuple[AbstractKernel, AbstractKernel | None]:
            of_places = tuple(kernel for j, kernel in enumerate(factors) if j != self.axis)
            if not of_places:
                return factors[self.axis], None
            return factors[self.axis], kernel_of([of_places], widths_of_places)

        terms = terms_of(kernel, len(widths))
        return [None if factors is None else split(factors) for factors in terms]

    def _form(self, kernel: AbstractKernel) -> AbstractStateSpace:
        return form_in(kernel, self.num_harmonics, self.dtype)

    def _of_places(
        self, kernel: Any, rows: Float[Array, "m d"], columns: Float[Array, "p d"] | None = None
    ) -> Float[Array, "m p"]:
        """The covariance of places; one where time is the only axis."""
        if kernel is None:
            return jnp.ones((len(rows), len(rows if columns is None else columns)), self.dtype)
        if columns is None:
            return kernel.evaluate_covariance(rows).astype(self.dtype)
        return kernel.evaluate(rows, columns).astype(self.dtype)

    def prior(self, places: Float[Array, "p d"] | None = None) -> passes.Prior:
        """The process at the places of the grid, or at others."""
        terms = [term for term in self.terms(self.kernel) if term is not None]
        places = self.places if places is None else places
        return passes.Prior(
            tuple(self._form(of_time) for of_time, _ in terms),
            tuple(self._of_places(of_places, places) for _, of_places in terms),
        )

    def observation(self, kernel: AbstractKernel, times: Float[Array, " m"]) -> Float[Array, "m s"]:
        """The vectors h of the function, or of a component."""
        vectors = []
        for component, term in zip(self.terms(kernel), self.terms(self.kernel), strict=True):
            assert term is not None
            of_time, _ = term if component is None else component
            h = self._form(of_time).observation(times[:, None])
            vectors.append(jnp.zeros_like(h) if component is None else h)
        return jnp.concatenate(vectors, axis=1).astype(self.dtype)

    def check(self) -> None:
        """Warn of times that this precision cannot tell apart, and of truncated series."""
        for term in self.terms(self.kernel):
            assert term is not None
            times = self.times[order_of(self.times)]
            check_times(self._form(term[0]), term[0], times[:, None], times)

    def log_density(self, residual: Float[Array, "k *shape"]) -> Float[Array, " k"]:
        """The log density of arrays of observations less their mean."""
        self.check()
        prior, order = self.prior(), order_of(self.times)
        times, h = self.times[order], self.observation(self.kernel, self.times[order])
        y = self.by_time(residual.astype(self.dtype))[order]
        cells = self._cells(self.noise)[order], self.weight[order]
        rows = passes.rows(prior, times, y, *cells, h, h)
        return passes.log_density(prior.place_covariances, *rows)

    def smoothed(
        self,
        residual: Float[Array, "k *shape"],
        steps: "Steps",
        kernel: AbstractKernel,
        readout: Float[Array, "terms q p"],
        *,
        variances: bool = True,
    ) -> passes.Smoothed:
        """Moments of a component at times and places; weights at the times of the grid.

        The means have shape (m, q, k), the weights (n_t, p, k).
        """
        all_times = jnp.concatenate([self.times, steps.extra.astype(self.dtype)])
        order = order_of(all_times)
        rank = jnp.argsort(order)
        times, num_extra = all_times[order], len(steps.extra)

        def with_extra(values: Array, fill: float) -> Array:
            around = ((0, num_extra), *[(0, 0)] * (values.ndim - 1))
            return jnp.pad(values, around, constant_values=fill)[order]

        prior = self.prior()
        y = with_extra(self.by_time(residual.astype(self.dtype)), 0.0)
        cells = with_extra(self._cells(self.noise), 1.0), with_extra(self.weight, 0.0)
        h, target_h = (self.observation(k, times) for k in (self.kernel, kernel))
        rows = passes.rows(prior, times, y, *cells, h, target_h)
        of_states = readout[jnp.asarray(prior.terms)]
        smoothed = passes.smooth(
            prior.place_covariances, *rows, of_states, len(times), variances=variances
        )
        of_steps, of_grid = rank[steps.index], rank[: len(self.times)]
        means, of_f, weights, precisions = smoothed
        return passes.Smoothed(
            means[of_steps],
            None if of_f is None else of_f[of_steps],
            weights[of_grid],
            None if precisions is None else precisions[of_grid],
        )

    def readout(
        self, kernel: AbstractKernel, places: Float[Array, "q d"]
    ) -> tuple[Float[Array, "terms q p"], Float[Array, "terms q"]]:
        """How a component at new places depends on the places of the grid, for each term.

        Returns:
            Coefficients of the values at the places of the grid, and the variances of the places
            given these, for a variance of one in time.
        """
        coefficients, remaining = [], []
        for component, term in zip(self.terms(kernel), self.terms(self.kernel), strict=True):
            assert term is not None
            K = self._of_places(term[1], self.places)
            if component is None:
                coefficients.append(jnp.zeros((len(places), len(K)), K.dtype))
                remaining.append(jnp.zeros(len(places), K.dtype))
                continue
            of_places = component[1]
            L = linalg.cholesky(K, warn=False)
            white = linalg.solve_lower(L, self._of_places(of_places, places, self.places).T)
            weights = jax.scipy.linalg.solve_triangular(L, white, lower=True, trans=1).T
            variance = jnp.ones(len(places), K.dtype)
            if of_places is not None:
                variance = of_places.evaluate_diag(places).astype(K.dtype)
            variance = at_least(variance - jnp.sum(jnp.square(white), axis=0), 0.0)
            if _is_same(of_places, term[1]):
                # A place of the grid is itself.
                same = jnp.all(places[:, None, :] == self.places[None, :, :], axis=2)
                first = same & (jnp.cumsum(same, axis=1) == 1)
                is_place = jnp.any(same, axis=1)
                weights = jnp.where(is_place[:, None], first.astype(K.dtype), weights)
                variance = jnp.where(is_place, 0.0, variance)
            coefficients.append(weights)
            remaining.append(variance)
        return jnp.stack(coefficients), jnp.stack(remaining)

    def is_component_of_places(self, kernel: AbstractKernel) -> bool:
        """Whether a component has other covariances of the places."""
        pairs = zip(self.terms(kernel), self.terms(self.kernel), strict=True)
        return any(
            component is not None and term is not None and not _is_same(component[1], term[1])
            for component, term in pairs
        )

    def variance_in_time(
        self, kernel: AbstractKernel, times: Float[Array, " m"]
    ) -> Float[Array, "terms m"]:
        """The variance of each term of a component at times, for a variance of one in space."""
        variances = [
            jnp.zeros_like(times) if term is None else term[0].evaluate_diag(times[:, None])
            for term in self.terms(kernel)
        ]
        return jnp.stack(variances).astype(self.dtype)


def _is_same(component: AbstractKernel | None, kernel: AbstractKernel | None) -> bool:
    """Whether a component of a kernel is the kernel, from which only static flags may differ."""
    structures: Any = [jax.tree.structure(k) for k in (component, kernel)]
    return structures[0] == structures[1]


class Steps(eqx.Module):
    """Times at which moments are wanted, beside the times of the grid."""

    extra: Float[Array, " u"]  # those that the grid does not have
    index: Int[Array, " m"]  # of each time, among the times of the grid and these

    @classmethod
    def of(cls, times: Float[Array, " n_t"], new: Float[Array, " m"]) -> "Steps":
        """The steps of new times, each once if they are known."""
        n_t = len(times)
        if not checks.is_concrete((times, new)):
            return cls(new, n_t + jnp.arange(len(new)))
        times_of_grid, requested = np.asarray(times), np.asarray(new)
        order = np.argsort(times_of_grid, kind="stable")
        place = np.minimum(np.searchsorted(times_of_grid[order], requested), n_t - 1)
        is_on_grid = times_of_grid[order][place] == requested
        extra, inverse = np.unique(requested[~is_on_grid], return_inverse=True)
        index = np.where(is_on_grid, order[place], 0)
        index[~is_on_grid] = n_t + inverse
        return cls(jnp.asarray(extra, times.dtype), jnp.asarray(index))
