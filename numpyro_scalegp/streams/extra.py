"""Import the packages of the extra `streams` when they are first needed."""

import importlib
from typing import Any


def imported(module: str) -> Any:
    """A module of grain or pyarrow.

    Raises:
        ImportError: if it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"streams need the package `{package}`, which could not be imported: "
            'pip install "numpyro_scalegp[streams]".',
            name=package,
        ) from error
