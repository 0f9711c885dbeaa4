"""The examples, run small, and the code on the first pages, run as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import numpyro_scalegp as sgp
from tests.files import ROOT, blocks, load

pytest.importorskip("matplotlib")


def example(name: str) -> ModuleType:
    return load(f"examples/{name}.py")


def test_the_first_pages_show_the_same_example() -> None:
    (example,) = blocks("README.md")
    assert blocks("docs/index.md") == [example]
    assert len(Path(ROOT / "README.md").read_text().splitlines()) <= 90


def run(*arguments: str, folder: Path) -> str:
    """The output of a script, which runs in a separate process and must succeed."""
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_the_first_page_runs_as_pasted(tmp_path: Path) -> None:
    script = tmp_path / "pasted.py"
    script.write_text("\n".join(blocks("README.md")))
    printed = run("-W", "error:::numpyro_scalegp", str(script), folder=tmp_path)
    mean, variance = (float(number) for number in re.findall(r"\[([^]]+)\]", printed))
    assert 0.0 < variance < 0.05
    assert abs(mean - np.sin(1.6)) < 4 * variance**0.5


@pytest.mark.slow
@pytest.mark.one_interpreter
@pytest.mark.parametrize("where", ["--devices=3", "--processes=2"])
def test_many_devices(where: str, tmp_path: Path) -> None:
    options = where, "--rows=101", f"--output={tmp_path}"
    printed = run("examples/many_devices.py", *options, folder=ROOT)
    differences = re.findall(r"^[a-zA-Z ]+ (\d\.\de[-+]\d+)$", printed, re.M)
    assert len(differences) == 7
    assert max(map(float, differences)) < 1e-8


@pytest.mark.slow
def test_co2(tmp_path: Path, x64: None) -> None:
    pytest.importorskip("statsmodels")
    pytest.importorskip("arviz")
    scores = example("co2").main(5, num_warmup=40, num_samples=30, num_chains=1, folder=tmp_path)
    # Ten years after five of training: a forecast that falls back to the mean is off by 8 ppm.
    assert scores["rmse"] < 5.0
    assert scores["coverage"] > 0.5
    for name in ("forecast.svg", "parts.svg"):
        assert (tmp_path / name).stat().st_size > 0


@pytest.mark.slow
def test_seasons(tmp_path: Path, x64: None) -> None:
    pytest.importorskip("pandas")
    spread = example("seasons").main(30, 6, folder=tmp_path, num_steps=20)
    # In January days differ as much as the hours within them, and the weather differs more.
    assert 0.3 < spread["daily cycle"] < spread["weather"]
    assert (tmp_path / "parts.svg").stat().st_size > 0


@pytest.mark.slow
def test_thompson(tmp_path: Path) -> None:
    best, largest = example("thompson").main(2, num_first=20, folder=tmp_path)
    assert best > 0.8 * largest
    assert (tmp_path / "yield.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
@pytest.mark.filterwarnings("ignore:a covariance matrix")  # from a step that is too large
def test_carriers(tmp_path: Path, x64: None) -> None:
    pytest.importorskip("pandas")
    mean, sd, draws = example("carriers").main(60, 30, folder=tmp_path)
    assert mean.shape == sd.shape == (16, 80)
    # Airlines are in the order of their numbers of flights, and delays grow over the day.
    assert np.all(sd[0] > sd[-1])
    assert np.all(mean[8:, 50] > mean[8:, 5])
    assert draws["amplitude"].shape == (30, 16)
    assert (tmp_path / "carriers.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_air_times(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    scores = example("air_times").main(30, 30, folder=tmp_path)
    assert scores["processes"] < scores["mean of each series"] - 0.1
    assert (tmp_path / "air_times.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_weather(tmp_path: Path, x64: None) -> None:
    pytest.importorskip("pandas")
    scores = example("weather").main(5, hidden_days=1, num_steps=60, folder=tmp_path)
    assert scores["all airports"] < 2.5
    assert scores["all airports"] < 0.7 * scores["this airport alone"]
    assert (tmp_path / "gaps.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_latent_inputs(tmp_path: Path, x64: None) -> None:
    pytest.importorskip("sklearn")
    scores, noises = example("latent_inputs").main(200, 80, folder=tmp_path)
    assert scores["GP"] > scores["principal components"]
    assert noises["noisy inputs"] < 0.7 * noises["exact inputs"]
    assert (tmp_path / "maps.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_counts(tmp_path: Path) -> None:
    pytest.importorskip("statsmodels")
    scores = example("counts").main(2000, num_inducing=20, num_steps=250, folder=tmp_path)
    assert scores["Poisson GP"] > scores["Poisson constant"] + 0.1
    assert scores["negative binomial GP"] > scores["Poisson GP"] + 0.3
    assert (tmp_path / "replicates.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_space(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    scores = example("space").main(num_steps=200, num_draws=100, folder=tmp_path)
    assert scores["airlines and a GP"] > scores["airlines only"] + 0.1
    # One rate for all pairs has -3.62.
    assert scores["airlines only"] > -3.62
    assert (tmp_path / "map.svg").stat().st_size > 0


# The first steps of a sampler are large.
@pytest.mark.slow
@pytest.mark.one_interpreter
@pytest.mark.filterwarnings("ignore:a covariance matrix:RuntimeWarning")
def test_altitudes(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    scores = example("altitudes").main(30, 20, grid=(8, 10), folder=tmp_path)
    assert scores["rmse"] < 0.6 * scores["deviation"]
    assert 0.8 < scores["coverage"] < 0.99
    assert 1.2 < scores["average"] < 2.6
    assert (tmp_path / "map.svg").stat().st_size > 0


@pytest.mark.one_interpreter
def test_temperatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALEGP_DATA", raising=False)
    scores = example("temperatures").main(100, 128, side=50, folder=tmp_path)
    assert scores["RMSE"] < 0.8 * scores["deviation"]
    assert 0.85 < scores["coverage"] < 0.995
    assert (tmp_path / "map.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_births_by_state(tmp_path: Path) -> None:
    results = example("births_by_state").main(5, 500, num_steps=40, years=1, folder=tmp_path)
    for cells in ("hidden cells", "next weeks"):
        error, covered = results[cells, "all states together"]
        assert error < results[cells, "calendar alone"][0]
        assert 0.75 < covered < 0.98
    assert results["hidden cells", "all states together"][0] < 1.4
    assert (tmp_path / "filled.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_house_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALEGP_DATA", raising=False)
    scores = example("house_prices").main(60, 1200, folder=tmp_path)
    for error, log_score in scores.values():
        assert error < 0.55  # the standard deviation of prices is 0.6
        assert log_score < 0.75
    error, _ = scores["interpolation", "any smoothness"]
    assert error < 0.36
    assert (tmp_path / "map.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_vapor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALEGP_DATA", raising=False)
    scores = example("vapor").main(40, 2200, 300, folder=tmp_path)
    assert scores["CRPS"] < 0.4  # the standard deviation of the amounts is above 1
    assert 0.82 < scores["coverage of 90 % intervals"] < 0.97
    assert (tmp_path / "map.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_births(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    scores, largest = example("births").main(4, num_steps=60, folder=tmp_path)
    # The noise of the simulated data has a standard deviation of 2, and a log score of 2.1.
    assert scores["process"] < min(2.6, scores["364 days earlier"])
    assert largest["December 25"] < -10.0
    assert (tmp_path / "parts.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_delays(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    scores = example("delays").main(60, every=10, num_steps=10, folder=tmp_path)
    flights = "a tenth of the flights"
    assert scores[flights, "process"] < scores[flights, "hour of the week"] - 0.03
    assert (tmp_path / "delays.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_deep_kernel(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    errors = example("deep_kernel").main(folder=tmp_path)
    # Against a step of height 1 and a wave of amplitude 0.5.
    assert errors["plain"] < 0.15
    assert errors["deep"] < 0.75 * errors["plain"]
    assert (tmp_path / "fits.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_network_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flax")
    monkeypatch.delenv("SCALEGP_DATA", raising=False)
    # The observations are standardized, and a tenth of their scale is noise.
    assert example("network_features").main(epochs=10, folder=tmp_path) < 0.4
    assert (tmp_path / "training.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_heteroscedastic(tmp_path: Path) -> None:
    pytest.importorskip("statsmodels")
    scores = example("heteroscedastic").main(10, num_draws=200, folder=tmp_path)
    assert scores["one noise level"] > 0.8
    assert scores["two GP sites"] > scores["one noise level"] + 0.05
    assert (tmp_path / "bands.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_robust(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    scores = example("robust").main(60, num_steps=200, num_draws=100, folder=tmp_path)
    # Without the function the error is 4.9 miles an hour.
    assert scores["Student t"]["error"] < min(2.5, 0.7 * scores["normal"]["error"])
    assert scores["Student t"]["error"] < 1.1 * scores["normal, cleaned by hand"]["error"]
    assert scores["Student t"]["log density"] > scores["normal"]["log density"] + 1.0
    assert (tmp_path / "wind.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_exact_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALEGP_DATA", raising=False)
    small = {"subset_size": 100, "num_subsets": 1, "num_steps": 40, "num_refinements": 4}
    scores, posterior = example("exact_large").main(500, 50, folder=tmp_path, **small)
    assert max(scores["first"]["rmse"], scores["all"]["rmse"]) < scores["rmse of the mean"]
    assert posterior.diagnostics["converged"] and posterior.X.shape[0] == 500
    X = posterior.X[:3]
    again = sgp.load(tmp_path / "posterior.npz").mean(X)
    np.testing.assert_allclose(again, posterior.mean(X), rtol=1e-6)
    assert (tmp_path / "fit.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a covariance matrix:RuntimeWarning")
def test_bayesian_hyperparameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("blackjax")
    pytest.importorskip("pandas")
    pytest.importorskip("arviz")
    monkeypatch.delenv("SCALEGP_DATA", raising=False)
    table, _ = example("bayesian_hyperparameters").main(60, 100, 60, large_rows=0, folder=tmp_path)
    assert list(table) == ["AutoNormal", "AutoMultivariateNormal", "SGLD"]
    for shifts, ratios in table.values():
        # Short runs: near, not exact.
        assert np.median(np.abs(shifts)) < 0.7
        assert 0.4 < np.median(ratios) < 2.0
    assert (tmp_path / "small.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_streaming(tmp_path: Path) -> None:
    errors = example("streaming").main(
        40, every=20, held=10, num_inducing=30, num_residual=256, output=tmp_path
    )
    # Thirty points cannot follow the function; a few hundred for the mean do better.
    assert errors["decoupled"][-1][1] < 0.7 * errors["sparse"][-1][1]
    assert (tmp_path / "errors.svg").stat().st_size > 0


@pytest.mark.slow
def test_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert example("checkpoint").main(300, 5, rows=50, output=tmp_path)
    resumed = re.search(r"killed\nresuming from step (\d+)\n", capsys.readouterr().out)
    assert resumed is not None
    assert 10 <= int(resumed[1]) < 300


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_more_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grain")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    same, error = example("more_than_memory").main(30_000, 512, 10, output=tmp_path)
    assert same
    # The function's standard deviation is 0.8.
    assert error < 0.2


@pytest.mark.slow
def test_flights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))  # for flights_report
    (score, *_), _ = example("flights").main(
        steps=150, rows=4000, num_inducing=20, output=str(tmp_path)
    )
    # A normal distribution around the mean has about -1.4: the likelihood must do better.
    assert score.log_density > -1.2
    assert 0.8 < score.coverage[1] < 0.97
    for name in ("loss.svg", "lengthscales.svg", "calibration.svg", "hour.svg", "flights.nc"):
        assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_flights_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))  # for flights_report
    error, linear = example("flights_features").main(300, 2000, rows=4000, folder=tmp_path)
    assert error < linear
    assert (tmp_path / "hours.svg").stat().st_size > 0


@pytest.mark.slow
def test_relevance_vectors(tmp_path: Path) -> None:
    number, error = example("relevance_vectors").main(200, num_steps=10_000, folder=tmp_path)
    # One function cannot follow the sinc, and all 200 functions are no sparse model.
    assert 5 <= number <= 20
    assert error < 0.05
    assert (tmp_path / "fit.svg").stat().st_size > 0


@pytest.mark.slow
def test_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    scores = example("digits").main(2000, num_steps=300, num_drawn=500, folder=tmp_path)
    # A linear logistic regression has 0.92 and 0.21.
    assert scores["accuracy"] > 0.94
    assert scores["mnlp"] < 0.2
    assert (tmp_path / "most_wrong.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.one_interpreter
def test_digits_classes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    scores = example("digits_classes").main(50, num_steps=200, num_draws=50, folder=tmp_path)
    assert scores["accuracy"] > 0.97
    assert scores["mnlp"] < 0.3
    assert (tmp_path / "most_wrong.svg").stat().st_size > 0


@pytest.mark.slow
def test_sparse_hyperparameters(tmp_path: Path) -> None:
    tables = example("sparse_hyperparameters").main(100, 800, 50, 150, folder=tmp_path)
    assert list(tables) == ["measurements", "counts"]
    for kind, table in tables.items():
        assert list(table) == ["usual guide", "natural=True", "refined"]
        # Short runs: near, not exact.
        ratios = {method: [ratio for _, ratio in row.values()] for method, row in table.items()}
        assert 0.5 < np.median(ratios["natural=True"]) < 1.8
        assert min(ratios["usual guide"]) < 0.5 * min(ratios["natural=True"])
        assert (tmp_path / f"{kind}.svg").stat().st_size > 0
