"""Parameters with a row for each feature: which they are, and whether they go row by row."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
from numpyro.primitives import Messenger


class DeclaredRows(Messenger):
    """Notes the parameters that are declared with `rows=True`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def process_message(self, msg: dict[str, Any]) -> None:
        """Look at a parameter."""
        if msg["type"] == "param" and msg["kwargs"].get("rows"):
            self.names[msg["name"]] = None


def check_rows(
    params: dict[str, Array], num_features: int, constrain: Callable[[dict], dict]
) -> None:
    """Raise unless each parameter has a row for each feature, and its constraint acts by rows.

    Args:
        params: unconstrained parameters by name, those with rows alone.
        num_features: the number of features.
        constrain: from unconstrained parameters to constrained ones.
    """
    some = jnp.arange(num_features)[:: max(1, num_features // 3)]
    for name, param in params.items():
        if param.shape[:1] != (num_features,):
            raise ValueError(
                f"the parameter `{name}` is declared with rows=True and has the shape "
                f"{param.shape}: it must have a row for each of the {num_features} features."
            )
        whole, rows = constrain({name: param})[name], constrain({name: param[some]})[name]
        if rows.shape != whole[some].shape or not jnp.allclose(rows, whole[some]):
            raise ValueError(
                f"the constraint of the parameter `{name}`, declared with rows=True, does not "
                "act on each row by itself: take one that does, such as `positive`."
            )
